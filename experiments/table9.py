#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 9, one GPU, the compute alone: H = 480, N = 20480, d = 128, in chunks of 20 heads that lie on the device.

The paper's row holds the copies from host memory, too; this one does not, and says so: "part": "compute alone"."""

import torch

from baselines import Shape
from shared.results import DTYPES, Results, arguments, chosen, label, parsed
from shared.swap import function_of
from shared.timing import times

CHUNK = 20  # heads


def main():
    parser = arguments(__doc__, methods=("flash2", "cudnn", "exact", "lsh-sample", "lsh-mean", "energy"))
    options = parsed(parser)
    heads, n, chunk = (4, 150, 2) if options.quick else (480, 20480, CHUNK)
    dtype = DTYPES[options.dtype]
    results = Results(options, ("method", "group_size"), part="compute alone", heads=heads, seq=n, head_dim=128)
    q, k, v = (torch.rand(1, heads, n, 128, device=options.device, dtype=dtype) for _ in range(3))
    shape, calls = Shape(chunk, chunk, 128), {}
    for name in options.methods:
        row = {"method": label(name, options.device), "group_size": options.group_size, "gpus": 1}
        if not results.wants(**row):
            continue
        function = function_of(chosen(options, name), shape, options.device, dtype)

        def by_chunks(of=function):
            for at in range(0, heads, chunk):
                of(*(x[:, at : at + chunk] for x in (q, k, v)))

        calls[tuple(row.items())] = by_chunks
    with torch.no_grad():
        for row, found in times(calls, options.device, 2 if options.quick else 30).items():
            results.add(dict(row) | found)


if __name__ == "__main__":
    main()
