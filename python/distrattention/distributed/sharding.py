# SPDX-License-Identifier: Apache-2.0
"""DTensor's rules for the operators: batch and heads may be sharded, rows may not (attention() is for those)."""

import functools
import math

from distrattention import ops  # first, for it says in words what is missing
from distrattention.packing import unpack, unpack_near
from distrattention.settings import STRATEGIES

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # isort: skip
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo  # isort: skip
from torch.distributed.tensor.experimental import register_sharding  # isort: skip

_BATCH, _HEADS = 0, 1


@functools.cache
def register() -> None:
    """What register_sharding_rules() does."""
    register_sharding(ops.attend)(_attend)
    register_sharding(ops.make_grouping.default)(_make_grouping)
    _tell_calls_apart_by_all(ops.make_grouping.default)
    register_sharding(ops.forward.default)(_forward)
    register_sharding(ops.forward_counting.default)(functools.partial(_forward, outputs=3))
    register_sharding(ops.backward.default)(_backward)


def _tell_calls_apart_by_all(operator):
    """DTensor remembers what a rule said by those arguments alone that follow the first integer: here, not by the
    strategy, which the results depend on."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    by_all = RuntimeSchemaInfo(2, needs_pytree=True)
    propagator.register_op_strategy(operator, propagator.op_strategy_funcs[operator], by_all)


def _attend(q, k, v, mask, scale, settings, near, key_offset, skip, seed, window_size, lse, softcap=0.0):
    _, strategy, group_size, *_ = unpack(settings)
    window, sinks, _ = unpack_near(near)
    groups = lse and strategy != "exact" and group_size > 1  # without LSE no order is returned
    has_means = groups and ops.needs_key_means(strategy, group_size, window, sinks)
    found = []
    for of_q, of_k in _placements(q, k, v):
        outputs = [of_q, of_q if lse else None, of_q if groups else None, of_k if has_means else None]
        found.append((outputs, [of_q, of_k, of_k, *_inputs(mask, _of_mask(mask, of_q))]))
    return found


def _make_grouping(q, k, *settings):
    _, _, _, strategy, group_size, _, _, _, _, window, sinks, *_ = ops.with_defaults(
        ops.make_grouping.default, (q, k, *settings)
    )
    has_order = STRATEGIES[strategy].order != "caller" or group_size == 1
    has_means = ops.needs_key_means(strategy, group_size, window, sinks)
    found = []
    for of_q, of_k in _placements(q, k):
        outputs = [of_q if has_order else Replicate(), of_k if has_means else Replicate()]  # [0] where there is none
        found.append((outputs, [of_q, of_k]))
    return found


def _forward(q, k, v, mask=None, order=None, key_means=None, *settings, outputs=2):
    found = []
    for of_q, of_k in _placements(q, k, v):
        others = (mask, _of_mask(mask, of_q)), (order, of_q), (key_means, of_k)
        found.append(([of_q] * outputs, [of_q, of_k, of_k, *_inputs(*(x for pair in others for x in pair))]))
    return found


def _backward(
    grad_out, grad_lse, q, k, v, mask, order, key_means, out, lse, mask_gradient=False, *settings
):  # fmt: skip
    found = []
    for of_q, of_k in _placements(q, k, v):
        of_mask = _of_mask(mask, of_q)
        of_grad_k = Partial() if of_k != of_q else of_k  # one head of key that serves the heads of several processes
        of_grad_mask = Replicate()
        if mask is not None and mask_gradient:  # others may read the same mask
            of_grad_mask = Partial() if of_q.is_shard() and of_mask == Replicate() else of_mask
        inputs = _inputs(grad_out, of_q, grad_lse, of_q, q, of_q, k, of_k, v, of_k, mask, of_mask, order, of_q,
                         key_means, of_k, out, of_q, lse, of_q)  # fmt: skip
        found.append(([of_q, of_grad_k, of_grad_k, of_grad_mask], inputs))
    return found


def _placements(q, k, *others):
    """[(of Q and all that has its heads, of K and V)] that one axis of the mesh may have."""
    found = [(Replicate(), Replicate()), (Shard(_BATCH), Shard(_BATCH))]
    over = {axis for x in (q, k, *others) for axis, placement in enumerate(x.placements) if placement.is_shard(_HEADS)}
    parts = math.prod(q.mesh.size(axis) for axis in over)  # heads are offered where they are sharded already
    if over and k.shape[_HEADS] % parts == 0:
        found.append((Shard(_HEADS), Shard(_HEADS)))
    elif over and k.shape[_HEADS] == 1 and q.shape[_HEADS] % parts == 0:
        found.append((Shard(_HEADS), Replicate()))
    return found


def _of_mask(mask, of_q):
    """Of a mask that broadcasts to [B, Hq, Nq, Nk]: as Q, where it has Q's axis and does not repeat along it."""
    if mask is None or not of_q.is_shard():
        return None if mask is None else Replicate()
    axis = of_q.dim - 4 + len(mask.shape)
    return Shard(axis) if axis >= 0 and mask.shape[axis] > 1 else Replicate()


def _inputs(*pairs):
    """The placements of those tensors that there are, of tensors and placements in turn."""
    return [placement for tensor, placement in zip(pairs[::2], pairs[1::2]) if tensor is not None]
