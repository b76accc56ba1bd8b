# SPDX-License-Identifier: Apache-2.0
"""The loop of Table 9 that streams heads through a GPU: what it gives, and that its events suffice for any timing."""

import collections
import contextlib
import importlib
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from shared.stream import Streamed  # noqa: E402


def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_stream_gives_what_one_call_gives():
    inputs = torch.randn(3, 1, 10, 40, 16).unbind()
    out = torch.full_like(inputs[0], torch.nan)
    Streamed(inputs, out, 2, "cpu")(attention)
    torch.testing.assert_close(out, attention(*inputs))


def test_table9_refuses_another_result():
    table9 = importlib.import_module("table9")
    inputs = torch.randn(3, 1, 10, 40, 16).unbind()
    out = torch.empty_like(inputs[0])
    stream = Streamed(inputs, out, 2, "cpu")
    table9.check(attention, stream, inputs, out, 2)
    with pytest.raises(AssertionError, match="not close"):
        table9.check(attention, stream, [inputs[0], inputs[1], inputs[2].flip(1)], out, 2)


class Device:
    """In the place of torch.cuda: streams are queues, which run in any order that events allow."""

    def __init__(self):
        self.main, self.queues = Stream(self), collections.defaultdict(list)
        self.current, self.reached = self.main, set()

    def current_stream(self):
        return self.main

    @contextlib.contextmanager
    def stream(self, stream):
        self.current = stream
        yield
        self.current = self.main

    def add(self, action, stream=None, after=None):
        self.queues[stream or self.current].append((after, action))

    def run(self, choose):
        while any(self.queues.values()):
            ready = [queue for queue in self.queues.values() if queue and queue[0][0] in {None, *self.reached}]
            choose(ready).pop(0)[1]()

    def Event(self):  # noqa: N802
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.point = device, None

    def record(self, stream):
        self.point = point = object()
        self.device.add(lambda: self.device.reached.add(point), stream)

    def wait(self, stream):
        self.device.add(lambda: None, stream, self.point)


class Stream:
    def __init__(self, device):
        self.device = device

    def wait_stream(self, other):
        event = Event(self.device)
        event.record(other)
        event.wait(self)


class Memory:
    """In the place of a tensor; memory that is given back is the next to be taken."""

    def __init__(self, device, value=None, free=None):
        self.device, self.free = device, free
        self.cell = free.pop() if free else [value]

    def __del__(self):
        if self.free is not None:
            self.free.append(self.cell)

    def contiguous(self):
        return self

    def copy_(self, other, non_blocking):
        assert non_blocking
        self.device.add(lambda to=self.cell, of=other.cell: to.__setitem__(0, of[0]))


@pytest.mark.parametrize("seed", range(20))
def test_events_suffice_for_any_timing(seed):
    device, free, seen = Device(), [], []
    stream = Streamed.__new__(Streamed)
    stream.of, stream.copies_in, stream.copies_out = device, Stream(device), Stream(device)
    stream.chunks = [[Memory(device, (name, number)) for name in ("q", "k", "v", None)] for number in range(5)]
    stream.slots = [[Memory(device) for _ in range(3)] for _ in range(2)]

    def function(*inputs):
        result, cells = Memory(device, free=free), [x.cell for x in inputs]
        device.add(lambda to=result.cell: to.__setitem__(0, [cell[0] for cell in cells]))
        return result

    for _ in range(2):
        stream(function)
        device.add(lambda: seen.extend(chunk[-1].cell[0] for chunk in stream.chunks))
        device.add(lambda: [chunk[-1].cell.__setitem__(0, None) for chunk in stream.chunks])
    device.run(random.Random(seed).choice)
    assert len(free) == 2  # no memory but that of two results was taken
    assert seen == 2 * [[("q", number), ("k", number), ("v", number)] for number in range(5)]
