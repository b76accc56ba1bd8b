# SPDX-License-Identifier: Apache-2.0
"""The orders of the columns, and the means of the keys, of the rows that a rank owns: those of one process that has the
whole sequence, but for ties within rounding (method, 2 and 8). A rank computes its part from its own rows of Q and K;
what it needs of others is small: sums over their keys, and what the last block of rows before its own decides.
"""

from typing import NamedTuple

from distrattention import ops  # first, for it says in words what is missing
from distrattention.settings import STRATEGIES

import torch  # isort: skip
import torch.distributed as dist  # isort: skip


class Columns(NamedTuple):
    """What the operators read of a rank's blocks: the order, int32 [B, Hq, blocks, d], and the means of the keys,
    float32 [B, Hkv, blocks or 1, d]; None where they read none."""

    order: torch.Tensor | None = None
    key_means: torch.Tensor | None = None


class Moments(NamedTuple):
    """Of some keys, float64: how many they are [n] or a number, their sum [B, Hkv, n, d] column by column, and the sum
    of their squared distances from their mean."""

    count: torch.Tensor
    sum: torch.Tensor
    squares: torch.Tensor

    @property
    def mean(self):
        """Column by column; 0 of no keys."""
        return self.sum / self.count.clamp(min=1)[:, None]


def columns_of(q, k, pieces, group, options, seed, callers_order):
    """The Columns of this rank, whose rows are q [B, Hq, n, d] and k [B, Hkv, n, d].

    pieces: of each rank of the ring (layout.py). options: of core.options_of(), with "auto" resolved.
    callers_order: of the rows of this rank, or None.
    """
    strategy, group_size, block, _, order_from, window, sinks, *_ = options
    if strategy == "exact":
        return Columns()
    length = max((piece.stop for of_rank in pieces for piece in of_rank), default=0)
    block = max(1, min(block, length))  # blocks are filled up with zeros below
    previous = order_from == "previous"
    mine = pieces[0 if group is None else group.rank()]
    needs_means = ops.needs_key_means(strategy, group_size, window, sinks)
    by_weight = STRATEGIES[strategy].reads_keys and callers_order is None
    keys = None
    if by_weight or needs_means:
        rows = block if previous else max(1, min(block, k.shape[2]))
        keys = _before_blocks(k, rows, pieces, mine, group) if previous else _of_all(k, rows, pieces, mine, group)
    if callers_order is not None:
        order = ops.order_of_caller(callers_order, q, block)
    elif by_weight:
        weights = _WEIGHTS[strategy](q, block)
        if previous:
            weights = _of_block_before(weights, block, pieces, mine, group)
        order = _heaviest_first(weights, keys.squares.to(weights.dtype).repeat_interleave(q.shape[1] // k.shape[1], 1))
    else:
        order, _ = ops.make_grouping(q, k, "none", strategy, group_size, block, "own", seed)
        if previous:
            order = _of_block_before(order, block, pieces, mine, group)
    if previous and callers_order is None and mine and mine[0].start == 0:
        order[:, :, 0] = torch.arange(q.shape[3], device=q.device)  # of a block that is exact
    return Columns(order.contiguous(), keys.mean.to(torch.float32).contiguous() if needs_means else None)


def _in_blocks(x, rows):
    """[B, H, n, d] as [B, H, blocks, rows, d]; the last block is filled up with zeros."""
    missing = -x.shape[2] % rows
    return (torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (-1, rows))


def _squares_in_blocks(x, rows):
    """The sums of squares of each block's columns [B, H, blocks, d], at least in float32, in one pass over x."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(_in_blocks(x, rows), dim=3, dtype=dtype).square()


_WEIGHTS = {"energy": _squares_in_blocks}  # of the strategies that read K: what they multiply its spread by


def _heaviest_first(weights, spread):
    """The columns by falling product of both, ties to the lower column, NaN and infinity first."""
    energy = weights * spread
    energy = torch.where(energy.isnan(), torch.inf, energy)
    return energy.argsort(dim=3, descending=True, stable=True).to(torch.int32)


def _moments_in_blocks(k, rows):
    """The Moments of each block of so many keys."""
    whole = k.shape[2] // rows
    found = [_moments_of(k[:, :, : whole * rows].unflatten(2, (whole, rows)))]
    if k.shape[2] % rows:
        found.append(_moments_of(k[:, :, whole * rows :].unsqueeze(2)))
    return _chained(found)


def _moments_of(blocks):
    """The Moments of blocks of keys [B, H, n, rows, d]. Their variances are made in one pass, at least in float32."""
    dtype = torch.promote_types(blocks.dtype, torch.float32)
    first = blocks[:, :, :, :1].to(dtype)  # of each block: what is apart from it cancels little
    squares, mean = torch.var_mean(blocks - first, 3, correction=0)
    count = squares.new_full((blocks.shape[2],), blocks.shape[3], dtype=torch.float64)
    mean = mean.to(torch.float64) + first.squeeze(3)
    return Moments(count, mean * count[:, None], squares.to(torch.float64) * count[:, None])


def _chained(parts):
    """The Moments of several parts as those of one list."""
    counts, sums, squares = zip(*parts)
    return Moments(torch.cat(counts), torch.cat(sums, 2), torch.cat(squares, 2))


def _joined(parts, cumulative=False):
    """The Moments of all parts together, n = 1, or of each part with those before it."""

    def added(x, axis):
        return x.cumsum(axis) if cumulative else x.sum(axis, keepdim=True)

    joined = Moments(added(parts.count, 0), added(parts.sum, 2), added(parts.squares, 2))
    # The sum of n_i (mean_i - mean)^2, expanded around the mean of all, near which it cancels little.
    middle = parts.sum.sum(2, keepdim=True) / parts.count.sum().clamp(min=1)
    between = added(parts.count[:, None] * (parts.mean - middle).square(), 2)
    between = between - joined.count[:, None] * (joined.mean - middle).square()
    return joined._replace(squares=joined.squares + between.clamp(min=0))


def _of_all(k, rows, pieces, mine, group):
    """The Moments of all keys of the sequence."""
    _, totals = _moments(k, rows, pieces, mine, group)
    return _joined(_chained([moments for _, moments in totals]))


def _before_blocks(k, rows, pieces, mine, group):
    """The Moments of the keys before each block of this rank."""
    blocks, totals = _moments(k, rows, pieces, mine, group)
    found = []
    for piece in mine:
        first, end = piece.at // rows, -(-piece.end // rows)
        before = [moments for other, moments in totals if other.stop <= piece.start]
        none = Moments(*(torch.zeros_like(x) for x in totals[0][1]))
        within = Moments(blocks.count[first : end - 1], blocks.sum[:, :, first : end - 1],
                         blocks.squares[:, :, first : end - 1])  # fmt: skip
        joined = _joined(_chained([none, *before, within]), cumulative=True)
        skipped = len(before)
        found.append(Moments(joined.count[skipped:], joined.sum[:, :, skipped:], joined.squares[:, :, skipped:]))
    return _chained(found) if found else blocks


def _moments(k, rows, pieces, mine, group):
    """The Moments of each block of this rank's keys, and [(piece, its Moments)] of all ranks' pieces."""
    blocks = _moments_in_blocks(k, rows)
    own = []
    for piece in mine:
        where = slice(piece.at // rows, -(-piece.end // rows))
        of_piece = _joined(Moments(blocks.count[where], blocks.sum[:, :, where], blocks.squares[:, :, where]))
        own.append(torch.stack((of_piece.sum, of_piece.squares)))
    like = blocks.sum.new_zeros((2, *k.shape[:2], 1, k.shape[3]))
    found = _of_every_piece(own, like, pieces, group)
    return blocks, [(piece, Moments(like.new_full((1,), piece.stop - piece.start), *both)) for piece, both in found]


def _of_block_before(x, rows, pieces, mine, group):
    """What each block's predecessor has in x [B, H, blocks, d]; of the sequence's first block, something."""
    lasts = [x[:, :, -(-piece.end // rows) - 1] for piece in mine]
    like = x.new_zeros((*x.shape[:2], x.shape[3]))
    found = {piece.stop: last for piece, last in _of_every_piece(lasts, like, pieces, group)}
    shifted = x.roll(1, 2)
    for piece in mine:
        if piece.start > 0:
            shifted[:, :, piece.at // rows] = found[piece.start]
    return shifted


def _of_every_piece(own, like, pieces, group):
    """[(piece, its tensor)] of all ranks, in the order of the sequence; `own` are those of this rank's pieces, each of
    the shape and dtype of `like`."""
    if group is None:
        found = [own]
    else:
        most = max(map(len, pieces))
        mine = torch.stack([*own, *[like] * (most - len(own))]).contiguous()
        found = [torch.empty_like(mine) for _ in pieces]
        dist.all_gather(found, mine, group=group)
    of_all = [pair for of_rank, tensors in zip(pieces, found) for pair in zip(of_rank, tensors)]
    return sorted(of_all, key=lambda pair: pair[0].start)
