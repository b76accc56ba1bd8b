# SPDX-License-Identifier: Apache-2.0
"""A ring's transport between GPUs of one machine that reach each other's memory: each reads what it needs from where it
lies, by its copy engine. Messages of NCCL are kernels, which take SMs from attention, and start late where it has them
all.

K and V of a rank lie still in its memory while the others read them. The gradients that it found for another's keys lie
in one of three slots, where the backward writes them, so that the owner reads one while another is written:

    step t = 1, 2, ...: rank r computes with the keys of rank r - t and writes their gradients to slot t % 3
                        all ranks meet (a barrier)
                        rank r reads its own from slot t % 3 of rank r + t, while all compute step t + 1

A slot is written again three steps later: behind the barrier of step t + 1, which comes behind what its reader read. So
what writes it waits for all ranks to have finished the step before the last, not the last one. Barriers and copies have
a stream of their own beside the kernels, the Lane. It waits for K and V alone, not for what a call computes first, of
its own keys."""

import os
import socket
import weakref
from pathlib import Path

from distrattention.distributed.layout import rows_of, size_of
from distrattention.distributed.travel import Messages, Room, add_up, elements, seen_keys, views

import torch  # isort: skip
import torch.distributed as dist  # isort: skip

SWITCH = "DISTR_PEER_MEMORY"  # 0: messages always

_MOST_PARTS = 3  # of the gradients of a rank's keys, that are kept
_MOST_SLOTS = 3  # for gradients

_found = weakref.WeakKeyDictionary()  # by group: the transport of each device
_made = 0  # how often this process has called shared()


def transport_of(call, q, k, v):
    """How K and V go between the ranks of the call: by PeerMemory where all ranks can, else by Messages. All ranks call
    it."""
    if size_of(call.group) == 1 or not k.is_cuda:
        return Messages()
    of_group = _found.setdefault(call.group, {})
    with torch.cuda.device(k.device):  # where groups without a backend for the CPU put what they tell
        if k.device not in of_group:
            of_group[k.device] = PeerMemory(k.device) if _all_reach_all(call.group, k.device) else Messages()
        transport = of_group[k.device]
        with_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
        if isinstance(transport, PeerMemory) and not transport.reserve(k, v, call, with_gradients):
            transport = of_group[k.device] = Messages()
    return transport


def barriers_of(group, device):
    """At how many barriers the ranks of the group met before on GPUs; None where they did not go by PeerMemory."""
    transport = _found.get(group, {}).get(device)
    return transport.barriers if isinstance(transport, PeerMemory) else None


def _all_reach_all(group, device):
    """Whether the ranks are on one machine, a GPU each, and all see that those reach each other's memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = socket.gethostname(), boot.read_text() if boot.exists() else ""
    uuids = [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
    told = _told((host, uuids[device.index]), group)
    can = os.environ.get(SWITCH) != "0" and len(set(told)) == len(told) and all(of == host for of, _ in told)
    others = {uuid for _, uuid in told} - {uuids[device.index]}
    can = can and all(
        uuid in uuids and torch.cuda.can_device_access_peer(device.index, uuids.index(uuid)) for uuid in others
    )
    return all(_told(can, group))


def _told(mine, group):
    """What each rank of the group tells the others."""
    found = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def room(count, device):
    """So many bytes that other GPUs can reach; None where there are none left."""
    from torch.distributed import _symmetric_memory  # torch has it only where it was built with GPUs

    for _ in range(2):
        try:  # what empty() gives may be part of a pool, which keeps what was given up
            return _symmetric_memory._SymmetricMemory.empty_strided_p2p((count,), (1,), torch.uint8, device)
        except RuntimeError:
            torch.cuda.empty_cache()  # torch does not give up by itself what it keeps for tensors
    return None


def shared(mine, group):
    """(The memory that room() gave each rank, by rank, which this one reaches, too; a barrier, which makes what the
    current stream is given next wait until all ranks have come there; what both last as long as.) All ranks call it,
    and have called it as often: torch (2.11) numbers its messages by process, not by group."""
    from torch.distributed import _symmetric_memory

    handle = _symmetric_memory.rendezvous(mine, group)
    milliseconds = int(1000 * _timeout(group, mine.device).total_seconds())

    def barrier():  # a kernel of one warp, which fails when the time is over
        handle.barrier(0, milliseconds)

    return [handle.get_buffer(rank, mine.shape, mine.dtype) for rank in range(group.size())], barrier, mine


def _timeout(group, device):
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # what wraps a backend, to debug it, has none
        return dist.constants.default_pg_timeout


def now(device):
    """An event behind all that the current stream has been given."""
    return torch.cuda.current_stream(device).record_event()


class Lane:
    """A stream beside the one that computes, of high priority, for its small kernels not to wait for all blocks of a
    large one."""

    def __init__(self, device):
        self._device, self._stream = device, torch.cuda.Stream(device, priority=-1)

    def give(self, function, behind=None):
        """Calls the function with the lane as the current stream, behind an event (by default now). Returns a function
        that makes what the stream is given next that is current then wait for it."""
        self._stream.wait_event(behind or now(self._device))
        with torch.cuda.stream(self._stream):
            function()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)

    def empty(self, like, shape):
        """Memory for what the lane is given, which need not wait for what computes. follow() comes before its end."""
        with torch.cuda.stream(self._stream):
            return like.new_empty(shape)

    def follow(self):
        """What the lane is given next comes behind all that the current stream has been given."""
        self._stream.wait_event(now(self._device))

    def finish(self):
        """Waits for all that the lane has been given."""
        self._stream.synchronize()


class PeerMemory:
    """Memory of the GPUs of a group that all of them reach. It grows with the calls and is kept: K and V of one rank,
    and their gradients for each slot."""

    def __init__(self, device):
        self._device = device
        self.lane = Lane(device)
        self.barriers = 0
        self._buffers = {}

    def keys(self, k, v, call, since=None):
        """Yields (source, k, v) of every rank of the ring, this one's first; those of the next come meanwhile. `since`:
        an event behind which K and V are there, now unless given."""
        rank, size = call.rank, len(call.pieces)
        rows = [rows_of(pieces) for pieces in call.pieces]
        counts = [elements(k, v, count) for count in rows]
        lying = self.buffers("keys", max(counts), k.dtype)
        arriving = self.lane.empty(k, (min(size - 1, 2), max(counts)))

        def lay():
            self.barrier("keys", call.group)  # nobody reads what lay there any more
            for place, tensor in zip(views(lying[rank], k, v, rows[rank]), (k, v)):
                place.copy_(tensor)
            self.barrier("keys", call.group)

        def start(step, behind=None):
            source = (rank - step) % size
            into = arriving[step % len(arriving)][: counts[source]]
            return source, into, self.fetch(into, lying[source][: counts[source]], behind)

        try:
            self.lane.give(lay, since)
            coming = start(1, since)
            yield rank, k, v
            for step in range(1, size):
                source, here, wait = coming
                wait()
                if step + 1 < size:
                    coming = start(step + 1)
                yield source, *views(here, k, v, rows[source])
        finally:
            self.lane.follow()

    def gradients(self, k, v, call, dtype):
        """What takes the gradients of others' K and V home, and brings those of this rank's; sums are in `dtype`."""
        return _Slots(self, k, v, call, dtype)

    def reserve(self, k, v, call, with_gradients):
        """Makes room for what the call leaves here. False, on all ranks, where there is none to be had."""
        most = max(elements(k, v, rows_of(pieces)) for pieces in call.pieces) * k.dtype.itemsize
        wanted = {"keys": most} | ({"gradients": slots_of(call) * most} if with_gradients else {})
        return all(self.grow(name, count, call.group) for name, count in wanted.items())

    def grow(self, name, count, group):
        """Makes the buffers of a name hold so many bytes; False, on all ranks, where one has no room or these must not
        call shared(). Then what there was is kept, for the backward of earlier calls."""
        global _made
        if name in self._buffers and self._buffers[name][0][0].numel() >= count:
            return True
        self.lane.finish()  # so that nobody reads what is given up below, once all have told
        if len(set(_told(_made, group))) > 1:
            return False
        mine = room(count, self._device)
        if not all(_told(mine is not None, group)):
            return False
        self._buffers[name] = shared(mine, group)
        _made += 1
        return True

    def buffers(self, name, count, dtype):
        """So many numbers in the memory of each rank, by rank."""
        buffers, *_ = self._buffers[name]
        return [buffer[: count * dtype.itemsize].view(dtype) for buffer in buffers]

    def barrier(self, name, group):
        """Makes what the current stream is given next wait until all ranks have come here, with the buffers of a
        name."""
        _, meet, _ = self._buffers[name]
        self.barriers += 1
        try:
            meet()
        except RuntimeError as error:
            raise RuntimeError(f"the ring of {group.size()} ranks broke at a barrier: {error}") from error

    def fetch(self, into, source, behind=None):
        """Starts to copy from another rank's memory; returns a function that waits for it."""
        return self.lane.give(lambda: into.copy_(source, non_blocking=True), behind)


class _Slots:
    """The gradients of K and V, which each rank leaves in its memory for the rank that owns the rows; of the keys alone
    that its rows see."""

    def __init__(self, peers, k, v, call, dtype):
        self._peers, self._k, self._v, self._call, self._dtype = peers, k, v, call, dtype
        self._rows = rows_of(call.pieces[call.rank])
        most, slots = max(elements(k, v, rows_of(pieces)) for pieces in call.pieces), slots_of(call)
        self._slots = [of_rank.view(slots, most) for of_rank in peers.buffers("gradients", slots * most, k.dtype)]
        self._coming, self._parts = [], []

    def room(self, source):
        """The Room for gradients of the keys of rank `source`: a slot, once all ranks have read what lay there."""
        self._collect(but=1)
        keys, lying = self._left_by(self._call.rank, source)
        return Room(views(lying, self._k, self._v, keys.stop - keys.start), keys.start)

    def add(self, source, found):
        """Leaves what was found for the rank's keys to it, and reads what another one found for this rank's."""
        rank, size = self._call.rank, len(self._call.pieces)
        keys, lying = self._left_by(rank, source)
        add_up(found, views(lying, self._k, self._v, keys.stop - keys.start), keys.start)
        self._peers.lane.give(lambda: self._peers.barrier("gradients", self._call.group))
        keys, lying = self._left_by((2 * rank - source) % size, rank)
        into = torch.empty_like(lying)
        wait = self._peers.fetch(into, lying)
        self._coming.append((wait, (keys, *views(into, self._k, self._v, keys.stop - keys.start))))

    def arrived(self):
        """[(keys, dk, dv)], parts of what others found for this rank's K and V, in the order of the steps."""
        self._collect()
        return self._parts

    def _left_by(self, rank, source):
        """(the keys of rank `source` that rows of `rank` see, the memory that it leaves their gradients in)."""
        keys = seen_keys(self._call, rank, source)
        slots = self._slots[rank]
        slot = slots[(rank - source) % len(self._call.pieces) % len(slots)]
        return keys, slot[: elements(self._k, self._v, keys.stop - keys.start)]

    def _collect(self, but=0):
        """Keeps what has come, but for so many parts that were asked for last; a few, and where there are more their
        sum."""
        while len(self._coming) > but:
            wait, part = self._coming.pop(0)
            wait()
            self._keep(part)

    def _keep(self, part):
        if len(self._parts) == _MOST_PARTS:
            total = self._k.new_empty(elements(self._k, self._v, self._rows), dtype=self._dtype)
            sums = views(total, self._k, self._v, self._rows)
            add_up(self._parts, sums)
            self._parts = [(slice(0, self._rows), *sums)]
        self._parts.append(part)


def slots_of(call):
    """How many slots for gradients a rank has: as many as there are steps, or enough to take turns at."""
    return min(len(call.pieces) - 1, _MOST_SLOTS)
