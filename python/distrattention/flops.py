# SPDX-License-Identifier: Apache-2.0
"""What torch.utils.flop_counter.FlopCounterMode counts for attention: as for torch's own attention, the products with
Q, K, P, V and their gradients, 2 for each multiplication, and all scores, hidden or not, those that a sliding window
hides included. Near keys count with all columns and far keys with those that are kept. What `skip` leaves out is known
only when the call has run, so it counts as if nothing were left out: with `finish` that is exact attention. Making the
groups is not counted, as it grows with N d, not with N^2 d.
"""

from distrattention import ops  # first, for it says in words what is missing
from distrattention.settings import DEFAULTS, STRATEGIES

from torch.utils.flop_counter import register_flop_formula  # isort: skip

NEAR_TILE = 128  # keys that are near or far together


@register_flop_formula([ops.forward, ops.forward_counting], get_raw=True)
def _(q, k, v, mask=None, order=None, key_means=None, *settings, out_val=None):
    heads = q.shape[0] * q.shape[1]
    values = q.shape[2] * k.shape[2] * v.shape[3]
    return 2 * heads * (_products("forward", q, k, v, mask, *settings) + values)


@register_flop_formula(ops.backward, get_raw=True)
def _(grad_out, grad_lse, q, k, v, mask, order, key_means, out, lse, mask_gradient=False, *settings, out_val=None):
    return _of_backward(q, k, v, mask, *settings)


@register_flop_formula(ops.backward_into, get_raw=True)
def _(grad_out, grad_lse, q, k, v, order, key_means, out, lse, grad_q, grad_k, grad_v, *settings, out_val=None):
    return _of_backward(q, k, v, None, *settings)


def _of_backward(q, k, v, mask, *settings):
    heads = q.shape[0] * q.shape[1]
    values = q.shape[2] * k.shape[2] * v.shape[3]
    return 2 * heads * (3 * _products("backward", q, k, v, mask, *settings) + 2 * values)


def _products(
    operation, q, k, v, mask, causal="none", scale=None, strategy=DEFAULTS["strategy"],
    group_size=DEFAULTS["group_size"], block_size=DEFAULTS["block_size"], estimator=DEFAULTS["estimator"],
    order_from=DEFAULTS["order_from"], window=DEFAULTS["window"], sinks=DEFAULTS["sinks"], key_offset=None,
    skip=DEFAULTS["skip"], finish=DEFAULTS["finish"], deterministic=True, first_row=None, first_key=None,
    window_left=None, window_right=None, softcap=0.0,
):  # fmt: skip
    """Multiplications of the scores of a head: N Nk d where attention is exact, else fewer by about G."""
    (rows, d), keys = q.shape[2:], k.shape[2]
    if "auto" in (strategy, order_from):
        near = (window, sinks, key_offset, skip, finish)
        options = (causal, scale, strategy, group_size, block_size, estimator, order_from, *near, deterministic)
        strategy, order_from, *_ = ops.explain(q, k, v, mask, operation, *options, window_left, window_right, softcap)
    if strategy == "exact" or group_size == 1 or finish:
        return rows * keys * d
    is_first_exact = order_from == "previous" and STRATEGIES[strategy].order == "computed" and not first_row
    exact_rows = min(rows, block_size) if is_first_exact else 0
    if key_offset is None:
        key_offset = keys - rows if causal == "bottom_right" else 0
    if first_row is not None:  # of a part of a longer call
        key_offset, sinks = first_row - first_key, max(sinks - first_key, 0)
    length = NEAR_TILE if block_size >= rows and first_row is None else block_size
    near = 0
    for start in range(exact_rows, rows, length):
        end = min(start + length, rows)
        near += (end - start) * near_keys(start, end, keys, window, sinks, key_offset)
    far = (rows - exact_rows) * keys - near
    return (exact_rows * keys + near) * d + far * -(-d // group_size)


def near_keys(start, end, keys, window, sinks, key_offset):
    """How many keys are near the rows from `start` to before `end`, which share them."""
    of_sinks = min(-(-min(sinks, keys) // NEAR_TILE) * NEAR_TILE, keys)
    if window is None:
        return of_sinks
    low, high = max(start + key_offset - window, 0), min(end - 1 + key_offset + window, keys - 1)
    if low > high:
        return of_sinks
    first, last = low // NEAR_TILE * NEAR_TILE, min((high // NEAR_TILE + 1) * NEAR_TILE, keys)
    return of_sinks + last - max(first, min(of_sinks, last))
