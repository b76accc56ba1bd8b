# SPDX-License-Identifier: Apache-2.0
"""An order of the columns that the caller brings: strategy `given`, and order= with the others."""

import itertools
import json

import pytest
import torch

from distrattention import Settings, flash_attn_func, ops, replace_sdpa, report, scaled_dot_product_attention

B, HQ, HKV, N, D, L = 2, 4, 2, 200, 16, 64


def random_order(batch, blocks, dtype=torch.int64):
    return torch.rand(batch, HQ, blocks, D).argsort(-1).to(dtype)


@pytest.fixture
def qkv(problem):
    return problem(B, HQ, HKV, N, d=D, grad=True)


@pytest.mark.parametrize(
    ("batch", "blocks", "dtype", "causal", "size"),
    [
        *itertools.product((1, B), (1, 4), (torch.int64,), (False, True), (2,)),
        (B, 4, torch.int32, False, 3),
    ],
)
def test_values_and_gradients_are_the_textbooks(qkv, textbook, batch, blocks, dtype, causal, size):
    order = random_order(batch, blocks, dtype)
    settings = dict(strategy="given", group_size=size, block_size=L)
    out, lse = scaled_dot_product_attention(
        *qkv, is_causal=causal, enable_gqa=True, order=order, return_lse=True, **settings
    )
    expected, expected_lse = textbook(
        *qkv, causal="top_left" if causal else "none", order=order.expand(B, HQ, 4, D), **settings
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    weight = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, qkv, weight), torch.autograd.grad(expected, qkv, weight))


@pytest.mark.parametrize("strategy", ["lsh", "energy"])
def test_an_order_that_was_made_before_gives_the_bits_of_one_that_is_made(qkv, strategy):
    q, k, v = (tensor.detach().float() for tensor in qkv)
    order, _ = ops.make_grouping(q, k, "none", strategy, 2, L)
    settings = dict(strategy=strategy, group_size=2, block_size=L, enable_gqa=True)
    expected = scaled_dot_product_attention(q, k, v, **settings)
    assert torch.equal(scaled_dot_product_attention(q, k, v, order=order, **settings), expected)


def test_every_entry_takes_it(qkv):
    q, k, v = (tensor.detach() for tensor in qkv)
    settings = Settings("given", 2, L, order=random_order(1, 1))
    expected = scaled_dot_product_attention(q, k, v, enable_gqa=True, **settings.asdict())
    flash = flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)), **settings.asdict())
    assert torch.equal(flash.transpose(1, 2), expected)
    with replace_sdpa(**settings.asdict()):
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), expected)
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, enable_gqa=True, **settings.asdict()), expected)


def test_report_measures_it():
    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    settings = Settings("given", 2, order=random_order(1, 1))
    found = report(Model().eval(), torch.randn(1, HQ, 100, D), [settings], repeats=1)
    (layer,) = found.layers
    assert json.loads(found.json())["settings"][0]["order"] == [1, HQ, 1, D]
    assert 0 < layer.measurements[0].error < 2


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        (dict(strategy="given"), ValueError, "order None; allowed: a tensor"),
        (dict(strategy="given", order=[[0, 1]]), TypeError, "order is of type list; allowed: None or a torch.Tensor"),
        (dict(strategy="given", order=torch.zeros(1, HQ, 1, D)), TypeError, "float32; allowed: int64, int32"),
        (dict(strategy="given", order=torch.arange(D)), ValueError, "order has 1 axis; allowed: 4"),
        (dict(strategy="exact", order=random_order(1, 1)), ValueError, "'exact'; allowed: lsh, energy, given"),
        (dict(strategy="auto", order=random_order(1, 1)), ValueError, "'auto'; allowed: lsh, energy, given"),
        (dict(strategy="given", order=random_order(1, 3)), ValueError, "allowed: .2 or 1, 4, 4 or 1, 16."),
        (dict(strategy="given", order=random_order(3, 1)), ValueError, "allowed: .2 or 1, 4, 4 or 1, 16."),
        (dict(strategy="given", order=0 * random_order(1, 1)), RuntimeError, "no permutation: it has 0 at position 1"),
    ],
)
def test_what_does_not_fit_is_refused(qkv, keywords, error, message):
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(*qkv, enable_gqa=True, block_size=L, **keywords)


def test_there_is_no_order_to_make(qkv):
    with pytest.raises(RuntimeError, match="has nothing to compute, as the caller brings the order"):
        ops.make_grouping(*qkv[:2], "none", "given", 2, L)


def test_settings_with_one_order_are_equal():
    order = random_order(1, 1)
    assert Settings("given", order=order) == Settings("given", order=order)
    assert hash(Settings("given", order=order)) == hash(Settings("given", order=order))
    assert Settings("given", order=order) != Settings("given", order=order.clone())
