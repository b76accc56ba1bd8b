#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 6: the time to the first token of a Llama, by the length of the prompt.

ms is the median by CUDA events, ms_cold that of the first call; a method that runs out of memory has an "error".
llama-1b has the geometry of Llama 3.2 1B and random weights, on which times do not depend. hyper is exact up to 4096
tokens, as in the paper; hyper-short approximates beyond 128."""

import copy

import torch

from shared import models
from shared.results import DTYPES, Results, arguments, chosen, label, parsed
from shared.swap import swap
from shared.timing import times

METHODS = ("standard", "flash2", "cudnn", "exact", "hydra", "hyper", "hyper-short", "flatten", "primal", "lsh-sample",
           "lsh-mean", "energy", "lsh-sample-near", "energy-near")  # fmt: skip


def main():
    parser = arguments(__doc__, methods=METHODS, model="llama-1b")
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192,16384,32768", help="n [%(default)s]")
    options = parsed(parser)
    lengths = [16, 200] if options.quick else [int(n) for n in options.lengths.split(",")]
    whole, _ = models.llama("tiny" if options.quick else options.model, DTYPES[options.dtype], options.device)
    results = Results(options, ("method", "seq"))
    for name in options.methods:
        model = copy.deepcopy(whole)
        swap(model, chosen(options, name))
        model.eval()
        for n in lengths:
            row = {"method": label(name, options.device), "seq": n}
            if not results.wants(**row):
                continue
            torch.manual_seed(0)
            prompt = torch.randint(0, model.config.vocab_size, (1, n), device=options.device)
            call = lambda: model(prompt, use_cache=True, logits_to_keep=1)  # noqa: E731, B023
            with torch.no_grad():
                found = times({name: call}, options.device, 2 if options.quick else 10, 1 if options.quick else 3)
            results.add(row | found[name])
        del model


if __name__ == "__main__":
    main()
