#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 8: draws the loss curves of fine-tuning out of result files of table5.py.

    python3 experiments/fig8.py docs/paper_losses.png bench/results/h200/paper/table5.json ..."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("results", type=Path, nargs="+", help="of table5.py")
    options = parser.parse_args()
    curves = {}  # of a data set and regime, by method: its losses, of each seed
    for row in (row for path in options.results for row in json.loads(path.read_text())["rows"]):
        curves.setdefault((row["data"], row["regime"]), {}).setdefault(row["method"], []).append(row["losses"])
    figure, panels = plt.subplots(1, len(curves), figsize=(4 * len(curves), 3.5), squeeze=False, layout="constrained")
    for axes, ((data, regime), methods) in zip(panels[0], sorted(curves.items())):
        for method, losses in methods.items():
            means = [sum(of_epoch) / len(of_epoch) for of_epoch in zip(*losses)]
            axes.plot(range(1, len(means) + 1), means, label=method)
        axes.set_title(f"{data}, {regime}", fontsize=10)
        axes.set_xlabel("epoch")
    panels[0][0].set_ylabel("training loss")
    panels[0][-1].legend(fontsize=7)
    figure.savefig(options.picture, dpi=120)


if __name__ == "__main__":
    main()
