#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times how long a whole language model takes to read a prompt, by torch's attention and by ours.

    python3 bench/quality/prefill.py --json-out bench/results/cpu/prefill.json

A call is what generate() does with prompts: the model with a key-value cache, to the logits of the last tokens. Each
round calls every contender once, in an order of its own: the model with torch's `sdpa` (on CUDA also pinned to cuDNN),
and with ours, exact and by the settings that docs/choosing.md recommends. The clock is the wall's.

Writes {"meta", "rows"}: `seconds` is the median, `time_of_sdpa` the median over the rounds of this time relative to
that of the quicker of torch's contenders in the same round, and `loss` the mean cross entropy of the first prompt's
tokens in nats, of a further call. On a GPU one short prompt of a small model takes as long as the host needs to launch
its kernels; --batch reads several at once.
"""

import argparse
import contextlib
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from distrattention import Settings, ops
from distrattention.evaluation import label
from distrattention.integrations.transformers import register

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import models
import perplexity
import result_file
from processor import cpu_name

NEAR = {"window": 512, "sinks": 128}
SETTINGS = (
    Settings("exact"), Settings("exact", **NEAR, skip=0.0025), Settings("energy", 2, **NEAR),
    Settings("energy", 2, **NEAR, skip=0.0025),
)  # fmt: skip


def contenders_on(device):
    """{name: what makes a model use it}, a function that returns a context to call the model in."""

    def torchs(*backends):
        def use(model):
            model.set_attn_implementation("sdpa")
            return sdpa_kernel(*backends) if backends else contextlib.nullcontext()

        return use

    def ours(number, setting):
        register(f"distr{number}", setting)

        def use(model):
            model.set_attn_implementation(f"distr{number}")
            return contextlib.nullcontext()

        return use

    found = {"sdpa": torchs()}
    if device == "cuda":
        found["sdpa, cuDNN"] = torchs(SDPBackend.CUDNN_ATTENTION)
    return found | {label(setting): ours(number, setting) for number, setting in enumerate(SETTINGS)}


@torch.no_grad()
def measure(model, tokens, rounds):
    """The rows of prompts [B, N]."""
    device = tokens.device.type
    contenders = contenders_on(device)
    losses, times, turn = {}, {name: [] for name in contenders}, random.Random(1)
    for name, use in contenders.items():
        with use(model):
            losses[name] = perplexity.losses_of(model, tokens[0]).mean().item()
            model(tokens, use_cache=True, logits_to_keep=1)  # the first call is not timed
    for _ in range(rounds):
        for name in turn.sample(list(contenders), len(contenders)):
            with contenders[name](model):
                if device == "cuda":
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                model(tokens, use_cache=True, logits_to_keep=1)
                if device == "cuda":
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - begin)
    peers = [name for name in contenders if name.startswith("sdpa")]
    best = times[min(peers, key=lambda name: statistics.median(times[name]))]
    return [
        {
            "batch": len(tokens),
            "length": tokens.shape[1],
            "impl": name,
            "seconds": statistics.median(mine),
            "seconds_min": min(mine),
            "seconds_max": max(mine),
            "rounds": rounds,
            "time_of_sdpa": statistics.median(here / there for here, there in zip(mine, best)),
            "loss": losses[name],
        }
        for name, mine in times.items()
    ]


def meta(options):
    facts = perplexity.meta(options, {})
    del facts["tokens"]
    facts["disabled_kernels"] = os.environ.get("DISTR_DISABLE_KERNELS", "")
    if options.device == "cpu":
        facts |= {"cpu": cpu_name(), "instruction_set": ops.describe().instruction_set}
        facts["threads"] = torch.get_num_threads()
    return facts | {"clock": "wall", "model": models.SMOLLM2 if options.model == "smollm2" else options.model}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json-out", type=Path, required=True, help="result file")
    models.add_options(parser)
    parser.add_argument("--lengths", default="2048,8192", help="N, the tokens of a prompt")
    parser.add_argument("--batch", type=int, default=1, help="so many prompts at once, of the texts in a row")
    parser.add_argument("--rounds", type=int, help="[3; on CUDA 20]")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    options.rounds = options.rounds or (20 if options.device == "cuda" else 3)
    return options


def main():
    options, clock = parse_arguments(), perplexity.Clock()
    model, tokens = models.load(options.model, options.weights, getattr(torch, options.dtype), options.device)
    text = torch.cat(list(tokens.values()))
    rows = []
    for length in map(int, options.lengths.split(",")):
        if length * options.batch > len(text):
            allowed = f"up to {len(text) // options.batch}, as the texts have {len(text)} tokens"
            raise SystemExit(f"--lengths has {length} and --batch is {options.batch}; allowed: {allowed}")
        of_length = measure(model, text[: length * options.batch].view(options.batch, length), options.rounds)
        rows += of_length
        result_file.write(options.json_out, {"meta": meta(options), "rows": rows})
        for row in of_length:
            beside = f"{row['time_of_sdpa']:.3f} of torch's, loss {row['loss']:.4f}"
            clock.log(f"B {options.batch} N {length:5}  {row['impl']:54} {row['seconds'] * 1e3:9.1f} ms, {beside}")


if __name__ == "__main__":
    main()
