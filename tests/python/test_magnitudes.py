# SPDX-License-Identifier: Apache-2.0
"""Scores from 1e-30 to 1e30, held against PyTorch's own function in float64."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from distrattention import scaled_dot_product_attention

EXPONENTS = [-100, -30, -3, 0, 7, 13, 20, 24, 27, 30, 33, 60, 100]  # powers of 2
HALF_EXPONENTS = [-20, -10, 0, 7, 14]
CALLS = [(dtype, e) for dtype in (torch.float32, torch.bfloat16) for e in EXPONENTS]
CALLS += [(torch.float16, e) for e in HALF_EXPONENTS]


def quarters(*shape):
    """Values of so few bits that scores have no rounding, in any order of summation."""
    return (torch.randn(shape) * 4).round().clamp(-15, 15) / 4


@pytest.mark.parametrize("dtype, exponent", CALLS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_softmax_is_torchs_whatever_the_magnitude(dtype, exponent, causal):
    torch.manual_seed(1)
    q, k, v = (quarters(2, 2, 64, 64) for _ in range(3))
    q = (q * 2.0**exponent).to(dtype).requires_grad_()
    k, v = k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, strategy="exact")
    exact = sdpa(q.double(), k.double(), v.double(), is_causal=causal)
    assert (out - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()

    if dtype != torch.float16 or exponent < 14:  # dK times values of 6e4 leaves fp16's range
        gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        assert all(gradient.isfinite().all() for gradient in gradients)
