#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times a decoding step on one GPU, flash_attn_with_kvcache() with lengths in device memory, beside PyTorch's attention
and beside a device copy that moves as many bytes as K and V have.

One process; random data in bf16. All contenders are captured in graphs, a call for each of several caches that together
are larger than the L2, and the graphs are replayed by turns, so that no launch is timed. PyTorch's attention gets the
filled rows of the cache, whose number it must know on the host, and its choice of a kernel is its own. Half as many
bytes as K and V have are copied, which reads and writes as many as are read of them.

Results are checked first, against attention in float32. Writes {"meta", "rows"}, as
bench/results/<gpu>/decode.json has them. Exit status: 0; 1 where the error is more than twice that of PyTorch's.
"""

import argparse
import contextlib
import pathlib
import random
import statistics
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torch_gpu

import distrattention

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import result_file  # noqa: E402

# B, Hq, Hkv, d, rows of the cache
SHAPES = (
    (1, 32, 8, 128, 8192),
    (1, 32, 8, 128, 32768),
    (1, 32, 8, 128, 131072),
    (1, 32, 32, 128, 32768),
    (16, 32, 8, 128, 8192),
    (64, 32, 8, 128, 4096),
    (1, 32, 8, 64, 131072),
)
REPLAYS = 11  # of a graph, after one that is not counted


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    keys: int

    def __str__(self):
        return f"B{self.batch} H{self.heads}/{self.kv_heads} d{self.head_dim} N{self.keys}"

    @property
    def bytes(self):
        return 2 * 2 * self.batch * self.kv_heads * self.keys * self.head_dim

    def sets(self):
        """[(q, k_cache, v_cache, lengths), ...], rows first; the caches are full."""
        make = lambda *sizes: torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        cache = self.batch, self.keys, self.kv_heads, self.head_dim
        lengths = torch.full((self.batch,), self.keys, dtype=torch.int32, device="cuda")
        count = min(max(-(-torch_gpu.CACHE_BYTES // self.bytes), 2), 32)
        return [
            (make(self.batch, 1, self.heads, self.head_dim), make(*cache), make(*cache), lengths) for _ in range(count)
        ]


class Contender:
    def __init__(self, impl, call):
        self.impl, self.call = impl, call

    def pinned(self):
        return contextlib.nullcontext()


def of_distr(q, k, v, lengths):
    return distrattention.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)


def of_torch(q, k, v, lengths):
    grouped = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=grouped)
    return out.transpose(1, 2)


CONTENDERS = (Contender("distr", of_distr), Contender("sdpa", of_torch))


def copy_of(sets):
    """A copy that reads and writes as many bytes as K and V have."""
    targets = [torch.empty_like(k) for _, k, _, _ in sets]
    return Contender("copy", lambda number: targets[number].copy_(sets[number][1]))


def float32(q, k, v):
    """Attention of the first sequence's first KV head, [query heads of it, d]."""
    of_head = q[0, 0, : q.shape[2] // k.shape[2]].float()
    scores = of_head @ k[0, :, 0].float().T / q.shape[3] ** 0.5
    return scores.softmax(-1) @ v[0, :, 0].float()


def errors(sets):
    """{impl: relative error of the first KV head's part of O}"""
    exact = float32(*sets[0][:3])
    found = {}
    for contender in CONTENDERS:
        out = contender.call(*sets[0])[0, 0, : len(exact)].float()
        found[contender.impl] = ((out - exact).norm() / exact.norm()).item()
    return found


def times(sets):
    """{impl: milliseconds of a call in each replay}"""
    calls = {c.impl: (c, lambda number, c=c: c.call(*sets[number])) for c in CONTENDERS}
    copy = copy_of(sets)
    calls["copy"] = copy, copy.call
    graphs = {name: torch_gpu.graph_of(contender, call, len(sets)) for name, (contender, call) in calls.items()}
    order, events = random.Random(0), {name: [] for name in calls}
    for _ in range(1 + REPLAYS):
        for name in order.sample(list(calls), len(calls)):
            events[name].append(torch_gpu.timed(calls[name][0], lambda _, g=graphs[name]: g.replay(), range(1)))
    return {name: [ms / len(sets) for ms in torch_gpu.elapsed(pairs)[1:]] for name, pairs in events.items()}



def measure(shape):
    sets = shape.sets()
    found = errors(sets)
    of_all = times(sets)
    copy = statistics.median(of_all["copy"])
    for impl, ms in of_all.items():
        median = statistics.median(ms)
        row = {"impl": impl, "op": "decode", "batch": shape.batch, "heads": shape.heads}
        row |= {"kv_heads": shape.kv_heads, "seq_q": 1, "seq_k": shape.keys, "head_dim": shape.head_dim}
        row |= {"dtype": "bf16", "ms": median, "ms_min": min(ms), "ms_max": max(ms), "runs": len(ms)}
        row |= {"gb_per_s": shape.bytes / median / 1e6, "ratio_to_copy": copy / median}
        row["rel_error_out"] = found.get(impl)
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="result file")
    parser.add_argument("--commit", help="for the result file; else git is asked")
    parser.add_argument("--filter", default="", help='only shapes whose label holds it, "N131072" for instance')
    options = parser.parse_args()
    result = {"meta": torch_gpu.meta(options), "rows": []}
    wrong = []
    for shape in (Shape(*sizes) for sizes in SHAPES):
        if options.filter not in str(shape):
            continue
        rows = list(measure(shape))
        result["rows"] += rows
        result_file.write(options.out, result)
        by_impl = {row["impl"]: row for row in rows}
        if by_impl["distr"]["rel_error_out"] > 2 * by_impl["sdpa"]["rel_error_out"] + 2**-8:
            wrong.append(str(shape))
        shares = (f"{impl} {row['ms']:.4f} ms, {row['ratio_to_copy']:.2f} of a copy" for impl, row in by_impl.items())
        print(f"{shape}: {'; '.join(shares)}", flush=True)
    for label in wrong:
        print(f"{label}: errs more than twice as much as torch's attention", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
