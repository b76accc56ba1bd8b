#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures how often 16-bit sums of four columns of K break the tolerance (method, 4), and how often luck alone does.

The rule allows twice the largest error of a plain implementation, which rounds a sum to the dtype once. LSE has no
other leeway, so this compares errors of LSE on random problems (bf16, d = 128, G = 4, causal, 300 rows, 2 heads, blocks
of 128, random groups, `mean`). Two ways round more often: after each addition, as sm80/forward once did, or the sums of
pairs and then their sum. Two ways measure luck: they round once, as the plain implementation does, but 1.37 k_hat, or
1.37 k_hat and 1.37 q_hat, so that the rounding is another draw. Elsewhere q_hat is rounded as in the plain one. With
`previous` the first block is exact and does not count; with `own` some rows see few keys, whose errors do not cancel.

Writes {"meta", "summary"} (bench/results/cpu/experiments/roundings.json): for each of them the root mean square of the
errors over the plain one's, and of the largest error of a problem over the plain one's the median, the 99th percentile,
the largest and how many problems have it above 2.
"""

import argparse
import datetime
import os
import platform
import shlex
import sys
from pathlib import Path

import torch

import result_file

D, GROUP, ROWS, BLOCK, HEADS = 128, 4, 300, 128, 2
FACTOR = 1.37
WAYS = ("each addition", "pairs", "another draw of k_hat", "another draw of both")


def rounded(x):
    return x.bfloat16().double()


def lse(q_hat, k_hat, visible):
    scores = q_hat @ k_hat.mT / D**0.5
    return scores.masked_fill(~visible, -torch.inf).logsumexp(-1)


def errors(q, k, first):
    """{way: errors of LSE} of the block of queries from row `first` on; "plain" is one of the ways."""
    groups = torch.randperm(D).view(-1, GROUP)
    q, k = q[first : first + BLOCK][:, groups], k[:, groups]  # [rows, r, G]
    visible = torch.arange(ROWS) <= torch.arange(first, first + len(q))[:, None]
    q_hat, k_hat = q.mean(-1), k.sum(-1)
    a, b, c, d = k.unbind(-1)
    sums = {
        "plain": rounded(k_hat),
        "each addition": rounded(rounded(rounded(a + b) + c) + d),
        "pairs": rounded(rounded(a + b) + rounded(c + d)),
    }
    found = {way: lse(rounded(q_hat), k_hat_of_way, visible) for way, k_hat_of_way in sums.items()}
    other_k_hat = rounded(FACTOR * k_hat) / FACTOR
    found["another draw of k_hat"] = lse(rounded(q_hat), other_k_hat, visible)
    found["another draw of both"] = lse(rounded(FACTOR * q_hat) / FACTOR, other_k_hat, visible)
    truth = lse(q_hat, k_hat, visible)
    return {way: values - truth for way, values in found.items()}


def problem(order_from):
    """{way: errors of LSE} of a random problem."""
    found = {}
    for _ in range(HEADS):
        q, k = rounded(torch.randn(ROWS, D)), rounded(torch.randn(ROWS, D))
        for first in range(BLOCK if order_from == "previous" else 0, ROWS, BLOCK):
            for way, of_block in errors(q, k, first).items():
                found.setdefault(way, []).append(of_block)
    return {way: torch.cat(of_blocks) for way, of_blocks in found.items()}


def summary(problems):
    """{way: its numbers} of what problem() returned."""
    largest, squares = (
        {way: torch.stack([of(found[way]) for found in problems]) for way in ("plain", *WAYS)}
        for of in (lambda error: error.abs().max(), lambda error: error.square().mean())
    )
    result = {}
    for way in WAYS:
        ratio = largest[way] / largest["plain"]
        numbers = {
            "root_mean_square": (squares[way].mean() / squares["plain"].mean()).sqrt(),
            "median": ratio.median(),
            "p99": ratio.quantile(0.99),
            "max": ratio.max(),
            "above_2": (ratio > 2).sum(),
        }
        result[way] = {name: round(number.item(), 4) for name, number in numbers.items()}
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", type=int, default=10000, help="random problems (10000)")
    parser.add_argument("--json-out", type=Path, required=True, help="result file")
    options = parser.parse_args()
    if options.problems < 1:
        parser.error(f"--problems is {options.problems}; allowed: 1 or more")
    torch.manual_seed(0)
    found = {
        order_from: summary([problem(order_from) for _ in range(options.problems)])
        for order_from in ("own", "previous")
    }
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    meta = {"torch": torch.__version__, "cpu": platform.machine(), "commit": os.environ.get("DISTR_COMMIT")}
    meta |= {"date": date, "command": shlex.join(["bench/roundings.py", *sys.argv[1:]]), "problems": options.problems}
    result_file.write(options.json_out, {"meta": meta, "summary": found})
    for order_from, ways in found.items():
        for way, numbers in ways.items():
            print(f"{order_from:9} {way:21}", ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()))


if __name__ == "__main__":
    main()
