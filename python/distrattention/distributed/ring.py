# SPDX-License-Identifier: Apache-2.0
"""Attention around a ring: K and V go from rank to rank (travel.py, peer_memory.py) while each rank computes with those
that it has, and merges what it gets, O and LSE of its rows over ever more keys (method, 3 for the gradients, which need
no more than both)."""

from typing import Any, NamedTuple

from distrattention import ops  # first, for it says in words what is missing
from distrattention.distributed import peer_memory
from distrattention.distributed.agreement import device_for
from distrattention.distributed.columns import Columns
from distrattention.distributed.layout import Piece, pairs_of, rank_in, size_of
from distrattention.distributed.travel import Beside, Messages, Room, add_up, add_up_rows, empty_like

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from torch.autograd.function import once_differentiable  # isort: skip

_MOST_PARTS = 4  # that are kept


class Call(NamedTuple):
    """All but the tensors that the ranks of a ring have agreed on."""

    group: dist.ProcessGroup | None
    pieces: list[list[Piece]]  # of each rank
    causal: bool
    scale: float | None
    options: tuple  # of core.options_of(), with "auto" resolved
    deterministic: bool
    transport: Any = Messages()  # how K, V and their gradients go from rank to rank

    @property
    def rank(self) -> int:
        return rank_in(self.group)

    @property
    def has_near_keys(self) -> bool:
        strategy, *_ = self.options
        window, sinks = self.options[5:7]
        return strategy != "exact" and (window is not None or sinks > 0)

    @property
    def length(self) -> int:
        """The rows of the sequence."""
        return max((piece.stop for of_rank in self.pieces for piece in of_rank), default=0)

    def pairs(self, source):
        """The Pairs of this rank's rows and the keys of rank `source`."""
        return pairs_of(self.pieces[self.rank], self.pieces[source], self.causal, not self.has_near_keys)

    def settings(self, pair):
        """What the operators take behind their tensors."""
        strategy, _, block, _, order_from, *_ = self.options
        part = (None, None)
        if strategy == "exact" or block >= self.length:
            pass  # one block is on one rank, and the pair is no part: near keys then go by 128 rows
        elif self.has_near_keys:
            part = pair.first_row, pair.first_key
        elif order_from == "previous":
            part = (min(pair.first_row, block),) * 2  # it counts only whether they are the first ones
        return "top_left" if pair.causal else "none", self.scale, *self.options, self.deterministic, *part

    def columns(self, columns, pair):
        """The order and the means of a Pair's rows."""
        if columns.order is None:
            return None, None
        block = self.options[2]
        blocks = slice(pair.rows.start // block, -(-pair.rows.stop // block))
        means = columns.key_means
        if means is not None and self.options[4] == "previous":
            means = means[:, :, blocks]
        return columns.order[:, :, blocks], means


class Begun(NamedTuple):
    """What a rank computes of a call while the ranks agree on it."""

    since: Any  # an event behind which K and V are there
    part: tuple  # (out, lse) of its rows and its own keys


def begin(q, k, v, causal, scale, options, group):
    """The Begun of exact attention, which of its own keys needs nothing that others tell. None where it is not exact,
    or where keys or what ranks tell each other go by messages of NCCL, which would wait for it."""
    if options[0] != "exact" or q.numel() == 0 or peer_memory.barriers_of(group, q.device) is None:
        return None
    if device_for(group, q).type != "cpu":
        return None
    since = peer_memory.now(q.device)
    with torch.no_grad():
        call = ("top_left" if causal else "none", scale, *options, True, None, None)
        return Begun(since, ops.forward(q, k, v, None, None, None, *call))


def attend(q, k, v, columns, call, begun=None):
    """(out, lse) of this rank's rows, with gradients: q [B, Hq, n, d], k [B, Hkv, n, d], v [B, Hkv, n, dv]."""
    return _Ring.apply(q, k, v, columns.order, columns.key_means, call, begun)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, order, key_means, call, begun):
        columns, heads = Columns(order, key_means), slice(0, q.shape[1])
        parts = _Parts(_merged, ops.lse_dtype(q.dtype), [heads], call)
        for source, keys, values in call.transport.keys(k, v, call, begun and begun.since):
            if begun and source == call.rank:
                parts.add(heads, slice(0, q.shape[2]), begun.part)
                continue
            for pair in call.pairs(source):
                part = ops.forward(
                    q[:, :, pair.rows], keys[:, :, pair.keys], values[:, :, pair.keys], None,
                    *call.columns(columns, pair), *call.settings(pair),
                )  # fmt: skip
                parts.add(heads, pair.rows, part)
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty(q.shape[:3], dtype=ops.lse_dtype(q.dtype))
        parts.finish(out, lse)
        ctx.save_for_backward(q, k, v, order, key_means, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse):
        """A rank's own keys come first for one half of the heads, while others' keys are on their way here, and last
        for the other half, while the gradients of its keys are on their way home."""
        q, k, v, order, key_means, out, lse = ctx.saved_tensors
        call = ctx.call
        # As O lies: else each part would copy its rows of one or both.
        rows = _Rows(q, out, lse, grad_out.contiguous(), grad_lse, Columns(order, key_means))
        shares = _shares(k.shape[1], q.shape[1] // k.shape[1], size_of(call.group))
        sums_dtype = ops.lse_dtype(q.dtype)
        sums = _Parts(_added, sums_dtype, [share.rows for share in shares], call)
        home = call.transport.gradients(k, v, call, sums_dtype)
        grads = tuple(empty_like(tensor) for tensor in (q, k, v))

        def gradients(share, source, keys, values, room, room_q):
            """[(keys of the pair, dk, dv)], in the room; dq goes to the sums."""
            found = []
            for pair in call.pairs(source):
                grad_q, *of_keys = *room_q.take(pair.rows), *room.take(pair.keys)
                rows.of(share).backward(pair, keys[:, share.keys], values[:, share.keys], (grad_q, *of_keys), call)
                sums.add(share.rows, pair.rows, (grad_q,))
                found.append((pair.keys, *of_keys))
            return found

        def of_own(share):
            room, room_q = Room([grad[:, share.keys] for grad in grads[1:]]), Room([grads[0][:, share.rows]])
            return gradients(share, call.rank, k, v, room, room_q)

        own = []
        for source, keys, values in call.transport.keys(k, v, call):
            if source == call.rank:
                own.append(of_own(shares[0]))
            else:
                every = _Heads(slice(0, q.shape[1]), slice(0, k.shape[1]))
                home.add(source, gradients(every, source, keys, values, home.room(source), Beside([q])))
        own += [of_own(share) for share in shares[1:]]
        arrived = home.arrived()
        for share, found in zip(shares, own):
            of_others = [(keys, *(grad[:, share.keys] for grad in found_there)) for keys, *found_there in arrived]
            add_up(of_others + found, [grad[:, share.keys] for grad in grads[1:]])
        sums.finish(grads[0])
        return *grads, None, None, None, None


class _Heads(NamedTuple):
    """Some heads: of Q, and the ones of K and V that they share."""

    rows: slice
    keys: slice


def _shares(heads_kv, group, ranks):
    """The heads in two halves, where there are ranks to wait for and heads to part."""
    middle = (heads_kv + 1) // 2 if ranks > 1 else heads_kv
    found = [slice(0, middle), slice(middle, heads_kv)]
    return [_Heads(slice(s.start * group, s.stop * group), s) for s in found if s.stop > s.start or s.start == 0]


class _Rows(NamedTuple):
    """What the gradients of a rank's rows come from."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor
    columns: Columns

    def of(self, share):
        *of_rows, (order, means) = self
        columns = Columns(order if order is None else order[:, share.rows], means if means is None else
                          means[:, share.keys])  # fmt: skip
        return _Rows(*(tensor[:, share.rows] for tensor in of_rows), columns)

    def backward(self, pair, keys, values, grads, call):
        """Writes (dq, dk, dv) of the pair."""
        rows, of_keys = (slice(None), slice(None), pair.rows), (slice(None), slice(None), pair.keys)
        ops.backward_into(
            self.grad_out[rows], self.grad_lse[rows], self.q[rows], keys[of_keys], values[of_keys],
            *call.columns(self.columns, pair), self.out[rows], self.lse[rows], *grads, *call.settings(pair),
        )  # fmt: skip


class _Parts:
    """What several pairs found for the same rows, to be put together: by `together(parts, *result)`. A few are kept for
    that, which reads each of them once; where more come, they are put together in `dtype` first."""

    def __init__(self, together, dtype, heads, call):
        self._together, self._dtype = together, dtype
        self._kept = [(of_heads, slice(piece.at, piece.end), []) for of_heads in heads
                      for piece in call.pieces[call.rank]]  # fmt: skip

    def add(self, heads, rows, part):
        """part: tensors [B, heads, rows, ...]."""
        for of_heads, of_rows, kept in self._kept:
            if _holds(heads, of_heads) and _holds(rows, of_rows):
                where = (slice(None), _within(heads, of_heads), _within(rows, of_rows))
                if len(kept) == _MOST_PARTS:
                    both = [empty_like(tensor, self._dtype) for tensor in kept[0]]
                    self._together(kept, *both)
                    kept[:] = [both]
                kept.append([tensor[where] for tensor in part])

    def finish(self, *result):
        for of_heads, of_rows, kept in self._kept:
            self._together(kept, *(tensor[:, of_heads, of_rows] for tensor in result))


def _holds(whole, part):
    return whole.start <= part.start and part.stop <= whole.stop


def _within(whole, part):
    return slice(part.start - whole.start, part.stop - whole.start)


def _merged(parts, out, lse):
    ops.merge([part[0] for part in parts], [part[1] for part in parts], out, lse)


def _added(parts, total):
    add_up_rows([tensor for (tensor,) in parts], total)
