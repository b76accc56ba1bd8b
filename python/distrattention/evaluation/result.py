# SPDX-License-Identifier: Apache-2.0
"""What a report holds, as a text table, JSON and a plot."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from ..settings import STRATEGIES, Settings


@dataclass(frozen=True)
class Measurement:
    """One setting on one call."""

    strategy: str  # of the setting, or what its `auto` took
    error: float  # |O - O_exact| / |O_exact|, Frobenius norm over all of O
    row_cosine_min: float  # the smallest cosine between a row of O and of O_exact
    total_variation: float  # mean over sampled rows of 1/2 sum_j |P_ij - P_exact_ij|, 0 to 1
    ms: float  # median, choice of the order included
    speed: float  # exact_ms / ms


@dataclass(frozen=True)
class Layer:
    """One attention call of the model."""

    name: str  # of the innermost module under way; "" outside of modules
    query: tuple[int, ...]  # [..., Hq, Nq, d]
    key: tuple[int, ...]  # [..., Hkv, Nk, d]
    head_dim_v: int
    dtype: str
    causal: str  # "none", "top_left" or "bottom_right"
    mask: str | None  # "bool mask 1x1x512x512", say
    exact_ms: float | None = None  # median of exact attention; None where the call was left out
    torch_ms: float | None = None  # median of torch's own attention; None where that has no such call
    measurements: tuple[Measurement, ...] = ()  # one a setting
    left_out: str | None = None  # why the call was not measured


@dataclass(frozen=True)
class Output:
    """One floating-point tensor among the model's outputs."""

    name: str
    errors: tuple[float | None, ...]  # |X - X_exact| / |X_exact| of each setting; None where the shapes differ


@dataclass(frozen=True)
class Report:
    """What `report` found. `str()` of it is the table."""

    settings: tuple[Settings, ...]
    layers: tuple[Layer, ...]  # in the order of the calls
    outputs: tuple[Output, ...]  # of the whole model, approximated in all layers at once
    outputs_left_out: str | None  # why `outputs` is empty, if it is
    meta: dict  # versions, device, threads

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """A line for each call and setting, then one a setting over all calls, then the model's outputs."""
        labels = [label(setting) for setting in self.settings]
        head = ["attention call", "Q", "K", "hidden", "setting", "error of O", "min cosine", "TV of P", "ms", "speed"]
        lines = []
        for layer in self.layers:
            start = [layer.name or "-", _shape(layer.query), _shape(layer.key), _hidden(layer)]
            if layer.left_out:
                lines.append([*start, f"left out: {layer.left_out}"])
                continue
            lines.append([*start, "exact", "0", "1", "0", f"{layer.exact_ms:.2f}", "1.00"])
            for name, m in zip(labels, layer.measurements):
                name += f" ({m.strategy})" * name.startswith("auto")
                numbers = [f"{m.error:.3f}", f"{m.row_cosine_min:.2f}", f"{m.total_variation:.3f}"]
                lines.append(["", "", "", "", name, *numbers, f"{m.ms:.2f}", f"{m.speed:.2f}"])
        text = [_align(head, lines)]
        if measured := self._measured():
            text += ["", f"All {len(measured)} measured calls", self._summary(labels, measured)]
        text += ["", "Error of the model's outputs, approximated in all calls at once"]
        if self.outputs_left_out:
            text += [f"left out: {self.outputs_left_out}"]
        else:
            rows = [[o.name, *("-" if e is None else f"{e:.3f}" for e in o.errors)] for o in self.outputs]
            text += [_align(["output", *labels], rows)]
        return "\n".join(text) + "\n"

    def json(self) -> str:
        """The report as JSON: {"meta", "settings", "layers", "outputs", "outputs_left_out"}, the fields of the
        classes of this module as keys; numbers that are not finite are null, and an order is its shape."""
        return json.dumps(_finite(dataclasses.asdict(self)), indent=1, allow_nan=False) + "\n"

    def to_json(self, path: str | Path) -> None:
        """Writes `json()` to a file."""
        Path(path).write_text(self.json(), encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draws error, total variation and speed by layer, a line a setting, to a file (.png, .svg, .pdf).

        Needs matplotlib; raises ImportError where it is missing."""
        from matplotlib.figure import Figure

        measured = self._measured()
        figure = Figure(figsize=(min(24, 5 + 0.3 * len(measured)), 9), layout="constrained")
        panels = figure.subplots(3, 1, sharex=True)
        for n, setting in enumerate(self.settings):
            of_setting = [layer.measurements[n] for layer in measured]
            for axes, field in zip(panels, ("error", "total_variation", "speed")):
                axes.plot([getattr(m, field) for m in of_setting], marker="o", markersize=4, label=label(setting))
        for axes, title in zip(panels, ("error of O", "total variation of P", "speed relative to exact")):
            axes.set_ylabel(title)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        panels[2].axhline(1, color="black", linewidth=0.8)
        panels[2].set_xticks(range(len(measured)), [layer.name for layer in measured], rotation=90, fontsize=7)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
        figure.savefig(path)

    def _measured(self) -> list[Layer]:
        return [layer for layer in self.layers if not layer.left_out]

    def _summary(self, labels: list[str], measured: list[Layer]) -> str:
        exact_ms = sum(layer.exact_ms for layer in measured)
        rows = [["exact", "0", "0", "0", f"{exact_ms:.2f}", "1.00"]]
        if all(layer.torch_ms is not None for layer in measured):
            torch_ms = sum(layer.torch_ms for layer in measured)
            rows.append(["torch's own", "", "", "", f"{torch_ms:.2f}", f"{exact_ms / torch_ms:.2f}"])
        for n, name in enumerate(labels):
            of_setting = [layer.measurements[n] for layer in measured]
            errors = [m.error for m in of_setting]
            variation = statistics.mean(m.total_variation for m in of_setting)
            ms = sum(m.ms for m in of_setting)
            numbers = [f"{statistics.median(errors):.3f}", f"{max(errors):.3f}", f"{variation:.3f}"]
            rows.append([name, *numbers, f"{ms:.2f}", f"{exact_ms / ms:.2f}"])
        return _align(["setting", "median error", "largest error", "mean TV of P", "ms", "speed"], rows)


def label(settings: Settings) -> str:
    """A short name: what differs from the defaults."""
    words = [settings.strategy]
    if settings.strategy != "exact":
        words += [settings.estimator] if STRATEGIES[settings.strategy].has_estimator else []
        default = settings.strategy == "auto" and settings.group_size is None
        words += [] if default else [f"G={settings.taken_group_size}"]
        words += [f"l={settings.block_size}"] if settings.block_size is not None else []
        words += [settings.order_from] if settings.order_from is not None else []
        words += [f"seed={settings.seed}"] if settings.seed else []
    return " ".join(words)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _hidden(layer: Layer) -> str:
    """What hides keys from queries, in words."""
    causal = {"none": None, "top_left": "causal", "bottom_right": "causal, bottom right"}[layer.causal]
    return ", ".join(filter(None, (causal, layer.mask))) or "nothing"


def _align(head: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest entry; numbers to the right. An entry that ends a short row may stick out."""
    full = [row for row in [head, *rows] if len(row) == len(head)]
    widths = [max(len(row[c]) for row in full) for c in range(len(head))]
    right = [all(row[c][:1] in set("-.0123456789") for row in full[1:] if row[c]) for c in range(len(head))]
    cells = ([f"{x:>{w}}" if r else f"{x:<{w}}" for x, w, r in zip(row, widths, right)] for row in [head, *rows])
    return "\n".join("  ".join(line).rstrip() for line in cells)


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "shape"):  # an order
        return list(value.shape)
    return None if isinstance(value, float) and not math.isfinite(value) else value
