# SPDX-License-Identifier: Apache-2.0
"""The entry: attention of the rows of one process to the keys of all."""

import math
from typing import Any

from distrattention import context, core, ops  # first, for it says in words what is missing
from distrattention.determinism import is_nondeterministic_backward_allowed
from distrattention.distributed import peer_memory, ring, ulysses
from distrattention.distributed.agreement import agree
from distrattention.distributed.columns import columns_of
from distrattention.distributed.layout import (
    DEFAULT_MULTIPLE,
    cut,
    cut_as_found,
    ranks_of,
    require_chunks,
    require_shares,
)
from distrattention.settings import Fields, Settings, chosen, counted, require_int

import torch  # isort: skip
from torch import Tensor  # isort: skip
from torch.distributed import ProcessGroup  # isort: skip
from torch.distributed.device_mesh import DeviceMesh  # isort: skip
from typing_extensions import Unpack  # isort: skip  # torch brings it

NEAR_TILE = 128  # keys that are near or far together
_NAMES = ("query", "key", "value")


@torch.compiler.disable
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    layout: str = "contiguous",
    multiple: int = DEFAULT_MULTIPLE,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    settings: Settings | None = None,
    **fields: Unpack[Fields],
) -> Tensor | tuple[Tensor, Tensor]:
    """scaled_dot_product_attention() of a sequence whose rows lie on several processes: each calls it with its own rows
    and gets those of the result. It equals the call of one process that has all rows, within rounding, gradients
    included, and has the same bits in every run of as many processes.

    query [B, Hq, n, E], key [B, H, n, E], value [B, H, n, Ev]: n rows of the sequence, those that shard() and
    positions() give this process. scale, enable_gqa, return_lse, and `settings` or the fields of Settings: as
    scaled_dot_product_attention() takes them. is_causal: by positions in the whole sequence. `order`, if it is given,
    is of this process' blocks; with "ulysses", one for all blocks, of all heads.

    group: the processes: a ProcessGroup (of NCCL for GPUs, of gloo for CPUs), a DeviceMesh of one axis, None for all,
    or a mesh of two axes: a ring along the first, heads exchanged along the second.
    layout: "contiguous" or "zigzag", for a ring: rank p of P has the p-th chunk of the sequence, or of 2P chunks the
    p-th and the p-th from the end, which gives all the same work in causal calls. "ulysses": contiguous rows, and heads
    are exchanged for rows (all-to-all), which takes as many heads of key as there are processes, or a multiple.
    multiple: of how many rows chunks are multiples, as shard() was told. A ring's chunks must be multiples of
    block_size, and with window or sinks of 128 as well; only the sequence's last one may be shorter.

    Returns out [B, Hq, n, Ev], with return_lse also lse [B, Hq, n], which is differentiable.

    Every process of the group has to call it, with the same settings, and where gradients are recorded to go backward.
    Where one fails, or differs in a setting or shape, each raises an error that says which and in what:
    DifferenceError, a ValueError. One that has died, or does not call, shows as a RuntimeError, when the group's
    timeout (init_process_group()) is over at the latest; with NCCL alone torch's watchdog ends the process then.
    torch.compile leaves the call as it is. Raises NotImplementedError for `skip` in a ring.
    """
    ranks = ranks_of(group, layout)
    described, rows, error, begun = None, 0, None, None
    try:
        settings = chosen(settings, fields)
        query, key, value = context.autocast(query, key, value)
        _check(query, key, value, scale, enable_gqa, settings, ranks)
        multiple = require_int("multiple", multiple, 1)
        described, rows = _description(query, key, value, ranks, multiple, is_causal, scale, settings), query.shape[2]
        if ranks.ring and not ranks.heads:
            options = core.options_of(settings, query.shape[3])
            begun = ring.begin(query, key, value, is_causal, scale, options, ranks.ring)
    except (TypeError, ValueError, RuntimeError) as found:  # out of memory, say
        error = found
    try:
        rows_exchanged = agree(ranks.heads, described, rows, error, query)
    except (TypeError, ValueError, NotImplementedError) as found:  # the ring's ranks are to know
        error, rows_exchanged = found, [0]
    rows = agree(ranks.ring, described, sum(rows_exchanged), error, query)

    tensors = (query, key, value)
    if ranks.heads:
        tensors = [ulysses.with_all_rows(tensor, rows_exchanged, ranks.heads) for tensor in tensors]
        settings = _of_own_heads(settings, ranks.heads)
    causal = "top_left" if is_causal else "none"
    if ranks.ring and sum(rows) > 0 and query.shape[0] * query.shape[1] > 0:
        out, lse = _around_the_ring(*tensors, rows, ranks, multiple, causal, scale, settings, begun)
    else:
        out, lse = core.attend(*tensors, None, causal, scale, settings)
    if ranks.heads:
        out = ulysses.with_all_heads(out, rows_exchanged, ranks.heads)
        lse = ulysses.with_all_heads(lse.unsqueeze(3), rows_exchanged, ranks.heads).squeeze(3) if return_lse else None
    return (out, lse) if return_lse else out


def _around_the_ring(q, k, v, rows, ranks, multiple, causal, scale, settings, begun):
    if ranks.layout == "zigzag":
        pieces = cut(sum(rows), ranks.rings, ranks.layout, multiple)
        require_shares(rows, pieces, multiple)
    else:
        pieces = cut_as_found(rows)
    options = _resolved(q, k, v, sum(rows), causal, scale, settings)
    _require_blocks(pieces, options)
    with torch.no_grad():
        columns = columns_of(q.detach(), k.detach(), pieces, ranks.ring, options, settings.seed, settings.order)
    deterministic = not is_nondeterministic_backward_allowed() or torch.are_deterministic_algorithms_enabled()
    call = ring.Call(ranks.ring, pieces, causal != "none", scale, options, deterministic)
    call = call._replace(transport=peer_memory.transport_of(call, q, k, v))
    return ring.attend(q, k, v, columns, call, begun)


def _resolved(q, k, v, length, causal, scale, settings):
    """core.options_of(), with what "auto" comes to for the whole sequence."""
    options = core.options_of(settings, q.shape[3])
    whole = [tensor.new_empty(tensor.shape[3]).expand(*tensor.shape[:2], length, -1) for tensor in (q, k, v)]
    strategy, order_from, *_ = ops.explain(*whole, None, "forward", causal, scale, *options)
    return (strategy, *options[1:4], order_from, *options[5:])


def _require_blocks(pieces, options):
    strategy, _, block, _, _, window, sinks, *_ = options
    if strategy == "exact":
        return
    if window is None and sinks == 0:
        require_chunks(pieces, block, "the rows of a block (block_size)")
    else:
        unit = math.lcm(block, NEAR_TILE)
        require_chunks(pieces, unit, f"whole blocks (block_size {block}) and whole tiles of near keys (128)")


def _check(query, key, value, scale, enable_gqa, settings, ranks):
    core.check((query, key, value), _NAMES, enable_gqa)
    if query.dim() != 4:
        raise ValueError(f"query has {counted(query.dim(), 'axis', 'axes')}; allowed: 4, [B, heads, rows, E]")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"key has {counted(key.shape[2], 'row')}; allowed: {query.shape[2]}, as many as query")
    core.check_scale(scale)
    if settings.skip and ranks.ring:
        found = f"skip is {settings.skip} in a ring, where near keys may be on another rank"
        raise NotImplementedError(f"{found}; allowed: 0, or layout 'ulysses'")
    if key.shape[1] % ranks.exchanges:
        found = f"key has {counted(key.shape[1], 'head')}"
        raise ValueError(f"{found}; allowed: a multiple of {ranks.exchanges}, the processes that exchange heads")
    strategy, _, block, *_ = core.options_of(settings, query.shape[3])
    if settings.order is not None and strategy != "exact":
        ops.order_of_caller(settings.order, query, block)  # raises where it does not fit
    if settings.order is not None and ranks.heads and settings.order.shape[2] != 1:
        blocks = settings.order.shape[2]
        raise ValueError(f"order has {blocks} blocks where heads are exchanged; allowed: 1, which serves all rows")


def _description(query, key, value, ranks, multiple, is_causal, scale, settings):
    """What must be the same on all ranks, by the names that the caller knows."""
    needs_grad = torch.is_grad_enabled() and ops.any_requires_grad((query, key, value))
    shapes = {f"the shape of {name} but for its rows": (*x.shape[:2], x.shape[3])
              for name, x in zip(_NAMES, (query, key, value))}  # fmt: skip
    chosen_fields = {**settings.asdict(), "order": settings.order is not None}
    return {
        **{name: list(shape) for name, shape in shapes.items()},
        "dtype": str(query.dtype),
        "device type": query.device.type,
        "layout": ranks.layout,
        "multiple": multiple,
        "is_causal": bool(is_causal),
        "scale": None if scale is None else float(scale),
        **chosen_fields,
        "whether gradients are recorded": needs_grad,
        "how often GPUs met in earlier calls": peer_memory.barriers_of(ranks.ring, query.device) if ranks.ring else 0,
    }


def _of_own_heads(settings, group):
    """The settings with the part of the caller's order that is of this rank's heads."""
    if settings.order is None:
        return settings
    order = settings.order.chunk(group.size(), 1)[group.rank()]
    return Settings(**{**settings.asdict(), "order": order})
