# SPDX-License-Identifier: Apache-2.0
"""What torch.utils.flop_counter.FlopCounterMode counts for attention: as for torch's own attention, the products with
Q, K, P, V and their gradients, 2 for each multiplication, and all scores, hidden or not. Making the groups is not
counted, as it grows with N d, not with N^2 d.
"""

from distrattention import ops  # first, for it says in words what is missing
from distrattention.settings import STRATEGIES

from torch.utils.flop_counter import register_flop_formula  # isort: skip


@register_flop_formula(ops.forward, get_raw=True)
def _(q, k, v, mask=None, order=None, *settings, out_val=None):
    heads, keys = q.shape[0] * q.shape[1], k.shape[2]
    return 2 * heads * keys * (_columns("forward", q, k, v, mask, *settings) + q.shape[2] * v.shape[3])


@register_flop_formula(ops.backward, get_raw=True)
def _(grad_out, grad_lse, q, k, v, mask, order, out, lse, mask_gradient=False, *settings, out_val=None):
    heads, keys = q.shape[0] * q.shape[1], k.shape[2]
    columns = _columns("backward", q, k, v, mask, *settings)
    return 2 * heads * keys * (3 * columns + 2 * q.shape[2] * v.shape[3])


def _columns(
    operation, q, k, v, mask, causal="none", scale=None, strategy="auto", group_size=1, block_size=128,
    estimator="mean", order_from="auto", deterministic=True,
):
    """The columns of Q-hat, summed over the rows of a head: N d where attention is exact, else about N d / G."""
    rows, d = q.shape[2:]
    if "auto" in (strategy, order_from):
        options = (causal, scale, strategy, group_size, block_size, estimator, order_from, deterministic)
        strategy, order_from, *_ = ops.explain(q, k, v, mask, operation, *options)
    if strategy == "exact":
        return rows * d
    is_first_exact = order_from == "previous" and STRATEGIES[strategy].order == "computed"
    exact_rows = min(rows, block_size) if is_first_exact else 0
    return exact_rows * d + (rows - exact_rows) * -(-d // group_size)
