#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 8: draws the loss curves of fine-tuning out of result files of table5.py.

    python3 experiments/fig8.py docs/paper_losses.png bench/results/h*/paper/table5_*.json"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = ("black", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")  # of Okabe and Ito; then dashed


def means(methods):
    """{method: its mean losses by epoch} of {method: {seed: losses}}: over the seeds that all methods
    have, as a seed's order of images shows in all curves."""
    seeds = set.intersection(*map(set, methods.values()))
    if not seeds:
        raise SystemExit(f"no seed is of all of {', '.join(methods)}; allowed: results with one that is")
    return {method: [sum(of_epoch) / len(seeds) for of_epoch in zip(*(of[seed] for seed in sorted(seeds)))]
            for method, of in methods.items()}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("results", type=Path, nargs="+", help="of table5.py")
    options = parser.parse_args()
    curves = {}  # of a data set and regime, by method and seed: its losses
    for row in (row for path in options.results for row in json.loads(path.read_text())["rows"]):
        curves.setdefault((row["data"], row["regime"]), {}).setdefault(row["method"], {})[row["seed"]] = row["losses"]
    sets, regimes = (sorted({key[place] for key in curves}) for place in (0, 1))  # a row each, a column each
    size = (4 * len(regimes) + 1.5, 2.8 * len(sets))
    figure, panels = plt.subplots(len(sets), len(regimes), figsize=size, squeeze=False, layout="constrained")
    for (data, regime), methods in sorted(curves.items()):
        axes = panels[sets.index(data)][regimes.index(regime)]
        for number, (method, losses) in enumerate(sorted(means(methods).items())):
            style = {"color": COLOURS[number % len(COLOURS)], "linestyle": ("-", "--")[number // len(COLOURS) % 2]}
            axes.plot(range(1, len(losses) + 1), losses, label=method, **style)
        axes.set_title(f"{data}, {regime}", fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("epoch")
    for row in panels:
        row[0].set_ylabel("training loss")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(options.picture, dpi=120)


if __name__ == "__main__":
    main()
