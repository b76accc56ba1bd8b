#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what a call costs beside its kernel: the package's and PyTorch's attention on inputs of next to no work.

One process, one thread, the same tensors. Each round makes --calls calls of every contender, in a new order; `us` is
the median over the rounds of the time of a call. On a GPU it is the host's time: the clock stops when the kernels are
queued. Three operations:
    no_grad            a call under torch.no_grad()
    forward            a call that autograd records
    forward_backward   the same, then torch.autograd.grad() of its output
`ratio_to_torch` is the median over the rounds of this time / torch's; below 1 is quicker. A slow moment of the machine
slows neighbouring calls alike and so hardly changes the ratio.

Writes {"meta", "rows"} (bench/results/cpu/call_overhead.json).
"""

import argparse
import datetime
import gc
import os
import pathlib
import random
import statistics
import time

import torch
import torch.nn.functional as F

import result_file
from processor import cpu_name

import distrattention

CONTENDERS = {
    "torch": None,
    "auto": {},
    "exact": {"strategy": "exact"},
    "auto G=2": {"strategy": "auto", "group_size": 2},
    "energy G=2": {"strategy": "energy", "group_size": 2},
    "lsh G=2": {"strategy": "lsh", "group_size": 2},
}


def attend(qkv, settings):
    if settings is None:
        return F.scaled_dot_product_attention(*qkv)
    return distrattention.scaled_dot_product_attention(*qkv, **settings)


def attend_and_back(qkv, settings):
    torch.autograd.grad(attend(qkv, settings), qkv, qkv[0].detach())


OPERATIONS = {"no_grad": attend, "forward": attend, "forward_backward": attend_and_back}


def microseconds(run, qkv, settings, calls):
    """The time of a call of run(), as the mean of `calls` calls."""
    begin = time.perf_counter()
    for _ in range(calls):
        run(qkv, settings)
    taken = time.perf_counter() - begin
    if qkv[0].is_cuda:
        torch.cuda.synchronize()  # or the queue would fill up, and calls would wait for it
    return taken / calls * 1e6


def measure(op, options):
    """The rows of one operation."""
    sizes = (1, options.heads, options.seq, options.head_dim)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    grad = op != "no_grad"
    qkv = [torch.randn(sizes, dtype=dtype, device=options.device, requires_grad=grad) for _ in range(3)]
    times = {name: [] for name in CONTENDERS}
    turn = random.Random(20)
    gc.collect()
    gc.disable()
    with torch.set_grad_enabled(grad):
        for number in range(options.rounds + 1):
            for name in turn.sample(list(CONTENDERS), len(CONTENDERS)):
                taken = microseconds(OPERATIONS[op], qkv, CONTENDERS[name], options.calls)
                if number > 0:  # the first round warms up
                    times[name].append(taken)
    gc.enable()
    for name, mine in times.items():
        ratio = statistics.median(here / torchs for here, torchs in zip(mine, times["torch"]))
        yield {"op": op, "contender": name, "us": round(statistics.median(mine), 2), "ratio_to_torch": round(ratio, 2)}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: float32; cuda: bfloat16")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--seq", type=int, default=1, help="N")
    parser.add_argument("--head-dim", type=int, default=16, help="d")
    parser.add_argument("--calls", type=int, default=200, help="of a contender in a round")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json-out", type=pathlib.Path, help="result file")
    options = parser.parse_args()
    for name, low in (("heads", 1), ("seq", 1), ("head_dim", 2), ("calls", 1), ("rounds", 1)):
        if getattr(options, name) < low:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; allowed: {low} and above")
    return options


def main():
    options = parse_arguments()
    torch.set_num_threads(1)
    rows = []
    for op in OPERATIONS:
        rows.extend(measure(op, options))
        for row in rows[-len(CONTENDERS) :]:
            print(f"{op:16} {row['contender']:10} {row['us']:8.2f} us, {row['ratio_to_torch']:5.2f} of torch's")
    if options.json_out:
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        meta = {"torch": torch.__version__, "commit": os.environ.get("DISTR_COMMIT"), "date": date, "threads": 1}
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
        meta |= {"cpu": cpu_name(), "gpu": gpu, "command": result_file.command()}
        meta |= {name: getattr(options, name) for name in ("device", "heads", "seq", "head_dim", "calls", "rounds")}
        result_file.write(options.json_out, {"meta": meta, "rows": rows})


if __name__ == "__main__":
    main()
