# SPDX-License-Identifier: Apache-2.0
"""Near keys and skipped tiles through the package; tests/python/test_ops_cases.py has the operators' values."""

import functools
import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import distrattention
from distrattention import Settings, flash_attn_func, ops, scaled_dot_product_attention
from distrattention.evaluation import label
from distrattention.packing import pack_near, unpack_near
from distrattention.settings import MAX_DISTANCE

NEAR = {"strategy": "energy", "group_size": 2, "block_size": 32, "window": 0, "sinks": 1}
SKIP = {**NEAR, "skip": 0.05}


def tensors(n=300, m=None, d=16, heads_kv=2, **options):
    """q [1, 2, n, d], k and v [1, heads_kv, m, d]; keys are large and small by turns of 64."""
    m = m or n
    turns = torch.where(torch.arange(m) // 64 % 3 == 1, 1.5, 0.25)[:, None]
    q, k, v = torch.randn(1, 2, n, d), torch.randn(1, heads_kv, m, d) * turns, torch.randn(1, heads_kv, m, d)
    return [tensor.to(**options) for tensor in (q, k, v)]


REFUSED = [
    ({"window": -1}, ValueError, "window is -1; allowed: 0 to 1099511627776"),
    ({"window": 1.5}, TypeError, "window is 1.5; allowed: an int"),
    ({"window": True}, TypeError, "window is True; allowed: an int"),
    ({"sinks": None}, TypeError, "sinks is None; allowed: an int"),
    ({"sinks": MAX_DISTANCE + 1}, ValueError, "sinks is 1099511627777; allowed: 0 to"),
    ({"window": 0, "skip": 1}, ValueError, "skip is 1; allowed: 0 .nothing is skipped., or a probability below 1"),
    ({"window": 0, "skip": -0.1}, ValueError, "skip is -0.1; allowed"),
    ({"window": 0, "skip": float("nan")}, ValueError, "skip is nan; allowed"),
    ({"window": 0, "skip": "0.1"}, TypeError, "skip is '0.1'; allowed: None, or a probability"),
    ({"skip": 0.1}, ValueError, "skip is 0.1 without near keys, .* allowed: with window or sinks"),
    ({"window": 0, "finish": True}, ValueError, "finish is True without skip"),
    ({"window": 0, "skip": 0.1, "finish": 1}, TypeError, "finish is 1; allowed: True or False"),
    ({"window": 0, "skip": 0.1, "finish": True, "strategy": "lsh"}, ValueError, "finish is True with strategy 'lsh'"),
    ({"window": 0, "skip": 0.1, "finish": True, "strategy": "exact"}, ValueError, "which drop no columns"),
    ({"window": 0, "skip": 0.1, "finish": True, "strategy": "auto"}, ValueError, "and group_size 1, which drop no"),
]


@pytest.mark.parametrize("fields, kind, message", REFUSED)
def test_settings_that_do_not_fit_are_refused(fields, kind, message):
    with pytest.raises(kind, match=message):
        Settings(**{"strategy": "energy", **fields})


def test_settings_by_default_have_no_near_keys():
    settings = Settings("energy")
    assert (settings.window, settings.sinks, settings.skip, settings.finish) == (None, 0, 0.0, False)
    assert Settings("energy", window=5, skip=None) == Settings("energy", window=5, skip=0)
    assert Settings("energy", window=5) != settings and len({settings, Settings("energy", sinks=1)}) == 2
    assert label(Settings("energy", 4, window=512, sinks=128, skip=0.0025, finish=True)) == (
        "energy G=4 window=512 sinks=128 skip=0.0025 finish"
    )


def test_pack_near_keeps_every_setting():
    for window, sinks, finish in itertools.product((None, 0, 1, 2**30 - 1), (0, 1, 2**30 - 1), (False, True)):
        assert unpack_near(pack_near(window, sinks, finish)) == (window, sinks, finish)
    assert pack_near(None, 0, False) == 0
    assert unpack_near(pack_near(MAX_DISTANCE, MAX_DISTANCE, True)) == (2**30 - 1, 2**30 - 1, True)


ALL = [NEAR, SKIP, {**SKIP, "finish": True}, {**SKIP, "strategy": "exact", "group_size": None}]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fields", ALL)
def test_all_ways_are_one(fields, causal):
    """The short way of eager code, the long one, flash-attn's, compiled code, and the operators themselves."""
    q, k, v = tensors()
    settings = Settings(**fields)
    wanted = scaled_dot_product_attention(q, k, v, is_causal=causal, **fields)
    corner = "top_left" if causal else "none"
    results = [scaled_dot_product_attention(*(tensor[None] for tensor in (q, k, v)), is_causal=causal, **fields)[0]]
    results.append(flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal, **fields).transpose(1, 2))
    options = distrattention.core.options_of(settings, 16)
    columns = distrattention.core.columns_of(q, k, corner, settings, options)
    results.append(ops.forward(q, k, v, None, *columns, corner, None, *options)[0])
    assert all(torch.equal(wanted, result) for result in results)
    exact = scaled_dot_product_attention(q, k, v, is_causal=causal, strategy="exact")
    assert not torch.equal(wanted, exact)


@pytest.mark.parametrize("fields", [NEAR, {**SKIP, "finish": True}])
def test_compiled_code_has_them_in_one_graph(fields):
    torch._dynamo.reset()
    q, k, v = tensors()
    run = functools.partial(scaled_dot_product_attention, is_causal=True, **fields)
    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v), run(q, k, v))


def test_export_over_a_range_of_lengths():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return scaled_dot_product_attention(q, k, v, is_causal=True, **NEAR)

    length = torch.export.Dim("length", min=8, max=4096)
    exported = torch.export.export(Model(), tuple(tensors(70)), dynamic_shapes=[{2: length}] * 3).module()
    for n in (20, 300):
        q, k, v = tensors(n)
        assert torch.equal(exported(q, k, v), scaled_dot_product_attention(q, k, v, is_causal=True, **NEAR))


ASKED = [("energy", "none"), ("energy", "top_left"), ("given", "none"), ("auto", "none")]


@pytest.mark.parametrize("strategy, causal", ASKED)
def test_opcheck(strategy, causal):
    q, k, v = (tensor.requires_grad_() for tensor in tensors(100, 200, heads_kv=1))
    near = (0, 1, None, 0.0, False)
    check = torch.library.opcheck
    for flat in (False, True):
        grouping = (causal, strategy, 2, 32, "auto", 0, flat)
        check(torch.ops.distrattention.make_grouping.default, (q, k, *grouping, *near))
        order, means = ops.make_grouping(q, k, *grouping, *near)
        assert means.numel() == 16 * (4 if causal != "none" else 1) and not means.requires_grad
    if strategy in ("given", "auto"):
        return
    settings = (causal, None, strategy, 2, 32, "mean", "auto", *near)
    check(torch.ops.distrattention.forward.default, (q, k, v, None, order, means, *settings))
    out, lse = (result.detach() for result in ops.forward(q, k, v, None, order, means, *settings))
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    saved = (torch.randn_like(out), None, q, k, v, None, order, means, out, lse, False)
    check(torch.ops.distrattention.backward.default, (*saved, *settings))
    skipping = (*settings[:-2], 0.05, True)
    check(torch.ops.distrattention.forward_counting.default, (q, k, v, None, order, means, *skipping))
    packed = ops.pack(causal, strategy, 2, 32, "mean", "auto")
    check(torch.ops.distrattention.attend.default,
          (q, k, v, None, None, packed, pack_near(0, 1, False), None, 0.0, 0, 0, True))  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"strategy": "lsh"}, {"order_from": "previous"}, {"window": None}])
def test_gradcheck(fields):
    """The order and the means are held constant."""
    q, k, v = (x.requires_grad_() for x in tensors(70, 140, d=4, heads_kv=1, dtype=torch.float64))
    settings = Settings(**{**NEAR, **fields, "block_size": 40})
    options = distrattention.core.options_of(settings, 4)
    columns = distrattention.core.columns_of(q, k, "none", settings, options)
    run = lambda *leaves: ops.forward(*leaves, None, *columns, "none", None, *options)  # noqa: E731
    torch.autograd.gradcheck(run, (q, k, v), fast_mode=True)


def test_torch_func_and_vmap():
    q, k, v = tensors(70, 200)
    run = lambda q: scaled_dot_product_attention(q, k, v, **NEAR)  # noqa: E731
    leaf = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(run(leaf).square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda q: run(q).square().sum())(q), wanted)
    batch = torch.stack([q, -q])
    for one, result in zip(batch, torch.func.vmap(run)(batch)):
        torch.testing.assert_close(result, run(one))


def test_a_call_that_records_gradients_refuses_to_skip():
    q, k, v = tensors()
    k.requires_grad_()
    message = "skip is 0.05 in a call with gradients; allowed: 0, as skipping is for the forward alone"
    for call in (
        lambda: scaled_dot_product_attention(q, k, v, **SKIP),
        lambda: scaled_dot_product_attention(q, k, v, return_halves=True, **SKIP),
        lambda: flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)), **SKIP),
        lambda: torch.func.grad(lambda q: scaled_dot_product_attention(q, k.detach(), v, **SKIP).sum())(q),
        lambda: ops.forward(q, k, v, None, None, None, "none", None, "exact", 1, 32, "mean", "own", 0, 1, None, 0.05),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call()
    with torch.no_grad():
        assert not scaled_dot_product_attention(q, k, v, **SKIP).requires_grad
    with distrattention.replace_sdpa(on_unsupported="silent", **SKIP) as calls:
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert calls.taken == 0 and "skip is" in next(iter(calls.reasons))


def test_no_row_sees_its_future():
    """Strictly causal with window and sinks: later rows change no earlier one."""
    q, k, v = tensors(300)
    others = [torch.cat((tensor[:, :, :200], torch.randn_like(tensor[:, :, 200:])), 2) for tensor in (q, k, v)]
    for fields in (NEAR, {**NEAR, "window": 70}, {**NEAR, "strategy": "lsh"}):
        one, other = (scaled_dot_product_attention(*x, is_causal=True, **fields) for x in ((q, k, v), others))
        assert torch.equal(one[:, :, :200], other[:, :, :200]) and not torch.equal(one, other)


def test_a_window_of_all_keys_is_exact():
    q, k, v = tensors()
    exact = scaled_dot_product_attention(q, k, v, strategy="exact")
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, **{**NEAR, "window": 300}), exact)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, strategy="exact", sinks=1, skip=1e-30), exact)


def test_halves_are_counted_and_more_are_kept_as_skip_falls():
    q, k, v = tensors(n=300)
    shares = []
    for skip in (0.5, 0.05, 1e-30):
        run = functools.partial(scaled_dot_product_attention, q, k, v, **{**SKIP, "skip": skip})
        out, lse, halves = run(return_lse=True, return_halves=True)
        assert halves.shape == (1, 2, 5, 2) and lse.shape == (1, 2, 300)
        assert torch.equal(out, run())
        kept, seen = halves.sum((0, 1, 2)).tolist()
        shares.append(kept / seen)
    assert shares[0] < shares[1] < shares[2] == 1
    out, halves = scaled_dot_product_attention(q[0], k[0], v[0], return_halves=True, **SKIP)
    assert halves.shape == (2, 5, 2)
    with pytest.raises(ValueError, match="return_halves is True without skip"):
        scaled_dot_product_attention(q, k, v, return_halves=True, **NEAR)


def test_a_key_offset_is_where_a_causal_corner_is():
    q, k, v = tensors(100, 300)
    mask = torch.ones(100, 300, dtype=torch.bool).tril(200)
    settings = {**SKIP, "order_from": "own"}
    causal = flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=True, **settings).transpose(1, 2)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask, key_offset=200, **settings), causal)
    assert not torch.equal(scaled_dot_product_attention(q, k, v, mask, **settings), causal)
    assert distrattention.explain(q, k, v, mask, key_offset=200, **settings)["kernel"]
    with pytest.raises(ValueError, match="key_offset is 3 in a causal call, whose corner says"):
        scaled_dot_product_attention(q, k, v, is_causal=True, key_offset=3, **settings)
    with pytest.raises(TypeError, match="key_offset is 1.5; allowed: an int"):
        scaled_dot_product_attention(q, k, v, key_offset=1.5, **settings)


def test_explain_says_what_is_near_and_skipped():
    q, k, v = tensors(1200, heads_kv=1)
    skipping = Settings("exact", window=0, sinks=1, skip=0.05)
    found = distrattention.explain(q, k, v, is_causal=True, enable_gqa=True, settings=skipping)
    assert found["choice"].startswith("as asked for; near keys, up to") and "far keys are skipped" in found["choice"]
    assert "near" not in distrattention.explain(q, k, v, is_causal=True, strategy="exact")["choice"]
    with pytest.raises(ValueError, match="enable_gqa"):
        distrattention.explain(q, *(tensor.expand(1, 3, 1200, 16) for tensor in (k, v)), enable_gqa=False)


def test_a_given_order_takes_means():
    q, k, v = tensors(100, 300)
    order, means = ops.make_grouping(q, k, "none", "energy", 2, 32, "own", 0, False, 0, 1)
    wanted = scaled_dot_product_attention(q, k, v, **NEAR)
    for strategy in ("given", "energy"):
        out = scaled_dot_product_attention(q, k, v, order=order, **{**NEAR, "strategy": strategy})
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("heads", [0, 2])
def test_gradients_of_any_number_of_heads(heads):
    q, k, v = (torch.randn(1, heads, 40, 8, requires_grad=True) for _ in range(3))
    scaled_dot_product_attention(q, k, v, strategy="energy", group_size=2, window=20).sum().backward()
    assert q.grad.shape == q.shape and q.grad.isfinite().all()


def test_flops_of_near_keys():
    """4 blocks of 128 rows, window 0: a block's own tile is near, and with sinks the first one; d 16, G 4."""
    q, k, v = (torch.randn(1, 1, 512, 16) for _ in range(3))

    def flops(**fields):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            scaled_dot_product_attention(q, k, v, **fields)
        return counter.get_total_flops()

    values = 512 * 512 * 16
    near = 4 * 128 * 128
    fields = {"strategy": "energy", "group_size": 4, "order_from": "own", "window": 0}
    assert flops(**fields) == 2 * (near * 16 + (512 * 512 - near) * 4 + values)
    near += 3 * 128 * 128
    assert flops(**fields, sinks=1) == 2 * (near * 16 + (512 * 512 - near) * 4 + values)
    assert flops(**fields, skip=0.5) == flops(**fields)
    assert flops(**fields, skip=0.5, finish=True) == flops(strategy="exact")


@pytest.mark.filterwarnings("ignore")
def test_a_report_tells_what_is_kept():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    skip = {**SKIP, "skip": 0.008}
    settings = [Settings(**NEAR), Settings(**skip), Settings("exact", block_size=32, sinks=1, skip=0.01)]
    found = distrattention.report(Model().eval(), tensors(300), settings, repeats=1)
    plain, skipping, exact = found.layers[0].measurements
    assert plain.kept_share is None and 0 < skipping.kept_share < 1 and 0 < exact.kept_share < 1
    assert exact.strategy == "exact" and exact.error > 0 and plain.error < skipping.error
    assert "kept" in str(found) and f"{skipping.kept_share:.2f}" in str(found)
    assert "kept" not in str(distrattention.report(Model().eval(), tensors(40), settings[:1], repeats=1))
