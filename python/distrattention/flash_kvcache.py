# SPDX-License-Identifier: Apache-2.0
"""The contract of flash-attn's flash_attn_with_kvcache(): decoding against a contiguous cache, exact, no gradients.

Lengths that are a tensor stay one: nothing is read on the host, and of the cache no more than is filled. The query
heads that share a KV head are rows of one call where causality allows it, so that K and V are read once for them also
by kernels that do not see to that themselves.
"""

from typing import Any

from distrattention import sequences
from distrattention.core import NO_WINDOW, attend, check, check_scale, sides_of, softcap_of
from distrattention.flash import refuse, require_axes
from distrattention.settings import EXACT, require_int
from distrattention.sink_logits import check_sink_logits, with_sink_logits

import torch  # isort: skip
from torch import Tensor  # isort: skip


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: int | Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    block_table: None = None,
    learnable_sink: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | Any:
    """Attention of q [B, Sq, Hq, D] to the filled rows of a cache: k_cache [B, S, H, D], v_cache [B, S, H, Dv].

    cache_seqlens: how many rows each sequence of the cache has, a number for all or int32 or int64 [B] on q's device,
    which is not read on the host; None: all S. k [B, Sn, H, D] and v [B, Sn, H, Dv] are first written behind them, in
    place, and count; cache_seqlens is left as it is. That they fit the cache is checked for a number alone: a tensor's
    would have to be read. causal is anchored at the bottom right of the filled rows, and so is window_size (left,
    right), -1 for unlimited. softmax_scale, softcap and learnable_sink: as in flash_attn_func(). Dtypes: as in
    scaled_dot_product_attention(); no gradient is recorded. num_splits is ignored: how keys are split depends on the
    sizes alone.

    Returns out [B, Sq, Hq, Dv]; with return_softmax_lse (out, lse [B, Hq, Sq]). A row that sees no key gets 0. Raises
    NotImplementedError for alibi_slopes, rotary embeddings, a paged cache (block_table),
    cache_batch_idx and cache_leftpad, else as scaled_dot_product_attention().
    """
    refuse(
        0, alibi_slopes, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, block_table=block_table,
    )  # fmt: skip
    sides = sides_of(window_size)
    names = ("q", "k_cache", "v_cache")
    require_axes((q, k_cache, v_cache), 4, "[batch, rows, heads, columns]", names)
    check([tensor.transpose(1, 2) for tensor in (q, k_cache, v_cache)], names, True)
    check_scale(softmax_scale, "softmax_scale")
    if learnable_sink is not None:
        check_sink_logits(learnable_sink, q, "learnable_sink", heads_axis=-2)
    lengths = _lengths(cache_seqlens, q, k_cache)
    if k is not None or v is not None:
        lengths = _append(k, v, k_cache, v_cache, cache_seqlens, lengths)
    out, lse = _attend(q, k_cache, v_cache, lengths, softmax_scale, causal, sides, softcap_of(softcap))
    if learnable_sink is not None:
        out, lse = with_sink_logits(out, lse, learnable_sink)
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def _lengths(cache_seqlens, q, cache):
    """How many rows are filled: a number, or an int32 tensor [B]."""
    capacity = cache.shape[1]
    if cache_seqlens is None:
        return capacity
    if not isinstance(cache_seqlens, Tensor):
        return require_int("cache_seqlens", cache_seqlens, 0, capacity)
    if cache_seqlens.dtype not in (torch.int32, torch.int64) or cache_seqlens.device != q.device:
        found = f"{cache_seqlens.dtype} on {cache_seqlens.device}"
        raise TypeError(f"cache_seqlens is {found}; allowed: a number, or int32 or int64 on {q.device}")
    if cache_seqlens.shape != q.shape[:1]:
        found = list(cache_seqlens.shape)
        raise ValueError(f"cache_seqlens is {found}; allowed: [{q.shape[0]}], one for each sequence")
    return cache_seqlens.int()


def _append(k, v, k_cache, v_cache, cache_seqlens, lengths):
    """Writes k and v behind the filled rows, and returns how many rows are filled then."""
    if k is None or v is None or cache_seqlens is None:
        missing = "k" if k is None else "v" if v is None else "cache_seqlens"
        raise ValueError(f"{missing} is None; allowed: k and v together, with cache_seqlens")
    rows, capacity = k.shape[1] if k.dim() == 4 else 0, k_cache.shape[1]
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        shape = (cache.shape[0], rows, *cache.shape[2:])
        if tuple(new.shape) != shape:
            raise ValueError(f"{name} is {list(new.shape)}; allowed: {list(shape)}, as its cache but for the rows")
        if (new.dtype, new.device) != (cache.dtype, cache.device):
            found, allowed = (f"{of.dtype} on {of.device}" for of in (new, cache))
            raise TypeError(f"{name} is {found}; allowed: {allowed}, as its cache")
    if isinstance(lengths, int):
        if lengths + rows > capacity:
            raise ValueError(f"k has {rows} rows behind {lengths}; allowed: up to {capacity}, the rows of the cache")
        k_cache[:, lengths : lengths + rows] = k
        v_cache[:, lengths : lengths + rows] = v
    else:
        sequences = torch.arange(k.shape[0], device=k.device)[:, None]
        where = lengths[:, None] + torch.arange(rows, device=k.device)
        k_cache[sequences, where] = k
        v_cache[sequences, where] = v
    return lengths + rows


def _attend(q, k_cache, v_cache, lengths, scale, causal, sides, softcap):
    """(out [B, Hq, Sq, Dv], lse [B, Hq, Sq])."""
    batch, rows, heads, _ = q.shape
    causal = causal and rows > 1
    together = heads // k_cache.shape[2] if not causal and sides == NO_WINDOW else 1
    # Rows of a KV head: its query heads, one after the other.
    grouped = q.unflatten(2, (-1, together)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hq / together, rows, D]
    k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    corner = "bottom_right" if causal else "none"
    if isinstance(lengths, Tensor):
        out, lse = sequences.attend_cache(grouped, k, v, lengths, corner, scale, *sides, softcap)
    else:
        tensors = (grouped, k[:, :, :lengths], v[:, :, :lengths])
        offset = None if causal or sides == NO_WINDOW else lengths - rows
        options = {"key_offset": offset, "sides": sides, "softcap": softcap}
        out, lse = attend(*tensors, None, corner, scale, EXACT, True, True, **options)[:2]
    return out.reshape(batch, heads, rows, out.shape[-1]), lse.reshape(batch, heads, rows)
