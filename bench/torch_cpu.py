#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the package on the CPU against PyTorch's own scaled_dot_product_attention.

One process, one thread pool (torch's), random data. Each round calls every contender once, in a new order; `ms` is the
median over the rounds of one call of the public function: grouping, fusion and attention. Three operations:
    forward            a call without gradients
    forward_backward   a call with gradients, then torch.autograd.grad() of its output
    backward           the second part of the same runs, by itself
Orders come from where the package's default has them: in causal problems from the block before.
Ratios are medians over the rounds of the other's time / this time; above 1 is quicker. A slow moment of the machine
slows neighbouring calls alike and so hardly changes them. The batch is 1. Above N = 2048 there are fewer heads, so that
H * N stays and the sweep ends in minutes. With --threads 1 the clock is the process's CPU time, which other processes
hardly disturb; else it is wall-clock time.

Writes {"meta", "rows"} (bench/results/cpu/torch.json) and a plot. Exit status: 0; 1 where our exact attention errs more
than twice as much as torch's, against float64.
"""

import argparse
import datetime
import gc
import itertools
import math
import os
import pathlib
import random
import shlex
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import distrattention
from distrattention import ops

import result_file
from processor import cpu_name

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
BLOCK, ESTIMATOR = 128, "mean"
ERROR_ROWS = 128  # the error of O is taken over so many rows of each head, evenly spread
MOST_ROUNDS = 40
LONG = 2048  # from this N on an approximation should be quicker than exact attention; above it there are fewer heads


@dataclass(frozen=True)
class Shape:
    dtype: str
    heads: int
    head_dim: int
    n: int
    causal: bool

    def __str__(self):
        return f"{self.dtype} H{self.heads} d{self.head_dim} N{self.n}{' causal' if self.causal else ''}"

    def inputs(self, gradients):
        """q, k, v and the gradient of O, each [1, H, N, d]."""
        generator = torch.Generator().manual_seed(20)
        sizes = (1, self.heads, self.n, self.head_dim)
        *qkv, grad = (torch.randn(sizes, generator=generator).to(DTYPES[self.dtype]) for _ in range(4))
        return [tensor.requires_grad_(gradients) for tensor in qkv], grad

    def flops(self, op):
        """The operations of exact attention: two for each multiply-add of its 2 products forward and 5 backward (S
        again, dP, dQ, dK, dV), over the pairs of a query and a key that it sees."""
        pairs = self.n * (self.n + 1) / 2 if self.causal else self.n**2
        return 2 * {"forward": 2, "backward": 5, "forward_backward": 7}[op] * self.heads * self.head_dim * pairs


@dataclass(frozen=True)
class Contender:
    name: str
    impl: str
    strategy: str | None = None
    group_size: int | None = None

    def attend(self, q, k, v, causal):
        """O [1, H, N, d]."""
        if self.impl == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        settings = dict(strategy=self.strategy, group_size=self.group_size, block_size=BLOCK, estimator=ESTIMATOR)
        return distrattention.scaled_dot_product_attention(q, k, v, is_causal=causal, **settings)

    def kernel(self, qkv, causal, operation):
        """The name of the kernel that runs; None for torch's, which has none."""
        if self.impl == "sdpa":
            return None
        settings = dict(strategy=self.strategy, group_size=self.group_size, block_size=BLOCK)
        return distrattention.explain(*qkv, is_causal=causal, operation=operation, **settings)["kernel"]


TORCH, EXACT = Contender("torch", "sdpa"), Contender("exact", "distr", "exact", 1)
GROUPED = [
    Contender(f"{strategy} G={size}", "distr", strategy, size) for strategy in ("energy", "lsh") for size in (2, 4)
]
CONTENDERS = [TORCH, EXACT, *GROUPED]


def clock():
    """The clock in seconds; the notes at the top say which."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def run(contender, qkv, grad, causal):
    """One call; {operation: milliseconds}. With gradients where q requires one."""
    begin = clock()
    if not qkv[0].requires_grad:
        contender.attend(*qkv, causal)
        return {"forward": (clock() - begin) * 1e3}
    out = contender.attend(*qkv, causal)
    middle = clock()
    torch.autograd.grad(out, qkv, grad)
    end = clock()
    return {"forward_backward": (end - begin) * 1e3, "backward": (end - middle) * 1e3}


def rounds_of(qkv, grad, causal, seconds, least):
    """{contender: {operation: [milliseconds of each round]}}, over about `seconds` but at least `least` rounds."""
    times = {contender: {} for contender in CONTENDERS}
    turn = random.Random(20)
    gc.collect()
    gc.disable()
    begin = time.perf_counter()
    for count in range(MOST_ROUNDS):
        if count >= least and time.perf_counter() - begin >= seconds:
            break
        for contender in turn.sample(CONTENDERS, len(CONTENDERS)):
            for op, ms in run(contender, qkv, grad, causal).items():
                times[contender].setdefault(op, []).append(ms)
    gc.enable()
    return times


def sampled_rows(n):
    return torch.arange(min(n, ERROR_ROWS)) * n // min(n, ERROR_ROWS)


def exact_rows(q, k, v, causal):
    """O [1, H, rows, d] of the sampled rows, in float64 over their scores."""
    rows = sampled_rows(q.shape[2])
    scores = q[:, :, rows].double() @ k.double().mT / math.sqrt(q.shape[3])
    if causal:
        scores.masked_fill_(torch.arange(k.shape[2]) > rows[:, None], -torch.inf)
    return scores.softmax(-1) @ v.double()


def measure(shape, gradients, options):
    """The rows of one shape: `forward`, or with gradients `forward_backward` and `backward`."""
    qkv, grad = shape.inputs(gradients)
    with torch.no_grad():
        exact = exact_rows(*qkv, shape.causal)
    errors = {}
    for contender in CONTENDERS:  # each one's first call, which is not timed
        out = contender.attend(*qkv, shape.causal)
        if gradients:
            torch.autograd.grad(out, qkv, grad)
        rows = out.detach()[:, :, sampled_rows(shape.n)].double()
        errors[contender] = ((rows - exact).norm() / exact.norm()).item()
    least = options.rounds if shape.dtype == "f32" else (options.rounds + 1) // 2
    times = rounds_of(qkv, grad, shape.causal, options.seconds, least)
    return [
        row_of(shape, contender, op, times, errors[contender], qkv)
        for op in times[TORCH]
        for contender in CONTENDERS
    ]


def row_of(shape, contender, op, times, error, qkv):
    grouped = contender in GROUPED
    order_from = "previous" if shape.causal else "own"
    mine = times[contender][op]
    ms = statistics.median(mine)
    operation = "forward" if op == "forward" else "backward"
    row = {"impl": contender.impl, "kernel": contender.kernel(qkv, shape.causal, operation), "op": op, "batch": 1}
    row |= {"heads": shape.heads, "kv_heads": shape.heads, "seq_q": shape.n, "seq_k": shape.n}
    row |= {"head_dim": shape.head_dim, "head_dim_v": shape.head_dim, "dtype": shape.dtype, "causal": shape.causal}
    row |= {"strategy": contender.strategy, "estimator": ESTIMATOR if contender.strategy == "lsh" else None}
    row |= {"group_size": contender.group_size, "block": BLOCK if grouped else None}
    row |= {"order_from": order_from if grouped else None}
    row |= {"ms": ms, "ms_min": min(mine), "ms_max": max(mine), "runs": len(mine)}
    for key, other in (("ratio_to_sdpa", TORCH), ("ratio_to_exact", EXACT)):
        row[key] = statistics.median(theirs / here for theirs, here in zip(times[other][op], mine))
    row |= {"tflops_exact_flops": shape.flops(op) / ms / 1e9, "rel_error_out": error}
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()}


def meta():
    described = ops.describe()
    facts = {"version": described.version, "command": shlex.join(["bench/torch_cpu.py", *sys.argv[1:]])}
    facts["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    facts |= {"commit": os.environ.get("DISTR_COMMIT"), "cpu": cpu_name(), "gpu": None, "driver": None, "cuda": None}
    facts |= {"torch": torch.__version__, "cudnn": None, "torch_uses": torch.backends.cpu.get_cpu_capability()}
    facts |= {"instruction_set": described.instruction_set, "threads": torch.get_num_threads()}
    return facts | {"clock": "CPU time" if torch.get_num_threads() == 1 else "wall"}


def rows_of(rows, **wanted):
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def verdicts(rows):
    """Sentences on what was aimed at: exact attention level with torch's in the median, G > 1 ahead of exact."""
    for dtype, op in itertools.product(DTYPES, ("forward", "backward", "forward_backward")):
        exact = rows_of(rows, dtype=dtype, op=op, strategy="exact")
        ratios = [row["ratio_to_sdpa"] for row in exact]
        if ratios:
            behind = [row for row in exact if row["ratio_to_sdpa"] < 1]
            yield (
                f"{dtype} {op}: exact / torch speed {statistics.median(ratios):.2f} in the median, "
                f"{min(ratios):.2f} to {max(ratios):.2f}; behind in {len(behind)} of {len(ratios)} rows"
            )
            for row in behind:
                causal = " causal" if row["causal"] else ""
                yield f"    d{row['head_dim']} N{row['seq_q']}{causal}: {row['ratio_to_sdpa']:.2f}"
        for strategy, size in ((contender.strategy, contender.group_size) for contender in GROUPED):
            long = rows_of(rows, dtype=dtype, op=op, strategy=strategy, group_size=size)
            ratios = [row["ratio_to_exact"] for row in long if row["seq_q"] >= LONG]
            if ratios:
                behind = sum(ratio <= 1 for ratio in ratios)
                yield (
                    f"{dtype} {op}: {strategy} G={size} / exact speed from N = {LONG} on {min(ratios):.2f} to "
                    f"{max(ratios):.2f}; behind in {behind} of {len(ratios)} rows"
                )


def plot(result, path):
    """Speed relative to torch's attention over N, first dtype; a panel for each d, operation and causality."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dtype = result["rows"][0]["dtype"]
    rows = rows_of(result["rows"], dtype=dtype)
    panels = [
        (op, causal)
        for op, causal in itertools.product(("forward", "forward_backward"), (False, True))
        if rows_of(rows, op=op, causal=causal)
    ]
    dims, lengths = (sorted({row[key] for row in rows}) for key in ("head_dim", "seq_q"))
    sizes = {"figsize": (3.4 * len(dims) + 0.8, 2.3 * len(panels) + 0.9), "squeeze": False}
    figure, axes = plt.subplots(len(panels), len(dims), sharex=True, sharey=True, layout="constrained", **sizes)
    looks = {"exact": ("#0072B2", "o"), "energy": ("#009E73", "s"), "lsh": ("#E69F00", "^")}  # Okabe and Ito's palette
    for (op, causal), line in zip(panels, axes):
        for dim, axis in zip(dims, line):
            for contender in (EXACT, *GROUPED):
                setting = {"strategy": contender.strategy, "group_size": contender.group_size}
                series = rows_of(rows, op=op, causal=causal, head_dim=dim, **setting)
                points = sorted((row["seq_q"], row["ratio_to_sdpa"]) for row in series)
                colour, marker = looks[contender.strategy]
                style = "--" if contender.group_size == 4 else "-"
                axis.plot(*zip(*points), style, marker=marker, markersize=4, color=colour, label=contender.name)
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [str(n) for n in lengths], minor=False)
            axis.set_title(f"{op.replace('_', ' + ')}{', causal' if causal else ''}, d = {dim}", fontsize=9)
            axis.grid(alpha=0.3)
    axes[0][0].set_ylim(bottom=0)
    figure.supxlabel("N")
    figure.supylabel(f"speed relative to torch's attention, {dtype}")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=9)
    figure.savefig(path, dpi=110)


def parse_arguments():
    def integers(text):
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seq", type=integers, default=[512, 1024, 2048, 4096, 8192], help="N, comma-separated")
    parser.add_argument("--head-dim", type=integers, default=[32, 64, 128], help="d, comma-separated")
    parser.add_argument("--dtypes", default="f32,bf16", help="f32, bf16, or both")
    parser.add_argument("--heads", type=int, default=4, help=f"up to N = {LONG}, above it fewer: heads * N is level")
    parser.add_argument("--threads", type=int, help="of torch [its own choice]")
    parser.add_argument("--seconds", type=float, default=0.3, help="to spend on the rounds of one shape and operation")
    parser.add_argument("--rounds", type=int, default=4, help="but at least so many; half of them for bf16")
    parser.add_argument("--json-out", type=pathlib.Path, help="result file")
    parser.add_argument("--plot", type=pathlib.Path, help="picture, of the first dtype")
    options = parser.parse_args()
    options.dtypes = options.dtypes.split(",")
    if not set(options.dtypes) <= set(DTYPES):
        parser.error(f"--dtypes is {','.join(options.dtypes)}; allowed: {', '.join(DTYPES)}")
    for name in ("seq", "head_dim"):
        if min(getattr(options, name)) < 4:
            parser.error(f"--{name.replace('_', '-')} is {min(getattr(options, name))}; allowed: 4 and above")
    if options.rounds < 1 or options.heads < 1 or (options.threads or 1) < 1:
        parser.error("--rounds, --heads and --threads: allowed are 1 and above")
    return options


def main():
    options = parse_arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    result, wrong, begin = {"meta": meta(), "rows": []}, [], time.perf_counter()
    sweep = itertools.product(options.dtypes, (False, True), options.head_dim, (False, True), options.seq)
    for dtype, gradients, dim, causal, n in sweep:
        heads = max(1, min(options.heads, options.heads * LONG // n))
        shape = Shape(dtype, heads, dim, n, causal)
        rows = measure(shape, gradients, options)
        result["rows"].extend(rows)
        torchs, ours = (row["rel_error_out"] for row in rows[:2])
        if ours > 2 * torchs:
            wrong.append(f"{shape}: exact attention errs by {ours:.1e}, torch's by {torchs:.1e}")
        times = ", ".join(f"{contender.name} {row['ms']:.2f}" for contender, row in zip(CONTENDERS, rows))
        at = time.perf_counter() - begin
        print(f"{at:4.0f} s  {shape} {rows[0]['op']}, {rows[0]['runs']} rounds: {times} ms", flush=True)
    print(*verdicts(result["rows"]), sep="\n")
    if options.json_out:
        result_file.write(options.json_out, result)
    if options.plot:
        plot(result, options.plot)
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
