# SPDX-License-Identifier: Apache-2.0
"""FLatten: Focused Linear Attention (arXiv 2308.00442), and what the paper's authors ran under its name."""

import torch
import torch.nn.functional as F
from torch import nn

from baselines.shape import merge, repeat_heads, require_whole, split, widen, zero_padding

EPS = 1e-6
CHUNK = 128  # tokens whose products with each other are formed at once in the causal form


def linear(q, k, v, causal):
    """O_i = mean_j (q_i . k_j) v_j / (mean_j q_i . k_j + eps), for q, k >= 0: [B, H, N, d]. Causal: the means are sums
    over j <= i."""
    n = q.shape[2]
    v = torch.cat((v, torch.ones_like(v[..., :1])), 3)  # the last column sums the weights
    if not causal:
        sums = q @ (k.transpose(2, 3) @ v / n)
        return sums[..., :-1] / (sums[..., -1:] + EPS)
    pad = (0, 0, 0, -n % CHUNK)
    q, k, v = (F.pad(x, pad).unflatten(2, (-1, CHUNK)) for x in (q, k, v))  # [B, H, chunks, CHUNK, d]
    states = k.transpose(3, 4) @ v
    before = states.cumsum(2) - states  # what the chunks before have summed up, [B, H, chunks, d, dv + 1]
    sums = q @ before + (q @ k.transpose(3, 4)).tril() @ v
    sums = sums.flatten(2, 3)[:, :, :n]
    return sums[..., :-1] / (sums[..., -1:] + EPS)


class Convolution(nn.Module):
    """The depth-wise convolution of V, [B, H, N, d] -> [B, H, N, d], with the same 5 or 5 x 5 weights for every head.

    Over the patches of an image (tokens before them get 0), else over the tokens, and of those before alone if causal.
    """

    def __init__(self, shape, kernel=5):
        super().__init__()
        self.grid, self.causal = shape.grid, shape.causal
        kind = nn.Conv1d if shape.grid is None else nn.Conv2d
        padding = kernel - 1 if shape.causal else kernel // 2
        self.conv = kind(shape.head_dim, shape.head_dim, kernel, padding=padding, groups=shape.head_dim)

    def forward(self, v, first=None):
        """first: the token that the image begins with; None: such that it ends with the last."""
        batch, heads, n, d = v.shape
        if self.grid is None:
            out = self.conv(v.flatten(0, 1).transpose(1, 2))[..., :n]
            return out.transpose(1, 2).unflatten(0, (batch, heads))
        rows, columns = self.grid
        first = n - rows * columns if first is None else first
        patches = v[:, :, first : first + rows * columns].flatten(0, 1).transpose(1, 2).unflatten(2, self.grid)
        out = self.conv(patches).flatten(2).transpose(1, 2).unflatten(0, (batch, heads))
        return F.pad(out, (0, 0, first, n - first - rows * columns))


class FLatten(nn.Module):
    """Linear attention of focused features (its Equations 5 to 8): f_p(x) = ||x|| x^p / ||x^p|| of relu(x), p = 3, with
    norms over all C features; plus the depth-wise convolution of V.

    `scale` [1, 1, C] enters by softplus; the position embedding [1, N, C] is added to K where N is fixed and attention
    not causal. Both begin as 0. The causal form is ours: prefix sums, a convolution of width 5 over the tokens before,
    and a rotary embedding comes before the focusing, where it leaves the features non-negative."""

    def __init__(self, shape, power=3):
        super().__init__()
        self.shape, self.power = shape, power
        self.scale = nn.Parameter(torch.zeros(1, 1, shape.width))
        has_positions = shape.tokens is not None and not shape.causal
        self.positions = nn.Parameter(torch.zeros(1, shape.tokens, shape.width)) if has_positions else None
        self.convolution = Convolution(shape)

    def focus(self, x):
        """f_p of [B, N, C], >= 0."""
        x = (F.relu(x) + EPS) / F.softplus(self.scale).to(x.dtype)
        powers = (x / x.amax(-1, keepdim=True)) ** self.power  # the largest is 1, so that no power overflows
        return powers * (x.norm(dim=-1, keepdim=True) / powers.norm(dim=-1, keepdim=True))

    def forward(self, q, k, v, keys=None, causal=False, scale=None):
        require_whole(q, k)
        if causal != self.shape.causal:
            raise ValueError(f"causal is {causal}; allowed: {self.shape.causal}, which this layer was made for")
        heads, n = q.shape[1:3]
        k, v = (repeat_heads(x, heads) for x in (k, v))
        v = zero_padding(v, keys)
        q_, k_ = (merge(x) for x in widen(q, k))  # [B, N, C]
        if self.positions is not None:
            if n > self.positions.shape[1]:
                raise ValueError(f"{n} tokens; allowed: at most {self.positions.shape[1]}, that have a position")
            k_ = k_ + self.positions[:, :n].to(k_.dtype)
        q_, k_ = (split(self.focus(x), heads) for x in (q_, k_))
        out = linear(q_, zero_padding(k_, keys), *widen(v), causal)
        return out.to(q.dtype) + self.convolution(v)


class FLattenAuthors(nn.Module):
    """What DistrAttention's published code runs as "Flatten": relu features without focusing, scale and positions, and
    a convolution over the tokens from 0 on, so that the image is shifted by its class token and its last patch lost.
    There it also returns before the layer's output projection; swap() leaves that out, too. Images alone."""

    skips_projection = True

    def __init__(self, shape):
        super().__init__()
        if shape.grid is None:
            raise ValueError(f"flatten-authors has no grid of patches ({shape}); allowed: image models")
        self.convolution = Convolution(shape)

    def forward(self, q, k, v, keys=None, causal=False, scale=None):
        require_whole(q, k)
        if causal or keys is not None:
            raise ValueError("flatten-authors was called with causality or padding; allowed: neither")
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
        out = linear(*widen(F.relu(q), F.relu(k), v), causal=False).to(q.dtype)
        return out + self.convolution(v, first=0)
