# SPDX-License-Identifier: Apache-2.0
"""Sliding windows of scaled_dot_product_attention against torch's own with the band as a mask."""

import pytest
import torch
import torch.nn.functional as F
from conftest import in_window

from distrattention import Settings, explain, ops, scaled_dot_product_attention

SIZES = [(0, 0), (9, 4), (-1, 3), (30, -1), (200, 200)]


def tensors(n=70, m=70, heads_kv=2, dtype=torch.float32, grad=False):
    shapes = (2, 4, n, 16), (2, heads_kv, m, 16), (2, heads_kv, m, 8)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def torchs(q, k, v, mask):
    """torch's attention, whose rows that see nothing are 0."""
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n, m", [(70, 70), (150, 200), (200, 140)])
def test_values_and_gradients_are_torchs(n, m, is_causal, size):
    leaves = tensors(n, m, grad=True)
    out = scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True, window_size=size)
    mask = in_window(n, m, size, 0)
    mask = mask & torch.ones(n, m, dtype=torch.bool).tril() if is_causal else mask
    expected = torchs(*leaves, mask)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)
    weight = torch.randn_like(out)
    for actual, wanted in zip(torch.autograd.grad(out, leaves, weight), torch.autograd.grad(expected, leaves, weight)):
        torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=2e-5)


def test_a_mask_goes_with_it_and_gets_its_gradient():
    q, k, v = tensors(40, 60)
    size, offset = (12, 3), 20
    seen, bias = in_window(40, 60, size, offset), torch.randn(4, 40, 60, requires_grad=True)
    options = {"enable_gqa": True, "window_size": size, "key_offset": offset}
    out, lse = scaled_dot_product_attention(q, k, v, bias, return_lse=True, **options)
    expected = torchs(q, k, v, bias.masked_fill(~seen, -torch.inf))
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)
    actual, wanted = (torch.autograd.grad(result.square().sum(), bias)[0] for result in (out, expected))
    torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=2e-5)
    assert (actual[:, ~seen] == 0).all() and lse.isfinite().all()


def test_keys_outside_may_hold_anything():
    q, k, v = tensors(100, 400, dtype=torch.float64)
    options = {"window_size": (50, 20), "key_offset": 200, "enable_gqa": True}
    wanted = scaled_dot_product_attention(q, k, v, **options)
    for tensor in (k, v):
        tensor[:, :, :150] = torch.nan
        tensor[:, :, 320:] = torch.inf
    assert torch.equal(scaled_dot_product_attention(q, k, v, **options), wanted)
    v[:, :, 319] = torch.nan  # the last key that a row sees
    assert scaled_dot_product_attention(q, k, v, **options)[:, :, -1].isnan().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_way_to_the_operators_gives_the_same(is_causal):
    q, k, v = tensors(50, 50, heads_kv=4)

    def run(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, window_size=(7, 2))

    def gradients(*leaves):
        return torch.func.grad(lambda *leaves: run(*leaves).square().sum(), argnums=(0, 1, 2))(*leaves)

    wanted = run(q, k, v)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(q, k, v), wanted)
    assert torch.equal(torch.func.vmap(run)(*(x[:, None] for x in (q, k, v)))[:, 0], wanted)
    assert torch.equal(run(*(x[0] for x in (q, k, v))), wanted[0])  # of three axes
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for actual, expected in zip(gradients(q, k, v), torch.autograd.grad(run(*leaves).square().sum(), leaves)):
        assert torch.equal(actual, expected)


def test_the_operators_pass_torchs_checks():
    q, k, v = tensors(30, 40, heads_kv=4, grad=True)
    window = ("none", None, "exact", 1, 128, "mean", "own", None, 0, 3, 0.0, False, True, None, None, 5, 2)
    torch.library.opcheck(torch.ops.distrattention.forward.default, (q, k, v, None, None, None, *window))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = ops.forward(q, k, v, None, None, None, *window)
    saved = (torch.randn_like(out), None, q, k, v, None, None, None, out, lse, False)
    torch.library.opcheck(torch.ops.distrattention.backward.default, (*saved, *window))
    packed = (ops.pack("none", "exact", 1, 128, "mean", "own"), 0, 3, 0.0, 0, ops.pack_window_size(5, 2))
    arguments = (q, k, v, None, None, *packed, True)
    torch.library.opcheck(torch.ops.distrattention.attend.default, arguments)
    assert torch.equal(ops.attend(*arguments)[0], out)


def test_auto_is_exact_and_says_why():
    q, k, v = (torch.randn(1, 1, 2048, 64) for _ in range(3))
    found = explain(q, k, v, group_size=2, window_size=(500, 0))
    assert (found["strategy"], found["choice"]) == (
        "exact", "exact, as there is a sliding window, with which no approximation was measured",
    )  # fmt: skip
    exact = scaled_dot_product_attention(q, k, v, window_size=(500, 0))
    assert torch.equal(scaled_dot_product_attention(q, k, v, group_size=2, window_size=(500, 0)), exact)
    assert explain(q, k, v, group_size=2, window_size=(2048, -1))["strategy"] == "energy"


@pytest.mark.parametrize("fields", [{"strategy": "energy", "block_size": 32}, {"strategy": "lsh", "block_size": 1000},
                                    {"strategy": "lsh", "group_size": 4}, {"strategy": "energy", "sinks": 1},
                                    {"strategy": "lsh", "block_size": 32, "window": 0}])  # fmt: skip
def test_an_approximation_is_that_of_the_band_as_a_mask(fields):
    leaves = tensors(130, 170, grad=True)
    size, offset, options = (40, 7), 30, {"enable_gqa": True, "settings": Settings(**{"group_size": 2, **fields})}
    options["key_offset"] = offset
    out = scaled_dot_product_attention(*leaves, window_size=size, **options)
    expected = scaled_dot_product_attention(*leaves, in_window(130, 170, size, offset), **options)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)
    assert not torch.allclose(out, scaled_dot_product_attention(*leaves, **options))
    weight = torch.randn_like(out)
    for actual, wanted in zip(torch.autograd.grad(out, leaves, weight), torch.autograd.grad(expected, leaves, weight)):
        torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_what_is_skipped_is_that_of_the_band_as_a_mask():
    q, k, v = tensors(130, 300, heads_kv=4)
    k[:, :, 192:] *= 0.02
    settings, size, offset = Settings("exact", sinks=1, skip=0.2), (200, 20), 160
    out = scaled_dot_product_attention(q, k, v, window_size=size, key_offset=offset, settings=settings)
    band = in_window(130, 300, size, offset)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, band, key_offset=offset, settings=settings))
    exact = scaled_dot_product_attention(q, k, v, window_size=size, key_offset=offset)
    assert not torch.allclose(out, exact, atol=1e-4)


@pytest.mark.parametrize("size, error, message", [
    (5, TypeError, r"window_size is 5; allowed: \(left, right\), or None"),
    ((1, 2, 3), TypeError, r"window_size is \(1, 2, 3\); allowed: \(left, right\)"),
    ((1.5, 2), TypeError, "window_size is 1.5; allowed: an int from -1 on"),
    ((-2, 2), ValueError, "window_size is -2; allowed: -1 to 1099511627776"),
    ((0, 2**40 + 1), ValueError, "window_size is 1099511627777; allowed"),
])  # fmt: skip
@pytest.mark.parametrize("call", [scaled_dot_product_attention, explain])
def test_bad_sizes_are_refused(call, size, error, message):
    with pytest.raises(error, match=message):
        call(*tensors(heads_kv=4), window_size=size)
