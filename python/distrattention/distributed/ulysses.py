# SPDX-License-Identifier: Apache-2.0
"""Heads for rows: each of some ranks gives away all heads but its share of them, and gets their rows for that share."""

from distrattention import core  # noqa: F401; first, for it says in words what is missing

import torch  # isort: skip
import torch.distributed as dist  # isort: skip


def with_all_rows(x, rows, group):
    """[B, H, rows of this rank, d] to [B, H / ranks, rows of all ranks, d], with its gradient; rows: of each rank."""
    return _Exchange.apply(x, rows, group, True)


def with_all_heads(x, rows, group):
    """The inverse of with_all_rows()."""
    return _Exchange.apply(x, rows, group, False)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, group, to_rows):
        ctx.arguments = rows, group, to_rows
        return (_to_rows if to_rows else _to_heads)(x, rows, group)

    @staticmethod
    def backward(ctx, grad):
        rows, group, to_rows = ctx.arguments
        return _Exchange.apply(grad, rows, group, not to_rows), None, None, None


def _to_rows(x, rows, group):
    batch, heads, own, d = x.shape
    ranks, share = len(rows), heads // len(rows)
    leaving = x.unflatten(1, (ranks, share)).transpose(0, 1).reshape(-1).contiguous()  # x may be expanded
    counts = [batch * share * count * d for count in rows]
    arriving = _all_to_all(leaving, counts, [batch * share * own * d] * ranks, group)
    parts = zip(arriving.split(counts), rows)
    return torch.cat([part.view(batch, share, count, d) for part, count in parts], 2)


def _to_heads(x, rows, group):
    batch, share, _, d = x.shape
    ranks, own = len(rows), rows[group.rank()]
    leaving = torch.cat([part.reshape(-1) for part in x.split(rows, 2)])
    counts = [batch * share * count * d for count in rows]
    arriving = _all_to_all(leaving, [batch * share * own * d] * ranks, counts, group)
    return arriving.view(ranks, batch, share, own, d).transpose(0, 1).flatten(1, 2).contiguous()


def _all_to_all(leaving, arriving_counts, leaving_counts, group):
    arriving = leaving.new_empty(sum(arriving_counts))
    try:
        dist.all_to_all_single(arriving, leaving, arriving_counts, leaving_counts, group=group)
    except RuntimeError as error:
        raise RuntimeError(f"not all {group.size()} ranks of the group exchanged their heads: {error}") from error
    return arriving
