#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 5 and Figure 8: a ViT fine-tuned with each method, 20 epochs, all parameters, in the paper's two regimes.

Of DeiT's schedule over 300 epochs, r1 is epochs 0 to 19 and r2 epochs 180 to 199. l = 64, G = 2. Every row keeps its
losses by epoch, which experiments/fig8.py draws. --weights: what train_vit.py wrote. Other data than it was trained on
are transfer sets, with a new head."""

from pathlib import Path

from shared import models
from shared.data import Images, toy_images
from shared.evaluate import classify
from shared.results import DTYPES, Results, arguments, chosen, label, parsed, shard, shown
from shared.swap import swap
from shared.training import FIRST, deit_rate, image_loss, seed_all, train

METHODS = ("standard", "flash2", "exact", "hydra", "hyper-authors", "flatten", "flatten-authors", "primal",
           "lsh-sample", "lsh-mean", "energy")  # fmt: skip


def main():
    parser = arguments(__doc__, methods=METHODS, model="vit-ti-197", data="fashion-mnist.npz")
    parser.add_argument("--weights", type=Path, help="a .safetensors file [none: random, or timm's]")
    parser.add_argument("--regimes", default="r1,r2")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=100, help="the paper's code has [%(default)s]")
    parser.add_argument("--items", type=int, help="train on the first so many images [all]")
    parser.add_argument("--shard", type=shard, default=(0, 1), help="I/N: every N-th row, without times [all rows]")
    parser.set_defaults(block=64)
    options = parsed(parser)
    name, data = options.model, options.data
    if options.quick:
        name, data, options.epochs, options.batch = "tiny", options.out.with_suffix(".npz"), 3, 16
        toy_images(data)
    of = "toy" if options.quick else Path(data).stem
    images = Images(data, models.side_of(name), options.device)
    loss_of = image_loss(images.classes, options.device, *((0, 0) if options.quick else ()))
    key = ("data", "regime", "method", "seed")
    results = Results(options, key, epochs=options.epochs, batch=options.batch, weights=shown(options.weights),
                      items=options.items, block=options.block, group_size=options.group_size)  # fmt: skip
    for seed in map(int, options.seeds.split(",")):
        for regime in options.regimes.split(","):
            first = FIRST[regime]
            for method in options.methods:
                row = dict(zip(key, (of, regime, label(method, options.device), seed)))
                if not (results.wants(**row) and results.takes_turn()):
                    continue
                seed_all(seed)
                model = models.vision(name, images.classes, options.weights, options.device)
                swap(model, chosen(options, method))

                def batches(epoch, seed=seed):
                    return images.batches("train", options.batch, 1000 * seed + epoch, options.items)

                def rate(epoch, first=first):
                    return 3e-3 if options.quick else deit_rate(first + epoch, options.batch)

                losses = train(model, options.epochs, batches, loss_of, rate, device=options.device,
                               dtype=DTYPES[options.dtype], log=lambda text: None)  # fmt: skip
                found, _ = classify(model, images, 250, options)
                if options.shard[1] > 1:  # others use the GPU, too
                    del found["seconds"]
                results.add(row | found | {"losses": [round(loss, 4) for loss in losses]})
    if options.shard[1] == 1:
        measure_times(options, images, results)


def measure_times(options, images, results):
    """Times the test set of the methods' rows that shards trained, by the untrained model, whose calls are the same."""
    names, seconds = {label(name, options.device): name for name in options.methods}, {}
    for row in results.rows:
        if "seconds" not in row and row["method"] in names:
            method = names[row["method"]]
            if method not in seconds:
                name = "tiny" if options.quick else options.model
                model = models.vision(name, images.classes, options.weights, options.device)
                swap(model, chosen(options, method))
                seconds[method] = classify(model, images, 250, options)[0]["seconds"]
            row["seconds"] = seconds[method]
            results.write()


if __name__ == "__main__":
    main()
