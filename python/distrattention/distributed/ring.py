# SPDX-License-Identifier: Apache-2.0
"""Attention around a ring: K and V go from rank to rank while each rank computes with those that it has, and merges
what it gets, O and LSE of its rows over ever more keys (method, 3 for the gradients, which need no more than both)."""

from typing import NamedTuple

from distrattention import ops  # first, for it says in words what is missing
from distrattention.distributed.columns import Columns
from distrattention.distributed.layout import Piece, rank_in, rows_of, size_of

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from torch.autograd.function import once_differentiable  # isort: skip

_KEYS, _GRADIENTS = 1, 2  # tags of what travels


class Pair(NamedTuple):
    """Some of a rank's rows and some keys, of another rank or the same, which they all see, or causally."""

    rows: slice
    keys: slice
    causal: bool
    first_row: int  # positions in the sequence
    first_key: int


class Call(NamedTuple):
    """All but the tensors that the ranks of a ring have agreed on."""

    group: dist.ProcessGroup | None
    pieces: list[list[Piece]]  # of each rank
    causal: bool
    scale: float | None
    options: tuple  # of core.options_of(), with "auto" resolved
    deterministic: bool

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


def pairs_of(rows, keys, causal, fused):
    """The Pairs of pieces of rows and pieces of keys that see each other; `fused`: as few as there can be, where it
    does not matter how far rows and keys lie from each other."""
    if fused and rows and keys and (rows == keys or not causal):  # a causal rank's own pieces are as if they touched
        every = slice(0, rows_of(rows)), slice(0, rows_of(keys))
        return [Pair(*every, causal, rows[0].start, keys[0].start)]
    found = []
    for key in keys:
        seeing = [row for row in rows if not causal or row.start >= key.start]
        if fused and seeing:
            seeing = [seeing[0]._replace(stop=seeing[0].start + seeing[-1].end - seeing[0].at)]
        for row in seeing:
            pair = Pair(slice(row.at, row.end), slice(key.at, key.end), causal and row.start == key.start, row.start,
                        key.start)  # fmt: skip
            if fused and found and found[-1].rows == pair.rows:
                found[-1] = found[-1]._replace(keys=slice(found[-1].keys.start, key.end))
            else:
                found.append(pair)
    return found


def attend(q, k, v, columns, call):
    """(out, lse) of this rank's rows, with gradients: q [B, Hq, n, d], k [B, Hkv, n, d], v [B, Hkv, n, dv]."""
    return _Ring.apply(q, k, v, columns.order, columns.key_means, call)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, order, key_means, call):
        lse_dtype = ops.lse_dtype(q.dtype)
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=lse_dtype)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=lse_dtype, device=q.device)
        columns = Columns(order, key_means)
        begun = set()  # where pieces of this rank's rows begin that have met their first keys
        for source, keys, values in _travelling(k, v, call):
            for pair in call.pairs(source):
                part = ops.forward(
                    q[:, :, pair.rows], keys[:, :, pair.keys], values[:, :, pair.keys], None,
                    *call.columns(columns, pair), *call.settings(pair),
                )  # fmt: skip
                so_far = out[:, :, pair.rows], lse[:, :, pair.rows]
                if source == call.rank and pair.rows.start not in begun:  # every row meets its own rank's keys first
                    begun.add(pair.rows.start)
                    for tensor, some in zip(so_far, part):
                        tensor.copy_(some)
                else:
                    ops.merge_into(*so_far, *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, order, key_means, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse):
        q, k, v, order, key_means, out, lse = ctx.saved_tensors
        call, columns = ctx.call, Columns(order, key_means)
        wide = ops.lse_dtype(q.dtype)
        grad_q = torch.zeros_like(q, dtype=wide)
        home = _Homing(k, v, call, wide)
        for source, keys, values in _travelling(k, v, call):
            grad_k, grad_v = home.zeros(source)
            for pair in call.pairs(source):
                rows, of_keys = (slice(None), slice(None), pair.rows), (slice(None), slice(None), pair.keys)
                found = ops.backward(
                    grad_out[rows], grad_lse[rows], q[rows], keys[of_keys], values[of_keys], None,
                    *call.columns(columns, pair), out[rows], lse[rows], False, *call.settings(pair),
                )  # fmt: skip
                for sums, some in zip((grad_q[rows], grad_k[of_keys], grad_v[of_keys]), found):
                    sums.add_(some)
            home.send(source)
        grad_k, grad_v = home.arrived()
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _travelling(k, v, call):
    """Yields (source, k, v) of every rank of the ring, this one's first; those of the next come meanwhile."""
    size, rank = size_of(call.group), call.rank
    buffer = torch.cat((k.reshape(-1), v.reshape(-1))) if size > 1 else None
    for step in range(size):
        source, coming = (rank - step) % size, (rank - step - 1) % size
        moving = None
        if step + 1 < size:
            arriving = buffer.new_empty(_elements(k, v, call, coming))
            moving = _Moving(buffer, arriving, call, _KEYS)
        yield source, *((k, v) if step == 0 else _views(buffer, k, v, call, source))
        if moving:
            moving.wait()
            buffer = arriving


def _elements(k, v, call, source):
    return k.shape[0] * k.shape[1] * rows_of(call.pieces[source]) * (k.shape[3] + v.shape[3])


def _views(buffer, k, v, call, source):
    """K and V, or their gradients, of a rank, in a buffer that holds both."""
    rows = rows_of(call.pieces[source])
    shapes = [(*tensor.shape[:2], rows, tensor.shape[3]) for tensor in (k, v)]
    first = k.shape[0] * k.shape[1] * rows * k.shape[3]
    return buffer[:first].view(shapes[0]), buffer[first:].view(shapes[1])


class _Homing:
    """The gradients of K and V, which follow the ring until each is with the rank that owns the rows."""

    def __init__(self, k, v, call, dtype):
        self._k, self._v, self._call, self._dtype = k, v, call, dtype
        self._moving = self._buffer = self._arriving = None

    def zeros(self, source):
        """Where to add the gradients of the rank's rows."""
        count = _elements(self._k, self._v, self._call, source)
        self._buffer = self._k.new_zeros(count, dtype=self._dtype)
        return _views(self._buffer, self._k, self._v, self._call, source)

    def send(self, source):
        """Adds what others found for the same rows, and passes it on."""
        size = size_of(self._call.group)
        if self._moving:
            self._moving.wait()
            self._buffer.add_(self._arriving)
        if size > 1:
            count = _elements(self._k, self._v, self._call, (source - 1) % size)
            self._arriving = self._buffer.new_empty(count)
            self._moving = _Moving(self._buffer, self._arriving, self._call, _GRADIENTS)

    def arrived(self):
        """The gradients of this rank's K and V."""
        if self._moving:
            self._moving.wait()
            self._buffer = self._arriving
        return _views(self._buffer, self._k, self._v, self._call, self._call.rank)


class _Moving:
    """A tensor on its way to the next rank, and another from the one before; either may be empty."""

    def __init__(self, leaving, arriving, call, tag):
        group = call.group
        self._tensors = leaving, arriving  # until they have moved
        self._to, self._from = ((call.rank + step) % group.size() for step in (1, -1))
        operations = []
        if leaving.numel():
            operations.append(dist.P2POp(dist.isend, leaving, group=group, tag=tag, group_peer=self._to))
        if arriving.numel():
            operations.append(dist.P2POp(dist.irecv, arriving, group=group, tag=tag, group_peer=self._from))
        self._works = self._guarded(lambda: dist.batch_isend_irecv(operations) if operations else [])

    def wait(self):
        """Until both have moved; on a GPU, what is computed next waits, not the host."""
        self._guarded(lambda: [work.wait() for work in self._works])

    def _guarded(self, do):
        try:
            return do()
        except RuntimeError as error:
            raise RuntimeError(
                f"the ring broke between this rank and the ranks {self._from} and {self._to} of the group: {error}"
            ) from error
