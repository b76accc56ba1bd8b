# SPDX-License-Identifier: Apache-2.0
"""No tensor has an element for every pair of a query and a key: memory at a length where one would show."""

from programs import run_python

N = 12288
BOUND = N * N // 2  # bytes: a boolean for every pair would take twice as much

MEASURE = """
import ctypes
import sys
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
import distrattention

# Tensors go back to the system when they are freed (M_MMAP_THRESHOLD). Else the heap keeps fragments of one call, now
# more and now less, and the next call's peak has them.
assert ctypes.CDLL(None).mallopt(-3, 1 << 16) == 1

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

def run(function, n, masked=False, **settings):
    q, k, v = (torch.randn(1, 1, n, 64, requires_grad=True) for _ in range(3))
    bias = torch.randn(n, requires_grad=True) if masked else None
    out = function(q, k, v, bias, **settings)
    out.backward(torch.ones_like(out))
    assert all(leaf.grad.isfinite().all() for leaf in (q, k, v))

def all_scores(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        sdpa(q, k, v)

ours = distrattention.scaled_dot_product_attention
calls = {
    "exact": lambda n: run(ours, n, strategy="exact"),
    "exact, causal": lambda n: run(ours, n, strategy="exact", is_causal=True),
    "exact, a mask that requires a gradient": lambda n: run(ours, n, masked=True, strategy="exact"),
    "lsh": lambda n: run(ours, n, strategy="lsh", group_size=4),
    "energy, causal": lambda n: run(ours, n, strategy="energy", group_size=4, is_causal=True),
    "auto": lambda n: run(ours, n, group_size=2),
    "N x N scores": lambda n: all_scores(*torch.randn(3, 1, 1, n, 64)),
}
for name in sys.argv[2:]:
    calls[name](300)  # libraries, threads, allocator
before = peak()
for name in sys.argv[2:]:
    calls[name](int(sys.argv[1]))
    print(peak() - before)
"""


def memory_of(*calls):
    """Bytes that the process's peak grew by while the calls, forward and backward, ran one after the other."""
    done = run_python("-c", MEASURE, N, *calls)
    assert done.returncode == 0, done.stderr
    return dict(zip(calls, map(int, done.stdout.split())))


def test_memory_does_not_grow_with_the_square():
    calls = "exact", "exact, causal", "exact, a mask that requires a gradient", "lsh", "energy, causal", "auto"
    grown = memory_of(*calls)
    assert len(grown) == len(calls) and max(grown.values()) < BOUND, grown


def test_the_bound_sees_a_square():
    """The same measurement of PyTorch's own path that holds all scores, forward alone."""
    assert memory_of("N x N scores")["N x N scores"] > 4 * BOUND
