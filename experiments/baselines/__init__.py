# SPDX-License-Identifier: Apache-2.0
"""The paper's baselines as PyTorch modules on heads, written from their papers' equations.

Every module is called as

    o = attention(q, k, v, keys=None, causal=False, scale=None)

with q [B, H, N, d], k and v [B, Hkv, N, d] (Hkv divides H: GQA) and o [B, H, N, d] of q's dtype. keys: bool [B, N],
True for the tokens that count, where a batch is padded; None: all do. causal: a row sees no later row. scale: of the
scores, d^-1/2 unless given; methods without a softmax do not use it. All are differentiable by autograd. None caches
keys: they attend whole sequences.

    module = make("hydra", Shape(heads=12, kv_heads=12, head_dim=64))
"""

from baselines.exact import CuDNN, Flash2, Standard
from baselines.flatten import FLatten, FLattenAuthors
from baselines.hydra import Hydra
from baselines.hyper import HyperAttention
from baselines.primal import Primal, ksvd_loss
from baselines.shape import Shape

BASELINES = {
    "standard": Standard,
    "flash2": Flash2,
    "cudnn": CuDNN,
    "hydra": Hydra,
    "hyper": HyperAttention,  # as published: exact up to 4096 tokens
    "hyper-short": lambda shape: HyperAttention(shape, bits=7, block=64, samples=64, least_length=128),
    "hyper-authors": lambda shape: HyperAttention(shape, bits=8, block=128, samples=128, least_length=0),
    "flatten": FLatten,
    "flatten-authors": FLattenAuthors,
    "primal": Primal,
}

__all__ = ["BASELINES", "Shape", "ksvd_loss", "make"]


def make(name, shape):
    """The attention module of that name for heads of that Shape, its parameters as its paper begins with."""
    if name not in BASELINES:
        raise ValueError(f"baseline is {name!r}; allowed: {', '.join(map(repr, BASELINES))}")
    return BASELINES[name](shape)
