# SPDX-License-Identifier: Apache-2.0
"""The contract of the flash-attn package where Q, K and V, or K and V, are one tensor: views of it, and flash.py."""

from typing import Any

from distrattention.flash import flash_attn_func, flash_attn_varlen_func

import torch  # isort: skip
from torch import Tensor  # isort: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, **others: Any
) -> Tensor | Any:
    """flash_attn_func() of qkv [B, S, 3, H, D], which holds Q, K and V of as many heads, in this order.

    others: the further arguments of flash_attn_func(), by name. Gradients come as one tensor of qkv's shape.
    Returns and raises as it does, and ValueError for another shape of qkv.
    """
    return flash_attn_func(*_parts("qkv", qkv, 5, 3), dropout_p, softmax_scale, causal, **others)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> Tensor | Any:
    """flash_attn_func() of q [B, Sq, Hq, D] and kv [B, Sk, 2, H, D], which holds K and V, in this order. The rest as in
    flash_attn_qkvpacked_func()."""
    return flash_attn_func(q, *_parts("kv", kv, 5, 2), dropout_p, softmax_scale, causal, **others)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> Tensor | Any:
    """flash_attn_varlen_func() of qkv [T, 3, H, D], whose sequences `cu_seqlens` parts. The rest as in
    flash_attn_qkvpacked_func()."""
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(*_parts("qkv", qkv, 4, 3), *lengths, dropout_p, softmax_scale, causal, **others)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> Tensor | Any:
    """flash_attn_varlen_func() of q [Tq, Hq, D] and kv [Tk, 2, H, D]. The rest as in flash_attn_qkvpacked_func()."""
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, *_parts("kv", kv, 4, 2), *lengths, dropout_p, softmax_scale, causal, **others)


def _parts(name, packed, axes, count):
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{name} is {type(packed).__name__}; allowed: a tensor")
    if packed.dim() != axes or packed.shape[-3] != count:
        allowed = f"{axes} axes, of which the third last is {count}"
        raise ValueError(f"{name} is {list(packed.shape)}; allowed: {allowed}, then heads and columns")
    return packed.unbind(-3)
