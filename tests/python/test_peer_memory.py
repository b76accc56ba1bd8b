# SPDX-License-Identifier: Apache-2.0
"""Which rings go by the memory of peers, and how that is made, in one process; rings themselves are in
test_distributed.py."""

import contextlib
import importlib
from types import SimpleNamespace

import pytest
import torch

from distrattention import Settings, core, scaled_dot_product_attention
from distrattention.distributed import layout, peer_memory, ring, travel


class Told:
    """A group of this process and another one, which tells in turn what it is to."""

    def __init__(self, *others):
        self.others = list(others)

    def size(self):
        return 2


@pytest.fixture
def two_gpus(monkeypatch):
    """This process has the first GPU of a machine, "a", and sees the second one, "b"."""
    monkeypatch.setattr(peer_memory, "_told", lambda mine, group: [mine, group.others.pop(0)])
    monkeypatch.setattr(peer_memory.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(peer_memory.Path, "exists", lambda path: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid="ab"[n]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda n, other: True)


@pytest.mark.parametrize(
    ("others", "environment", "expected"),
    [
        ([(("here", ""), "b"), True], "1", True),
        ([(("here", ""), "b"), True], "0", False),
        ([(("here", ""), "b"), False], "1", False),  # it was told not to, or does not see this one
        ([(("there", ""), "b"), True], "1", False),
        ([(("here", ""), "a"), True], "1", False),  # two processes on one GPU
        ([(("here", ""), "c"), True], "1", False),  # one that is hidden here
    ],
)
def test_memory_of_peers_is_for_gpus_that_all_reach(two_gpus, monkeypatch, others, environment, expected):
    monkeypatch.setenv(peer_memory.SWITCH, environment)
    group = Told(*others)
    assert peer_memory._all_reach_all(group, torch.device("cuda", 0)) is expected and group.others == []


def test_memory_of_peers_takes_the_device_of_the_keys(two_gpus, monkeypatch):
    """Where what is told lies on GPUs, as with NCCL alone, each process has to use its own."""
    current = []

    @contextlib.contextmanager
    def device(chosen):
        current.append(chosen)
        yield
        current.pop()

    def told(what):
        assert current == [key.device]
        return what

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(peer_memory, "_all_reach_all", lambda *_: told(True))
    monkeypatch.setattr(peer_memory.PeerMemory, "__init__", lambda *_: None)
    monkeypatch.setattr(peer_memory.PeerMemory, "reserve", lambda *_: told(False))
    key = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), requires_grad=False)
    call = SimpleNamespace(group=Told())
    assert isinstance(peer_memory.transport_of(call, key, key, key), travel.Messages) and current == []


@pytest.mark.parametrize(("made", "has_room", "grows"), [(0, True, True), (1, True, False), (0, False, False)])
def test_buffers_grow_where_all_ranks_can(two_gpus, monkeypatch, made, has_room, grows):
    """What the other rank tells: how often it has made memory, and whether it has room."""
    monkeypatch.setattr(peer_memory, "_made", 0)
    monkeypatch.setattr(peer_memory, "Lane", lambda device: SimpleNamespace(finish=lambda: None))
    monkeypatch.setattr(peer_memory, "room", lambda count, device: torch.empty(count, dtype=torch.uint8))
    monkeypatch.setattr(peer_memory, "shared", lambda mine, group: ([mine, mine], None, None))
    peers = peer_memory.PeerMemory(torch.device("cpu"))
    assert peers.grow("keys", 8, Told(0, True)) and peers.grow("keys", 4, Told())
    assert peers.grow("keys", 16, Told(1 + made, has_room)) is grows
    assert len(peers.buffers("keys", 8, torch.uint8)[0]) == 8  # for calls that began before
    assert peer_memory._made == 1 + grows


def test_room_is_made_of_what_torch_keeps(monkeypatch):
    module = pytest.importorskip("torch.distributed._symmetric_memory")
    full = [True]

    def empty(size, stride, dtype, device):
        if full[0]:
            raise torch.OutOfMemoryError("no")
        return torch.empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(module, "_SymmetricMemory", SimpleNamespace(empty_strided_p2p=empty))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert peer_memory.room(8, "cpu") is None
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: full.__setitem__(0, False))
    assert len(peer_memory.room(8, "cpu")) == 8


class Noted:
    """Stands for a Lane and for what of PeerMemory waits: notes what happens, in its order."""

    def __init__(self, monkeypatch):
        self.notes, self.lane = [], self
        monkeypatch.setattr(peer_memory, "Lane", lambda device: self)
        monkeypatch.setattr(peer_memory, "add_up", lambda *_: self.notes.append("write"))
        self.peers = peer_memory.PeerMemory(torch.device("cpu"))
        memory = [torch.zeros(1 << 12, dtype=torch.uint8)] * 6
        self.peers._buffers = dict.fromkeys(("keys", "gradients"), (memory, lambda: self.notes.append("barrier"), None))

    def give(self, function, behind=None):
        self.notes.append(f"behind {behind}")
        function()
        return lambda: self.notes.append("wait")

    def empty(self, like, shape):
        return like.new_empty(shape)

    def follow(self):
        self.notes.append("follow")


@pytest.fixture
def noted(monkeypatch):
    return Noted(monkeypatch)


@pytest.fixture
def four_ranks():
    return of_ranks(4)


def of_ranks(ranks):
    """(k, v, the call) of rank 0 of so many, with a row each."""
    pieces = [layout.pieces_of([(rank, rank + 1)]) for rank in range(ranks)]
    call = SimpleNamespace(rank=0, pieces=pieces, group=Told(), causal=False)
    return torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), call


def test_others_keys_come_while_own_ones_are_computed_with(noted, four_ranks):
    seen = []
    for source, *_ in noted.peers.keys(*four_ranks, "the start"):
        seen.append((source, noted.notes[:]))
        noted.notes.clear()
    assert seen == [
        (0, ["behind the start", "barrier", "barrier", "behind the start"]),  # its own keys, between two barriers
        (3, ["wait", "behind None"]),
        (2, ["wait", "behind None"]),
        (1, ["wait"]),
    ]
    assert noted.notes == ["follow"]


def test_gradients_are_written_where_all_have_read(noted):
    """A step's kernels wait for what the step before the last one left, and for no more."""
    slots, lying = noted.peers.gradients(*of_ranks(6), torch.float32), []
    for source in (5, 4, 3, 2, 1):
        lying.append(slots.room(source).take(slice(0, 1))[0].data_ptr())
        noted.notes.append("kernels")
        slots.add(source, [])
    step = ["kernels", "write", "behind None", "barrier", "behind None"]  # the last: what another one found is read
    assert noted.notes == 2 * step + 3 * ["wait", *step]
    assert lying[:2] == lying[3:] and len(set(lying)) == 3
    assert len(slots.arrived()) == 3 and noted.notes[-3:] == ["wait", "write", "wait"]  # the sum of three, two


def test_gradients_in_a_slot_are_not_copied(noted, four_ranks, monkeypatch):
    monkeypatch.setattr(peer_memory, "add_up", travel.add_up)
    monkeypatch.setattr(travel.ops, "add_up", lambda parts, total: noted.notes.append(f"sum of {len(parts)}"))
    slots, row = noted.peers.gradients(*four_ranks, torch.float32), slice(0, 1)
    slots.add(3, [(row, *slots.room(3).take(row))])
    assert noted.notes == ["behind None", "barrier", "behind None"]
    slots.add(2, [(row, *four_ranks[:2])])  # which lie elsewhere
    assert noted.notes[3:] == ["sum of 1", "sum of 1", "behind None", "barrier", "behind None"]


@pytest.mark.parametrize(("ranks", "slots"), [(2, 1), (3, 2), (4, 3), (6, 3)])
def test_there_are_no_more_slots_than_steps(noted, monkeypatch, ranks, slots):
    wanted = {}
    monkeypatch.setattr(noted.peers, "grow", lambda name, count, group: wanted.setdefault(name, count))
    assert noted.peers.reserve(*of_ranks(ranks), True) and wanted == {"keys": 32, "gradients": slots * 32}


def test_exact_attention_begins_with_own_keys(monkeypatch, problem):
    """Where the ranks have met before, and where it needs nothing of others'."""
    q, k, v = problem(n=40, d=8)
    monkeypatch.setattr(peer_memory, "now", lambda device: "now")

    def begin(settings, *tensors):
        return ring.begin(*tensors, True, None, core.options_of(settings, 8), Told())

    assert begin(Settings("exact"), q, k, v) is None
    monkeypatch.setattr(peer_memory, "barriers_of", lambda group, device: 2)
    monkeypatch.setattr(ring, "device_for", lambda group, tensor: torch.device("cuda"))
    assert begin(Settings("exact"), q, k, v) is None
    monkeypatch.setattr(ring, "device_for", lambda group, tensor: torch.device("cpu"))
    assert begin(Settings("energy", 2), q, k, v) is None
    assert begin(Settings("exact"), *(tensor[:, :, :0] for tensor in (q, k, v))) is None
    begun = begin(Settings("exact"), q, k, v)
    assert begun.since == "now" and begun.part[1].shape == q.shape[:3]
    assert torch.equal(begun.part[0], scaled_dot_product_attention(q, k, v, is_causal=True))


def test_others_are_told_where_own_keys_failed(monkeypatch, problem):
    module = importlib.import_module("distrattention.distributed.attention")

    def no_memory(*_):
        raise torch.OutOfMemoryError("no memory for own keys")

    def agree(group, described, rows, error, tensor):
        told.append(error)
        raise error

    told = []
    monkeypatch.setattr(module, "ranks_of", lambda group, kind: layout.Ranks(Told(), None, kind))
    monkeypatch.setattr(module.ring, "begin", no_memory)
    monkeypatch.setattr(module, "agree", lambda group, *of: agree(group, *of) if group else [0])
    with pytest.raises(torch.OutOfMemoryError, match="own keys"):
        module.attention(*problem(n=40, d=8))
    assert [str(error) for error in told] == ["no memory for own keys"]
