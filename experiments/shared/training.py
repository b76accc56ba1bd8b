# SPDX-License-Identifier: Apache-2.0
"""A training loop that goes on where it stopped, and the paper's learning rates."""

import math
from pathlib import Path

import numpy as np
import timm.data
import timm.loss
import torch

from baselines import ksvd_loss

WARM_UP, EPOCHS, LOWEST = 5, 300, 1e-5  # of DeiT's schedule, which the paper's regimes are parts of
FIRST = {"r1": 0, "r2": 180}  # the epoch that each regime begins with


def deit_rate(epoch, batch_size):
    """DeiT's learning rate at an epoch, which may be a fraction: 5e-4 batch / 512, a linear warm-up from 1e-6 of 5
    epochs, then a cosine over 300 epochs down to 1e-5."""
    base = 5e-4 * batch_size / 512
    if epoch < WARM_UP:
        return 1e-6 + (base - 1e-6) * epoch / WARM_UP
    return LOWEST + (base - LOWEST) * (1 + math.cos(math.pi * epoch / EPOCHS)) / 2


def seed_all(seed):
    """Seeds torch, and numpy, by which timm mixes images."""
    torch.manual_seed(seed)
    np.random.seed(seed)


def image_loss(classes, device, mix=0.5, erase=0.25, eta=0.05):
    """The loss of (model, (images, labels)) by DeiT's recipe: mixup 0.8 or cutmix 1 of a share `mix` of the batches, a
    label smoothing of 0.1, a share `erase` of the images with a rectangle of noise; and eta times the KSVD loss."""
    mixed = timm.data.Mixup(0.8, 1.0, prob=mix, label_smoothing=0.1, num_classes=classes)
    erased = timm.data.random_erasing.RandomErasing(erase, mode="pixel", device=device)
    criterion = timm.loss.SoftTargetCrossEntropy()

    def loss_of(model, batch):
        images, labels = mixed(*batch)
        return criterion(model(erased(images)).float(), labels) + eta * ksvd_loss(model)

    return loss_of


def train(model, epochs, batches, loss_of, rate, *, device, dtype, optimizer=None, checkpoint=None, log=print,
          is_over=lambda: False):  # fmt: skip
    """Trains the model in place, and returns the mean loss of each epoch.

    batches: of an epoch's number gives its (count, iterable of batches). loss_of: of the model and a batch. rate: of
    the epoch, with its fraction, gives the learning rate. dtype: of autocast on a GPU. checkpoint: a path outside git
    that is written after each epoch, and that a later call goes on from. is_over: asked after each epoch; ends it."""
    model.train()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    losses = []
    if checkpoint and Path(checkpoint).exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    for epoch in range(len(losses), epochs):
        total = torch.zeros((), device=device)
        count, of_epoch = batches(epoch)
        for step, batch in enumerate(of_epoch):
            for group in optimizer.param_groups:
                group["lr"] = rate(epoch + step / count)
            with torch.autocast(device.partition(":")[0], dtype, enabled=device.startswith("cuda")):
                loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        losses.append(total.item() / count)
        log(f"epoch {epoch}: loss {losses[-1]:.4f}")
        if not math.isfinite(losses[-1]):
            log("the loss is no number: training ends")
            break
        if checkpoint:
            Path(checkpoint).parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, checkpoint)
        if is_over():
            break
    model.eval()
    return losses
