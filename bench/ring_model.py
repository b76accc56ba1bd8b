#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model of attention around a ring of GPUs: what a call takes, and which share of the ideal that is.

A pass around a ring of P ranks has P steps. In each but the last, K and V of n = N / P rows go to the next rank while
kernels run, so that a step takes the longer of the two; in the backward the gradients of K and V go along, and home in
the end, and half of a rank's own step comes first and half last, beside the first and the last hop. By messages they
are in fp32, and by the memory of peers in the dtype of K (distrattention/distributed).
Kernels are those measured on one GPU (bench/results/h200/torch.json), whose time grows with the square of n beyond the
longest one measured; a merge reads what a step found and, every third time, reads and writes O in fp32; before a call
ranks gather 4 kB from each other. The ideal is one GPU's time for the whole sequence, divided by P. Links and memory
are assumptions, written into the meta; orders of the columns are left out. bench/distributed.py holds the model to what
it measures.

Writes {"meta", "rows"} (bench/results/model/ring.json) and draws docs/ring_model.png; --print shows the table.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import NamedTuple

import result_file

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "bench" / "results" / "h200" / "torch.json"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of one layer of a Llama of 8 billion weights, batch 1
RANKS = {"NVLink": (8,), "400 Gb/s": (64, 1024)}  # that are linked so
ROWS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)  # n, of a rank
STRATEGIES = (("exact", 1), ("energy", 2))
OPERATIONS = ("forward", "forward_backward")  # a row of the latter has the step and the hop of the backward
PUBLISHED = 0.85, 0.90  # shares of the ideal that ring-flash-attention names for 8 GPUs: forward; and backward
GATHERED_BYTES = 4096
MERGE_PASSES = 1.2  # over O in fp32, for each step: read in bf16; and every third time read and written
MEMORY_BYTES_PER_MS = 3.6e9  # three quarters of an H200's 4.8 TB/s


class Link(NamedTuple):
    """From each rank to the next, all at the same time."""

    latency_ms: float
    bytes_per_ms: float

    def ms(self, count):
        return self.latency_ms + count / self.bytes_per_ms

    @staticmethod
    def of_rows(rows):
        """By the smallest and the largest of the "link" rows of bench/distributed.py."""
        small, large = (choose(rows, key=lambda row: row["bytes"]) for choose in (min, max))
        return Link(small["ms"], large["bytes"] / max(large["ms"] - small["ms"], 1e-6))


# Bandwidths are 80 % of NVLink 4's 450 GB/s and of one 400 Gb/s port for each GPU.
LINKS = {"NVLink": Link(0.01, 360e6), "400 Gb/s": Link(0.02, 40e6)}
GRADIENTS = {"NVLink": 1, "400 Gb/s": 2}  # bytes of gradients to those of keys: the memory of peers, and messages


def bytes_of_keys(rows, kv_heads, head_dim, element_bytes):
    """Of K and V of so many rows."""
    return 2 * rows * kv_heads * head_dim * element_bytes


def pass_ms(ranks, compute_ms, moved_bytes, link, homing=False):
    """Of one pass around the ring, whose kernels take compute_ms in all; `homing`: what moves moves home in the end,
    and half of a rank's own step is beside that, and half beside the first hop."""
    if ranks == 1:
        return compute_ms
    step, hop = compute_ms / ranks, link.ms(moved_bytes)
    if homing:
        return 2 * max(step / 2, hop) + (ranks - 2) * max(step, hop) + step
    return (ranks - 1) * max(step, hop) + step


def ring_ms(ranks, forward_ms, backward_ms, key_bytes, gradient_bytes, link):
    """Of a call whose kernels take so long, its backward included unless backward_ms is None."""
    total = pass_ms(ranks, forward_ms, key_bytes, link) + (ranks - 1) * link.ms(GATHERED_BYTES)
    if backward_ms is not None:
        total += pass_ms(ranks, backward_ms, key_bytes + gradient_bytes, link, homing=True)
    return total


class Kernels:
    """Times of calls on one GPU, not causal, in ms for each head, by the measured lengths."""

    def __init__(self, result):
        self._ms = {}
        for row in result["rows"]:
            if row["impl"] == "distr" and not row["causal"] and row["batch"] == 4 and row.get("block") in (None, 128):
                key = row["strategy"], row["group_size"], row["head_dim"], row["op"]
                per_head = row["ms"] / (row["batch"] * row["heads"])
                self._ms.setdefault(key, {})[row["seq_q"]] = per_head

    def ms(self, strategy, group_size, head_dim, op, rows):
        """Of one head of so many rows and keys."""
        measured = self._ms[strategy, group_size, head_dim, op]
        longest = max(n for n in measured if n <= rows)
        return measured[longest] * (rows / longest) ** 2

    def passes(self, strategy, group_size, head_dim, rows):
        """(forward, backward)"""
        forward = self.ms(strategy, group_size, head_dim, "forward", rows)
        return forward, self.ms(strategy, group_size, head_dim, "forward_backward", rows) - forward


def rows_of(kernels):
    """A row for each strategy, link, number of ranks, rows of a rank, and with and without a backward."""
    return [
        row_of(kernels, *strategy, link, ranks, n, op)
        for strategy, link in itertools.product(STRATEGIES, LINKS)
        for ranks, n, op in itertools.product(RANKS[link], ROWS, OPERATIONS)
    ]


def row_of(kernels, strategy, group_size, link, ranks, n, op):
    """Of a causal call in zigzag, where a step computes half of the n^2 pairs of a rank's rows and another's keys."""
    gradients = op != "forward"
    step, whole = (
        [HEADS * ms / 2 for ms in kernels.passes(strategy, group_size, HEAD_DIM, rows)] for rows in (n, n * ranks)
    )
    step[0] += MERGE_PASSES * 4 * n * HEADS * HEAD_DIM / MEMORY_BYTES_PER_MS
    key_bytes = bytes_of_keys(n, KV_HEADS, HEAD_DIM, 2)
    gradient_bytes = GRADIENTS[link] * key_bytes
    ms = ring_ms(ranks, ranks * step[0], ranks * step[1] if gradients else None, key_bytes, gradient_bytes, LINKS[link])
    ideal = sum(whole if gradients else whole[:1]) / ranks
    hop = LINKS[link].ms(key_bytes + gradients * gradient_bytes)
    return {
        "strategy": strategy, "group_size": group_size, "link": link, "ranks": ranks, "seq": n * ranks, "rows": n,
        "op": op, "step_ms": step[gradients], "hop_ms": hop, "ms": ms, "share_of_ideal": ideal / ms,
    }  # fmt: skip


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    colours = {("NVLink", 8): "#0072B2", ("400 Gb/s", 64): "#E69F00", ("400 Gb/s", 1024): "#D55E00"}
    for axes, strategy in zip(both, ("exact", "energy")):
        for (link, ranks), colour in colours.items():
            for op, line in (("forward", "-"), ("forward_backward", "--")):
                wanted = {"strategy": strategy, "link": link, "ranks": ranks, "op": op}
                points = [(row["rows"], row["share_of_ideal"]) for row in rows
                          if all(row[key] == value for key, value in wanted.items())]  # fmt: skip
                label = f"{ranks} GPUs, {link}" if op == "forward" else None
                axes.plot(*zip(*points), line, color=colour, marker="o", markersize=4, label=label)
        for share, line in zip(PUBLISHED, ("-", "--")):
            label = "ring-flash-attention, 8 GPUs, published" if line == "-" else None
            axes.axhline(share, color="grey", linewidth=1, linestyle=line, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ROWS, [f"{n // 1024}k" for n in ROWS])
        axes.set_xlabel("rows on a GPU, N / P")
        axes.set_title("exact" if strategy == "exact" else "energy, G = 2", fontsize=10)
        axes.set_ylim(0, 1.05)
        axes.grid(alpha=0.3)
    both[0].set_ylabel("share of the ideal (model)")
    both[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json-out", type=Path, help="bench/results/model/ring.json, as it is committed")
    parser.add_argument("--plot", type=Path, help="docs/ring_model.png, as it is committed")
    parser.add_argument("--print", action="store_true")
    options = parser.parse_args()
    measured = json.loads(KERNELS.read_text(encoding="utf-8"))
    rows = rows_of(Kernels(measured))
    if options.json_out:
        meta = {
            "model": "bench/ring_model.py", "kernels": str(KERNELS.relative_to(ROOT)),
            "gpu": measured["meta"]["gpu"], "commit_of_kernels": measured["meta"]["commit"], "heads": HEADS,
            "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "bf16", "layout": "zigzag",
            "merge_passes": MERGE_PASSES, "memory_bytes_per_ms": MEMORY_BYTES_PER_MS,
            "links": {name: link._asdict() for name, link in LINKS.items()},
        }  # fmt: skip
        options.json_out.parent.mkdir(parents=True, exist_ok=True)
        result_file.write(options.json_out, {"meta": meta, "rows": rows})
    if options.plot:
        draw(rows, options.plot)
    if options.print:
        for row in rows:
            hidden = "hidden" if row["hop_ms"] <= row["step_ms"] else "not hidden"
            print(f"{row['strategy']:7}{row['link']:9} P {row['ranks']:5} n {row['rows']:6} {row['op']:17}"
                  f"step {row['step_ms']:9.3f} ms, hop {row['hop_ms']:7.3f} ms, {hidden:11}"
                  f"{row['share_of_ideal']:5.2f} of ideal")  # fmt: skip


if __name__ == "__main__":
    main()
