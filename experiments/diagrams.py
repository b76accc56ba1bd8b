#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the method, docs/method.png, from the queries and keys of a real encoder (data/minilm.safetensors).

Above, what happens to one block of Q and its keys, and which keys are near; below, the orders of all blocks, and what
comes of the first one's. Needs matplotlib.

    python3 experiments/diagrams.py docs/method.png"""

import argparse
import statistics
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from distrattention import ops  # noqa: E402

TENSORS = Path(__file__).resolve().parents[1] / "data/minilm.safetensors"
LAYER, HEAD, BLOCK, ROWS, SIZE = 1, 4, 64, 512, 2  # l rows of N, G columns a group
SHOWN, KEYS = 24, 48  # rows and keys that are drawn
WINDOW, SINKS, TILE, NEAR_BLOCK = 128, 128, 128, 128


def orders(q, k):
    """{strategy: the order of the columns of each block, [blocks, d]}."""
    q, k = (x[None, None].float() for x in (q, k))
    return {
        strategy: ops.make_grouping(q, k, "none", strategy, SIZE, BLOCK, "own", 0, False)[0][0, 0].long()
        for strategy in ("lsh", "energy")
    }


def projection(rows, seed=0):
    """R [rows, 16] of the hash: Philox4x32-10 picks its quantiles of the normal distribution (docs/method.md, 2.1)."""
    low = 0xFFFFFFFF
    counter, key = [np.arange(rows, dtype=np.uint64), *np.zeros((3, rows), np.uint64)], (seed & low, seed >> 32)
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [second >> 32 ^ counter[1] ^ key[0], second & low, first >> 32 ^ counter[3] ^ key[1], first & low]
        key = key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low
    picks = np.stack(counter, 1).astype("<u4").view(np.uint8).astype(int)
    normal = statistics.NormalDist()
    return torch.tensor([normal.inv_cdf((i + 0.5) / 256) for i in range(256)]).bfloat16().float()[picks]


def hashes(q):
    """(the bits [16, d], the hashes [d]) of the columns of a block of Q: a hash is the rank of its bits in the Gray
    sequence."""
    bits = (projection(len(q)).T @ q > 0).long()
    rank = (bits << torch.arange(16)[:, None]).sum(0)
    for by in (8, 4, 2, 1):
        rank ^= rank >> by
    return bits, rank


def estimates(q, k, of):
    """{method: S_hat [l, N]}: `sample` takes the first column of each group of Q, `mean` the group's mean, and K's are
    summed; `energy` keeps the first half of the columns."""
    pairs_q, pairs_k = (x[:, of["lsh"]].unflatten(1, (-1, SIZE)) for x in (q, k))
    kept = of["energy"][: len(of["energy"]) // SIZE]
    return {
        "lsh (sample)": pairs_q[..., 0] @ pairs_k.sum(-1).T,
        "lsh (mean)": pairs_q.mean(-1) @ pairs_k.sum(-1).T,
        "energy": q[:, kept] @ k[:, kept].T,
    }


def near(rows, keys):
    """bool [rows, keys]: the near keys of each row, in whole tiles, by the row's block (docs/method.md, 8)."""
    first = torch.arange(rows) // NEAR_BLOCK * NEAR_BLOCK
    begin, end = (torch.arange(keys) // TILE * TILE + by for by in (0, TILE - 1))
    in_window = (end >= first[:, None] - WINDOW) & (begin <= first[:, None] + NEAR_BLOCK - 1 + WINDOW)
    return in_window | (begin < SINKS)


def show(axes, values, title, limit=None, colours="RdBu_r"):
    limit = limit or values.abs().quantile(0.99).item()
    axes.imshow(values, aspect="auto", cmap=colours, vmin=-limit if colours == "RdBu_r" else 0, vmax=limit,
                interpolation="nearest")  # fmt: skip
    axes.set_title(title, fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    tensors = load_file(TENSORS)
    whole, k = (tensors[name][LAYER, HEAD, :ROWS].float() for name in "qk")
    all_orders = orders(whole, k)
    q, of = whole[:BLOCK], {strategy: order[0] for strategy, order in all_orders.items()}
    figure, panels = plt.subplot_mosaic("ABCDEFG;HIJKLMM", figsize=(15, 4.6), layout="constrained")

    limit = q.abs().quantile(0.99).item()
    by_hash, sums = q[:, of["lsh"]], k[:, of["lsh"]].unflatten(1, (-1, SIZE)).sum(-1)
    show(panels["A"], whole, f"Q in blocks of {BLOCK} rows", limit)
    for at in range(BLOCK, ROWS, BLOCK):
        panels["A"].axhline(at - 0.5, color="black", linewidth=1.5)
    show(panels["B"], q[:SHOWN], f"Q of a block, d = {q.shape[1]}", limit)
    show(panels["C"], hashes(q)[0].flip(0)[:, of["lsh"]], "hashes of its columns, sorted", 1, "Greys")
    show(panels["D"], by_hash[:SHOWN], "columns by their hash", limit)
    for at in range(SIZE, q.shape[1], SIZE):
        panels["D"].axvline(at - 0.5, color="black", linewidth=0.8)
    show(panels["E"], by_hash[:SHOWN, ::SIZE], r"$\hat q$: one column of each group", limit)
    show(panels["F"], sums[:SHOWN], r"$\hat k$: sums of K's columns")
    seen = near(1024, 1024) & torch.ones(1024, 1024).tril().bool()
    show(panels["G"], seen.float() + torch.ones(1024, 1024).tril(), "near keys (dark), causal", 2, "Blues")

    scale = q.shape[1] ** -0.5
    exact = q @ k.T * scale
    limit = exact.abs().quantile(0.99).item()
    show(panels["H"], all_orders["lsh"], "each block's order of columns", q.shape[1], "viridis")
    show(panels["I"], exact[:SHOWN, :KEYS], r"$S = QK^T / \sqrt{d}$", limit)
    weights = exact.softmax(-1)
    moved = []
    for axes, (name, scores) in zip((panels[name] for name in "JKL"), estimates(q, k, of).items()):
        show(axes, (scores * scale)[:SHOWN, :KEYS], rf"$\hat S$ of {name}", limit)
        moved.append((name, (((scores * scale).softmax(-1) - weights).abs().sum(-1) / 2).mean().item()))
    names, shares = zip(*moved)
    panels["M"].bar(range(len(names)), shares, color=["#D55E00", "#E69F00", "#0072B2"])
    panels["M"].set_xticks(range(len(names)), names, fontsize=7)
    panels["M"].set_title("share of P that moves", fontsize=9)
    figure.savefig(options.picture, dpi=90)


if __name__ == "__main__":
    main()
