# SPDX-License-Identifier: Apache-2.0
"""What a report holds."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..settings import STRATEGIES, Settings


@dataclass(frozen=True)
class Time:
    """Milliseconds of one call, or of the model on one batch; with several batches the mean over them."""

    ms: float  # median
    ms_min: float
    ms_max: float


@dataclass(frozen=True)
class Measurement:
    """One setting on one call."""

    strategy: str  # of the setting, or what its `auto` took
    error: float  # |O - O_exact| / |O_exact|, Frobenius norm over all of O, of all batches
    row_cosine_min: float  # the smallest cosine between a row of O and of O_exact
    total_variation: float  # mean over sampled rows of 1/2 sum_j |P_ij - P_exact_ij|, 0 to 1
    time: Time  # choice of the order included
    speed: float | None  # exact time / time; None where two runs of exact attention differ by more than that gains
    head_errors: tuple[float, ...] | None = None  # `error` of each head of Q, where they were asked for
    kept_share: float | None = None  # of the far halves of tiles in which a row sees a far key, those that `skip` kept


@dataclass(frozen=True)
class Layer:
    """One attention call of the model; calls of several batches are one where they are alike in all that is here."""

    name: str  # of the innermost module under way; "" outside of modules
    query: tuple[int, ...]  # [..., Hq, Nq, d]
    key: tuple[int, ...]  # [..., Hkv, Nk, d]
    head_dim_v: int
    dtype: str
    causal: str  # "none", "top_left" or "bottom_right"
    mask: str | None  # "bool mask 1x1x512x512", say
    batches: int = 1  # how many batches made the call
    exact: Time | None = None  # of exact attention; None where the call was left out
    twins: tuple[float, float] | None = None  # the medians of two runs of exact attention, whose difference is noise
    torch: Time | None = None  # of torch's own attention; None where that has no such call
    measurements: tuple[Measurement, ...] = ()  # one a setting
    left_out: str | None = None  # why the call was not measured


@dataclass(frozen=True)
class Output:
    """One floating-point tensor among the model's outputs."""

    name: str
    errors: tuple[float | None, ...]  # |X - X_exact| / |X_exact| of each setting; None where the shapes differ


@dataclass(frozen=True)
class Metric:
    """What a function of the caller makes of the model's outputs, the mean over the batches."""

    name: str
    exact: float
    values: tuple[float, ...]  # with each setting in all layers


@dataclass(frozen=True)
class Whole:
    """The time of the model on a batch."""

    as_it_is: Time  # outside of the report
    exact: Time  # with this package's exact attention
    twins: tuple[float, float]  # as in Layer
    times: tuple[Time, ...]  # with each setting in all layers
    speeds: tuple[float | None, ...]  # as in Measurement
    exact_share: float  # of attention in `exact`: the sum over all calls of their times alone, relative to it
    shares: tuple[float, ...]  # the same of each setting


@dataclass(frozen=True)
class Report:
    """What `report` found. `str()` of it is the table; notebooks show it as HTML."""

    settings: tuple[Settings, ...]
    layers: tuple[Layer, ...]  # in the order of the calls
    outputs: tuple[Output, ...]  # of the whole model, approximated in all layers at once
    metrics: tuple[Metric, ...]  # the caller's
    whole: Whole | None  # None where the model was not run as a whole
    whole_left_out: str | None  # why `outputs` is empty, if it is, and with it `metrics` and `whole`
    batches: int
    meta: dict  # versions, device, threads

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        from . import render

        return render.html(self)

    def table(self) -> str:
        """A line for each call and setting, then one a setting over all calls, then the model's outputs, metrics and
        time. A time is a median, with the least and the largest in brackets."""
        from . import render

        return render.text(self)

    def json(self) -> str:
        """The report as JSON, the fields of the classes of this module as keys; numbers that are not finite are null,
        and an order is its shape."""
        return json.dumps(_finite(dataclasses.asdict(self)), indent=1, allow_nan=False) + "\n"

    def to_json(self, path: str | Path) -> None:
        """Writes `json()` to a file."""
        Path(path).write_text(self.json(), encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draws error against speed to a file (.png, .svg, .pdf): a point a layer, a colour and a shape a setting.

        Needs matplotlib; raises ImportError where it is missing."""
        from . import render

        render.plot(self, path)

    def measured(self) -> list[Layer]:
        """The layers that were not left out."""
        return [layer for layer in self.layers if not layer.left_out]


def speed(exact_ms: float, ms: float, twins: tuple[float, float]) -> float | None:
    """How many times as quick as exact attention; None where `ms` differs from the nearer of two runs of exact
    attention by no more than they differ from each other."""
    quick, slow = min(twins), max(twins)
    return exact_ms / ms if max(quick / ms, ms / slow) > slow / quick else None


def label(settings: Settings) -> str:
    """A short name: what differs from the defaults."""
    words = [settings.strategy]
    near = [] if settings.window is None else [f"window={settings.window}"]
    near += [f"sinks={settings.sinks}"] if settings.sinks else []
    near += [f"skip={settings.skip:g}"] if settings.skip else []
    near += ["finish"] if settings.finish else []
    if settings.strategy != "exact":
        words += [settings.estimator] if STRATEGIES[settings.strategy].has_estimator else []
        default = settings.strategy == "auto" and settings.group_size is None
        words += [] if default else [f"G={settings.taken_group_size}"]
        words += [f"l={settings.block_size}"] if settings.block_size is not None else []
        words += [settings.order_from] if settings.order_from != "auto" else []
        words += [f"seed={settings.seed}"] if settings.seed else []
    return " ".join(words + near)


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "shape"):  # an order
        return list(value.shape)
    return None if isinstance(value, float) and not math.isfinite(value) else value
