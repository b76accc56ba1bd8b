#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times packed sequences (flash_attn_varlen_func) on one GPU, in exact and causal attention.

Three packs of as many rows: of four equal sequences, of many lengths, and of short ones. Beside them the same calls by
the portable kernels (DISTR_DISABLE_KERNELS), a dense call where lengths are equal, and torch's varlen_attn, where there
is one. One process, random data. `ms` is a call's time out of a captured graph, the graphs replayed by turns, so that
no launch is timed: the host needs longer to launch short sequences than the GPU to compute them. `ms_called` is that of
calls from Python, by turns as well. Checks the first head of the last sequence of each forward against float32 first.

Writes {"meta", "rows"}; rel_error_out is of O. Exit status: 0; 1 where ours errs by more than 1 %.
"""

import argparse
import inspect
import itertools
import os
import pathlib
import random
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch_gpu

import distrattention

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import result_file  # noqa: E402

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

ROWS = 16384


def mixed_lengths():
    """Of many lengths, from 1 to 4096, the same in every run."""
    lengths, draw = [], random.Random(0)
    while sum(lengths) < ROWS:
        lengths.append(min(int(2 ** draw.uniform(0, 12)) + 1, ROWS - sum(lengths)))
    return lengths


def packs(short):
    return {"equal": [ROWS // 4] * 4, "mixed": mixed_lengths(), "short": [short] * (ROWS // short)}


class Portable(torch_gpu.Contender):
    """Without Hopper's kernels: each call asks which are left."""

    def pinned(self):
        return mock.patch.dict(os.environ, {"DISTR_DISABLE_KERNELS": "sm90/"})


@dataclass(frozen=True)
class Pack:
    name: str
    lengths: tuple[int, ...]
    heads: int
    heads_kv: int
    head_dim: int

    def starts(self):
        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device="cuda")

    def flops(self, op):
        pairs = sum(n * (n + 1) / 2 for n in self.lengths)
        return 2 * {"forward": 2, "forward_backward": 7}[op] * self.heads * self.head_dim * pairs

    def sets(self, gradients):
        make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        inputs = partial(make, requires_grad=gradients)
        q, kv = (ROWS, self.heads, self.head_dim), (ROWS, self.heads_kv, self.head_dim)
        return [(inputs(q), inputs(kv), inputs(kv), make(q)) for _ in range(4)]

    def attends(self):
        """{name: (contender, function of q, k, v)}"""
        starts, longest = self.starts(), max(self.lengths)
        ours = partial(distrattention.flash_attn_varlen_func, cu_seqlens_q=starts, cu_seqlens_k=starts,
                       max_seqlen_q=longest, max_seqlen_k=longest, causal=True)  # fmt: skip
        result = {"distr": (torch_gpu.Contender("distr"), ours), "distr portable": (Portable("distr portable"), ours)}
        if len(set(self.lengths)) == 1:

            def dense(q, k, v):
                q, k, v = (x.unflatten(0, (len(self.lengths), longest)) for x in (q, k, v))
                return distrattention.flash_attn_func(q, k, v, causal=True).flatten(0, 1)

            result["distr dense"] = torch_gpu.Contender("distr dense"), dense
        if varlen_attn is not None:
            known = inspect.signature(varlen_attn).parameters
            causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
            gqa = {"enable_gqa": True} if self.heads != self.heads_kv and "enable_gqa" in known else {}

            def torchs(q, k, v):
                return varlen_attn(q, k, v, starts, starts, longest, longest, **causal, **gqa)

            result["torch varlen_attn"] = torch_gpu.Contender("torch varlen_attn"), torchs
        return result


def float32_head(q, k, v, first):
    scores = q[first:, 0].float() @ k[first:, 0].float().T * q.shape[-1] ** -0.5
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v[first:, 0].float()


def measure(pack, op, seconds):
    sets = pack.sets(op == "forward_backward")

    def call(attend, number):
        q, k, v, grad = sets[number % len(sets)]
        if op == "forward":
            with torch.no_grad():
                return attend(q, k, v)
        return torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

    calls, errors, skipped = {}, {}, {}
    for name, (contender, attend) in pack.attends().items():
        try:
            with contender.pinned():
                out = call(attend, 0)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if name.startswith("distr"):
                raise
            skipped[name] = str(error).splitlines()[0]
            continue
        if op == "forward":
            first = ROWS - pack.lengths[-1]
            exact = float32_head(*(x.detach() for x in sets[0][:3]), first)
            errors[name] = ((out[first:, 0].float() - exact).norm() / exact.norm()).item()
        calls[name] = contender, partial(call, attend)
    called, _ = torch_gpu.interleaved(calls, seconds)
    times = torch_gpu.in_graphs(calls, len(sets))
    rows = []
    for name, ms in times.items():
        row = {"impl": name, "op": op, "pack": pack.name, "sequences": len(pack.lengths), "rows": ROWS}
        row |= {"heads": pack.heads, "heads_kv": pack.heads_kv, "head_dim": pack.head_dim, "dtype": "bf16"}
        row |= {"ms": ms, "ms_called": statistics.median(called[name]), "calls": len(called[name])}
        row |= {"tflops": pack.flops(op) / ms / 1e9, "rel_error_out": errors.get(name)}
        rows.append(row)
    return rows, skipped


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="result file")
    parser.add_argument("--commit", help="for the result file; else git is asked")
    parser.add_argument("--seconds", type=float, default=1.5, help="to spend on the rounds of one pack and operation")
    parser.add_argument("--short", type=int, default=256, help="rows of a short sequence [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="the forward of d = 128 alone")
    options = parser.parse_args()
    result = {"meta": torch_gpu.meta(options), "rows": []}
    failures = []
    ops, dims = ("forward", "forward_backward"), (128, 64)
    if options.quick:
        ops, dims = ops[:1], dims[:1]
    for op, dim, (name, lengths) in itertools.product(ops, dims, packs(options.short).items()):
        pack = Pack(name, tuple(lengths), 16, 4, dim)
        rows, skipped = measure(pack, op, options.seconds)
        result["rows"].extend(rows)
        for row in rows:
            error = row["rel_error_out"]
            if error is not None and row["impl"].startswith("distr") and not error < 0.01:
                failures.append(f"{pack}, {row['impl']}: errs by {error}")
            print(f"{name} d{dim} {op} {row['impl']}: {row['ms']:.3f} ms (called {row['ms_called']:.3f}), "
                  f"{row['tflops']:.0f} TFLOPS", flush=True)
        for impl, why in skipped.items():
            print(f"{name} d{dim} {op} {impl}: {why}", flush=True)
        result_file.write(options.out, result)
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
