# SPDX-License-Identifier: Apache-2.0
"""What travels in a ring: K and V of each rank, which all others need, and the gradients for them, which go home to the
rank that owns the rows. Here by messages from each rank to the next, between any processes; GPUs that reach each
other's memory need none (peer_memory.py)."""

from distrattention import ops  # first, for it says in words what is missing
from distrattention.distributed.layout import pairs_of, rows_of, size_of

import torch  # isort: skip
import torch.distributed as dist  # isort: skip

_KEYS, _GRADIENTS = 1, 2  # tags of messages


def elements(k, v, rows):
    """How many numbers so many rows of K and V hold."""
    return k.shape[0] * k.shape[1] * rows * (k.shape[3] + v.shape[3])


def views(buffer, k, v, rows):
    """So many rows of K and V, or of their gradients, in a flat buffer that begins with both."""
    found, first = [], 0
    for tensor in (k, v):
        shape = (*tensor.shape[:2], rows, tensor.shape[3])
        found.append(buffer[first : first + torch.Size(shape).numel()].view(shape))
        first += found[-1].numel()
    return found


def seen_keys(call, rank, source):
    """The keys of rank `source`, from the first to the last, that rows of `rank` see."""
    keys = [pair.keys for pair in pairs_of(call.pieces[rank], call.pieces[source], call.causal, True)]
    return slice(min((of.start for of in keys), default=0), max((of.stop for of in keys), default=0))


class Beside:
    """Memory for parts, [B, H, rows, ...] as of the tensors: of its own for each."""

    def __init__(self, tensors):
        self._tensors = tensors

    def take(self, rows):
        """Where to write a part of these rows."""
        return [empty_like(tensor[:, :, rows]) for tensor in self._tensors]


class Room(Beside):
    """The same, of sums over parts, of the rows from `first` on: a part that is the first one of its rows is written
    where its sum will be."""

    def __init__(self, tensors, first=0):
        super().__init__(tensors)
        self._first, self._taken = first, []

    def take(self, rows):
        there = slice(rows.start - self._first, rows.stop - self._first)
        if any(rows.start < taken.stop and taken.start < rows.stop for taken in self._taken):
            return super().take(there)
        self._taken.append(rows)
        return [tensor[:, :, there] for tensor in self._tensors]


def empty_like(tensor, dtype=None):
    """Memory as the tensor's, but with contiguous rows, as sums are written to."""
    found = torch.empty_like(tensor, dtype=dtype)
    return found if found.stride(-1) == 1 else torch.empty_like(found, memory_format=torch.contiguous_format)


def add_up_rows(parts, total):
    """Makes `total` the sum of the parts, rounded once. A part may lie where the sum does; alone it is the sum."""
    if not (len(parts) == 1 and parts[0].is_set_to(total)):
        ops.add_up(parts, total)


def add_up(parts, totals, first=0):
    """Makes (dk, dv), of the keys from `first` on, the sums of parts, [(keys, dk, dv)], each of some keys, rounded
    once. A part may lie where the sum does."""
    bounds = [bound - first for keys, *_ in parts for bound in (keys.start, keys.stop)]
    bounds = sorted({0, totals[0].shape[2], *bounds})
    for start, stop in zip(bounds, bounds[1:]):
        there = [(grads, start + first - keys.start) for keys, *grads in parts
                 if keys.start <= start + first and stop + first <= keys.stop]  # fmt: skip
        for n, total in enumerate(totals):
            add_up_rows([grads[n][:, :, at : at + stop - start] for grads, at in there], total[:, :, start:stop])


class Messages:
    """Once around the ring, from each rank to the next, while that computes; gradients behind what they are of."""

    def keys(self, k, v, call, since=None):
        """Yields (source, k, v) of every rank of the ring, this one's first; those of the next come meanwhile. `since`
        is of no use here."""
        size, rank = size_of(call.group), call.rank
        buffer = torch.cat((k.reshape(-1), v.reshape(-1))) if size > 1 else None
        for step in range(size):
            source, coming = (rank - step) % size, (rank - step - 1) % size
            moving = None
            if step + 1 < size:
                arriving = buffer.new_empty(elements(k, v, rows_of(call.pieces[coming])))
                moving = Moving(buffer, arriving, call.group, _KEYS)
            yield source, *((k, v) if step == 0 else views(buffer, k, v, rows_of(call.pieces[source])))
            if moving:
                moving.wait()
                buffer = arriving

    def gradients(self, k, v, call, dtype):
        """What takes the gradients of others' K and V home, and brings those of this rank's; sums are in `dtype`."""
        return _Following(k, v, call, dtype)


class _Following:
    """The gradients of K and V, which follow the ring until each is with the rank that owns the rows."""

    def __init__(self, k, v, call, dtype):
        self._k, self._v, self._call, self._dtype = k, v, call, dtype
        self._moving = self._arriving = None

    def room(self, source):
        """The Room for gradients of the keys of rank `source`."""
        keys = seen_keys(self._call, self._call.rank, source)
        rows = keys.stop - keys.start
        return Room(views(self._k.new_empty(elements(self._k, self._v, rows)), self._k, self._v, rows), keys.start)

    def add(self, source, found):
        """Adds what was found for the rank's keys to what others found, and passes it on."""
        buffer = self._wait()
        rows, of_next = (rows_of(self._call.pieces[(source - step) % len(self._call.pieces)]) for step in (0, 1))
        of_others = []
        if buffer is None:
            buffer = self._k.new_empty(elements(self._k, self._v, rows), dtype=self._dtype)
        else:
            of_others = [(slice(0, rows), *views(buffer, self._k, self._v, rows))]
        add_up(of_others + found, views(buffer, self._k, self._v, rows))
        self._arriving = buffer.new_empty(elements(self._k, self._v, of_next))
        self._moving = Moving(buffer, self._arriving, self._call.group, _GRADIENTS)

    def arrived(self):
        """[(keys, dk, dv)], parts of what others found for this rank's K and V."""
        buffer, rows = self._wait(), rows_of(self._call.pieces[self._call.rank])
        return [] if buffer is None else [(slice(0, rows), *views(buffer, self._k, self._v, rows))]

    def _wait(self):
        if self._moving:
            self._moving.wait()
        return self._arriving


class Moving:
    """A tensor on its way to the next rank of a group, and another from the one before; either may be empty."""

    def __init__(self, leaving, arriving, group, tag):
        self._tensors = leaving, arriving  # until they have moved
        self._to, self._from = ((group.rank() + step) % group.size() for step in (1, -1))
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
