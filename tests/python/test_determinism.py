# SPDX-License-Identifier: Apache-2.0
"""allow_nondeterministic_backward(): what reaches the operator, and who overrides it."""

import contextlib

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import distrattention
from distrattention import flash_attn_func, ops, scaled_dot_product_attention

NONDETERMINISTIC = ("none", None, "exact", 1, 128, "mean", "own", None, 0, None, 0.0, False, False)
PLACE = 23  # of `deterministic` among the arguments of the backward

on_gpu = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(ops.describe().cuda_build == "none", reason="the package was built without CUDA"),
]


@pytest.fixture(autouse=True)
def defaults():
    yield
    distrattention.allow_nondeterministic_backward(False)
    torch.use_deterministic_algorithms(False)


class Watch(TorchDispatchMode):
    """`deterministic` of every backward within the block."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is torch.ops.distrattention.backward.default:
            self.seen.append(arguments[PLACE] if len(arguments) > PLACE else True)  # defaults are left out
        return function(*arguments, **(keywords or {}))


@pytest.fixture(params=[contextlib.nullcontext, Watch], ids=["attend", "forward"])
def called_in(request):
    """What attention is called in: eager code takes `attend`, and in a mode the operators of compiled code."""
    return request.param


def leaves(**options):
    return [torch.randn(1, 2, 24, 8, requires_grad=True, **options) for _ in range(3)]


def seen_in_backward(out):
    with Watch() as watch:
        out.sum().backward()
    assert len(watch.seen) == 1
    return watch.seen[0]


def attention(called_in, function=scaled_dot_product_attention, **settings):
    with called_in():
        return function(*leaves(), **settings)


def test_both_ways_are_taken(called_in):
    name = "_AttendBackward" if called_in is contextlib.nullcontext else "_ForwardBackward"
    assert attention(called_in).grad_fn.name() == name


def test_a_backward_is_deterministic_unless_allowed_otherwise(called_in):
    assert not distrattention.is_nondeterministic_backward_allowed()
    assert seen_in_backward(attention(called_in)) is True
    distrattention.allow_nondeterministic_backward()
    assert distrattention.is_nondeterministic_backward_allowed()
    assert seen_in_backward(attention(called_in)) is False
    assert seen_in_backward(attention(called_in, strategy="energy", group_size=2)) is False
    assert seen_in_backward(attention(called_in, flash_attn_func)) is False
    distrattention.allow_nondeterministic_backward(False)
    assert seen_in_backward(attention(called_in)) is True


def test_the_choice_is_made_with_the_forward(called_in):
    out = attention(called_in)
    distrattention.allow_nondeterministic_backward()
    other = attention(called_in)
    distrattention.allow_nondeterministic_backward(False)
    assert seen_in_backward(out) is True and seen_in_backward(other) is False


@pytest.mark.parametrize("settings", [(), NONDETERMINISTIC])
def test_the_operator_goes_by_its_argument(settings):
    assert seen_in_backward(ops.forward(*leaves(), None, None, None, *settings)[0]) is not bool(settings)
    out, _ = ops.forward(*leaves(), None, None, None, *settings)
    torch.use_deterministic_algorithms(True)
    assert seen_in_backward(out) is True


@pytest.mark.parametrize("warn_only", [False, True])
def test_torch_overrides_it(warn_only, called_in):
    distrattention.allow_nondeterministic_backward()
    out = attention(called_in)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    assert not distrattention.is_nondeterministic_backward_allowed()
    assert seen_in_backward(out) is True


def test_deterministic_of_flash_attention_overrides_it(called_in):
    distrattention.allow_nondeterministic_backward()
    assert seen_in_backward(attention(called_in, flash_attn_func, deterministic=True)) is True


def test_compiled_code_follows():
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    for allowed in (False, True, False):
        distrattention.allow_nondeterministic_backward(allowed)
        assert seen_in_backward(compiled(*leaves())) is not allowed


def test_compiled_autograd_follows(called_in):
    torch._dynamo.reset()
    seen = []

    def backend(graph, _):
        calls = [node for node in graph.graph.nodes if "distrattention.backward" in str(node.target)]
        seen.extend(call.args[PLACE] if len(call.args) > PLACE else True for call in calls)
        return graph

    for allowed, overridden in ((False, False), (True, False), (True, True)):
        distrattention.allow_nondeterministic_backward(allowed)
        out = attention(called_in)
        torch.use_deterministic_algorithms(overridden)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
            out.sum().backward()
    assert seen == [True, False, True]


@pytest.mark.parametrize("mode", [0, 1, None, "yes"])
def test_other_modes_are_refused(mode):
    with pytest.raises(TypeError, match="allowed: True or False"):
        distrattention.allow_nondeterministic_backward(mode)
    assert not distrattention.is_nondeterministic_backward_allowed()


def test_the_cpu_is_deterministic_anyway():
    tensors = leaves()
    wanted = torch.autograd.grad(scaled_dot_product_attention(*tensors).sum(), tensors)
    distrattention.allow_nondeterministic_backward()
    assert distrattention.explain(*tensors, operation="backward")["kernel"] == "cpu/backward"
    assert all(map(torch.equal, torch.autograd.grad(scaled_dot_product_attention(*tensors).sum(), tensors), wanted))


@pytest.mark.parametrize("settings", [dict(strategy="exact"), dict(strategy="lsh", group_size=2, is_causal=True)])
@pytest.mark.parametrize("_", [pytest.param(None, marks=on_gpu)])
def test_on_a_gpu_dq_is_the_same_but_for_rounding(settings, _):
    tensors = [torch.randn(2, 4, 500, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def gradients():
        out = scaled_dot_product_attention(*tensors, **settings)
        return torch.autograd.grad(out, tensors, torch.ones_like(out))

    def kernel():
        return distrattention.explain(*tensors, operation="backward", **settings)["kernel"]

    ordered = "sm90/backward" if torch.cuda.get_device_capability()[0] == 9 else "sm80/backward"
    wanted = gradients()
    assert kernel() == ordered
    distrattention.allow_nondeterministic_backward()
    assert kernel() == ordered + "_atomics"
    d_q, d_k, d_v = gradients()
    assert torch.equal(d_k, wanted[1]) and torch.equal(d_v, wanted[2])
    # Two roundings of almost the same sum are neighbours: 2^-7 of the largest.
    assert (d_q - wanted[0]).abs().max() <= 2**-7 * wanted[0].abs().max()
    torch.use_deterministic_algorithms(True)
    assert kernel() == ordered and all(map(torch.equal, gradients(), wanted))
