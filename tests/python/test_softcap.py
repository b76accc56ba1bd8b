# SPDX-License-Identifier: Apache-2.0
"""Capped scores of scaled_dot_product_attention against the equations written out in torch."""

import pytest
import torch

from distrattention import Settings, explain, ops, scaled_dot_product_attention


def tensors(n=40, m=70, heads_kv=2, dtype=torch.float32, grad=False):
    shapes = (2, 4, n, 16), (2, heads_kv, m, 16), (2, heads_kv, m, 8)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def spelled_out(q, k, v, softcap, mask=None):
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = softcap * torch.tanh(q @ k.transpose(2, 3) * q.shape[3] ** -0.5 / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(3) @ v, scores.logsumexp(3)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("softcap", [0.1, 1, 50.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_values_and_gradients(is_causal, softcap, dtype, tolerance):
    leaves = tensors(dtype=dtype, grad=True)
    options = {"is_causal": is_causal, "enable_gqa": True, "return_lse": True}
    found = scaled_dot_product_attention(*leaves, softcap=softcap, **options)
    mask = torch.ones(40, 70, dtype=torch.bool).tril() if is_causal else None
    expected = spelled_out(*leaves, softcap, mask)
    weights = [torch.randn_like(result) for result in found]
    for actual, wanted in zip(found, expected):
        torch.testing.assert_close(actual, wanted, atol=tolerance, rtol=tolerance)
    gradients = (torch.autograd.grad(results, leaves, weights) for results in (found, expected))
    for actual, wanted in zip(*gradients):
        torch.testing.assert_close(actual, wanted, atol=20 * tolerance, rtol=20 * tolerance)


def test_gradients_are_those_of_finite_differences():
    q, k, v = (x[:1, :, :9] for x in tensors(dtype=torch.float64))
    bias = torch.randn(4, 9, 9, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]

    def run(*leaves, **fields):
        return scaled_dot_product_attention(*leaves, enable_gqa=True, softcap=0.7, return_lse=True, **fields)

    assert torch.autograd.gradcheck(run, leaves)
    order = torch.randperm(16).expand(1, 4, 1, 16)
    assert torch.autograd.gradcheck(lambda *x: run(*x, strategy="lsh", group_size=2, order=order), leaves)


def test_a_mask_comes_behind_the_cap_and_gets_its_gradient():
    q, k, v = tensors()
    bias = torch.randn(4, 40, 70).masked_fill(torch.rand(40, 70) > 0.8, -torch.inf).requires_grad_()
    out = scaled_dot_product_attention(q, k, v, bias, enable_gqa=True, softcap=1.0)
    expected, _ = spelled_out(q, k, v, 1.0, bias)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)
    actual, wanted = (torch.autograd.grad(result.square().sum(), bias)[0] for result in (out, expected))
    torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=2e-5)


def test_a_cap_far_above_the_scores_changes_nothing():
    q, k, v = tensors(heads_kv=4)
    capped = scaled_dot_product_attention(q, k, v, softcap=1e6)
    torch.testing.assert_close(capped, scaled_dot_product_attention(q, k, v), atol=1e-6, rtol=1e-5)
    plain = scaled_dot_product_attention(q, k, v)
    assert all(torch.equal(scaled_dot_product_attention(q, k, v, softcap=off), plain) for off in (0, 0.0, None))


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_way_to_the_operators_gives_the_same(is_causal):
    q, k, v = tensors(50, 50, heads_kv=4)

    def run(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, softcap=1.5)

    def gradients(*leaves):
        return torch.func.grad(lambda *leaves: run(*leaves).square().sum(), argnums=(0, 1, 2))(*leaves)

    wanted = run(q, k, v)
    assert not torch.allclose(wanted, scaled_dot_product_attention(q, k, v, is_causal=is_causal), atol=1e-3)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(q, k, v), wanted)
    assert torch.equal(torch.func.vmap(run)(*(x[:, None] for x in (q, k, v)))[:, 0], wanted)
    assert torch.equal(run(*(x[0] for x in (q, k, v))), wanted[0])  # of three axes
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    of_compiled = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
    for found in (gradients(q, k, v), of_compiled):
        assert all(map(torch.equal, found, expected))


def test_a_compiled_call_may_change_its_cap():
    q, k, v = tensors(heads_kv=4)
    compiled = torch.compile(
        lambda softcap: scaled_dot_product_attention(q, k, v, softcap=softcap), fullgraph=True, backend="eager"
    )
    for softcap in (1.0, 2.0, 3.0, 0.0):
        assert torch.equal(compiled(softcap), scaled_dot_product_attention(q, k, v, softcap=softcap))


def test_the_operators_pass_torchs_checks():
    q, k, v = tensors(30, 40, heads_kv=4, grad=True)
    grouping, near = ("exact", 1, 128, "mean", "own"), (None, 0, None, 0.0, False)
    settings = ("none", None, *grouping, *near, True, None, None, None, None, 1.5)
    torch.library.opcheck(torch.ops.distrattention.forward.default, (q, k, v, None, None, None, *settings))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = ops.forward(q, k, v, None, None, None, *settings)
    saved = (torch.randn_like(out), None, q, k, v, None, None, None, out, lse, False)
    torch.library.opcheck(torch.ops.distrattention.backward.default, (*saved, *settings))
    packed = (ops.pack("none", "exact", 1, 128, "mean", "own"), 0, None, 0.0, 0, 0)
    arguments = (q, k, v, None, None, *packed, True, 1.5)
    torch.library.opcheck(torch.ops.distrattention.attend.default, arguments)
    assert torch.equal(ops.attend(*arguments)[0], out)


def test_auto_is_exact_and_says_why():
    q, k, v = (torch.randn(1, 1, 2048, 64) for _ in range(3))
    found = explain(q, k, v, group_size=2, softcap=50.0)
    assert (found["strategy"], found["choice"]) == (
        "exact", "exact, as no approximation has been measured with capped scores",
    )  # fmt: skip
    exact = scaled_dot_product_attention(q, k, v, softcap=2.0)
    assert torch.equal(scaled_dot_product_attention(q, k, v, group_size=2, softcap=2.0), exact)


@pytest.mark.parametrize("softcap, error, message", [
    ("x", TypeError, "softcap is of type str; allowed: None or a number"),
    (-1.0, ValueError, r"softcap is -1.0; allowed: 0 \(scores are not capped\), or a positive number"),
    (1e-40, ValueError, "softcap is 1e-40; allowed: 0"),
    (float("nan"), ValueError, "softcap is nan; allowed: a finite number"),
    (float("inf"), ValueError, "softcap is inf; allowed: a finite number"),
])  # fmt: skip
@pytest.mark.parametrize("call", [scaled_dot_product_attention, explain])
def test_bad_caps_are_refused(call, softcap, error, message):
    with pytest.raises(error, match=message):
        call(*tensors(heads_kv=4), softcap=softcap)


def test_skip_is_refused():
    with pytest.raises(RuntimeError, match="softcap is 2 with skip, which is 0.1.*; allowed: one of them"):
        scaled_dot_product_attention(*tensors(heads_kv=4), softcap=2.0, settings=Settings("exact", sinks=1, skip=0.1))
