#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Captures Q, K and V (rotated) of some layers of a pretrained language model on real text, as a .safetensors file that
`distr` and bench/near.py read, and which far halves of tiles each head keeps.

    python3 bench/quality/capture.py --out qkv.safetensors --layers 3,15,27 --maps maps.npz --shares shares.json

q is bf16 [layers, Hq, N, d], k and v [layers, Hkv, N, d]: 15.7 MB a layer of SmolLM2. The maps, of all layers, are
`kept` and `seen`, bool [layers, Hq, N / 64, N / 64]. The shares are a result file with a row for each layer:
`kept_share` of each head, of the far halves that rows see, those that are kept; and `kept_by_distance`, the same by how
many halves they lie before their rows, in steps of 8 halves (null where none is seen).
"""

import argparse
import datetime
import math
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from distrattention import Settings, scaled_dot_product_attention
from distrattention.evaluation import label
from distrattention.evaluation.measure import Call
from distrattention.evaluation.probabilities import HALF, approximate, is_near, scores_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import models
import result_file
from near_inputs import DISTANCES
from processor import cpu_name


def map_of(call, settings):
    """(kept, seen): bool [Hq, N / 64, N / 64] of the far halves of one causal call, in which far keys come before rows
    and fill tiles."""
    resolved = call.resolve(settings)
    columns, alone = call.columns(resolved), replace(resolved, window=None, sinks=0, skip=None)
    k, seeing = call.key.float(), replace(call, causal="none")
    heads, rows_of_call = call.query.shape[1:3]
    kept = torch.zeros(heads, -(-rows_of_call // HALF), -(-rows_of_call // HALF), dtype=torch.bool)
    seen = kept.clone()
    for half, rows in enumerate(torch.arange(rows_of_call, device=k.device).split(HALF)):
        is_far = ~is_near(call, resolved, rows, int(rows[-1]) + 1)[0]  # all rows of a block have the same near keys
        if not is_far.any():
            continue
        q, (far, near) = call.query[:, :, rows].float(), (of.nonzero()[:, 0] for of in (is_far, ~is_far))
        of_near = scores_of(seeing, q, k[:, :, near], rows).masked_fill_(near > rows[:, None], -torch.inf)
        bound = of_near.logsumexp(-1) + math.log(settings.skip)
        exact = scores_of(seeing, q, k[:, :, far], rows) if columns[0] is None else None
        scores = approximate(seeing, alone, columns, q, k[:, :, far], rows, exact)
        above = (scores.unflatten(-1, (-1, HALF)).amax(-1) > bound[..., None])[0].any(1)
        at = far[::HALF].cpu() // HALF
        kept[:, half, at], seen[:, half, at] = above.cpu(), True
    return kept, seen


def rows_of(maps):
    """The rows of --shares, of {layer: (kept, seen)}."""

    def share(some, every):
        return round((some / every).item(), 4) if every else None

    for layer, (kept, seen) in sorted(maps.items()):
        distance = (torch.arange(kept.shape[1])[:, None] - torch.arange(kept.shape[2])).clamp_min(0) // DISTANCES
        counts = [
            torch.zeros(len(of), distance.max() + 1).index_add_(1, distance.flatten(), of.flatten(1).float())
            for of in (kept, seen)
        ]
        of_heads = [share(*both) for both in zip(*(count.sum(1) for count in counts))]
        by_distance = [[share(*both) for both in zip(*of_head)] for of_head in zip(*counts)]
        yield {"layer": layer, "kept_share": of_heads, "kept_by_distance": by_distance}


def meta(options, settings):
    return {
        "model": options.model,
        "text": options.text,
        "length": options.length,
        "setting": label(settings),
        "dtype": options.dtype,
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "commit": os.environ.get("DISTR_COMMIT"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": shlex.join(["bench/quality/capture.py", *(Path(word).name for word in sys.argv[1:])]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a .safetensors file with q, k and v")
    parser.add_argument("--layers", default="3,15,27", help="those to keep")
    parser.add_argument("--length", type=int, default=8192, help="N")
    parser.add_argument("--text", default="docs/kernel-log.md", help="which document of data/quality.jsonl")
    parser.add_argument("--maps", type=Path, help="a .npz file of what every layer and head keeps")
    parser.add_argument("--shares", type=Path, help="a result file of the shares that every layer and head keeps")
    parser.add_argument("--group-size", type=int, default=2, help="of strategy energy, for what is kept; 1: exact")
    parser.add_argument("--skip", type=float, default=0.0025, help="for what is kept")
    models.add_options(parser)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="the model's")
    options = parser.parse_args()

    near = {"window": 512, "sinks": 128, "skip": options.skip}
    settings = Settings("energy", options.group_size, **near) if options.group_size > 1 else Settings("exact", **near)
    layers = [int(layer) for layer in options.layers.split(",")]
    captured, maps = {}, {}

    def attention(module, query, key, value, attention_mask, scaling=None, **others):
        layer = module.layer_idx
        if layer in layers:
            captured[layer] = [tensor[0].to("cpu", torch.bfloat16) for tensor in (query, key, value)]
        if options.maps or options.shares:
            maps[layer] = map_of(Call(query, key, value, None, "top_left", scaling), settings)
            print(f"layer {layer}: kept {maps[layer][0].sum() / maps[layer][1].sum().clamp_min(1):.3f}", flush=True)
        grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2), None

    AttentionInterface.register("capture", attention)
    AttentionMaskInterface.register("capture", sdpa_mask)
    model, tokens = models.load(options.model, options.weights, getattr(torch, options.dtype), options.device)
    model.set_attn_implementation("capture")
    with torch.no_grad():
        model.model(tokens[options.text][None, : options.length], use_cache=False)
    if missing := [layer for layer in layers if layer not in captured]:
        raise SystemExit(f"--layers has {missing}; allowed: 0 to {model.config.num_hidden_layers - 1}")
    stacked = (torch.stack(tensors).contiguous() for tensors in zip(*(captured[layer] for layer in layers)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(zip("qkv", stacked)), options.out, metadata={"layers": options.layers, "text": options.text})
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")
    if options.maps:
        kept, seen = (torch.stack([maps[layer][part] for layer in sorted(maps)]).numpy() for part in (0, 1))
        np.savez_compressed(options.maps, kept=kept, seen=seen)
        print(f"{options.maps}: {options.maps.stat().st_size / 1e6:.1f} MB")
    if options.shares:
        result_file.write(options.shares, {"meta": meta(options, settings), "rows": list(rows_of(maps))})


if __name__ == "__main__":
    main()
