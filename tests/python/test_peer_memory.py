# SPDX-License-Identifier: Apache-2.0
"""Which rings go by the memory of peers, and how that is made, in one process; rings themselves are in
test_distributed.py."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from distrattention.distributed import peer_memory, travel


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
    monkeypatch.setattr(peer_memory, "CopyEngine", lambda device: SimpleNamespace(finish=lambda: None))
    monkeypatch.setattr(peer_memory, "room", lambda count, device: torch.empty(count, dtype=torch.uint8))
    monkeypatch.setattr(peer_memory, "shared", lambda mine, group: ([mine, mine], None))
    peers = peer_memory.PeerMemory(torch.device("cpu"))
    assert peers.grow("keys", 8, Told(0, True)) and peers.grow("keys", 4, Told())
    assert peers.grow("keys", 16, Told(1 + made, has_room)) is grows
    assert len(peers.buffers("keys", 8, torch.uint8)[0]) == 8  # for calls that began before
    assert peer_memory._made == 1 + grows


def test_room_is_made_of_what_torch_keeps(monkeypatch):
    module = pytest.importorskip("torch.distributed._symmetric_memory")
    full = [True]

    def empty(count, dtype, device):
        if full[0]:
            raise torch.OutOfMemoryError("no")
        return torch.empty(count, dtype=dtype, device=device)

    monkeypatch.setattr(module, "empty", empty)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert peer_memory.room(8, "cpu") is None
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: full.__setitem__(0, False))
    assert len(peer_memory.room(8, "cpu")) == 8
