# SPDX-License-Identifier: Apache-2.0
"""A report as text, as HTML and as a plot."""

from __future__ import annotations

import html as escaping
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .result import Layer, Report, Time, label, speed

# Colours that the colour-blind tell apart (Okabe and Ito), and shapes that need no colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SHAPES = "os^DvPX*<>"


class Section(NamedTuple):
    """A table under a title; without rows a line of text."""

    title: str
    head: list[str]
    rows: list[list[str]]  # as long as the head, or shorter, and then the last cell is a remark


def text(report: Report) -> str:
    parts = []
    for title, head, rows in _sections(report):
        parts.append("\n".join(filter(None, (title, _align(head, rows) if head else ""))))
    return "\n\n".join(parts) + "\n"


def html(report: Report) -> str:
    parts = []
    for title, head, rows in _sections(report):
        if title:
            parts.append(f"<p><b>{escaping.escape(title)}</b></p>")
        if head:
            lines = [_html_row("th", head, len(head)), *(_html_row("td", row, len(head)) for row in rows)]
            parts.append(f"<table>{''.join(lines)}</table>")
    return "".join(parts)


def _html_row(tag: str, cells: list[str], count: int) -> str:
    """The last cell of a short row reaches to the right end."""
    wide = f' colspan="{count - len(cells) + 1}"'
    row = [f"<{tag}>{escaping.escape(cell)}</{tag}>" for cell in cells]
    if len(cells) < count:
        row[-1] = row[-1].replace(f"<{tag}>", f"<{tag}{wide}>", 1)
    return f"<tr>{''.join(row)}</tr>"


def _sections(report: Report) -> Iterator[Section]:
    labels = [label(setting) for setting in report.settings]
    yield _calls(report, labels)
    measured = report.measured()
    if measured:
        yield _summary(report, labels, measured)
    if any(m.head_errors for layer in measured for m in layer.measurements):
        yield _heads(labels, measured)
    title = "The whole model, approximated in all calls at once"
    if report.whole_left_out:
        yield Section(f"{title}: left out, as {report.whole_left_out}", [], [])
        return
    rows = [[f"error of {o.name}", "0", *("-" if e is None else f"{e:.3f}" for e in o.errors)] for o in report.outputs]
    rows += [[m.name, *(f"{value:.4g}" for value in (m.exact, *m.values))] for m in report.metrics]
    yield Section(title, ["", "exact", *labels], rows)
    if report.whole:
        yield _time(report, labels)


def _calls(report: Report, labels: list[str]) -> Section:
    head = ["attention call", "Q", "K", "hidden", "setting", "error of O", "min cosine", "TV of P", "ms", "speed"]
    skips = any(setting.skip for setting in report.settings)
    head += ["kept"] if skips else []
    rows = []
    for layer in report.layers:
        start = [layer.name or "-", _shape(layer.query), _shape(layer.key), _hidden(layer)]
        if layer.left_out:
            rows.append([*start, f"left out: {' '.join(layer.left_out.split())}"])
            continue
        rows.append([*start, "exact", "0", "1", "0", _ms(layer.exact), "1.00", *([""] if skips else [])])
        for name, setting, m in zip(labels, report.settings, layer.measurements):
            name += f" ({m.strategy})" * (setting.strategy == "auto")
            numbers = [f"{m.error:.3f}", f"{m.row_cosine_min:.2f}", f"{m.total_variation:.3f}"]
            kept = [_share(m.kept_share)] if skips else []
            rows.append(["", "", "", "", name, *numbers, _ms(m.time), _speed(m.speed), *kept])
    return Section(f"{report.batches} batches" if report.batches > 1 else "", head, rows)


def _summary(report: Report, labels: list[str], measured: list[Layer]) -> Section:
    skips = any(setting.skip for setting in report.settings)
    exact_ms = sum(layer.exact.ms for layer in measured)
    twins = tuple(map(sum, zip(*(layer.twins for layer in measured))))
    rows = [["exact", "0", "0", "0", f"{exact_ms:.2f}", "1.00"]]
    if all(layer.torch is not None for layer in measured):
        torch_ms = sum(layer.torch.ms for layer in measured)
        rows.append(["torch's own", "", "", "", f"{torch_ms:.2f}", _speed(speed(exact_ms, torch_ms, twins))])
    for n, name in enumerate(labels):
        of_setting = [layer.measurements[n] for layer in measured]
        errors = [m.error for m in of_setting]
        variation = statistics.mean(m.total_variation for m in of_setting)
        ms = sum(m.time.ms for m in of_setting)
        numbers = [f"{statistics.median(errors):.3f}", f"{max(errors):.3f}", f"{variation:.3f}"]
        rows.append([name, *numbers, f"{ms:.2f}", _speed(speed(exact_ms, ms, twins))])
        if skips:
            shares = [m.kept_share for m in of_setting if m.kept_share is not None]
            rows[-1].append(_share(statistics.mean(shares) if shares else None))
    title = f"All {len(measured)} measured calls" if len(measured) > 1 else "The measured call"
    title += f" (two runs of exact attention differ by {_noise(twins)}; a speed within that of either is -)"
    if skips:
        title += "; kept: of the far halves of tiles, those that are not skipped"
    head = ["setting", "median error", "largest error", "mean TV of P", "ms", "speed", *(["kept"] if skips else [])]
    return Section(title, head, [row + [""] * (len(head) - len(row)) for row in rows])


def _heads(labels: list[str], measured: list[Layer]) -> Section:
    rows = [
        [layer.name or "-", name, " ".join(f"{error:.3f}" for error in m.head_errors)]
        for layer in measured
        for name, m in zip(labels, layer.measurements)
        if m.head_errors
    ]
    return Section("Errors of O by head, from head 0 on", ["attention call", "setting", "errors"], rows)


def _time(report: Report, labels: list[str]) -> Section:
    whole = report.whole
    rows = [
        ["as it is", _ms(whole.as_it_is), _speed(speed(whole.exact.ms, whole.as_it_is.ms, whole.twins)), ""],
        ["exact", _ms(whole.exact), "1.00", f"{whole.exact_share:.0%}"],
    ]
    of_settings = zip(labels, whole.times, whole.speeds, whole.shares)
    rows += [[name, _ms(time), _speed(ratio), f"{share:.0%}"] for name, time, ratio, share in of_settings]
    title = f"Time of the whole model (two runs with exact attention differ by {_noise(whole.twins)})"
    return Section(title, ["setting", "ms", "speed", "share of attention"], rows)


def plot(report: Report, path: str | Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for n, setting in enumerate(report.settings):
        colour, shape = COLOURS[n % len(COLOURS)], SHAPES[n % len(SHAPES)]
        found = [layer.measurements[n] for layer in report.measured()]
        for known in (True, False):
            points = [(m.speed or 1.0, m.error) for m in found if (m.speed is not None) == known]
            face = colour if known else "none"
            x, y = zip(*points) if points else ((), ())
            name = label(setting) if known else None
            axes.scatter(x, y, marker=shape, facecolors=face, edgecolors=colour, label=name)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("speed relative to exact attention (hollow, at 1: lost in the noise)")
    axes.set_ylabel("error of O")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.suptitle("A point is an attention call of the model", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path)


def _noise(twins: tuple[float, float]) -> str:
    return f"{max(twins) / min(twins) - 1:.1%}"


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ms(time: Time) -> str:
    return f"{time.ms:.2f} ({time.ms_min:.2f}-{time.ms_max:.2f})"


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
