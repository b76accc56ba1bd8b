# SPDX-License-Identifier: Apache-2.0
"""What the baselines share: the sizes of a layer, and small things about heads."""

from typing import NamedTuple

import torch


class Shape(NamedTuple):
    """The sizes of a layer's attention. Methods with parameters of their own need more than the heads."""

    heads: int  # H
    kv_heads: int  # Hkv
    head_dim: int  # d
    causal: bool = False  # some methods have other parameters then
    tokens: int | None = None  # N, where it is fixed: of a position embedding (FLatten), of sampled rows (Primal)
    grid: tuple[int, int] | None = None  # of an image's patches; tokens before them are class tokens

    @property
    def width(self):
        """C = H d."""
        return self.heads * self.head_dim


def repeat_heads(x, heads):
    """[B, Hkv, N, d] -> [B, H, N, d], where query head h reads key head h // (H / Hkv)."""
    return x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] != heads else x


def merge(x):
    """[B, H, N, d] -> [B, N, C]."""
    return x.transpose(1, 2).flatten(2)


def split(x, heads):
    """[B, N, C] -> [B, H, N, d]."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def widen(*tensors):
    """In float32 at least: float64 stays."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def zero_padding(x, keys):
    """[B, H, N, d] with the rows of padded tokens set to 0."""
    return x if keys is None else x.masked_fill(~keys[:, None, :, None], 0)


def require_whole(q, k):
    """Raises unless there are as many rows as keys."""
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} queries meet {k.shape[2]} keys; allowed: as many, since no keys are cached (no decoding)"
        )
