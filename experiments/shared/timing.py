# SPDX-License-Identifier: Apache-2.0
"""Times: CUDA events on a GPU, the wall clock elsewhere."""

import math
import statistics
import time

import torch


def once(function, device):
    """Milliseconds of one call, what it launches included."""
    if device.startswith("cuda"):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1000


def times(functions, device, rounds=20, warm_up=3, seconds=math.inf):
    """{name: {"ms": median, "ms_min", "ms_max", "ms_cold": of the very first call}} of functions that are called by
    turns. One that runs out of memory, or that refuses, has {"error": in words} instead. seconds: one that has taken so
    long, warm-up apart, is called no more."""
    found, errors, cold = {name: [] for name in functions}, {}, {}
    for number in range(warm_up + rounds):
        for name, function in functions.items():
            if name in errors or sum(found[name]) > 1000 * seconds:
                continue
            try:
                ms = once(function, device)
            except (torch.cuda.OutOfMemoryError, NotImplementedError, ValueError, RuntimeError) as error:
                errors[name] = "out of memory" if "out of memory" in str(error) else str(error).splitlines()[0]
                if device.startswith("cuda"):
                    torch.cuda.empty_cache()
                continue
            cold.setdefault(name, ms)
            if number >= warm_up:
                found[name].append(ms)
    return {
        name: {"error": errors[name]} if name in errors else
        {"ms": statistics.median(of), "ms_min": min(of), "ms_max": max(of), "ms_cold": cold[name]}
        for name, of in found.items()
    }  # fmt: skip
