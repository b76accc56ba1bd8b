#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Section 4.7: the time of the grouping alone (hash and sort), and its share of attention's: d = 128, U(0, 1)."""

import torch

from distrattention import ops
from distrattention.settings import DEFAULT_BLOCK

from baselines import Shape
from shared.results import DTYPES, Results, arguments, chosen, parsed
from shared.swap import function_of
from shared.timing import times


def main():
    parser = arguments(__doc__, methods=("lsh-sample", "energy"))
    parser.add_argument("--lengths", default="2048,4096,20480,40960", help="N [%(default)s]")
    parser.add_argument("--heads", default="1,10", help="H, with B = 1 [%(default)s]")
    options = parsed(parser)
    lengths = [16, 300] if options.quick else [int(n) for n in options.lengths.split(",")]
    results = Results(options, ("method", "heads", "seq"), head_dim=128, group_size=options.group_size)
    for heads in [int(x) for x in options.heads.split(",")]:
        for n in lengths:
            dtype = DTYPES[options.dtype]
            q, k, v = (torch.rand(1, heads, n, 128, device=options.device, dtype=dtype) for _ in range(3))
            for name in options.methods:
                row = {"method": name, "heads": heads, "seq": n}
                if not results.wants(**row):
                    continue
                settings = chosen(options, name)
                attend = function_of(settings, Shape(heads, heads, 128))
                block = settings.block_size or DEFAULT_BLOCK
                what = settings.strategy, settings.group_size, block, "own", settings.seed, True
                calls = {
                    "grouping": lambda what=what: ops.make_grouping(q, k, "none", *what),
                    "attention": lambda attend=attend: attend(q, k, v),
                }
                with torch.no_grad():
                    found = times(calls, options.device, 3 if options.quick else 100)
                row |= {f"{part}_{unit}": ms for part, of in found.items() for unit, ms in of.items()}
                results.add(row | {"share": found["grouping"]["ms"] / found["attention"]["ms"]})


if __name__ == "__main__":
    main()
