#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figure 1: the share of self-attention in the time of a layer of Llama-2-7B (d = 128, random weights), by N.

share: of the layer's time, what attention takes on heads of the same sizes: scores, softmax and product with V, without
the projections."""

import torch

from shared import models
from shared.results import DTYPES, Results, arguments, chosen, label, parsed
from shared.swap import attention_layers, function_of, shape_of, swap
from shared.timing import times


def main():
    parser = arguments(__doc__, methods=("standard", "flash2", "cudnn", "exact", "lsh-sample", "energy"),
                       model="llama-7b-layer")  # fmt: skip
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192,16384", help="N [%(default)s]")
    options = parsed(parser)
    lengths = [16, 300] if options.quick else [int(n) for n in options.lengths.split(",")]
    name = "tiny" if options.quick else options.model
    dtype = DTYPES[options.dtype]
    model, _ = models.llama(name, dtype, options.device)
    decoder, config = model.model, model.config
    shape = shape_of(decoder, next(attention_layers(decoder)))
    results = Results(options, ("method", "seq"))
    for method in options.methods:
        swap(decoder, chosen(options, method))
        attend = function_of(chosen(options, method), shape, options.device, dtype)
        for n in lengths:
            row = {"method": label(method, options.device), "seq": n}
            if not results.wants(**row):
                continue
            x = torch.randn(1, n, config.hidden_size, device=options.device, dtype=dtype)
            sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
            q, k, v = (torch.randn(1, h, n, shape.head_dim, device=options.device, dtype=dtype) for h in sizes)
            calls = {
                "layers": lambda x=x: decoder(inputs_embeds=x, use_cache=False),
                "attention": lambda q=q, k=k, v=v: attend(q, k, v, True),
            }
            with torch.no_grad():
                found = times(calls, options.device, 3 if options.quick else 20)
            row |= {f"{part}_{unit}": value for part, of in found.items() for unit, value in of.items()}
            if "attention_ms" in row and "layers_ms" in row:
                row["share"] = config.num_hidden_layers * row["attention_ms"] / row["layers_ms"]
            results.add(row)


if __name__ == "__main__":
    main()
