# SPDX-License-Identifier: Apache-2.0
"""Attention with the contract of torch.nn.functional.scaled_dot_product_attention."""

from typing import Any

from distrattention import context, core  # first, for it says in words what is missing
from distrattention.settings import (
    DEFAULT_BLOCK,
    EXACT,
    MAX_DISTANCE,
    Fields,
    Settings,
    chosen,
    fields_of,
    require_int,
    require_name,
)
from distrattention.sink_logits import check_sink_logits, with_sink_logits

import torch  # isort: skip
from torch import Tensor  # isort: skip
from torch.nn.attention.bias import CausalBias, CausalVariant  # isort: skip
from typing_extensions import Unpack  # isort: skip  # torch brings it

OPERATIONS = ("grouping", "forward", "backward")


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,  # the fields one by one, as a dictionary of them would take longer
    settings: Settings | None = None,
    strategy: str = Settings.strategy,
    group_size: int | None = Settings.group_size,
    block_size: int | None = Settings.block_size,
    estimator: str = Settings.estimator,
    order_from: str = Settings.order_from,
    seed: int = Settings.seed,
    window: int | None = Settings.window,
    sinks: int = Settings.sinks,
    skip: float | None = Settings.skip,
    finish: bool = Settings.finish,
    order: Tensor | None = Settings.order,
    window_size: tuple[int, int] | None = None,
    key_offset: int | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    return_lse: bool = False,
    return_halves: bool = False,
) -> Tensor | Any:
    """softmax(scale * q_hat k_hat^T + mask) V (paper, Equation 2), called like PyTorch's function of this name.

    query [..., Hq, L, E], key [..., H, S, E] and value [..., H, S, Ev] are of one dtype (float16, bfloat16, float32, or
    on the CPU float64) and device and have any strides; under autocast they are cast as PyTorch's are. E and Ev: 1 to
    512.

    attn_mask broadcasts to [..., Hq, L, S]: bool (True keeps), or float32 or the query's dtype and added to the scaled
    scores, and then it gets a gradient when it requires one; or a torch.nn.attention.bias.CausalBias. is_causal is
    anchored at the top left and excludes a mask. scale is 1/sqrt(E) when None. enable_gqa: Hq may be a multiple of H.
    A query that sees no key gets 0. `settings` or the keywords from `strategy` on, its fields, say how attention is
    approximated. A causal call by "lsh" or "energy" that is one block of more than 128 rows is refused unless
    order_from="own" is named: the first block of "previous" is exact, and with it the call would be.

    window_size: a sliding window (left, right), as flash-attn has it: query i sees the keys from i + c - left to i + c
    + right, of those that it would see without; -1: unlimited. c is the key that key_offset says. "auto" is exact
    with a window that hides a key. Not `window`, which hides nothing: of the keys that are seen, it says which are
    exact.

    key_offset: the key that stands beside the first query, for window_size and `window` in calls that are not causal,
    as where a mask holds the causality of a chunk of a prompt; None: key 0. Causal calls know it by their corner.

    softcap: no score exceeds it: they become softcap * tanh(score / softcap) before the mask, as in Gemma 2 and
    flash-attn; 0: they are not capped. "auto" is exact with it, and `skip` refuses it.

    sink_logits [Hq], of any floating-point dtype: exp of it is added to the denominators of a head's rows, as GPT-OSS
    does; it gets a gradient when it requires one. Not `sinks`, which are keys.

    Returns out [..., Hq, L, Ev] of the query's dtype. With return_lse also the natural logarithm of the softmax's
    denominators, [..., Hq, L] in float32 (float64 for float64), -inf where no key is seen; it is differentiable. With
    return_halves, which `skip` needs, last of all int32 [..., Hq, ceil(L / 64), 2]: for 64 queries, of the 64 far keys
    each in which one of them sees a far key, how many were kept, and how many there are.

    Sizes before the last two broadcast, those of the heads not with enable_gqa. Other than in PyTorch's, the three have
    as many axes as each other, and E and Ev may not be 0.

    Raises ValueError (shapes, settings, scale), TypeError (dtypes, devices), NotImplementedError (dropout, nested and
    sparse tensors, forward-mode and second derivatives, gradients with `skip`), and RuntimeError where no kernel of the
    device serves, or for such a causal call.
    """
    fields = (
        strategy, group_size, block_size, estimator, order_from, seed, window, sinks, skip, finish, order,
    )  # fmt: skip
    if settings is not None:
        fields = fields_of(settings, fields)
    if attn_mask is None and dropout_p == 0 and key_offset is None and sink_logits is None and not return_halves:
        results = core.attend_simply(
            query, key, value, is_causal, scale, enable_gqa, window_size, softcap, fields, return_lse
        )
        if results is not None:
            return results if return_lse else results[0]
    settings = core.settings_of(*fields)
    if dropout_p != 0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; allowed: 0, as there is no dropout")
    if return_halves and not settings.skip:
        raise ValueError("return_halves is True without skip, whose halves are counted; allowed: with a skip above 0")
    *tensors, causal = _prepare(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_key_offset(key_offset, causal)
    if sink_logits is not None:
        check_sink_logits(sink_logits, tensors[0])
    with_lse = return_lse or sink_logits is not None
    options = {"with_lse": with_lse, "key_offset": key_offset, "counting": return_halves}
    options |= {"sides": core.sides_of(window_size), "softcap": core.softcap_of(softcap)}
    out, lse, *halves = core.attend(*tensors, causal, scale, settings, **options)
    if sink_logits is not None:
        out, lse = with_sink_logits(out, lse, sink_logits)
    results = (out, *((lse,) if return_lse else ()), *halves)
    return results if len(results) > 1 else out


def attention_of_prompts(query, key, value, *, settings, **others):
    """scaled_dot_product_attention(), but exact in decoding; the integration in transformers calls it."""
    if is_decoding(query.shape[-2], key.shape[-2], settings.block_size):
        settings = EXACT
        if others.get("window_size") is None:
            others["key_offset"] = None
    return scaled_dot_product_attention(query, key, value, settings=settings, **others)


def is_decoding(rows, keys, block_size):
    """One row, or fewer rows than a block against more keys (speculative decoding, short chunks of a prompt)."""
    return rows == 1 or rows < min(keys, block_size or DEFAULT_BLOCK)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    enable_gqa: bool = True,
    operation: str = "forward",
    window_size: tuple[int, int] | None = None,
    key_offset: int | None = None,
    softcap: float = 0.0,
    settings: Settings | None = None,
    **fields: Unpack[Fields],
) -> dict[str, Any]:
    """What scaled_dot_product_attention() would do with these tensors, without doing it: their data are not read.

    enable_gqa=False refuses a KV head for several query heads, as the call would. operation: "grouping", "forward" or
    "backward". fields: of Settings, instead of `settings`. Returns a dict: "strategy" and "order_from", what these came
    to; "choice", a sentence that says so and why, and what is near and skipped; "kernel", the name of
    the kernel that would run ("" for none); "kernels", for each kernel of the device why it would not serve ("" if it
    would). Raises as scaled_dot_product_attention(), but for what is refused where gradients are recorded.
    """
    require_name("operation", operation, OPERATIONS)
    settings = chosen(settings, fields)
    *tensors, causal = _prepare(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    _check_key_offset(key_offset, causal)
    others = (core.sides_of(window_size), core.softcap_of(softcap))
    return core.explain(*tensors, causal, scale, settings, operation, key_offset, *others)


def _check_key_offset(key_offset, causal):
    if key_offset is None:
        return
    if not isinstance(key_offset, torch.SymInt):
        require_int("key_offset", key_offset, -MAX_DISTANCE, MAX_DISTANCE)
    if causal != "none":
        raise ValueError(
            f"key_offset is {key_offset} in a causal call, whose corner says where queries stand; allowed: None"
        )


def _prepare(query, key, value, mask, is_causal, scale, grouped_heads):
    """(query, key, value, what is left of the mask, the corner of causality), cast as under autocast, and checked."""
    core.require_tensors((query, key, value), ("query", "key", "value"))
    causal, mask = causality(query, key, mask, is_causal)
    query, key, value, mask = context.autocast(query, key, value, mask)
    if not core.fit(query, key, value, grouped_heads):
        query, key, value = core.broadcast((query, key, value), grouped_heads)
        core.check((query, key, value), ("query", "key", "value"), grouped_heads)
    if mask is not None:
        core.check_mask(mask, query, key)
    if scale is not None:
        core.check_scale(scale)
    return query, key, value, mask, causal


def causality(query, key, mask, is_causal):
    """(which corner causality is anchored to, or "none"; what is left of the mask)."""
    if is_causal and mask is not None:
        raise ValueError("attn_mask and is_causal=True were both given; allowed: one of them")
    if not isinstance(mask, CausalBias):
        return "top_left" if is_causal else "none", mask
    rows, keys = (tensor.shape[-2] if tensor.dim() > 1 else 1 for tensor in (query, key))
    if (mask.seq_len_q, mask.seq_len_kv) != (rows, keys):
        raise ValueError(
            f"attn_mask is a CausalBias for {mask.seq_len_q} queries and {mask.seq_len_kv} keys; "
            f"allowed: {rows} and {keys}"
        )
    return "top_left" if mask.variant == CausalVariant.UPPER_LEFT else "bottom_right", None
