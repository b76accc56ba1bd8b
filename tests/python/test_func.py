# SPDX-License-Identifier: Apache-2.0
"""Gradients by torch.func are those of torch.autograd."""

import pytest
import torch
from torch.func import grad, hessian, jacrev, vjp, vmap

from distrattention import flash_attn_func, scaled_dot_product_attention

GROUPED = {"group_size": 2, "block_size": 16}
KINDS = {
    "exact": {"strategy": "exact"},
    "lsh": {"strategy": "lsh", **GROUPED},
    "energy": {"strategy": "energy", **GROUPED},
    "causal": {"strategy": "energy", **GROUPED, "is_causal": True},  # the order of the previous block
    "mask": {"strategy": "energy", **GROUPED, "attn_mask": torch.randn(40, 40, dtype=torch.float64)},
}


@pytest.fixture
def qkv(problem):
    return problem(batch=3, heads=2, n=40, d=8)


def loss_with(kind):
    def loss(q, k, v):
        out, lse = scaled_dot_product_attention(q, k, v, return_lse=True, **KINDS[kind])
        return (out * v).sum() + lse.square().sum()

    return loss


def by_autograd(loss, *inputs):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(loss(*leaves), leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_grad_vjp_and_jacrev(kind, qkv):
    loss = loss_with(kind)
    wanted = by_autograd(loss, *qkv)
    assert all(map(torch.equal, grad(loss, argnums=(0, 1, 2))(*qkv), wanted))
    _, pull = vjp(loss, *qkv)
    assert all(map(torch.equal, pull(torch.ones((), dtype=torch.float64)), wanted))
    assert torch.equal(jacrev(loss)(*qkv), wanted[0])


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_of_grad_and_grad_of_vmap(kind, qkv):
    """Gradients for each sample, and the gradient of all samples' sum."""
    loss = loss_with(kind)
    wanted = by_autograd(loss, *qkv)

    def of_one(q, k, v):
        return loss(q[None], k[None], v[None])

    for found in (
        vmap(grad(of_one, argnums=(0, 1, 2)))(*qkv),
        grad(lambda *inputs: vmap(of_one)(*inputs).sum(), argnums=(0, 1, 2))(*qkv),
    ):
        for x, y in zip(found, wanted):
            torch.testing.assert_close(x, y)


def test_the_gradient_of_a_mask(qkv):
    mask = torch.randn(2, 1, 40, dtype=torch.float64)

    def loss(mask):
        return scaled_dot_product_attention(*qkv, mask, strategy="lsh", **GROUPED).square().sum()

    assert torch.equal(grad(loss)(mask), *by_autograd(loss, mask))


def test_flash(qkv):
    def loss(q, k, v):
        return flash_attn_func(q, k, v, causal=True, strategy="energy", **GROUPED).square().sum()

    qkv = [tensor.transpose(1, 2) for tensor in qkv]
    assert torch.equal(grad(loss)(*qkv), by_autograd(loss, *qkv)[0])


def test_second_derivatives_and_forward_mode_are_refused_by_name(qkv):
    q, k, v = qkv
    loss = loss_with("energy")
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        grad(lambda q: grad(loss)(q, k, v).sum())(q)
    with pytest.raises(NotImplementedError, match="no forward-mode"):
        hessian(loss)(q, k, v)
