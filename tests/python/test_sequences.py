# SPDX-License-Identifier: Apache-2.0
"""The operators whose lengths are data: torch's own checks, numerical gradients, flops, refusals."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from distrattention import sequences

F64 = torch.float64
STARTS_Q = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
STARTS_K = torch.tensor([0, 4, 6, 11], dtype=torch.int32)


def packed(grad=True):
    shapes = (8, 4, 5), (11, 2, 5), (11, 2, 3)
    return [torch.randn(shape, dtype=F64, requires_grad=grad) for shape in shapes]


def cache(length=12):
    q, k, v = torch.randn(2, 4, 3, 5), torch.randn(2, 2, length, 5), torch.randn(2, 2, length, 4)
    return q, k, v, torch.tensor([7, 12], dtype=torch.int32)


@pytest.mark.parametrize("window", [(None, None), (2, 1)])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_packed_passes_torchs_checks(causal, window):
    tensors = (*packed(), STARTS_Q, STARTS_K)
    settings = {"causal": causal, "scale": 0.4, "window_left": window[0], "window_right": window[1]}
    torch.library.opcheck(sequences.attend_packed.default, (*tensors, 5, 5), settings)

    def attend(q, k, v):
        return sequences.attend_packed(q, k, v, STARTS_Q, STARTS_K, 5, 5, *settings.values())

    assert torch.autograd.gradcheck(attend, tensors[:3])


def test_a_cache_passes_torchs_checks():
    torch.library.opcheck(sequences.attend_cache.default, cache(), {"causal": "bottom_right"})


def test_gradients_have_the_layout_of_their_tensors():
    q, k, v = packed(grad=False)
    q = q.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()  # heads first in memory
    out, _ = sequences.attend_packed(q, k, v, STARTS_Q, STARTS_K, 5, 5)
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.stride() == q.stride()


def test_torch_func_gives_the_same():
    leaves = [x.detach() for x in packed()]

    def loss(*tensors):
        out, lse = sequences.attend(*tensors, STARTS_Q, STARTS_K, 5, 5, "bottom_right", None, (2, None), 1.5)
        return out.square().sum() + lse[:, 3:].sum()

    given = [x.clone().requires_grad_() for x in leaves]
    wanted = torch.autograd.grad(loss(*given), given)
    gradients = torch.func.grad(loss, argnums=(0, 1, 2))
    assert all(map(torch.equal, gradients(*leaves), wanted))
    assert all(map(torch.equal, torch.func.vmap(gradients)(*(x[None] for x in leaves)), (x[None] for x in wanted)))
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, *leaves[1:]).sum())(leaves[0])


def test_flops_are_those_of_the_longest():
    q, k, v = packed()
    with FlopCounterMode(display=False) as counter:
        out, _ = sequences.attend_packed(q, k, v, STARTS_Q, STARTS_K, 5, 6)
    forward = counter.get_total_flops()
    assert forward == 2 * 3 * 4 * 5 * 6 * (5 + 3)
    with counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 3 * 4 * 5 * 6 * (3 * 5 + 2 * 3)
    with counter:
        sequences.attend_cache(*cache())
    assert counter.get_total_flops() == 2 * 2 * 4 * 3 * 12 * (5 + 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"starts_q": STARTS_Q.long()}, "the dtype of the starts of the sequences of q is Long; allowed: Int"),
        ({"starts_k": STARTS_K[:2]}, r"the shape of the starts of the sequences of k is \[2\]; allowed: \[4\]"),
        ({"starts_k": STARTS_K - 1}, r"starts_k\[0\] is -1; allowed: 0"),
        ({"longest_k": 4}, r"starts_k\[3\] - starts_k\[2\] is 5; allowed: 0 to 4"),
        ({"q": torch.zeros(8, 5, dtype=F64)}, r"q has 2 axes; allowed: 3, \[rows, heads, columns\]"),
    ],
)
def test_refused_by_name(changes, words):
    names = ("q", "k", "v", "starts_q", "starts_k", "longest_q", "longest_k")
    arguments = dict(zip(names, (*packed(grad=False), STARTS_Q, STARTS_K, 5, 5))) | changes
    with pytest.raises(RuntimeError, match=words):
        sequences.attend_packed(*arguments.values())


def test_a_cache_has_no_gradients():
    q, *others = cache()
    out, _ = sequences.attend_cache(q.requires_grad_(), *others)
    with pytest.raises(NotImplementedError, match="attention to a cache has no gradients"):
        out.sum().backward()
