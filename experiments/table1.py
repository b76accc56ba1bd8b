#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 1: how much a smaller d makes exact attention quicker, and a smaller d of Q and K alone.

FlashAttention-2 takes (128, 128) and (64, 64) alone; cuDNN and this library take (64, 128), too."""

import torch

from baselines import Shape
from shared.results import DTYPES, Results, arguments, chosen, label, parsed
from shared.swap import function_of
from shared.timing import times

DIMS = ((128, 128), (64, 64), (64, 128))  # of Q and K, and of V


def main():
    parser = arguments(__doc__, methods=("flash2", "cudnn", "exact"))
    parser.add_argument("--lengths", default="1024,2048,4096,8192", help="N [%(default)s]")
    parser.add_argument("--heads", type=int, default=32, help="H, with B = 1 [%(default)s]")
    options = parsed(parser)
    lengths = [16, 32] if options.quick else [int(n) for n in options.lengths.split(",")]
    heads = 2 if options.quick else options.heads
    key = ("method", "seq", "head_dim", "head_dim_v")
    results = Results(options, key, heads=heads)
    for n in lengths:
        for d, dv in DIMS:
            rows = {name: dict(zip(key, (label(name, options.device), n, d, dv))) for name in options.methods}
            wanted = {name: row for name, row in rows.items() if results.wants(**row)}
            dtype = DTYPES[options.dtype]
            q, k, v = (torch.randn(1, heads, n, dim, device=options.device, dtype=dtype) for dim in (d, d, dv))
            shape = Shape(heads, heads, d)
            functions = {name: function_of(chosen(options, name), shape, options.device, dtype) for name in wanted}
            calls = {name: lambda of=function: of(q, k, v) for name, function in functions.items()}
            with torch.no_grad():
                for name, found in times(calls, options.device, 3 if options.quick else 50).items():
                    results.add(rows[name] | found)


if __name__ == "__main__":
    main()
