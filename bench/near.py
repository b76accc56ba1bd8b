#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the forward with near keys and skipped tiles on inputs of which little is kept, as in a real model.

    python3 bench/near.py --json-out bench/results/cpu/near.json --captured qkv.safetensors

The inputs are Q, K and V that bench/quality/capture.py captured, causal, a layer at a time, and Q and K that are
planted by the shares that the model's heads keep (near_inputs.py), causal and not. Each round calls every setting, one
after the other, in an order of its own; everything that a call needs is included. On the CPU one thread runs, and the
clock is its CPU time, which other processes hardly disturb; on CUDA events are the clock, and torch's own attention,
pinned to FlashAttention-2 and to cuDNN, is among the settings.

Writes {"meta", "inputs", "rows"}. `time_of_exact` and `time_of_energy` are medians over the rounds of this time
relative to that of exact attention, and of energy with G = 2, both without near keys. An input that is planted says
whose shares its heads have, what these are, and the maps that were drawn (near_inputs.unpacked reads them). Exit
status: 1 where a head keeps another share than it should, by more than 0.02.
"""

import argparse
import contextlib
import datetime
import itertools
import os
import random
import shlex
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from distrattention import Settings, explain, ops, scaled_dot_product_attention
from distrattention.evaluation import label

import near_inputs
import result_file
from processor import cpu_name

SHARES = Path(__file__).parent / "results/cpu/experiments/kept_halves.json"
EXACT, ENERGY = Settings("exact"), Settings("energy", 2)


ONE_GROUPING = {"block_size": 16384, "order_from": "own"}  # for the whole sequence


def near(strategy, size=None, skip=None, finish=False, window=near_inputs.WINDOW, **grouping):
    return Settings(strategy, size, window=window, sinks=near_inputs.SINKS, skip=skip, finish=finish, **grouping)


SETTINGS = (
    EXACT, near("exact", skip=0.0025), ENERGY, near("energy", 2), near("energy", 2, 0.0025), near("energy", 4, 0.0025),
    near("energy", 4, 0.0025, True), Settings("energy", 2, **ONE_GROUPING), near("energy", 2, **ONE_GROUPING),
    near("energy", 2, 0.0025, **ONE_GROUPING), near("energy", 4, 0.0025, **ONE_GROUPING),
)  # fmt: skip
ONLY_EXACT = SETTINGS[:2]
# On real data also what docs/choosing.md compares.
OF_CAPTURED = (
    *SETTINGS, Settings("energy", 4), *(near("energy", 2, window=window) for window in (128, 256, 1024)),
    near("energy", 4), *(near("exact", skip=skip) for skip in (0.01, 0.001)),
    *(near("energy", size, skip, size == 4) for size in (2, 4) for skip in (0.01, 0.001)),
)  # fmt: skip
PEERS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
ALLOWED = 0.02  # of a head's kept share, from what is planted


@dataclass
class Case:
    """q [B, Hq, N, d], k and v [B, H, N, d]; of those planted, what is kept by head and 64 rows, int64
    [Hq, N / 64]."""

    name: str
    causal: bool
    q: Tensor
    k: Tensor
    v: Tensor
    kept: Tensor | None = None
    about: dict = field(default_factory=dict)

    def __str__(self):
        batch, heads, n, d = self.q.shape
        return f"{self.name} B{batch} H{heads} d{d} N{n}{' causal' if self.causal else ''}"

    def to(self, device, dtype=torch.bfloat16):
        self.q, self.k, self.v = (tensor.to(device, dtype) for tensor in (self.q, self.k, self.v))
        return self

    def attend(self, settings, **options):
        return scaled_dot_product_attention(
            self.q, self.k, self.v, is_causal=self.causal, enable_gqa=True, settings=settings, **options
        )

    def attend_by_torch(self):
        k, v = (tensor.repeat_interleave(self.q.shape[1] // self.k.shape[1], 1) for tensor in (self.k, self.v))
        return lambda: F.scaled_dot_product_attention(self.q, k, v, is_causal=self.causal)


@dataclass(frozen=True)
class Contender:
    impl: str
    settings: Settings | None = None

    def __str__(self):
        return label(self.settings) if self.settings else self.impl

    def pinned(self):
        """The block within which its calls are made."""
        return sdpa_kernel(PEERS[self.impl]) if self.impl in PEERS else contextlib.nullcontext()

    def call(self, case):
        return (lambda: case.attend(self.settings)) if self.settings else case.attend_by_torch()


def captured_cases(path):
    """A case for each layer of the file."""
    with safe_open(path, "pt") as file:
        about, tensors = file.metadata(), [file.get_tensor(name) for name in "qkv"]
    for layer, *qkv in zip(about["layers"].split(","), *tensors):
        yield Case(f"captured layer {layer}", True, *(tensor[None] for tensor in qkv), about={"text": about["text"]})


def planted_cases(options):
    shares = near_inputs.read_shares(options.shares)
    for seq, head_dim, causal in itertools.product(options.seq, options.head_dims, (False, True)):
        halves = seq // near_inputs.HALF
        count = options.heads or (10 if options.device == "cuda" else max(1, 4 * 8192 // max(seq, 8192)))
        heads, expected = near_inputs.choose_heads(shares, count, halves, causal)
        of_heads = torch.stack([near_inputs.by_distance(shares[head], halves) for head in heads])
        kept = near_inputs.draw(of_heads, halves, causal, seed=1)
        q, k = (
            torch.cat(tensors)
            for tensors in zip(*(near_inputs.plant(kept, head_dim, seed=n) for n in range(options.batch)))
        )
        v = torch.randn(k.shape, generator=torch.Generator().manual_seed(1)).to(k.dtype)
        about = {"heads": heads, "expected_share": expected, "maps": [near_inputs.packed(of) for of in kept]}
        counted = (kept & near_inputs.far_halves(halves, causal)).sum(-1)
        yield Case("planted", causal, q, k, v, counted, about)


def times_on_cpu(calls, rounds):
    """{contender: seconds of each round}."""
    times, turn = {contender: [] for contender in calls}, random.Random(1)
    for _ in range(rounds):
        for contender in turn.sample(list(calls), len(calls)):
            begin = time.process_time()
            calls[contender]()
            times[contender].append(time.process_time() - begin)
    return times


def times_on_cuda(calls, rounds):
    """{contender: seconds of each round}, by events."""
    events, turn = {contender: [] for contender in calls}, random.Random(1)
    for _ in range(rounds):
        for contender in turn.sample(list(calls), len(calls)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with contender.pinned():
                start.record()
                calls[contender]()
                end.record()
            events[contender].append((start, end))
    torch.cuda.synchronize()
    return {contender: [a.elapsed_time(b) / 1e3 for a, b in pairs] for contender, pairs in events.items()}


def halves_of(case, settings):
    """(kept, all) of the far halves of tiles, int64 [B, Hq, N / 64] each."""
    *_, halves = case.attend(settings, return_halves=True)
    return halves.cpu().long().unbind(-1)


@torch.no_grad()
def measure(case, options):
    """The rows of a case, and what is wrong with it."""
    of_planted = ONLY_EXACT if options.only_exact else SETTINGS
    contenders = [Contender("distr", settings) for settings in (OF_CAPTURED if case.kept is None else of_planted)]
    if options.device == "cuda":
        contenders += map(Contender, ["sdpa_cudnn"] if options.only_exact else PEERS)
    calls = {contender: contender.call(case) for contender in contenders}
    exact = case.attend(EXACT).float()
    errors, rows, wrong = {}, [], []
    for contender in contenders:  # the first calls, which are not timed
        with contender.pinned():
            out = calls[contender]()
        errors[contender] = ((out.float() - exact).norm() / exact.norm()).item()
    times = (times_on_cuda if options.device == "cuda" else times_on_cpu)(calls, options.rounds)
    batch, heads, n, d = case.q.shape
    sizes = {"batch": batch, "heads": heads, "kv_heads": case.k.shape[1], "seq": n, "head_dim": d}
    sizes["dtype"] = str(case.q.dtype).removeprefix("torch.")
    for contender in contenders:
        settings, mine = contender.settings, times[contender]
        row = {"input": case.name, "impl": contender.impl, "kernel": None, **sizes, "causal": case.causal}
        row |= {"setting": str(contender), "ms": statistics.median(mine) * 1e3}
        row |= {"ms_min": min(mine) * 1e3, "ms_max": max(mine) * 1e3, "rounds": len(mine)}
        for name, other in (("time_of_exact", EXACT), ("time_of_energy", ENERGY)):
            if others := times.get(Contender("distr", other)):
                row[name] = statistics.median(here / there for here, there in zip(mine, others))
        if settings:
            facts = explain(case.q, case.k, case.v, is_causal=case.causal, settings=settings)
            row["kernel"] = facts["kernel"]
        if settings and settings.skip:
            kept, seen = halves_of(case, settings)
            row["kept_share"] = (kept.sum() / seen.sum()).item()
            row["kept_by_head"] = (kept.sum((0, 2)) / seen.sum((0, 2))).tolist()
            if case.kept is not None:
                row["rows_off"] = (kept != case.kept).sum().item()  # 64 of them each, of other counts than planted
                far = [abs(a - b) for a, b in zip(row["kept_by_head"], case.about["expected_share"])]
                if max(far) > ALLOWED:
                    wrong.append(f"{case}, {contender}: a head's kept share is {max(far):.3f} from what it should be")
        row["rel_error_out"] = errors[contender]
        rows.append({key: float(f"{of:.6g}") if isinstance(of, float) else of for key, of in row.items()})
    return rows, wrong


def meta(options):
    described = ops.describe()
    command = shlex.join(["bench/near.py", *(Path(word).name for word in sys.argv[1:])])
    facts = {"version": described.version, "command": command}
    facts |= {"commit": options.commit or os.environ.get("DISTR_COMMIT"), "torch": torch.__version__}
    facts["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    if options.device == "cpu":
        facts |= {"cpu": cpu_name(), "instruction_set": described.instruction_set, "threads": 1, "clock": "CPU time"}
    else:
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        facts |= {"disabled_kernels": os.environ.get("DISTR_DISABLE_KERNELS", ""), "built": described.cuda_build}
    return facts


def parse_arguments():
    def integers(text):
        return [int(word) for word in text.split(",") if word]

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json-out", type=Path, required=True, help="result file")
    parser.add_argument("--captured", type=Path, help="a .safetensors file of bench/quality/capture.py")
    parser.add_argument("--shares", type=Path, default=SHARES, help="what each head keeps; of the same command")
    parser.add_argument("--head-dims", type=integers, default=[64, 128], help="of planted inputs; empty: none")
    parser.add_argument("--batch", type=int, default=1, help="of planted inputs")
    parser.add_argument("--heads", type=int, help="of planted inputs [4, up to N = 8192, above it fewer; on CUDA 10]")
    parser.add_argument("--seq", type=integers, help="of planted inputs [4096,8192,16384; on CUDA 16384]")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--only-exact", action="store_true", help="of planted inputs, and beside cuDNN alone")
    parser.add_argument("--rounds", type=int, help="[3; on CUDA 30]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--commit", help="for the result file")
    options = parser.parse_args()
    on_cuda = options.device == "cuda"
    for name, values in (("seq", ([4096, 8192, 16384], [16384])), ("rounds", (3, 30))):
        if getattr(options, name) is None:
            setattr(options, name, values[on_cuda])
    return options


def main():
    options = parse_arguments()
    if options.device == "cpu":
        torch.set_num_threads(1)
    result, failures, begin = {"meta": meta(options), "inputs": [], "rows": []}, [], time.perf_counter()
    for case in itertools.chain(captured_cases(options.captured) if options.captured else (), planted_cases(options)):
        rows, wrong = measure(case.to(options.device, getattr(torch, options.dtype)), options)
        failures += wrong
        result["inputs"].append({"input": str(case), **case.about})
        result["rows"] += rows
        result_file.write(options.json_out, result)
        print(f"{time.perf_counter() - begin:4.0f} s  {case}", flush=True)
        for row in rows:
            kept = f"  kept {row['kept_share']:.3f}" if "kept_share" in row else ""
            of = [f"  {row[key]:.3f} of {key[8:]}" for key in ("time_of_exact", "time_of_energy") if key in row]
            times = f"{row['ms']:9.3f} ms{''.join(of)}"
            print(f"        {row['setting']:52} {times}{kept}", flush=True)
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
