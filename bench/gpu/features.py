#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times sliding windows and capped scores in exact attention on one GPU, against the same calls without.

Beside them torch's flex_attention, compiled, which has both as well. One process, random data; each round calls every
contender in an order of its own, as torch_gpu.py does. Checks the first head of each forward against float32 first.

Writes {"meta", "rows"} (bench/results/<gpu>/features.json). `of_plain` is the time divided by that of causal attention
without the feature, by the same implementation; rel_error_out is of O. Exit status: 0; 1 where ours errs more than
twice as much as flex_attention.
"""

import argparse
import itertools
import pathlib
import statistics
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch._dynamo
import torch_gpu
from torch.nn.attention import flex_attention as flex

import distrattention

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import result_file  # noqa: E402

SOFTCAP = 50.0  # of Gemma 2


@dataclass(frozen=True)
class Feature:
    """Causal attention with a sliding window of the `window` last keys, or capped scores; neither: plain."""

    window: int | None = None
    softcap: float | None = None

    def hidden(self, n):
        i, j = torch.arange(n, device="cuda")[:, None], torch.arange(n, device="cuda")
        return (j > i) | ((i - j > self.window) if self.window is not None else False)

    def ours(self, q, k, v):
        options = {}
        if self.window is not None:
            options["window_size"] = (self.window, -1)
        if self.softcap is not None:
            options["softcap"] = self.softcap
        return distrattention.scaled_dot_product_attention(q, k, v, is_causal=True, **options)

    def by_flex(self, n):
        """A function of (q, k, v), compiled for this length."""

        def sees(b, h, i, j):
            return (j <= i) if self.window is None else (j <= i) & (i - j <= self.window)

        def capped(score, b, h, i, j):
            return self.softcap * torch.tanh(score / self.softcap)

        mask = flex.create_block_mask(sees, None, None, n, n, device="cuda")
        function = torch.compile(flex.flex_attention, dynamic=False)
        return partial(function, block_mask=mask, score_mod=capped if self.softcap is not None else None)

    def float32_head(self, q, k, v):
        scores = q[0, 0].float() @ k[0, 0].float().T * q.shape[-1] ** -0.5
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return torch.softmax(scores.masked_fill(self.hidden(len(scores)), float("-inf")), -1) @ v[0, 0].float()


def calls_of(feature, shape, op, sets):
    """{implementation: call of a number}."""
    by_flex = feature.by_flex(shape.n)

    def call(attend, number):
        q, k, v, grad = sets[number % len(sets)]
        if op == "forward":
            with torch.no_grad():
                return attend(q, k, v)
        return torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

    return {"distr": partial(call, feature.ours), "flex_attention": partial(call, by_flex)}


def measure(shape, op, features, seconds):
    sets = shape.sets(op == "forward_backward")
    calls, errors = {}, {}
    for feature in features:
        for name, call in calls_of(feature, shape, op, sets).items():
            out = call(0)
            if op == "forward":
                with torch.no_grad():
                    exact = feature.float32_head(*sets[0][:3])
                errors[feature, name] = ((out[0, 0].float() - exact).norm() / exact.norm()).item()
            calls[feature, name] = torch_gpu.Contender(name), call
    times, _ = torch_gpu.interleaved(calls, seconds)
    rows = []
    for (feature, name), of_call in times.items():
        ms = statistics.median(of_call)
        row = {"impl": name, "op": op, "batch": shape.batch, "heads": shape.heads, "seq": shape.n}
        row |= {"head_dim": shape.head_dim, "dtype": shape.dtype, "window": feature.window, "softcap": feature.softcap}
        row |= {"ms": ms, "ms_min": min(of_call), "ms_max": max(of_call), "runs": len(of_call)}
        row["of_plain"] = ms / statistics.median(times[Feature(), name])
        row["rel_error_out"] = errors.get((feature, name))
        rows.append(row)
    return rows


def main():
    torch._dynamo.config.recompile_limit = 64  # else flex_attention is not compiled for all of them
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="result file")
    parser.add_argument("--commit", help="for the result file; else git is asked")
    parser.add_argument("--seconds", type=float, default=1.5, help="to spend on the rounds of one shape and operation")
    parser.add_argument("--quick", action="store_true", help="d = 128, B 1 H 10, N = 16384 alone")
    options = parser.parse_args()
    features = [Feature(), Feature(window=4096), Feature(window=1024), Feature(softcap=SOFTCAP)]
    result = {"meta": torch_gpu.meta(options), "rows": []}
    failures = []
    heads, dims, lengths = [(1, 10)], (128, 64), (16384,)
    if options.quick:
        dims = dims[:1]
    for op, (batch, count), dim, n in itertools.product(("forward", "forward_backward"), heads, dims, lengths):
        shape = torch_gpu.Shape(batch, count, dim, n, True)
        rows = measure(shape, op, [f for f in features if f.window is None or f.window < n], options.seconds)
        result["rows"].extend(rows)
        for ours, peer in zip(rows[::2], rows[1::2]):
            if op == "forward" and ours["rel_error_out"] > 2 * peer["rel_error_out"]:
                failures.append(f"{shape}, {ours}: {peer['impl']} errs by {peer['rel_error_out']}")
            times = ", ".join(f"{row['impl']} {row['ms']:.3f} ms, {row['of_plain']:.2f} of plain"
                              for row in (ours, peer))  # fmt: skip
            print(f"{shape} {op} window {ours['window']} softcap {ours['softcap']}: {times}", flush=True)
        result_file.write(options.out, result)
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
