#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Denoising by a diffusion transformer (DiT) of diffusers, its attention exact and approximate.

    pip install diffusers
    python examples/diffusion_transformer.py

The model is built from its configuration, with random weights: what is shown is how settings by layer and by step are
given and what they do to the time, not what they do to pictures. Its heads have the size of DiT-XL's, d = 72, and the
latents of 64 x 64 make 1024 tokens. Prints for each variant the calls that were approximated and left, the time of all
steps, and the relative difference of the last latents from exact attention's.
"""

import argparse
import time

import torch
from diffusers import DDIMScheduler, DiTTransformer2DModel

from distrattention import Settings
from distrattention.integrations.diffusers import register

ENERGY = Settings("energy", 2)
VARIANTS = {
    "exact": {"settings": Settings("exact")},
    "energy": {"settings": ENERGY},
    "energy, ends exact": {"settings": ENERGY, "exact_steps": (1, 1)},
    "energy, first block exact": {"settings": ENERGY, "per_layer": {"transformer_blocks.0": Settings("exact")}},
    "energy, G = 4 first": {
        "settings": ENERGY,
        "per_step": lambda step, steps: Settings("energy", 4) if step < steps // 2 else None,
    },
}


def denoise(model, scheduler, steps, noise):
    """The latents after all steps, [B, 4, size, size]."""
    scheduler.set_timesteps(steps)
    latents, label = noise, torch.zeros(len(noise), dtype=torch.long)
    for timestep in scheduler.timesteps:
        predicted = model(latents, timestep=timestep.expand(len(noise)), class_labels=label).sample
        latents = scheduler.step(predicted, timestep, latents).prev_sample
    return latents


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--size", type=int, default=64, help="of the latents; the tokens are a quarter of its square")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=options.heads, attention_head_dim=72, num_layers=options.layers, sample_size=options.size
    ).eval()
    scheduler = DDIMScheduler()
    noise = torch.randn(1, 4, options.size, options.size)
    exact = None
    for name, arguments in VARIANTS.items():
        calls = register("distr", scheduler=scheduler, **arguments)
        model.set_attention_backend("distr")
        started = time.perf_counter()
        with torch.no_grad():
            latents = denoise(model, scheduler, options.steps, noise)
        seconds = time.perf_counter() - started
        exact = latents if exact is None else exact
        difference = (latents - exact).norm() / exact.norm()
        print(f"{name:26} {calls.taken:3} taken, {calls.left:3} left, {seconds:6.2f} s, difference {difference:.4f}")


if __name__ == "__main__":
    main()
