# SPDX-License-Identifier: Apache-2.0
"""A call is validated, resolved and its kernel chosen once, on every path from Python."""

import pytest
import torch

from distrattention import flash_attn_func, ops, scaled_dot_product_attention


def decisions_of(call):
    before = ops.decisions()
    call()
    return tuple(now - then for now, then in zip(ops.decisions(), before))


@pytest.mark.parametrize("settings", [{}, {"strategy": "exact"}, {"group_size": 2}, {"strategy": "lsh"}])
@pytest.mark.parametrize("entry", [scaled_dot_product_attention, flash_attn_func])
def test_a_forward_decides_once(problem, entry, settings):
    q, k, v = problem(dtype=torch.float32)
    grouped = settings.get("strategy") == "lsh"
    assert decisions_of(lambda: entry(q, k, v, **settings)) == (1, 1, 2 if grouped else 1)  # an order has a kernel too


@pytest.mark.parametrize("strategy", ["exact", "energy"])
def test_a_backward_decides_once(problem, strategy):
    qkv = problem(dtype=torch.float32, grad=True)
    out = scaled_dot_product_attention(*qkv, strategy=strategy)
    assert decisions_of(lambda: torch.autograd.grad(out, qkv, torch.ones_like(out))) == (1, 1, 1)
