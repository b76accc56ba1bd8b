# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention: PyTorch's contract, held against PyTorch's own function."""

import logging
import math

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as sdpa

import distrattention
from distrattention import Settings, explain, ops, scaled_dot_product_attention

F64 = torch.float64


def randn(*shape, **options):
    return torch.randn(*shape, dtype=F64, **options)


CALLS = {  # arguments and keywords of PyTorch's function
    "4 axes": lambda: ((randn(2, 3, 50, 16), randn(2, 3, 60, 16), randn(2, 3, 60, 9)), {}),
    "3 axes": lambda: ((randn(3, 50, 16), randn(3, 60, 16), randn(3, 60, 9)), {}),
    "2 axes": lambda: ((randn(50, 16), randn(60, 16), randn(60, 9)), {}),
    "5 axes": lambda: ((randn(2, 2, 3, 50, 16), randn(2, 2, 3, 60, 16), randn(2, 2, 3, 60, 9)), {}),
    "6 axes, no batch": lambda: ([randn(2, 0, 1, 2, 5, 4)] * 3, {}),
    "causal": lambda: ([randn(2, 3, 50, 16)] * 3, {"is_causal": True}),
    "causal, more keys": lambda: ((randn(2, 3, 50, 16), randn(2, 3, 60, 16), randn(2, 3, 60, 9)), {"is_causal": True}),
    "causal, more queries": lambda: ((randn(3, 60, 8), randn(3, 50, 8), randn(3, 50, 9)), {"is_causal": True}),
    "scale": lambda: ([randn(2, 3, 50, 16)] * 3, {"scale": 0.1}),
    "negative scale": lambda: ([randn(2, 3, 50, 16)] * 3, {"scale": -0.2}),
    "one batch of keys": lambda: ((randn(4, 3, 50, 16), randn(1, 3, 60, 16), randn(4, 3, 60, 9)), {}),
    "one head of keys": lambda: ((randn(2, 3, 50, 16), randn(2, 1, 60, 16), randn(2, 1, 60, 9)), {"is_causal": True}),
    "one batch of queries": lambda: ((randn(1, 3, 50, 8), randn(2, 3, 60, 8), randn(2, 3, 60, 9)), {}),
    "one of each": lambda: ((randn(2, 1, 1, 5, 8), randn(1, 3, 1, 6, 8), randn(1, 1, 4, 6, 9)), {}),
    "gqa, one batch of keys": lambda: ((randn(2, 6, 9, 8), *[randn(1, 2, 9, 8)] * 2), {"enable_gqa": True}),
    "gqa": lambda: ((randn(2, 6, 50, 16), randn(2, 2, 60, 16), randn(2, 2, 60, 9)), {"enable_gqa": True}),
    "gqa, 3 axes": lambda: ((randn(6, 50, 16), randn(2, 60, 16), randn(2, 60, 9)), {"enable_gqa": True}),
    "gqa, causal": lambda: ((randn(2, 6, 50, 8), *[randn(2, 1, 50, 8)] * 2), {"enable_gqa": True, "is_causal": True}),
    "bool mask": lambda: ([randn(2, 3, 50, 16)] * 3, {"attn_mask": torch.rand(2, 3, 50, 50) > 0.5}),
    "bool mask, a row": lambda: ([randn(2, 3, 50, 16)] * 3, {"attn_mask": torch.rand(2, 1, 1, 50) > 0.5}),
    "bool mask, a column": lambda: ([randn(2, 3, 50, 16)] * 3, {"attn_mask": torch.rand(3, 50, 1) > 0.5}),
    "bool mask, nothing seen": lambda: ([randn(2, 3, 50, 16)] * 3, {"attn_mask": torch.zeros(50, 50).bool()}),
    "float mask": lambda: ([randn(2, 3, 50, 16)] * 3, {"attn_mask": randn(50, 50)}),
    "float mask with -inf": lambda: (
        [randn(2, 3, 50, 16)] * 3,
        {"attn_mask": randn(50, 50).masked_fill(torch.rand(50, 50) > 0.5, -torch.inf)},
    ),
    "float mask, repeated": lambda: ([randn(2, 3, 50, 16)] * 3, {"attn_mask": randn(50, 1).expand(2, 3, 50, 50)}),
    "float mask, transposed": lambda: (
        [randn(2, 3, 50, 16)] * 3,
        {"attn_mask": randn(50, 2, 50, 3).transpose(0, 3).transpose(0, 1)},
    ),
    "mask, 3 axes": lambda: ([randn(3, 50, 16)] * 3, {"attn_mask": randn(3, 50, 50)}),
    "mask, 5 axes": lambda: ([randn(2, 2, 3, 50, 16)] * 3, {"attn_mask": randn(2, 1, 3, 50, 50)}),
    "mask of 4 axes, 5 axes": lambda: ([randn(2, 4, 3, 50, 16)] * 3, {"attn_mask": randn(4, 3, 50, 50)}),
    "mask of ones before, 5 axes": lambda: ([randn(2, 2, 3, 50, 16)] * 3, {"attn_mask": randn(1, 1, 3, 50, 50)}),
    "no queries": lambda: ((randn(1, 2, 0, 8), randn(1, 2, 5, 8), randn(1, 2, 5, 8)), {}),
    "no keys": lambda: ((randn(1, 2, 5, 8), randn(1, 2, 0, 8), randn(1, 2, 0, 8)), {}),
    "one row": lambda: ((randn(2, 3, 1, 16), randn(2, 3, 60, 16), randn(2, 3, 60, 9)), {}),
    "one column": lambda: ([randn(2, 3, 9, 1)] * 3, {}),
    "512 columns": lambda: ([randn(1, 1, 9, 512)] * 3, {}),
    "views of one packed tensor": lambda: (randn(2, 50, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0), {}),
    "rows first": lambda: ([randn(2, 50, 3, 16).transpose(1, 2)] * 3, {}),
    "columns in steps": lambda: ([randn(2, 3, 50, 32)[..., ::2]] * 3, {}),
    "repeated batch": lambda: ([randn(1, 3, 50, 16).expand(2, -1, -1, -1)] * 3, {}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_exact_is_pytorchs(call, grad):
    """The same numbers as PyTorch's own function in float64, out and all gradients."""
    tensors, keywords = CALLS[call]()
    leaves = [tensor.detach().requires_grad_(grad) for tensor in tensors]
    mask = keywords.get("attn_mask")
    if grad and mask is not None and mask.is_floating_point():
        leaves.append(mask.detach().requires_grad_())
    results = []
    for function, extra in ((scaled_dot_product_attention, {"strategy": "exact"}), (sdpa, {})):
        if len(leaves) > 3:
            keywords["attn_mask"] = leaves[3]
        out = function(*leaves[:3], **keywords, **extra)
        grads = torch.autograd.grad((out * torch.arange(out.numel()).view(out.shape)).sum(), leaves) if grad else ()
        results.append((out, *grads))
    for actual, expected in zip(*results):
        assert actual.dtype == F64
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("call", ["4 axes", "causal", "gqa", "bool mask", "float mask", "views of one packed tensor"])
def test_exact_errs_no_more_than_pytorch(dtype, call, no_worse_than):
    tensors, keywords = CALLS[call]()
    mask = keywords.pop("attn_mask", None)
    narrow = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    narrow_mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    wide = [tensor.detach().to(F64).requires_grad_() for tensor in narrow]
    wide_mask = narrow_mask if mask is None or mask.dtype == torch.bool else narrow_mask.to(F64)
    results = []
    for function, inputs, this_mask in (
        (scaled_dot_product_attention, narrow, narrow_mask),
        (sdpa, wide, wide_mask),
        (sdpa, narrow, narrow_mask),
    ):
        extra = {"strategy": "exact"} if function is scaled_dot_product_attention else {}
        out = function(*inputs, attn_mask=this_mask, **keywords, **extra)
        results.append((out, *torch.autograd.grad(out.sum(), inputs)))
    for what, *values in zip(("out", "dq", "dk", "dv"), *results):
        no_worse_than(*values, what=what)


def test_no_heads():
    """By itself, for PyTorch 2.11's own function kills the process."""
    q, k, v = (torch.randn(2, 0, 5, 8, requires_grad=True) for _ in range(3))
    out = scaled_dot_product_attention(q, k, v[..., :3])
    assert out.shape == (2, 0, 5, 3)
    out.sum().backward()
    assert q.grad.shape == q.shape


def test_mask_is_the_fourth_argument():
    """Code that replaces PyTorch's function passes it by position."""
    q, k, v = (randn(1, 2, 9, 4) for _ in range(3))
    mask = torch.rand(9, 9) > 0.5
    assert torch.equal(
        scaled_dot_product_attention(q, k, v, mask, 0.0, False, strategy="exact"),
        scaled_dot_product_attention(q, k, v, attn_mask=mask, strategy="exact"),
    )


@pytest.mark.parametrize("bias, corner", [(causal_upper_left, "top_left"), (causal_lower_right, "bottom_right")])
def test_causal_bias(bias, corner, textbook):
    q, k, v = randn(1, 2, 7, 4), randn(1, 2, 9, 4), randn(1, 2, 9, 4)
    out = scaled_dot_product_attention(q, k, v, bias(7, 9), strategy="exact")
    torch.testing.assert_close(out, textbook(q, k, v, causal=corner)[0])
    with pytest.raises(ValueError, match="CausalBias for 7 queries and 8 keys; allowed: 7 and 9"):
        scaled_dot_product_attention(q, k, v, bias(7, 8))


def test_lse(textbook):
    q, k, v = (randn(2, 3, 50, 16, requires_grad=True) for _ in range(3))
    mask = torch.rand(50, 50) > 0.5
    mask[7] = False
    out, lse = scaled_dot_product_attention(q, k, v, mask, strategy="exact", return_lse=True)
    expected = textbook(q, k, v, mask)[1]
    torch.testing.assert_close(lse, expected)
    assert (lse[:, :, 7] == -torch.inf).all() and (out[:, :, 7] == 0).all()
    seen = torch.arange(50) != 7
    for tensor in (lse, expected):
        grad = torch.autograd.grad(tensor[:, :, seen].sum(), q, retain_graph=True)[0]
        torch.testing.assert_close(grad, torch.autograd.grad(expected[:, :, seen].sum(), q, retain_graph=True)[0])
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (F64, F64)):
        q, k, v = (torch.randn(2, 5, 4).to(dtype) for _ in range(3))
        lse = scaled_dot_product_attention(q, k, v, return_lse=True)[1]
        assert lse.dtype == wanted and lse.shape == (2, 5)


def test_rows_that_see_nothing_have_finite_gradients():
    q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
    mask = torch.rand(20, 20) > 0.5
    mask[3] = False
    for strategy in ("exact", "lsh", "energy"):
        out = scaled_dot_product_attention(q, k, v, mask, strategy=strategy)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(grad.isfinite().all() for grad in grads) and (grads[0][:, :, 3] == 0).all()


@pytest.mark.parametrize("strategy", ["lsh", "energy"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_approximations_are_the_textbooks(strategy, is_causal, textbook):
    """Through the whole function: its grouping, its defaults, its gradients."""
    q, k, v = randn(2, 4, 300, 12), randn(2, 2, 300, 12), randn(2, 2, 300, 5)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    causal = "top_left" if is_causal else "none"
    order_from = "previous" if is_causal else "own"
    order, _ = ops.make_grouping(q, k, causal, strategy, 3, 128, order_from, 5)
    results = []
    for out in (
        scaled_dot_product_attention(
            *leaves, None, 0.0, is_causal, None, True, strategy=strategy, group_size=3, seed=5
        ),
        textbook(*leaves, causal=causal, order=order, strategy=strategy, group_size=3, order_from=order_from)[0],
    ):
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_group_size_1_is_exact_to_the_bit():
    q, k, v = (torch.randn(2, 3, 300, 16) for _ in range(3))
    exact = scaled_dot_product_attention(q, k, v, strategy="exact")
    for strategy in ("auto", "lsh", "energy"):
        assert torch.equal(exact, scaled_dot_product_attention(q, k, v, strategy=strategy, group_size=1))


ALONE = {
    "exact": Settings("exact"),
    "energy": Settings("energy", 2),
    "lsh, short blocks": Settings("lsh", 2, block_size=3),
    "near": Settings("energy", 2, block_size=32, window=20, sinks=1),
    "skip": Settings("energy", 4, window=20, sinks=1, skip=0.01, finish=True),
    "exact, skip": Settings("exact", window=20, sinks=1, skip=0.01),
}


@pytest.mark.parametrize("settings", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_head_has_the_same_bits_alone_and_among_many(settings, dtype, is_causal):
    # The CPU's tasks have more rows where there are many heads. So few keys are not shared among tasks.
    q, k, v = (torch.randn(32, 2, 300, 16).to(dtype) for _ in range(3))
    out, lse = scaled_dot_product_attention(q, k, v, is_causal=is_causal, settings=settings, return_lse=True)
    one, its_lse = scaled_dot_product_attention(
        q[9:10], k[9:10], v[9:10], is_causal=is_causal, settings=settings, return_lse=True
    )
    assert torch.equal(out[9:10], one) and torch.equal(lse[9:10], its_lse)


def test_auto_approximates_only_where_a_group_size_is_given(caplog):
    q, k, v = (torch.randn(1, 1, 2100, 64) for _ in range(3))
    exact, energy = (scaled_dot_product_attention(q, k, v, strategy=strategy) for strategy in ("exact", "energy"))
    with caplog.at_level(logging.INFO, logger="distrattention"):
        assert torch.equal(exact, scaled_dot_product_attention(q, k, v))
    assert "a larger one is asked for" in caplog.text
    assert torch.equal(energy, scaled_dot_product_attention(q, k, v, group_size=2))  # its default where it is named
    assert not torch.equal(energy, exact)


@pytest.mark.parametrize("strategy", ["lsh", "energy"])
def test_causal_calls_take_previous_whether_gradients_are_asked_for_or_not(strategy):
    q, k, v = (torch.randn(1, 2, 400, 16) for _ in range(3))

    def run(grad, **keywords):
        return scaled_dot_product_attention(
            q.clone().requires_grad_(grad), k, v, strategy=strategy, **keywords
        ).detach()

    own, previous = (run(False, is_causal=True, order_from=order_from) for order_from in ("own", "previous"))
    assert not torch.equal(own, previous)
    assert torch.equal(run(False, is_causal=True), previous) and torch.equal(run(True, is_causal=True), previous)
    assert torch.equal(run(True, is_causal=True, order_from="own"), own)
    with torch.no_grad():
        assert torch.equal(run(True, is_causal=True), previous)
    mask = torch.ones(400, 400, dtype=torch.bool).tril()  # which does not say that it is causal
    for keywords in {}, {"attn_mask": mask}:
        assert torch.equal(run(True, **keywords), run(True, **keywords, order_from="own"))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_causal_call_of_one_block_is_exact_if_short_and_else_refused(requires_grad):
    q, k, v = (torch.randn(1, 2, 400, 16, requires_grad=requires_grad) for _ in range(3))
    for settings in dict(block_size=400), dict(block_size=10**6, order_from="previous"):
        with pytest.raises(RuntimeError, match="block is .*, one for all 400 rows of a causal call.*or order_from own"):
            scaled_dot_product_attention(q, k, v, is_causal=True, strategy="energy", **settings)
        with pytest.raises(RuntimeError, match="one for all 400 rows"):
            explain(q, k, v, is_causal=True, strategy="energy", **settings)
    own = dict(strategy="energy", block_size=400, order_from="own")
    assert explain(q, k, v, is_causal=True, **own)["choice"] == "as asked for"
    short = [tensor[:, :, :128] for tensor in (q, k, v)]
    out, exact = (
        scaled_dot_product_attention(*short, is_causal=True, strategy=strategy) for strategy in ("energy", "exact")
    )
    torch.testing.assert_close(out, exact)
    found = explain(*short, is_causal=True, strategy="energy")
    assert found["order_from"] == "previous" and found["choice"].startswith("exact, as the only block has none before")
    assert "orders come from the block before" in explain(q, k, v, is_causal=True, strategy="lsh")["choice"]
    assert explain(q, k, v, strategy="lsh")["order_from"] == "own"


def test_previous_is_strictly_causal():
    """With `previous` no output changes when later rows do; with `own` some do, so the check can fail."""
    q, k, v = (torch.randn(1, 2, 400, 16) for _ in range(3))
    changed = [tensor.clone() for tensor in (q, k, v)]
    for tensor in changed:
        tensor[:, :, 200:] += torch.randn(1, 2, 200, 16) * torch.linspace(0, 4, 16)
    for strategy in ("lsh", "energy"):
        same = {}
        for order_from in ("own", "previous"):
            settings = dict(strategy=strategy, block_size=64, order_from=order_from, is_causal=True)
            before, after = (
                scaled_dot_product_attention(*tensors, **settings)[:, :, :200] for tensors in ((q, k, v), changed)
            )
            same[order_from] = torch.equal(before, after)
        assert same == {"own": False, "previous": True}


@pytest.mark.parametrize("strategy", ["exact", "lsh", "energy"])
def test_gradients_of_rows_do_not_see_later_keys(strategy):
    """Not even NaN or infinity in them: dQ of earlier rows keeps its bits."""
    inputs = [torch.randn(1, 2, 400, 16) for _ in range(3)]

    def earlier_gradients(later):
        q, k, v = (tensor.clone() for tensor in inputs)
        k[:, :, 200:], v[:, :, 200:] = later, later
        q.requires_grad_()
        out = scaled_dot_product_attention(q, k, v, is_causal=True, strategy=strategy, block_size=64)
        out.backward(torch.ones_like(out))
        return q.grad[:, :, :200]

    finite = earlier_gradients(0.25)
    assert finite.isfinite().all() and finite.norm() > 0
    assert torch.equal(finite, earlier_gradients(-40.0))
    assert torch.equal(finite, earlier_gradients(math.nan))
    assert torch.equal(finite, earlier_gradients(math.inf))


def test_seed_and_estimator_and_block_size_matter():
    q, k, v = (torch.randn(1, 2, 400, 16) for _ in range(3))
    base = dict(strategy="lsh", group_size=2, block_size=64, estimator="mean", seed=0)
    out = scaled_dot_product_attention(q, k, v, **base)
    assert torch.equal(out, scaled_dot_product_attention(q, k, v, **base))
    for change in (
        dict(seed=1),
        dict(estimator="sample"),
        dict(block_size=128),
        dict(group_size=4),
        dict(strategy="energy"),
    ):
        assert not torch.equal(out, scaled_dot_product_attention(q, k, v, **base | change))
    one_order = scaled_dot_product_attention(q, k, v, **base | dict(block_size=400))
    assert torch.equal(one_order, scaled_dot_product_attention(q, k, v, **base | dict(block_size=2**62)))


def test_settings_are_the_keywords():
    settings = Settings("lsh", 4, 64, "sample", "previous", 3)
    q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    keywords = settings.asdict()
    assert torch.equal(
        scaled_dot_product_attention(q, k, v, **keywords),
        scaled_dot_product_attention(
            q, k, v, strategy="lsh", group_size=4, block_size=64, estimator="sample", order_from="previous", seed=3
        ),
    )
    assert hash(settings) == hash(Settings(**keywords)) and settings == Settings(**keywords)


def test_explain_says_what_auto_chooses():
    short, long = (torch.empty(1).expand(1, 2, n, 64) for n in (64, 4096))
    for tensor, reason in ((short, "64 rows or keys are too few"), (long[..., :32], "heads of head_dim 32")):
        found = distrattention.explain(tensor, tensor, tensor, group_size=2)
        assert found["choice"].startswith(f"exact, as {reason}")
    found = distrattention.explain(long, long, long, operation="backward", group_size=2)
    assert found["choice"].startswith("energy") and found["kernel"] == "cpu/backward"
    assert found["kernels"] == {
        "cpu/backward_bf16": "is for bf16",
        "cpu/backward": "",
        "reference/backward": "",
    }
    double = distrattention.explain(*(tensor.double() for tensor in (short, short, short)))
    assert double["kernel"] == "reference/forward" and "f64" in double["kernels"]["cpu/forward"]
    with pytest.raises(ValueError, match="operation is 'sideways'; allowed: 'grouping', 'forward', 'backward'"):
        distrattention.explain(short, short, short, operation="sideways")


def test_auto_is_logged_once_for_each_problem(caplog):
    q = torch.randn(1, 1, 77, 64)
    with caplog.at_level(logging.INFO, logger="distrattention"):
        for _ in range(2):
            scaled_dot_product_attention(q, q, q, group_size=2)
        scaled_dot_product_attention(q, q, q, strategy="energy")
    messages = [record.getMessage() for record in caplog.records if record.name == "distrattention"]
    assert len(messages) == 1 and "exact, as 77 rows" in messages[0]


def test_explain_casts_under_autocast_as_attention_does():
    q, k, v = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8).bfloat16(), torch.randn(1, 2, 9, 8)
    with pytest.raises(TypeError, match="key is torch.bfloat16"):
        distrattention.explain(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert distrattention.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        found = distrattention.explain(q, k, v)
        assert found["kernel"] == ("cpu/forward_bf16" if found["kernels"]["cpu/forward_bf16"] == "" else "cpu/forward")
