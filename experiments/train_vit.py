#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the ViT that Tables 5 and 8 begin from, with exact attention, and writes its weights (float16).

With DeiT's recipe (AdamW, cosine, label smoothing, mixup and cutmix, random erasing) but RandAugment, with shifts for
its crops. Goes on from --checkpoint, so that runs of some minutes add up. Not for what the paper measures."""

import math
from pathlib import Path

from shared import models
from shared.data import Images, toy_images
from shared.evaluate import classify
from shared.results import DTYPES, Results, arguments, chosen, parsed
from shared.swap import swap
from shared.training import image_loss, seed_all, train


def main():
    parser = arguments(__doc__, methods=("flash2",), model="vit-ti-197", data="fashion-mnist.npz")
    parser.add_argument("--weights", type=Path, help="a .safetensors file to begin from; of other images, too")
    parser.add_argument("--weights-out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="written after each epoch, and gone on from")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-3, help="largest learning rate [%(default)s]")
    parser.add_argument("--mix", type=float, default=0.5, help="how often images are mixed [%(default)s]")
    options = parsed(parser)
    name, data = options.model, options.data
    if options.quick:
        name, data, options.batch, options.rate = "tiny", options.out.with_suffix(".npz"), 32, 3e-3
        toy_images(data)
    images = Images(data, models.side_of(name), options.device)
    seed_all(0)
    model = models.vision(name, images.classes, options.weights, options.device)
    swap(model, chosen(options, options.methods[0]))
    results = Results(options, ("epochs",), epochs=options.epochs, batch=options.batch, rate=options.rate)
    loss_of = image_loss(images.classes, options.device, *((0, 0) if options.quick else (options.mix,)))

    def rate(epoch):
        warm_up = options.epochs / 20
        cosine = (1 + math.cos(math.pi * epoch / options.epochs)) / 2
        return options.rate * min(epoch / warm_up, 1) * cosine + 1e-6

    losses = train(
        model, options.epochs, lambda epoch: images.batches("train", options.batch, seed=epoch), loss_of, rate,
        device=options.device, dtype=DTYPES[options.dtype], checkpoint=options.checkpoint, log=results.log,
        is_over=results.is_over,
    )  # fmt: skip
    if len(losses) < options.epochs:
        return results.log(f"{options.epochs - len(losses)} epochs are left to a further run, from --checkpoint")
    found, _ = classify(model, images, options.batch, options)
    models.save_weights(options.weights_out, model)
    results.add({"epochs": len(losses), **found, "losses": losses})


if __name__ == "__main__":
    main()
