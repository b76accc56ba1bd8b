# SPDX-License-Identifier: Apache-2.0
"""One more logit a head in the denominator: against a softmax over the scores and the logit, and its gradients."""

import pytest
import torch

from distrattention import Settings, flash_attn_func, flash_attn_varlen_func, scaled_dot_product_attention

F64 = torch.float64


def spelled_out(q, k, v, logits, mask=None):
    """softmax over [scores, logit] without the logit's column, times V."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    column = logits[:, None, None].expand(*scores.shape[:-1], 1)
    both = torch.cat((scores, column), -1)
    return both.softmax(-1)[..., :-1] @ v, both.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
def test_exact_is_a_softmax_with_one_more_column(problem, causal):
    leaves = [tensor.requires_grad_() for tensor in problem(batch=2, heads=4, heads_kv=4, n=37, d=8, dtype=F64)]
    logits = torch.randn(4, dtype=F64, requires_grad=True)
    mask = torch.ones(37, 37, dtype=torch.bool).tril() if causal else None
    options = {"is_causal": causal, "strategy": "exact", "return_lse": True}
    found = scaled_dot_product_attention(*leaves, sink_logits=logits, **options)
    wanted = spelled_out(*leaves, logits, mask)
    weights = [torch.randn_like(tensor) for tensor in wanted]
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other)
    gradients = [torch.autograd.grad(both, (*leaves, logits), weights) for both in (found, wanted)]
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "settings", [Settings("energy", 2, 16), Settings("lsh", 2, 16), Settings("energy", 2, window=0)]
)
def test_an_approximation_has_the_logit_as_well(problem, settings):
    q, k, v = problem(heads=2, heads_kv=2, n=200, d=8, dtype=F64)
    logits = torch.tensor([0.5, 3.0], dtype=F64)
    found = scaled_dot_product_attention(q, k, v, settings=settings, sink_logits=logits)
    out, lse = scaled_dot_product_attention(q, k, v, settings=settings, return_lse=True)
    share = lse.exp() / (lse.exp() + logits.exp()[:, None])
    torch.testing.assert_close(found, out * share[..., None])


def test_logits_at_the_ends(problem):
    """-inf changes nothing, and a large one leaves nothing; a row that sees no key is 0 with any, and has gradients."""
    q, k, v = (tensor.requires_grad_() for tensor in problem(heads=3, heads_kv=3, n=20, d=8, dtype=F64))
    logits = torch.tensor([-torch.inf, 1e9, 0.0], dtype=F64, requires_grad=True)
    mask = torch.ones(20, 20, dtype=torch.bool)
    mask[5] = False
    out, lse = scaled_dot_product_attention(q, k, v, mask, strategy="exact", sink_logits=logits, return_lse=True)
    plain = scaled_dot_product_attention(q, k, v, mask, strategy="exact")
    torch.testing.assert_close(out[:, 0], plain[:, 0])
    assert (out[:, 1] == 0).all() and (out[:, :, 5] == 0).all() and lse[0, 2, 5] == 0
    assert all(tensor.isfinite().all() for tensor in torch.autograd.grad(out.sum(), (q, k, v, logits)))


def test_the_flash_functions_take_it(problem):
    q, k, v = problem(batch=1, heads=4, heads_kv=2, n=30, d=8, dtype=F64)
    logits = torch.randn(4, dtype=F64)
    options = {"strategy": "exact", "sink_logits": logits, "is_causal": True, "enable_gqa": True}
    wanted = scaled_dot_product_attention(q, k, v, **options)
    rows = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    call = {"causal": True, "strategy": "exact", "learnable_sink": logits}
    torch.testing.assert_close(flash_attn_func(*rows, **call), wanted.transpose(1, 2))
    starts = torch.tensor([0, 30], dtype=torch.int32)
    packed = flash_attn_varlen_func(*(tensor[0] for tensor in rows), starts, starts, 30, 30, **call)
    torch.testing.assert_close(packed, wanted.transpose(1, 2)[0])


@pytest.mark.parametrize(
    ("logits", "error", "words"),
    [
        (torch.zeros(3), ValueError, r"sink_logits is \[3\]; allowed: \[2\]"),
        (torch.zeros(2, dtype=torch.int64), TypeError, "sink_logits is a tensor of torch.int64; allowed"),
        (0.0, TypeError, "sink_logits is float; allowed"),
        (torch.zeros(2, device="meta"), TypeError, "sink_logits is on meta; allowed: cpu"),
    ],
)
def test_what_is_no_logit_of_each_head_is_refused(problem, logits, error, words):
    with pytest.raises(error, match=words):
        scaled_dot_product_attention(*problem(heads=2, heads_kv=2, n=8, d=4), sink_logits=logits)
