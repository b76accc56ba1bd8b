#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 9: the time of attention over N, with the paper's data, U(0, 1), B = 1 and H = 10, G = 2 and 4.

The time of ours holds the grouping. G = 1 stands for the exact methods."""

import torch

from baselines import Shape
from shared.results import DTYPES, Results, arguments, chosen, label, parsed
from shared.swap import METHODS, function_of
from shared.timing import times

LENGTHS = "2048,4096,8192,16384,20480,32768,40960"


def main():
    parser = arguments(__doc__, methods=("flash2", "cudnn", "exact", "lsh-sample", "lsh-mean", "energy"))
    parser.add_argument("--lengths", default=LENGTHS, help="N [%(default)s]")
    parser.add_argument("--head-dims", default="32,64,128", help="d [%(default)s]")
    parser.add_argument("--group-sizes", default="2,4", help="G [%(default)s]")
    options = parsed(parser)
    lengths = [16, 300] if options.quick else [int(n) for n in options.lengths.split(",")]
    heads = 2 if options.quick else 10
    dims, groups = ([int(x) for x in of.split(",")] for of in (options.head_dims, options.group_sizes))
    results = Results(options, ("method", "group_size", "seq", "head_dim"), heads=heads)
    grouped = {name for name in METHODS if name.startswith(("lsh", "energy"))}
    for n in lengths:
        for d in dims:
            dtype = DTYPES[options.dtype]
            q, k, v = (torch.rand(1, heads, n, d, device=options.device, dtype=dtype) for _ in range(3))
            shape, calls = Shape(heads, heads, d), {}
            for name in options.methods:
                for size in groups if name in grouped else [1]:
                    row = {"method": label(name, options.device), "group_size": size, "seq": n, "head_dim": d}
                    if results.wants(**row):
                        function = function_of(chosen(options, name, group_size=size), shape, options.device, dtype)
                        calls[tuple(row.items())] = lambda of=function: of(q, k, v)
            with torch.no_grad():
                for row, found in times(calls, options.device, 3 if options.quick else 30).items():
                    results.add(dict(row) | found)


if __name__ == "__main__":
    main()
