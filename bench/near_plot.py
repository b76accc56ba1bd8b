#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/near.png: how loss and time move with G, window, skip and finish, on SmolLM2-135M at N = 8192.

The loss is that of bench/quality/perplexity.py with the setting in every layer, the time that of bench/near.py on Q, K
and V captured from some layers, the mean over these; a panel for each result file with captured inputs that there is.
"""

import argparse
import json
import pathlib
import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
TIMES = {"cpu/near.json": "one core of an AMD EPYC", "h200/near.json": "an NVIDIA H200"}
NEAR = " window=512 sinks=128"
LEAST = 0.01  # per cent; smaller losses, and gains, are drawn there
SERIES = {  # name: (colour of Okabe and Ito's palette, marker, {setting: what stands beside the point})
    "no near keys": ("black", "x", {"energy G=2": "G = 2", "energy G=4": "G = 4"}),
    "energy, G = 2, by window": ("#0072B2", "o", {f"energy G=2 window={n} sinks=128": str(n)
                                                  for n in (128, 256, 512, 1024)}),
    "energy, G = 4, window 512": ("#56B4E9", "v", {f"energy G=4{NEAR}": ""}),
    "exact, by skip": ("#E69F00", "s", {f"exact{NEAR} skip={p}": p for p in ("0.01", "0.0025", "0.001")}),
    "energy, G = 2, by skip": ("#009E73", "D", {f"energy G=2{NEAR} skip={p}": p for p in ("0.01", "0.0025", "0.001")}),
    "energy, G = 4, finish, by skip": ("#D55E00", "^", {f"energy G=4{NEAR} skip={p} finish": p
                                                        for p in ("0.01", "0.0025", "0.001")}),
}  # fmt: skip


def losses():
    """{setting: per cent of perplexity} at N = 8192."""
    rows = json.loads((RESULTS / "h200/smollm2.json").read_text())["rows"]
    wanted = (row for row in rows if (row["length"], row["rows_together"]) == (8192, 64))
    return {row["setting"]: 100 * (row["relative_to_exact"] - 1) for row in wanted}


def times(name):
    """{setting: time relative to exact attention} on captured inputs."""
    path, found = RESULTS / name, {}
    for row in json.loads(path.read_text())["rows"] if path.exists() else ():
        if row["input"].startswith("captured"):
            found.setdefault(row["setting"], []).append(row["time_of_exact"])
    return {setting: statistics.fmean(of) for setting, of in found.items()}


def draw(axes, of_setting, loss, title):
    for name, (colour, marker, settings) in SERIES.items():
        points = [(of_setting[setting], max(loss[setting], LEAST)) for setting in settings]
        axes.plot(*zip(*points), color=colour, marker=marker, markersize=6, linewidth=1, label=name)
        for point, text in zip(points, settings.values()):
            beside = (-4, -12) if marker == "^" else (6, 4)
            axes.annotate(text, point, textcoords="offset points", xytext=beside, fontsize=8, color=colour)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    ticks = (0.01, 0.1, 1, 10, 100)
    axes.set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.set_xlim(left=0.35)
    axes.set_xlabel("time relative to exact attention")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plot", type=pathlib.Path, default=RESULTS.parents[1] / "docs/near.png")
    options = parser.parse_args()
    panels = {title: of for name, title in TIMES.items() if (of := times(name))}
    size = {"figsize": (5 * len(panels) + 2, 4.6), "sharey": True, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(1, len(panels), **size)
    for panel, (title, of_setting) in zip(axes[0], panels.items()):
        draw(panel, of_setting, losses(), f"on {title}")
    axes[0][0].set_ylabel("loss of perplexity")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(options.plot, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
