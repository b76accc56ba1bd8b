# SPDX-License-Identifier: Apache-2.0
"""Hydra attention (arXiv 2209.07484): as many heads as features, and a cosine kernel."""

import torch.nn.functional as F
from torch import nn

from baselines.shape import merge, repeat_heads, require_whole, split, widen, zero_padding


class Hydra(nn.Module):
    """O_t = phi(q_t) * sum_u phi(k_u) * v_u, products by element over all C = H d features, phi(x) = x / ||x|| over C
    (its Equation 9). Causal: the sum runs to u = t. O(N C); no softmax, no scale."""

    def __init__(self, shape=None):
        super().__init__()

    def forward(self, q, k, v, keys=None, causal=False, scale=None):
        require_whole(q, k)
        heads, dtype = q.shape[1], q.dtype
        k, v = (repeat_heads(x, heads) for x in (k, v))
        q, k, v = (merge(x) for x in widen(q, k, zero_padding(v, keys)))  # [B, N, C]
        products = F.normalize(k, dim=-1) * v
        sums = products.cumsum(1) if causal else products.sum(1, keepdim=True)
        return split(F.normalize(q, dim=-1) * sums, heads).to(dtype)
