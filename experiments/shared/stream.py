# SPDX-License-Identifier: Apache-2.0
"""Attention of heads in host memory, by chunks that go through one GPU."""

import torch


class Streamed:
    """stream(function) writes function(q, k, v) into out, `chunk` heads at a time; the current stream waits for it.

    inputs: q, k, v [1, H, N, d] in host memory, and out like q, pinned for a GPU. While one chunk is computed, in the
    current stream, the next one is copied in and the last one out, in streams of their own; a GPU holds two chunks. On
    a CPU streams and events do nothing, and all is done in the order in which it is written."""

    def __init__(self, inputs, out, chunk, device):
        self.of = torch.get_device_module(device)
        self.chunks = list(zip(*(x.split(chunk, 1) for x in (*inputs, out))))
        self.slots = [[torch.empty_like(x, device=device) for x in self.chunks[0][:-1]] for _ in range(2)]
        self.copies_in, self.copies_out = self.of.Stream(), self.of.Stream()

    def __call__(self, function):
        current = self.of.current_stream()
        arrived, computed, left = ([self.of.Event() for _ in range(2)] for _ in range(3))
        results = [None, None]
        self.copies_in.wait_stream(current)
        for number, (*inputs, out) in enumerate(self.chunks):
            slot = number % 2
            computed[slot].wait(self.copies_in)  # once the slot's last chunk has been read, if there was one
            with self.of.stream(self.copies_in):
                for buffer, x in zip(self.slots[slot], inputs):
                    buffer.copy_(x, non_blocking=True)
            arrived[slot].record(self.copies_in)
            arrived[slot].wait(current)
            left[slot].wait(current)
            results[slot] = None  # the next result takes its memory
            results[slot] = function(*self.slots[slot]).contiguous()
            computed[slot].record(current)
            computed[slot].wait(self.copies_out)
            with self.of.stream(self.copies_out):
                out.copy_(results[slot], non_blocking=True)
            left[slot].record(self.copies_out)
        current.wait_stream(self.copies_out)
