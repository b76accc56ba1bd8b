#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times training by strategy `given` with one order a head and near keys on one GPU, beside cuDNN and exact attention.

One process, random data, N = 16384; an order for each head, of a whole causal sequence, as a calibration gives it. Each
round calls every contender in an order of its own, as torch_gpu.py does.

Writes {"meta", "rows"} (bench/results/<gpu>/given.json). `of_cudnn` and `of_exact` are a time divided by theirs.
"""

import argparse
import itertools
import pathlib
import statistics
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch_gpu

import distrattention

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import result_file  # noqa: E402

LENGTH = 16384
WINDOW = 512


@dataclass(frozen=True)
class Setting:
    """Strategy `given`, with near keys: the window, and sinks where there are any."""

    group_size: int
    window: int | None = WINDOW
    sinks: int = 0

    def attend(self, shape, order, q, k, v):
        near = dict(window=self.window, sinks=self.sinks)
        blocks = dict(group_size=self.group_size, block_size=shape.n)
        attention = distrattention.scaled_dot_product_attention
        return attention(q, k, v, is_causal=shape.causal, strategy="given", order=order, **near, **blocks)


SETTINGS = [Setting(2), Setting(4), Setting(2, sinks=128), Setting(4, sinks=128), Setting(2, None), Setting(4, None)]
CUDNN, EXACT = torch_gpu.Contender("sdpa_cudnn"), torch_gpu.Contender("distr", "exact", 1)


def calls_of(shape):
    """{contender: (what pins its kernel, call of a number)}, forward and backward."""
    sets = shape.sets(True)
    orders = torch.rand(1, shape.heads, 1, shape.head_dim, device="cuda").argsort().int()

    def call(attend, number):
        q, k, v, grad = sets[number % len(sets)]
        return torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

    calls = {of: (of, partial(call, partial(of.attend, causal=shape.causal))) for of in (CUDNN, EXACT)}
    unpinned = torch_gpu.Contender("distr")
    return calls | {of: (unpinned, partial(call, partial(of.attend, shape, orders))) for of in SETTINGS}


def measure(shape, seconds):
    calls = calls_of(shape)
    for contender, call in calls.values():  # the first call loads kernels and plans
        with contender.pinned():
            call(0)
    times, _ = torch_gpu.interleaved(calls, seconds)
    medians = {of: statistics.median(of_calls) for of, of_calls in times.items()}
    for of, of_calls in times.items():
        given = isinstance(of, Setting)
        row = {"impl": "distr" if given else of.impl, "op": "forward_backward", "batch": shape.batch}
        row |= {"heads": shape.heads, "seq": shape.n, "head_dim": shape.head_dim, "dtype": shape.dtype}
        row |= {"causal": shape.causal, "strategy": "given" if given else of.strategy, "group_size": of.group_size}
        row |= {"window": of.window if given else None, "sinks": of.sinks if given else None}
        row |= {"ms": medians[of], "ms_min": min(of_calls), "ms_max": max(of_calls), "runs": len(of_calls)}
        yield row | {"of_cudnn": medians[of] / medians[CUDNN], "of_exact": medians[of] / medians[EXACT]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="result file")
    parser.add_argument("--commit", help="for the result file; else git is asked")
    parser.add_argument("--seconds", type=float, default=1.5, help="to spend on the rounds of one shape")
    options = parser.parse_args()
    result = {"meta": torch_gpu.meta(options), "rows": []}
    for dim, causal, (batch, heads) in itertools.product((128, 64), (True, False), torch_gpu.HEADS):
        shape = torch_gpu.Shape(batch, heads, dim, LENGTH, causal)
        for row in measure(shape, options.seconds):
            result["rows"].append(row)
            of = {name: row[name] for name in ("impl", "strategy", "group_size", "window", "sinks")}
            print(f"{shape} {of}: {row['ms']:.3f} ms, {row['of_cudnn']:.2f} of cuDNN", flush=True)
        result_file.write(options.out, result)


if __name__ == "__main__":
    main()
