#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what approximations cost causal language models with heads of d = 64 and 128, which strategy `auto` goes by.

It trains a small byte-level Llama for each d from scratch with exact attention, on the sources of Python's standard
library and of torch, which every machine that runs this has. Then it measures each setting on held-out files: the bits
per byte with the setting in every layer, and what distrattention.report says of the layers. Then it trains copies of
the model a little further, exactly and with each of a few settings, on the pieces of text that training began with, and
measures their bits per byte. order_from "own" sees a little of the future, "previous" does not. With --both-ways it
also trains and measures a model for each d that sees the text before and behind, and guesses bytes that are masked.
--near-only measures near keys and skipped tiles and what they are beside, at the whole length.

Writes {"meta", "models", "rows", "both_ways"} (bench/results/h200/small_model_report.json), anew after each model: a
row for each d, length and setting. `tuned` says whether the model was trained further with that setting;
`relative_to_exact` is the ratio of bits to those of the model that had the same steps with exact attention.
"""

import argparse
import contextlib
import copy
import datetime
import hashlib
import itertools
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from distrattention import Settings, ops, replace_sdpa, report
from distrattention.evaluation import label
from distrattention.settings import DEFAULT_BLOCK

import result_file
from processor import cpu_name

BEGIN = time.perf_counter()
KV_SHARE, ROPE_BASE = 2, 10000.0
MASKED = 256  # what stands for a byte that is to be guessed
EXACT = Settings("exact")
SETTINGS = [
    Settings(strategy, size, block, estimator, order_from)
    for (strategy, estimator), size, block, order_from in itertools.product(
        (("energy", "mean"), ("lsh", "mean"), ("lsh", "sample")), (2, 4), (64, 128, 512), ("own", "previous")
    )
]
OWN = [setting for setting in SETTINGS if setting.order_from == "own" and setting.block_size == 128]
ONE_GROUPING = {"block_size": 8192, "order_from": "own"}  # for the whole sequence
NEAR = [  # near keys, and what is skipped
    Settings("energy", size, window=window, sinks=128, **others)
    for size, window, others in (
        (2, 128, {}), (2, 512, {}), (4, 512, {}), (2, 512, {"skip": 0.0025}), (4, 512, {"skip": 0.0025}),
        (2, 512, {"skip": 0.0025, "finish": True}), (4, 512, {"skip": 0.0025, "finish": True}),
        (2, 512, ONE_GROUPING), (2, 512, {"skip": 0.0025, **ONE_GROUPING}),
    )
] + [Settings("exact", window=512, sinks=128, skip=0.0025)]  # fmt: skip
PLAIN = [Settings("energy", 2), Settings("energy", 4)]
TUNED = [Settings(*dial, 128, order_from="previous") for dial in (("energy", 2), ("energy", 4), ("lsh", 2))]


class Attention(nn.Module):
    def __init__(self, width, head_dim, causal):
        super().__init__()
        self.causal = causal
        self.head_dim, self.heads = head_dim, width // head_dim
        self.kv_heads = self.heads // KV_SHARE
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, rotation):
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(q, rotation), rotate(k, rotation)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, head_dim, causal):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, head_dim, causal)
        self.up, self.down = nn.Linear(width, 6 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x, rotation):
        x = x + self.attention(self.norms[0](x), rotation)
        gate, value = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class Llama(nn.Module):
    """Bytes [B, N] in; the logits of each next byte [B, N, 256] out, or, unless causal, of each byte that is MASKED."""

    def __init__(self, layers, width, head_dim, causal=True):
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(256 if causal else 257, width)
        self.layers = nn.ModuleList(Layer(width, head_dim, causal) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        self.head_dim = head_dim
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text):
        device = text.device
        frequencies = ROPE_BASE ** (-torch.arange(0, self.head_dim, 2, device=device) / self.head_dim)
        angles = torch.arange(text.shape[1], device=device)[:, None] * frequencies  # [N, d / 2]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            x = self.embedding(text)
            for layer in self.layers:
                x = layer(x, (angles.cos(), angles.sin()))
            return self.head(self.norm(x))


def rotate(x, rotation):
    """Rotary position embedding: each pair (i, i + d / 2) of columns turns by its angle."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def log(text):
    print(f"{time.perf_counter() - BEGIN:5.0f} s  {text}", flush=True)


def read_text():
    """(bytes to train on, held-out bytes): one file of 20 is held out, by a hash of its name."""
    parts = {False: [], True: []}
    for folder in Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent:
        for name in sorted(path.relative_to(folder) for path in folder.rglob("*.py")):
            if "site-packages" not in name.parts:
                digest = hashlib.sha256(name.as_posix().encode()).digest()
                parts[digest[0] % 20 == 0].append((digest, (folder / name).read_bytes()))
    return tuple(b"\n".join(content for _, content in sorted(part)) for part in parts.values())


def loss_of(model, text):
    """The mean cross entropy, in nats, of each byte of [B, N + 1] but the first given those before it; of a model both
    ways, of a byte in seven of [B, N] given the others."""
    if not model.causal:
        wanted = text[:, :-1].long()
        hidden = torch.rand(wanted.shape, generator=torch.Generator().manual_seed(int(wanted[0, :64].sum())))
        hidden = (hidden < 1 / 7).to(text.device)
        logits = model(wanted.masked_fill(hidden, MASKED))
        return F.cross_entropy(logits[hidden].float(), wanted[hidden])
    logits = model(text[:, :-1].long())
    return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten().long())


def train(model, text, steps, rate, options, attention):
    """`steps` steps within `attention`, a context, on random pieces of `text`, the same at each call."""
    random = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1, cycle_momentum=False)
    columns = torch.arange(options.seq + 1)
    model.train()
    with attention:
        for step in range(steps):
            starts = torch.randint(len(text) - options.seq, (options.batch, 1), generator=random)
            loss = loss_of(model, text[(starts + columns).to(text.device)])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 50 == 0 or step == steps - 1:
                log(f"step {step}: {loss.item() / math.log(2):.3f} bits a byte")
    return model.eval()


@torch.no_grad()
def bits_per_byte(model, held_out, length, setting):
    """Over `held_out` [windows, seq + 1], cut into pieces of `length`."""
    pieces = torch.cat([held_out[:, at : at + length + 1] for at in range(0, held_out.shape[1] - 1, length)])
    at_once = max(1, (1 << 15) // length)
    with replace_sdpa(**setting.asdict()):
        return statistics.fmean(loss_of(model, part).item() for part in pieces.split(at_once)) / math.log(2)


def has_a_second_block(setting, length):
    """What `previous` needs: its first block is exact, and a longer call that is no more than that is refused."""
    block_size = setting.block_size or DEFAULT_BLOCK
    return setting.order_from == "own" or block_size < length or length <= DEFAULT_BLOCK


def settings_at(options, causal):
    """{length: the settings to measure there}."""
    if options.near_only:
        return {options.seq: PLAIN + NEAR}
    settings = SETTINGS if causal else OWN
    shorter = {options.seq // part: settings for part in ((4, 2) if causal else ())}
    return {**shorter, options.seq: settings + NEAR}


def measure(model, held_out, length, settings):
    """The rows of the settings on a model that was trained exactly."""
    exact = bits_per_byte(model, held_out, length, EXACT)
    rows = [{"setting": "exact", "bits_per_byte": exact, "relative_to_exact": 1.0}]
    settings = [setting for setting in settings if has_a_second_block(setting, length)]
    layers = report(model, held_out[:1, :length].long(), settings, repeats=3, end_to_end=False).layers
    for n, setting in enumerate(settings):
        bits = bits_per_byte(model, held_out, length, setting)
        of_layers = [layer.measurements[n] for layer in layers]
        errors = [measurement.error for measurement in of_layers]
        row = {"setting": label(setting), "bits_per_byte": bits, "relative_to_exact": bits / exact}
        row |= {"error_median": statistics.median(errors), "error_min": min(errors), "error_max": max(errors)}
        row["total_variation"] = statistics.fmean(measurement.total_variation for measurement in of_layers)
        row["row_cosine_min"] = min(measurement.row_cosine_min for measurement in of_layers)
        if setting.skip:
            shares = [measurement.kept_share for measurement in of_layers if measurement.kept_share is not None]
            row["kept_share"] = statistics.fmean(shares) if shares else None
        row["speed_median"] = statistics.median(layer.exact.ms / layer.measurements[n].time.ms for layer in layers)
        rows.append(row)
    return [{"length": length, "tuned": False, **row} for row in rows]


def measure_tuned(model, text, held_out, lengths, options):
    """The rows of copies of the model that were trained on, exactly and with each of TUNED."""
    rows = []
    for setting in EXACT, *TUNED:
        log(f"further training, {label(setting)}")
        attention = replace_sdpa(**setting.asdict())
        tuned = train(copy.deepcopy(model), text, options.tune_steps, options.rate / 5, options, attention)
        for length in lengths:
            row = {"length": length, "tuned": True, "setting": label(setting)}
            rows.append(row | {"bits_per_byte": bits_per_byte(tuned, held_out, length, setting)})
    exact = {row["length"]: row["bits_per_byte"] for row in rows if row["setting"] == "exact"}
    return [row | {"relative_to_exact": row["bits_per_byte"] / exact[row["length"]]} for row in rows]


def command_output(*command):
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def meta(train_text, held_out):
    built = f"CUDA kernels: {ops.describe().cuda_build}"
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": None if torch.cuda.is_available() else cpu_name(),
        "driver": command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "built": built,
        "commit": os.environ.get("DISTR_COMMIT"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": result_file.command(),
        "train_bytes": len(train_text),
        "held_out_bytes": len(held_out),
        "sha256": hashlib.sha256(train_text + held_out).hexdigest(),
    }


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json-out", type=Path, required=True, help="result file")
    parser.add_argument("--head-dims", default="64,128", help="a model for each of them")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="of the model; head_dim twice or more")
    parser.add_argument(
        "--seq", type=int, default=8192, help="length of training; measured also at a half and a quarter"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=550, help="of the training with exact attention")
    parser.add_argument("--tune-steps", type=int, default=80, help="of the further training")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="largest learning rate")
    parser.add_argument("--both-ways", action="store_true", help="models that guess masked bytes, too")
    parser.add_argument("--near-only", action="store_true", help="near keys at the whole length, no further training")
    parser.add_argument("--windows", type=int, default=16, help="held-out sequences of the length of training")
    return parser.parse_args()


def main():
    options = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    contents = read_text()
    result = {"meta": meta(*contents), "models": [], "rows": [], "both_ways": []}
    text, held_out = (torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device) for content in contents)
    step = (len(held_out) - 1) // options.windows
    windows = torch.stack([held_out[at : at + options.seq + 1] for at in range(0, step * options.windows, step)])
    tasks = (True, False) if options.both_ways else (True,)
    for causal, head_dim in itertools.product(tasks, map(int, options.head_dims.split(","))):
        torch.manual_seed(0)
        model = Llama(options.layers, options.width, head_dim, causal).to(device)
        log(f"d = {head_dim}{'' if causal else ', both ways'}")
        train(model, text, options.steps, options.rate, options, contextlib.nullcontext())
        rows = []
        for length, settings in settings_at(options, causal).items():
            rows += measure(model, windows, length, settings)
        log("measured")
        if causal and not options.near_only:
            rows += measure_tuned(model, text, windows, list(settings_at(options, causal)), options)
        for row in rows:
            keys = ("bits_per_byte", "relative_to_exact", "error_median", "total_variation")
            numbers = (f"{row[key]:7.3f}" for key in keys if key in row)
            print(f"  {row['length']:5} {'tuned' if row['tuned'] else '':5} {row['setting']:50}", *numbers)
        size = sum(parameter.numel() for parameter in model.parameters())
        sizes = {"head_dim": head_dim, "causal": causal, "heads": options.width // head_dim}
        sizes |= {"kv_heads": options.width // head_dim // KV_SHARE}
        sizes |= {"layers": options.layers, "width": options.width, "parameters": size}
        result["models"].append(sizes | {"trained_bytes": options.steps * options.batch * options.seq})
        result["rows" if causal else "both_ways"] += [{"head_dim": head_dim, **row} for row in rows]
        result_file.write(options.json_out, result)


if __name__ == "__main__":
    main()
