#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/exact_speed.png, the README's plot: how many times as quick exact attention is as its peers, forward.

Reads the committed results of bench/torch_cpu.py and bench/gpu/torch_gpu.py.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
CPU_COLOURS = {"cpu/torch.json": "#0072B2", "cpu/torch_zen4.json": "#E69F00"}  # Okabe and Ito's palette, as below
COLOURS = {"cuDNN": "#D55E00", "FlashAttention-2": "#009E73"}
MARKERS = {64: "o", 128: "s"}  # by d
PEERS = {"cuDNN": "sdpa_cudnn", "FlashAttention-2": "sdpa_flash"}


def cpu_lines():
    """(name, colour, d, causal, [(N, how many times as quick)]) on CPUs, f32, one core, beside torch's attention."""
    for name, colour in CPU_COLOURS.items():
        rows = json.loads((RESULTS / name).read_text())["rows"]
        exact = [row for row in rows if (row["op"], row["dtype"], row["strategy"]) == ("forward", "f32", "exact")]
        core = f"EPYC at {1000 * max(row['tflops_exact_flops'] for row in exact):.0f} GFLOP/s"
        for dim in MARKERS:
            for causal in (True, False):
                found = [row for row in exact if (row["head_dim"], row["causal"]) == (dim, causal)]
                yield core, colour, dim, causal, sorted((row["seq_q"], row["ratio_to_sdpa"]) for row in found)


def gpu_lines():
    """The same on the GPU, bf16, B = 1, H = 10; whole calls from Python."""
    rows = json.loads((RESULTS / "h200/torch.json").read_text())["rows"]
    for peer, impl in PEERS.items():
        for dim in MARKERS:
            for causal in (True, False):
                shape = {"op": "forward", "batch": 1, "head_dim": dim, "causal": causal}
                of_shape = [row for row in rows if all(row[key] == value for key, value in shape.items())]
                theirs, ours = ({row["seq_q"]: row["ms"] for row in of_shape if row[key] == value}
                                for key, value in (("impl", impl), ("strategy", "exact")))
                yield peer, COLOURS[peer], dim, causal, sorted((n, theirs[n] / ms) for n, ms in ours.items())


def draw(axes, lines, title):
    lengths = set()
    for name, colour, dim, causal, points in lines:
        style = {"color": colour, "marker": MARKERS[dim], "linestyle": "-" if causal else "--"}
        label = f"{name}, d = {dim}{', causal' if causal else ''}"
        axes.plot(*zip(*points), markersize=5, label=label, **style)
        lengths |= {n for n, _ in points}
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(lengths), [str(n) for n in sorted(lengths)], minor=False)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("N")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8, frameon=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plot", type=pathlib.Path, default=RESULTS.parents[1] / "docs/exact_speed.png")
    options = parser.parse_args()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    draw(left, cpu_lines(), "times as quick as torch, on two AMD EPYCs, fp32")
    draw(right, gpu_lines(), "times as quick as the peer, on an NVIDIA H100, bf16")
    figure.savefig(options.plot, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
