# SPDX-License-Identifier: Apache-2.0
"""Attention with the contract of the flash-attn package: [B, S, H, D], causal at the bottom right, GQA unasked."""

from typing import Any

from distrattention import sequences
from distrattention.context import autocast
from distrattention.core import (
    attend,
    check,
    check_scale,
    fit,
    NO_WINDOW,
    is_exact,
    require_tensors,
    settings_of,
    sides_of,
    softcap_of,
)

from distrattention.settings import Fields, Settings, chosen, counted, require_int  # isort: skip
from distrattention.sink_logits import check_sink_logits, with_sink_logits  # isort: skip

import torch  # isort: skip
from torch import Tensor  # isort: skip
from typing_extensions import Unpack  # isort: skip  # torch brings it


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    settings: Settings | None = None,
    **fields: Unpack[Fields],
) -> Tensor | Any:
    """Attention of q [B, Sq, Hq, D], k [B, Sk, H, D] and v [B, Sk, H, Dv], Hq a multiple of H, any strides.

    softmax_scale is 1/sqrt(D) when None. causal is anchored at the bottom right: query i sees keys j <= i + Sk - Sq,
    and one that sees none gets 0. So is window_size (left, right), -1 for unlimited: query i sees the keys from i + Sk
    - Sq - left to i + Sk - Sq + right, and of these the settings choose near keys. softcap: scores become
    softcap * tanh(score / softcap); 0: they are not capped. The backward is
    deterministic, whatever `deterministic` says, unless allow_nondeterministic_backward() lets it be otherwise, which
    True overrides. learnable_sink [Hq]: logits that the denominators have besides. Dtypes: as in
    scaled_dot_product_attention(). fields: of Settings (strategy, group_size, ...), instead of `settings`. Name the
    arguments: other versions order them differently.

    Returns out [B, Sq, Hq, Dv]; with return_attn_probs (out, lse, None) with lse [B, Hq, Sq], natural logarithm,
    differentiable; there are no attention probabilities to return.

    Raises NotImplementedError for dropout_p and alibi_slopes, else as scaled_dot_product_attention().
    """
    settings = settings_of(**fields) if settings is None else chosen(settings, fields)
    refuse(dropout_p, alibi_slopes)
    q, k, v = autocast(q, k, v)
    require_axes((q, k, v), 4, "[batch, rows, heads, columns]")
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if not fit(q, k, v, True):
        check((q, k, v), ("q", "k", "v"), True)
    check_scale(softmax_scale, "softmax_scale")
    sides = sides_of(window_size)
    out, lse = _flash(
        q, k, v, softmax_scale, causal, sides, softcap_of(softcap), settings, deterministic, return_attn_probs,
        learnable_sink,
    )  # fmt: skip
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
    *,
    learnable_sink: Tensor | None = None,
    settings: Settings | None = None,
    **fields: Unpack[Fields],
) -> Tensor | Any:
    """Attention of B sequences of several lengths, one behind the other: q [Tq, Hq, D], k [Tk, H, D], v [Tk, H, Dv].

    cu_seqlens_q and cu_seqlens_k, int32 [B + 1] on the device of q, hold where the sequences start, and last Tq and Tk;
    max_seqlen_q and max_seqlen_k are at least their longest lengths. The result is that of flash_attn_func() on each.
    Nothing of them is read on the host, where attention is exact: on CUDA what is wrong in them is clamped, and rows
    that are then in no sequence are not written. An approximation reads them, as its blocks of rows, and so its orders
    of columns, start anew with each sequence; "auto" is exact.

    Returns out [Tq, Hq, Dv]; with return_attn_probs (out, lse [Hq, Tq], None). Raises as flash_attn_func(), and
    NotImplementedError for block_table.
    """
    settings = settings_of(**fields) if settings is None else chosen(settings, fields)
    refuse(dropout_p, alibi_slopes, block_table=block_table)
    q, k, v = autocast(q, k, v)
    require_axes((q, k, v), 3, "[rows of all sequences, heads, columns]")
    check([tensor.transpose(0, 1) for tensor in (q, k, v)], ("q", "k", "v"), True)
    check_scale(softmax_scale, "softmax_scale")
    starts = cu_seqlens_q, cu_seqlens_k
    longest = _check_lengths(q, starts, max_seqlen_q, max_seqlen_k)
    sides, softcap = sides_of(window_size), softcap_of(softcap)
    if learnable_sink is not None:
        check_sink_logits(learnable_sink, q, "learnable_sink", heads_axis=-2)
    corner = "bottom_right" if causal else "none"
    if is_exact(settings, q.shape[-1]):
        options = (corner, softmax_scale, sides, softcap, bool(deterministic))
        out, lse = sequences.attend(q, k, v, *starts, *longest, *options)
        if learnable_sink is not None:
            out, lse = with_sink_logits(out.transpose(0, 1), lse, learnable_sink)
            out = out.transpose(0, 1)
    else:
        options = (softmax_scale, causal, sides, softcap, settings, deterministic, return_attn_probs, learnable_sink)
        out, lse = _each_by_itself((q, k, v), starts, longest, options)
    return (out, lse, None) if return_attn_probs else out


def _each_by_itself(tensors, starts, longest, options):
    """(out, lse) of approximations, one sequence after the other."""
    q, k, v = (tensor.transpose(0, 1) for tensor in tensors)  # [H, T, D]
    names = ("q", "k")
    lengths_q, lengths_k = (
        _lengths(f"cu_seqlens_{name}", of, tensor.shape[1], f"max_seqlen_{name}", most)
        for name, of, tensor, most in zip(names, starts, (q, k), longest)
    )
    parts = zip(q.split(lengths_q, 1), k.split(lengths_k, 1), v.split(lengths_k, 1))
    results = [_flash(*part, *options) for part in parts] or [_flash(q, k, v, *options)]
    outs, lses = zip(*results)
    return torch.cat(outs, 1).transpose(0, 1), None if lses[0] is None else torch.cat(lses, 1)


def _flash(q, k, v, scale, causal, sides, softcap, settings, deterministic, with_lse, sink):
    """q [B, Hq, Sq, D] or [Hq, Sq, D], and so on."""
    corner = "bottom_right" if causal else "none"
    key_offset = None if causal or sides == NO_WINDOW else k.shape[-2] - q.shape[-2]
    if sink is not None:
        check_sink_logits(sink, q, "learnable_sink")
    options = {"with_lse": bool(with_lse) or sink is not None, "key_offset": key_offset}
    options |= {"sides": sides, "softcap": softcap}
    out, lse = attend(q, k, v, None, corner, scale, settings, bool(deterministic), **options)
    return (out, lse) if sink is None else with_sink_logits(out, lse, sink)


def refuse(dropout_p, alibi_slopes, **others):
    if dropout_p != 0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; allowed: 0, as there is no dropout")
    for name, value in (("alibi_slopes", alibi_slopes), *others.items()):
        if value is not None:
            raise NotImplementedError(f"{name} was given; allowed: None, as it is not there")


def require_axes(tensors, count, meaning, names="qkv"):
    require_tensors(tensors, names)
    for name, tensor in zip(names, tensors):
        if tensor.dim() != count:
            raise ValueError(f"{name} has {counted(tensor.dim(), 'axis', 'axes')}; allowed: {count}, {meaning}")


def _check_lengths(q, starts, longest_q, longest_k):
    """The longest lengths as numbers; raises for what can be seen without reading the starts."""
    for name, of in zip(("cu_seqlens_q", "cu_seqlens_k"), starts):
        if not isinstance(of, torch.Tensor):
            raise TypeError(f"{name} is of type {type(of).__name__}; allowed: a torch.Tensor, int32 [sequences + 1]")
        if of.dtype != torch.int32 or of.dim() != 1 or len(of) == 0:
            raise ValueError(f"{name} is {of.dtype} {tuple(of.shape)}; allowed: int32 [sequences + 1]")
        if of.device != q.device:
            raise TypeError(f"{name} is on {of.device}; allowed: {q.device}, where q is")
        if len(of) != len(starts[0]):
            found = counted(len(of) - 1, "sequence")
            raise ValueError(f"{name} has {found}; allowed: {len(starts[0]) - 1}, as cu_seqlens_q")
    most = ("max_seqlen_q", longest_q), ("max_seqlen_k", longest_k)
    return tuple(require_int(name, value, 0, 2**31 - 1) for name, value in most)


def _lengths(name, starts, total, name_of_longest, longest):
    """The lengths of the sequences that start at `starts`, which are read."""
    starts = starts.tolist()
    lengths = [end - start for start, end in zip(starts, starts[1:])]
    if starts[0] != 0 or starts[-1] != total or any(length < 0 for length in lengths):
        raise ValueError(f"{name} is {starts}; allowed: from 0 to {total}, the number of rows, never falling")
    if lengths and max(lengths) > longest:
        raise ValueError(f"{name_of_longest} is {longest}; allowed: {max(lengths)}, the longest sequence, and above")
    return lengths
