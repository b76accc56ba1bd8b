# SPDX-License-Identifier: Apache-2.0
"""flash_attn_func and flash_attn_varlen_func: layout, corner, grouped heads, lengths, refusals."""

import pytest
import torch

from distrattention import flash_attn_func, flash_attn_varlen_func, scaled_dot_product_attention

F64 = torch.float64


def rows_first(batch=2, n=40, m=None, heads=4, heads_kv=2, d=8, dv=6, grad=True):
    shapes = (batch, n, heads, d), (batch, m or n, heads_kv, d), (batch, m or n, heads_kv, dv)
    return [torch.randn(shape, dtype=F64, requires_grad=grad) for shape in shapes]


@pytest.mark.parametrize("m", [25, 40, 60])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_exact_is_the_textbook(m, causal, scale, textbook):
    """[B, S, H, D], query heads share KV heads unasked, causal at the bottom right, rows that see nothing are 0."""
    q, k, v = leaves = rows_first(m=m)
    out, lse, probabilities = flash_attn_func(
        q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True, strategy="exact"
    )
    corner = "bottom_right" if causal else "none"
    expected, expected_lse = textbook(*(tensor.transpose(1, 2) for tensor in leaves), causal=corner, scale=scale)
    expected = expected.transpose(1, 2)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert probabilities is None and out.is_contiguous()
    if causal and m < 40:
        assert (out[:, : 40 - m] == 0).all()
    weight = torch.randn_like(out)
    for actual, wanted in zip(torch.autograd.grad(out, leaves, weight), torch.autograd.grad(expected, leaves, weight)):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("m", [25, 40, 60])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", [(0, 0), (7, 3), (-1, 5), [20, -1], (100, 100)])
def test_sliding_windows_are_at_the_bottom_right(m, causal, window_size, textbook):
    q, k, v = leaves = rows_first(m=m)
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, window_size=window_size, return_attn_probs=True)
    corner = "bottom_right" if causal else "none"
    options = {"causal": corner, "window_size": window_size, "key_offset": m - 40}
    expected, expected_lse = textbook(*(tensor.transpose(1, 2) for tensor in leaves), **options)
    expected = expected.transpose(1, 2)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    weight = torch.randn_like(out)
    for actual, wanted in zip(torch.autograd.grad(out, leaves, weight), torch.autograd.grad(expected, leaves, weight)):
        torch.testing.assert_close(actual, wanted)


def test_near_keys_are_of_those_that_a_window_shows():
    leaves = rows_first(n=200, m=300, grad=False)
    options = {"strategy": "energy", "group_size": 4, "block_size": 64, "sinks": 1, "window": 0}
    out = flash_attn_func(*leaves, window_size=(150, 20), **options)
    rows, keys = torch.arange(200)[:, None] + 100, torch.arange(300)
    seen = (keys >= rows - 150) & (keys <= rows + 20)
    rows_last = (tensor.transpose(1, 2) for tensor in leaves)
    expected = scaled_dot_product_attention(*rows_last, seen, enable_gqa=True, key_offset=100, **options)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    exact = flash_attn_func(*leaves, window_size=(150, 20))
    assert not torch.allclose(out, exact) and not torch.allclose(out, flash_attn_func(*leaves, **options))


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_sliding_windows_are_each_sequences_own(causal):
    lengths_q, lengths_k = (20, 30), (45, 10)
    (q, k, v), where = packed(lengths_q, lengths_k)
    out = flash_attn_varlen_func(q, k, v, *where, causal=causal, window_size=(6, 2))
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
    expected = [flash_attn_func(*(x[None] for x in part), causal=causal, window_size=(6, 2))[0] for part in parts]
    assert torch.equal(out, torch.cat(expected))


@pytest.mark.parametrize("strategy", ["auto", "lsh", "energy"])
def test_square_causal_is_sdpas(strategy):
    q, k, v = rows_first(n=600, grad=False)
    settings = dict(strategy=strategy, block_size=64, group_size=4)
    out = flash_attn_func(q, k, v, causal=True, **settings)
    other = scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)), is_causal=True, enable_gqa=True, **settings
    )
    assert torch.equal(out, other.transpose(1, 2))


def test_causal_calls_take_the_previous_order():
    q, k, v = rows_first(n=400, grad=False)
    found = flash_attn_func(q, k, v, causal=True, strategy="energy")
    assert torch.equal(found, flash_attn_func(q.requires_grad_(), k, v, causal=True, strategy="energy"))
    for order_from, same in (("previous", True), ("own", False)):
        out = flash_attn_func(q, k, v, causal=True, strategy="energy", order_from=order_from)
        assert torch.equal(out, found) == same


LENGTHS = [((5, 130, 0, 64), (5, 130, 0, 64)), ((7, 1, 90), (40, 64, 90)), ((30, 20), (10, 25)), ((3,), (0,)), ((), ())]


def packed(lengths_q, lengths_k):
    """q, k, v [T, H, D] and the arguments that tell where sequences are."""
    starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)]
    (q,), (k,), (v,) = rows_first(1, sum(lengths_q), 1)[:1], *(rows_first(1, sum(lengths_k) or 0)[1:2] for _ in "kv")
    return [tensor.detach()[0].requires_grad_() for tensor in (q, k[:, : sum(lengths_k)], v[:, : sum(lengths_k)])], (
        *starts,
        max(lengths_q, default=0),
        max(lengths_k, default=0),
    )


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strategy", ["exact", "lsh", "energy"])
def test_varlen_is_each_sequence_by_itself(lengths, causal, strategy):
    (q, k, v), where = packed(*lengths)
    settings = dict(causal=causal, strategy=strategy, block_size=32, return_attn_probs=True)
    out, lse, _ = flash_attn_varlen_func(q, k, v, *where, **settings)
    assert out.shape == (*q.shape[:2], v.shape[2]) and lse.shape == (q.shape[1], q.shape[0])
    parts = []
    for first_q, end_q, first_k, end_k in zip(where[0][:-1], where[0][1:], where[1][:-1], where[1][1:]):
        sequence = q[None, first_q:end_q], k[None, first_k:end_k], v[None, first_k:end_k]
        parts.append(flash_attn_func(*sequence, **settings))
    expected = torch.cat([part[0][0] for part in parts]) if parts else out
    expected_lse = torch.cat([part[1][0] for part in parts], 1) if parts else lse
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    if parts:
        weight = torch.randn_like(out)
        results = [torch.autograd.grad(tensor, (q, k, v), weight) for tensor in (out, expected)]
        for actual, wanted in zip(*results):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_are_data_to_a_compiled_graph(causal):
    """Which has no break, is not made anew for others, and has gradients."""
    step = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    for number, lengths in enumerate([((7, 13), (11, 9)), ((12, 8), (3, 17))]):
        (q, k, v), (starts_q, starts_k, *_) = packed(*lengths)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            out, lse, _ = step(q, k, v, starts_q, starts_k, 20, 20, causal=causal, return_attn_probs=True)
        expected = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 20, 20, causal=causal, return_attn_probs=True)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        loss, wanted = ((o.sin().sum() + s.sin().sum()) for o, s in ((out, lse), expected[:2]))
        for one, other in zip(torch.autograd.grad(loss, (q, k, v)), torch.autograd.grad(wanted, (q, k, v))):
            assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", ["exact", "energy"])
def test_varlen_sequences_do_not_see_each_other(strategy):
    (q, k, v), where = packed((20, 30), (20, 30))
    out = flash_attn_varlen_func(q, k, v, *where, strategy=strategy)
    with torch.no_grad():
        k[20:] = v[20:] = float("nan")
    again = flash_attn_varlen_func(q, k, v, *where, strategy=strategy)
    assert torch.equal(out[:20], again[:20]) and again[20:].isnan().any()


@pytest.mark.parametrize("causal", [False, True])
def test_softcap(causal, textbook):
    q, k, v = rows_first(grad=False)
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, softcap=1.5, return_attn_probs=True)
    corner = "bottom_right" if causal else "none"
    expected = textbook(*(x.transpose(1, 2) for x in (q, k, v)), causal=corner, softcap=1.5)
    torch.testing.assert_close(out.transpose(1, 2), expected[0], atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected[1], atol=3e-6, rtol=1e-5)
    (q, k, v), where = packed((20, 30), (20, 30))
    out = flash_attn_varlen_func(q, k, v, *where, causal=causal, softcap=1.5)
    parts = zip(q.split((20, 30)), k.split((20, 30)), v.split((20, 30)))
    expected = [flash_attn_func(*(x[None] for x in part), causal=causal, softcap=1.5)[0] for part in parts]
    assert torch.equal(out, torch.cat(expected))


REFUSED = {
    "dropout_p": (0.1, NotImplementedError, "dropout_p is 0.1; allowed: 0"),
    "window_size": ((-2, 0), ValueError, "window_size is -2; allowed: -1 to"),
    "window_size, a number": (128, TypeError, r"window_size is 128; allowed: \(left, right\)"),
    "softcap": (-30.0, ValueError, "softcap is -30.0; allowed: 0"),
    "alibi_slopes": (torch.ones(4), NotImplementedError, "alibi_slopes was given; allowed: None"),
    "learnable_sink": (torch.ones(3), ValueError, r"learnable_sink is \[3\]; allowed: \[4\]"),
    "learnable_sink, a number": (1.0, TypeError, "learnable_sink is float; allowed: a tensor"),
    "window_size, one side": ((1,), TypeError, r"window_size is \(1,\); allowed: \(left, right\)"),
    "softmax_scale": (float("nan"), ValueError, "softmax_scale is nan; allowed: a finite number"),
    "group_size": (9, ValueError, "group_size is 9; allowed: 1 to 8"),
    "strategy": ("flash", ValueError, "strategy is 'flash'; allowed"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("varlen", [False, True])
def test_refused_by_name(name, varlen):
    value, error, message = REFUSED[name]
    keyword = name.split(",")[0]
    with pytest.raises(error, match=message):
        if varlen:
            (q, k, v), where = packed((5, 6), (5, 6))
            flash_attn_varlen_func(q, k, v, *where, **{keyword: value})
        else:
            flash_attn_func(*rows_first(), **{keyword: value})


@pytest.mark.parametrize("off", [{"softcap": None}, {"window_size": (None, None)}, {"window_size": [-1, None]}])
def test_what_is_off_is_accepted(off):
    tensors = rows_first_fixed()
    assert torch.equal(flash_attn_func(*tensors, **off), flash_attn_func(*tensors))


def test_deterministic_is_always_so():
    assert torch.equal(*(flash_attn_func(*rows_first_fixed(), deterministic=value) for value in (False, True)))


def rows_first_fixed():
    torch.manual_seed(1)
    return rows_first(grad=False)


def test_shapes_are_checked():
    q, k, v = rows_first()
    for tensors, message in (
        ((q[0], k, v), "q has 3 axes; allowed: 4"),
        ((q, k[:, :, :1].expand(-1, -1, 3, -1), v), "v has 2 heads; allowed: 3"),
        ((q, k[..., :4], v), "last size of k is 4; allowed: 8"),
        ((q, k[:1], v[:1]), "leading sizes of k"),
        ((q[:, :, :3], k, v), "k has 2 heads; allowed: a divisor of 3"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn_func(*tensors)
    with pytest.raises(TypeError, match="q is of type list; allowed: torch.Tensor"):
        flash_attn_func([1], k, v)


def test_lengths_are_checked():
    (q, k, v), (starts_q, starts_k, max_q, max_k) = packed((5, 6), (5, 6))
    int32 = torch.int32
    for changes, message in (
        (dict(starts_q=starts_q.long()), "cu_seqlens_q is torch.int64"),
        (dict(starts_q=torch.tensor([[0, 11]], dtype=int32)), r"cu_seqlens_q is torch.int32 \(1, 2\); allowed: int32"),
        (dict(starts_k=torch.tensor([0, 11], dtype=int32), max_k=11), "cu_seqlens_k has 1 sequence; allowed: 2"),
        (dict(max_q=-1), "max_seqlen_q is -1; allowed: 0 to"),
    ):
        arguments = dict(starts_q=starts_q, starts_k=starts_k, max_q=max_q, max_k=max_k) | changes
        with pytest.raises(ValueError, match=message):
            flash_attn_varlen_func(q, k, v, *arguments.values())
    for changes, exact, read in (  # the library reads them on the CPU, and approximations here
        (dict(starts_k=torch.tensor([0, 5, 10], dtype=int32)), r"starts_k\[2\] is 10; allowed: 11", r"is \[0, 5, 10\]"),
        (dict(starts_k=torch.tensor([1, 5, 11], dtype=int32)), r"starts_k\[0\] is 1; allowed: 0", "from 0 to 11"),
        (dict(starts_k=torch.tensor([0, 12, 11], dtype=int32)), r"starts_k\[1\] is 12; allowed: 0 to", "never falling"),
        (dict(max_q=5), r"starts_q\[2\] - starts_q\[1\] is 6; allowed: 0 to 5", "max_seqlen_q is 5; allowed: 6"),
    ):
        arguments = dict(starts_q=starts_q, starts_k=starts_k, max_q=max_q, max_k=max_k) | changes
        with pytest.raises(RuntimeError, match=exact):
            flash_attn_varlen_func(q, k, v, *arguments.values())
        with pytest.raises(ValueError, match=read):
            flash_attn_varlen_func(q, k, v, *arguments.values(), strategy="energy")
    with pytest.raises(TypeError, match="cu_seqlens_k is of type list; allowed: a torch.Tensor, int32"):
        flash_attn_varlen_func(q, k, v, starts_q, starts_k.tolist(), max_q, max_k)
    with pytest.raises(TypeError, match="max_seqlen_q is None; allowed: an int"):
        flash_attn_varlen_func(q, k, v, starts_q, starts_k, None, max_k)
    with pytest.raises(NotImplementedError, match="block_table was given"):
        flash_attn_varlen_func(q, k, v, starts_q, starts_k, max_q, max_k, block_table=torch.zeros(2, 1))
    with pytest.raises(ValueError, match="q has 4 axes; allowed: 3"):
        flash_attn_varlen_func(q[None], k, v, starts_q, starts_k, max_q, max_k)
