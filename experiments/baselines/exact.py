# SPDX-License-Identifier: Apache-2.0
"""Exact attention, O = softmax(scale Q K^T) V: eager, and torch's fused kernels, each pinned."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from baselines.shape import repeat_heads, require_whole, widen


def mask_of(keys, causal, n, device):
    """bool [B or 1, 1, N or 1, N], True where a row sees a key; None where every row sees all."""
    seen = torch.ones(n, n, dtype=torch.bool, device=device).tril()[None, None] if causal else None
    if keys is None:
        return seen
    return keys[:, None, None] if seen is None else seen & keys[:, None, None]


class Standard(nn.Module):
    """Eager attention: S and P are N x N in memory, the softmax in float32 at least."""

    def __init__(self, shape=None):
        super().__init__()

    def forward(self, q, k, v, keys=None, causal=False, scale=None):
        require_whole(q, k)
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
        scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
        mask = mask_of(keys, causal, q.shape[2], q.device)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return widen(scores)[0].softmax(-1).to(v.dtype) @ v


class Pinned(nn.Module):
    """torch's scaled_dot_product_attention by one of its backends, which raises where that does not serve."""

    backend: SDPBackend

    def __init__(self, shape=None):
        super().__init__()

    def forward(self, q, k, v, keys=None, causal=False, scale=None):
        require_whole(q, k)
        mask = None if keys is None else mask_of(keys, causal, q.shape[2], q.device)
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal and mask is None, scale=scale, enable_gqa=grouped
            )


class Flash2(Pinned):
    """FlashAttention-2 on CUDA; on a CPU torch's flash algorithm for CPUs, which is called flash-cpu in results."""

    backend = SDPBackend.FLASH_ATTENTION

    def forward(self, q, k, v, keys=None, causal=False, scale=None):
        if q.is_cuda and keys is not None:
            raise ValueError("keys were given to FlashAttention-2, which takes no mask; allowed: batches of one length")
        return super().forward(q, k, v, keys, causal, scale)


class CuDNN(Pinned):
    """cuDNN's attention, on CUDA alone; torch gives it as many heads of K and V as of Q."""

    backend = SDPBackend.CUDNN_ATTENTION

    def forward(self, q, k, v, keys=None, causal=False, scale=None):
        if not q.is_cuda:
            raise NotImplementedError(f"cuDNN's attention was called on {q.device}; allowed: CUDA devices")
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
        return super().forward(q, k, v, keys, causal, scale)
