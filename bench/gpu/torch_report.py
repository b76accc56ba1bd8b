#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables and plots from the result file of torch_gpu.py: the paper's Table 1 and Figure 9 on this GPU.

Prints the tables (markdown) and writes <plots>_time.png and <plots>_ratio.png.
"""

import argparse
import itertools
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

METHODS = {  # (impl, strategy, group size, one block): (name, colour, marker, line); the palette is Okabe and Ito's
    ("sdpa_flash", None, None, False): ("FlashAttention-2", "black", "v", "-"),
    ("sdpa_cudnn", None, None, False): ("cuDNN", "grey", "D", "-"),
    ("distr", "exact", 1, False): ("exact", "#0072B2", "o", "-"),
    ("distr", "lsh", 2, False): ("LSH, G = 2", "#E69F00", "^", "-"),
    ("distr", "lsh", 4, False): ("LSH, G = 4", "#E69F00", "^", "--"),
    ("distr", "energy", 2, False): ("energy, G = 2", "#009E73", "s", "-"),
    ("distr", "energy", 4, False): ("energy, G = 4", "#009E73", "s", "--"),
    ("distr", "energy", 2, True): ("energy, G = 2, one block", "#CC79A7", "P", "-"),
    ("distr", "energy", 4, True): ("energy, G = 4, one block", "#CC79A7", "P", "--"),
}
OURS = [method for method in METHODS if method[0] == "distr"]
FLASH, CUDNN = list(METHODS)[:2]
LONG = 4096  # from this N on the targets hold


class Results:
    """The rows by (op, (batch, heads, d, causal), method, N)."""

    def __init__(self, path):
        content = json.loads(path.read_text())
        self.meta, self.rows = content["meta"], {}
        for row in content["rows"]:
            series = row["batch"], row["heads"], row["head_dim"], row["causal"]
            method = row["impl"], row["strategy"], row["group_size"], row["block"] == row["seq_q"]
            self.rows[row["op"], series, method, row["seq_q"]] = row
        self.lengths = sorted({key[3] for key in self.rows})

    def get(self, op, series, method, n, key="ms"):
        return self.rows.get((op, series, method, n), {}).get(key)

    def series(self, op):
        return sorted({key[1] for key in self.rows if key[0] == op}, key=lambda of: (of[0], of[3], of[2]))

    def source(self):
        meta = self.meta
        versions = f"CUDA {meta['cuda']}, PyTorch {meta['torch']}, cuDNN {meta['cudnn']}"
        return f"{meta['gpu']}, {versions}, commit {meta['commit']}"

    def dtype(self):
        return ", ".join(sorted({row["dtype"] for row in self.rows.values()}))


def label(series):
    batch, heads, dim, causal = series
    return f"B = {batch}, H = {heads}, d = {dim}{', causal' if causal else ''}"


def number(value, digits=3):
    return "-" if value is None else f"{value:.{digits}f}" if value < 100 else f"{value:.1f}"


def table(head, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows))


def times_table(results, op, batch, heads, causal):
    """Like the paper's Table 1: ms by d and N."""
    rows = []
    for dim in (128, 64):
        for method, (name, *_) in METHODS.items():
            times = [results.get(op, (batch, heads, dim, causal), method, n) for n in results.lengths]
            if any(time is not None for time in times):
                rows.append([dim, name, *map(number, times)])
    return table(["d", "ms", *(f"N = {n}" for n in results.lengths)], rows)


def ratio_table(results, op):
    """Speed relative to FlashAttention-2, and how much of it holds for all lengths from LONG on."""
    rows = []
    for series in results.series(op):
        for n in results.lengths:
            flash = results.get(op, series, FLASH, n)
            if flash is None:
                continue
            others = [results.get(op, series, method, n, "ratio_to_flash") for method in (CUDNN, *OURS)]
            rows.append([label(series), n, number(flash), *(number(ratio, 2) for ratio in others)])
    for dim in (64, 128):
        worst = []
        for method in (CUDNN, *OURS):
            ratios = [
                row["ratio_to_flash"]
                for (of_op, series, of_method, n), row in results.rows.items()
                if (of_op, series[2], of_method) == (op, dim, method) and n >= LONG
            ]
            worst.append(number(min(ratios), 2) if ratios else "-")
        rows.append([f"smallest of d = {dim}", f"from {LONG}", "", *worst])
    names = [METHODS[method][0] for method in (CUDNN, *OURS)]
    return table(["speed relative to FlashAttention-2", "N", "its ms", *names], rows)


def ranges_table(results):
    """The smallest and the largest speed relative to others, forward, over all B, H and causality."""
    rows = []
    for method in OURS:
        for peer, dim in itertools.product((FLASH, CUDNN, OURS[0]), (64, 128)):
            if peer != method:
                cells = []
                for least, most in ((LONG, LONG), (8192, 8192), (16384, 1 << 30), (LONG, 1 << 30)):
                    ratios = [
                        results.get("forward", series, peer, n) / row["ms"]
                        for (op, series, of, n), row in results.rows.items()
                        if (op, series[2], of) == ("forward", dim, method) and least <= n <= most
                    ]
                    cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-")
                rows.append([METHODS[method][0], METHODS[peer][0], dim, *cells])
    return table(["speed of", "relative to", "d", "N = 4096", "N = 8192", "from 16384", "from 4096"], rows)


def backward_range(results):
    """The same of exact attention's backward, forward and backward less forward, relative to FlashAttention-2's."""
    ratios = []
    for (op, series, method, n), row in results.rows.items():
        flash = results.get("forward_backward", series, FLASH, n)
        if (op, method) == ("forward_backward", OURS[0]) and series[2] >= 64 and n >= LONG and flash:
            forward = [results.get("forward", series, of, n) for of in (FLASH, method)]
            ratios.append((flash - forward[0]) / (row["ms"] - forward[1]))
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"


def launch_table(results, batch, heads, dim):
    """Short sequences: a call as it is, and what the GPU needs for it out of a captured graph; in microseconds."""
    rows = []
    for n in results.lengths:
        cells = []
        for method in METHODS:
            found = [results.get("forward", (batch, heads, dim, False), method, n, key) for key in ("ms", "ms_graph")]
            cells.append("-" if None in found else " / ".join(f"{1000 * ms:.0f}" for ms in found))
        if set(cells) != {"-"}:
            rows.append([n, *cells])
    return table(["N", *(name for name, *_ in METHODS.values())], rows)


def plot_methods(results, path, key, ylabel, scale):
    """One panel for each causality and d, one line a method, at B = 1."""
    every = [series for series in results.series("forward") if series[0] == 1]
    dims, corners = sorted({series[2] for series in every}), sorted({series[3] for series in every})
    sizes = {"figsize": (4 * len(dims), 3.2 * len(corners) + 0.6), "squeeze": False, "layout": "constrained"}
    figure, panels = plt.subplots(len(corners), len(dims), **sizes)
    for series in every:
        panel = panels[corners.index(series[3])][dims.index(series[2])]
        for method, (name, colour, marker, line) in METHODS.items():
            points = [(n, results.get("forward", series, method, n, key)) for n in results.lengths]
            points = [point for point in points if point[1] is not None]
            if points:
                panel.plot(*zip(*points), line, color=colour, marker=marker, markersize=4, label=name)
        panel.set(title=label(series), xscale="log", yscale=scale, xlabel="N", ylabel=ylabel)
        panel.set_xticks(results.lengths, [f"{n // 1024}K" for n in results.lengths])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    finish(figure, panels[0][0], path, results, columns=5)


def finish(figure, panel, path, results, columns):
    """The legend stands above all panels, where it hides no line."""
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=columns, fontsize="small")
    figure.supxlabel(f"{results.source()}; {results.dtype()}, forward", fontsize="x-small")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--result", type=pathlib.Path, default="bench/results/h200/torch.json", help="of torch_gpu.py")
    parser.add_argument("--plots", default="docs/h200", help="how the plots' paths begin")
    options = parser.parse_args()
    results = Results(options.result)
    print(f"{results.source()}; {results.dtype()}. Medians, grouping and fusion included.")
    for op in ("forward", "forward_backward"):
        for batch, heads in sorted({series[:2] for series in results.series(op)}):
            for causal in (False, True):
                print(f"\n## {op}, B = {batch}, H = {heads}{', causal' if causal else ''}\n")
                print(times_table(results, op, batch, heads, causal))
        if results.series(op):
            print(f"\n## {op}, relative to FlashAttention-2\n\n{ratio_table(results, op)}")
    print(f"\n## Ranges, forward\n\n{ranges_table(results)}")
    print(f"\nBackward of exact attention, d = 64 and 128, from N = {LONG}, relative to FA2: {backward_range(results)}")
    for batch, heads, dim, causal in results.series("forward"):
        if dim == 128 and not causal:
            print(f"\n## A call / its share of a graph, µs, B = {batch}, H = {heads}, d = {dim}\n")
            print(launch_table(results, batch, heads, dim))
    plot_methods(results, f"{options.plots}_time.png", "ms", "ms", "log")
    plot_methods(results, f"{options.plots}_ratio.png", "ratio_to_flash", "speed relative to FA-2", "linear")


if __name__ == "__main__":
    main()
