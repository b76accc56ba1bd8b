# SPDX-License-Identifier: Apache-2.0
"""The function that register() gives to transformers, against transformers' own SDPA function."""

import inspect
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from distrattention import Settings, report, scaled_dot_product_attention
from distrattention.integrations import transformers as integration
from distrattention.integrations.transformers import register

ENERGY = {"strategy": "energy", "group_size": 4, "block_size": 16}
B, HQ, HKV, L, D, DV = 2, 4, 2, 40, 16, 8


def function(**arguments):
    register("distr_test", **arguments)
    return AttentionInterface()["distr_test"]


def module(**attributes):
    return SimpleNamespace(**{"training": False, "num_key_value_groups": HQ // HKV, **attributes})


def tensors(rows=L, keys=L, seed=0):
    """query [B, HQ, rows, D], key [B, HKV, keys, D], value [B, HKV, keys, DV]."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((B, HQ, rows, D), (B, HKV, keys, D), (B, HKV, keys, DV))
    return tuple(torch.randn(shape, generator=random) for shape in shapes)


def expected(query, key, value, **arguments):
    return scaled_dot_product_attention(query, key, value, enable_gqa=True, **arguments).transpose(1, 2)


def causal_mask(rows=L, keys=L):
    """[B, 1, rows, keys], bottom right, with some padding at the left of the first sequence."""
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows).expand(B, 1, rows, keys).clone()
    mask[0, ..., :3] = False
    return mask


def test_import_leaves_other_packages_alone():
    code = (
        "import sys, distrattention, distrattention.integrations; distrattention.replace_sdpa; "
        "print([name for name in ('transformers', 'timm', 'diffusers') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_register_fills_both_registries_and_replaces_its_own():
    function(strategy="exact")
    first = AttentionInterface()["distr_test"]
    assert AttentionMaskInterface()["distr_test"] is sdpa_mask
    query, key, value = tensors()
    before, _ = first(module(), query, key, value, None, is_causal=False)
    second = function(**ENERGY)
    assert AttentionInterface()["distr_test"] is second is not first
    assert not torch.allclose(second(module(), query, key, value, None, is_causal=False)[0], before)
    assert "distr_test" in AttentionInterface().valid_keys()


@pytest.mark.parametrize("name", ["", "eager", "sdpa", "flash_attention_2", "my_flash", "a|b", "org/repo"])
def test_names_that_transformers_reads_otherwise_are_refused(name):
    before = AttentionInterface().get(name)
    with pytest.raises(ValueError, match="allowed"):
        register(name)
    assert AttentionInterface().get(name) is before


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"strategy": "quick"}, ValueError, "quick"),
        ({"group_sise": 2}, TypeError, "group_sise"),
        ({"per_layer": {0: {"group_size": 2}}}, ValueError, "per_layer"),
        ({"per_layer": {"0": Settings()}}, ValueError, "per_layer"),
        ({"per_layer": {True: Settings()}}, ValueError, "per_layer has True: .*allowed: an int from 0 on"),
        ({"per_layer": {-1: Settings()}}, ValueError, "per_layer has -1: .*allowed: an int from 0 on"),
        ({"per_layer": 5}, ValueError, "per_layer is 5; allowed: a mapping of ints to Settings, or a function"),
    ],
)
def test_bad_settings_are_refused_at_once(arguments, error, text):
    with pytest.raises(error, match=text):
        register("distr_bad", **arguments)
    assert "distr_bad" not in AttentionInterface()


def test_signature_is_that_of_an_attention_function():
    names = list(inspect.signature(function()).parameters)
    assert names[:5] == ["module", "query", "key", "value", "attention_mask"]
    assert names[5:8] == ["dropout", "scaling", "is_causal"]


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("attribute", [None, True, False])
@pytest.mark.parametrize(("rows", "keys"), [(L, L), (1, L), (1, 1), (L, L + 7)])
@pytest.mark.parametrize("masked", [True, False])
def test_exact_equals_sdpa(flag, attribute, rows, keys, masked):
    query, key, value = tensors(rows, keys)
    mask = causal_mask(rows, keys) if masked else None
    layer = module() if attribute is None else module(is_causal=attribute)
    ours, weights = function(strategy="exact")(layer, query, key, value, mask, scaling=0.3, is_causal=flag)
    theirs, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3, is_causal=flag)
    torch.testing.assert_close(ours, theirs)
    assert weights is None and ours.shape == (B, rows, HQ, DV) and ours.is_contiguous()


@pytest.mark.parametrize(
    ("causal", "keys", "mask"),
    [
        (False, L, None),
        (False, L + 7, None),
        (True, L, None),
        (True, L + 7, None),  # a static cache, not filled yet
        (True, L, causal_mask()),
        (True, L + 7, causal_mask(L, L + 7)),
        (False, L, torch.randn(B, 1, L, L, generator=torch.Generator().manual_seed(3))),
    ],
    ids=["none", "cross", "causal", "static", "bool", "bool_longer", "float"],
)
def test_position_bias_and_its_gradient_equal_those_of_sdpa(causal, keys, mask):
    results = []
    for call in (function(strategy="exact"), sdpa_attention_forward):
        bias = torch.randn(1, HQ, L, keys, generator=torch.Generator().manual_seed(1)).requires_grad_()
        query, key, value = tensors(keys=keys)
        out, _ = call(module(is_causal=causal), query, key, value, mask, position_bias=bias)
        seen = torch.ones(out.shape[:2]) if mask is None or mask.dtype != torch.bool else mask.any(-1)[:, 0].float()
        out = out * seen[..., None, None]  # rows that see no key: 0 for us, a mean for a bias of the smallest number
        out.square().sum().backward()
        results.append((out.detach(), bias.grad))
    torch.testing.assert_close(results[0], results[1])
    assert results[0][1].abs().sum() > 0


def test_masks_may_repeat_over_every_axis_but_keys():
    query, key, value = tensors()
    for shape in ((1, 1, 1, L), (B, 1, 1, L), (1, HQ, L, L), (B, HQ, L, L)):
        mask = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        ours, _ = function(strategy="exact")(module(), query, key, value, mask)
        torch.testing.assert_close(ours, sdpa_attention_forward(module(), query, key, value, mask)[0])


@pytest.mark.parametrize(
    "shape", [(1, HQ, 1, 1), (HQ,), (B, L), (L, L), (HQ, L, L), (B, 1, L, L + 1), (B, 3, L, L), (2, 1, HQ, 1, 1)]
)
def test_masks_of_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="attention_mask"):
        function(strategy="exact")(module(), *tensors(), torch.ones(shape))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("softcap", -30.0, ValueError),
        ("sink_logits", torch.zeros(HQ + 1), TypeError),
        ("sinks", torch.zeros(HQ), NotImplementedError),
        ("head_mask", torch.ones(HQ), NotImplementedError),
        ("alibi", torch.ones(HQ), NotImplementedError),
        ("indices", torch.zeros(B, L, 4), NotImplementedError),
        ("cache", object(), NotImplementedError),
        ("dropout", 0.1, NotImplementedError),
        ("cu_seq_lens_q", torch.tensor([0, 3, L]), NotImplementedError),
        ("group_sise", 2, TypeError),
        ("bias_of_the_future", torch.zeros(1), TypeError),
        ("group_size", 0, ValueError),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(name, value, error):
    with pytest.raises(error, match=name):
        function(strategy="exact")(module(), *tensors(), None, **{name: value})


def test_sliding_windows_without_a_mask_are_for_causal_calls():
    inputs, size = tensors(), 7
    out, _ = function(strategy="exact")(module(), *inputs, None, sliding_window=size)
    band = torch.ones(1, 1, L, L, dtype=torch.bool).tril().triu(1 - size)
    torch.testing.assert_close(out, function(strategy="exact")(module(), *inputs, band)[0])
    with pytest.raises(NotImplementedError, match=f"sliding_window is {size}, fewer than {L} keys, without a mask"):
        function(strategy="exact")(module(), *inputs, None, is_causal=False, sliding_window=size)
    approximate, _ = function(**ENERGY)(module(), *inputs, None, sliding_window=size)
    assert approximate.isfinite().all() and not torch.equal(approximate, function(**ENERGY)(module(), *inputs, None)[0])


@pytest.mark.parametrize("rows", [L, L - 9])
def test_keys_outside_of_the_window_that_a_mask_shows_are_not_read(monkeypatch, rows):
    """On the CPU, unless the strategy is "auto"; they do not change the result, whatever they are."""
    given = []
    attend = integration.attention_of_prompts
    monkeypatch.setattr(integration, "attention_of_prompts",
                        lambda *a, **b: given.append((b["window_size"], b["key_offset"])) or attend(*a, **b))
    query, key, value = tensors(rows, L)
    band = causal_mask().triu(-6)[..., L - rows :, :].contiguous()
    call, plain = function(strategy="exact"), function(strategy="exact")(module(), query, key, value, band)[0]
    assert torch.equal(call(module(), query, key, value, band, sliding_window=7)[0], plain)
    assert torch.equal(call(module(), query, key, value, band, sliding_window=9)[0], plain)
    call(module(), query, key, value, band, sliding_window=6)  # the mask shows more
    call(module(), query, key, value, ~band, sliding_window=7)
    function(strategy="auto", group_size=2)(module(), query, key, value, band, sliding_window=7)
    for near in ({}, {"window": 0}):  # of which all keys are near, so that it is exact attention
        call_of_energy = function(**ENERGY, **near)
        approximate = call_of_energy(module(), query, key, value, band, sliding_window=7)[0]
        torch.testing.assert_close(approximate, call_of_energy(module(), query, key, value, band)[0])
        assert torch.allclose(approximate, plain, atol=1e-5) == bool(near)
    band[..., 0, 0] = True  # a mask that was changed is looked at again
    call(module(), query, key, value, band, sliding_window=7)
    shown = L - rows == 0  # row 0 sees key 0 anyway
    windows = [None, (6, 0), (8, 0), None, None, None, *2 * ((6, 0), None), (6, 0) if shown else None]
    assert [window for window, _ in given] == windows
    assert all(offset == L - rows for window, offset in given if window)


def test_a_misspelt_setting_is_told_its_name():
    with pytest.raises(TypeError, match="did you mean group_size"):
        function()(module(), *tensors(), None, group_sise=2)


def test_what_does_not_change_the_result_is_passed_over():
    call, inputs = function(strategy="exact", ignore=("image_sizes",)), tensors()
    plain, _ = call(module(), *inputs, None)
    harmless = {"position_ids": torch.arange(L), "use_cache": True, "output_router_logits": False, "softcap": None}
    harmless |= {"sliding_window": L, "cu_seq_lens_q": torch.tensor([0, L]), "image_sizes": 3, "anything": None}
    assert torch.equal(call(module(), *inputs, None, **harmless)[0], plain)
    packed = {"cu_seq_lens_q": torch.tensor([0, 3, L]), "sliding_window": 2}
    assert torch.equal(call(module(), *inputs, causal_mask(), **packed)[0], call(module(), *inputs, causal_mask())[0])


def test_output_attentions_warns_once_and_returns_none(monkeypatch):
    warnings = []
    monkeypatch.setattr(integration.logger, "warning", lambda message, *arguments: warnings.append(message))
    logging.Logger.warning_once.cache_clear()
    for _ in range(2):
        _, weights = function(strategy="exact")(module(), *tensors(), None, output_attentions=True)
        assert weights is None
    assert len(warnings) == 1 and "weights" in warnings[0]


@pytest.mark.parametrize(("rows", "keys", "exact"), [(1, L, True), (15, L, True), (16, L, False), (15, 15, False)])
def test_decoding_is_exact(rows, keys, exact):
    query, key, value = tensors(rows, keys)
    mask = causal_mask(rows, keys)
    out, _ = function(**ENERGY, order_from="own")(module(), query, key, value, mask)
    assert torch.equal(out, expected(query, key, value, attn_mask=mask)) == exact
    assert torch.equal(out, expected(query, key, value, attn_mask=mask, **ENERGY)) == (not exact)


def test_decoding_is_exact_in_the_outputs_of_a_report():
    class Chunk(torch.nn.Module):
        def forward(self, query, key, value):
            call = function()
            return call(module(), query, key, value, None, is_causal=False)[0]

    settings = [Settings("energy", 4), Settings("energy", 4, block_size=16)]
    found = report(Chunk().eval(), tensors(20, 60), settings, repeats=1)  # 20 rows: as a chunk of a prompt
    errors = [measured.error for measured in found.layers[0].measurements]
    assert min(errors) > 0.01 and found.outputs[0].errors == (0, pytest.approx(errors[1], rel=1e-4))


def test_one_row_is_exact_whatever_a_block_is():
    query, key, value = tensors(1, L)
    out, _ = function(**{**ENERGY, "block_size": 1})(module(), query, key, value, None)
    assert torch.equal(out, expected(query, key, value))


def test_the_unfilled_keys_of_a_static_cache_do_not_weigh():
    query, key, value = tensors(L, L + 30)
    out, _ = function(**ENERGY)(module(), query, key, value, None)
    key[:, :, L:], value[:, :, L:] = 1e3, torch.nan
    assert torch.equal(function(**ENERGY)(module(), query, key, value, None)[0], out)


def test_settings_come_from_the_last_that_speaks():
    query, key, value = tensors()

    def run(layer, per_layer=None, **call):
        distr = function(strategy="lsh", group_size=2, block_size=16, per_layer=per_layer)
        return distr(layer, query, key, value, None, is_causal=False, **call)[0]

    def is_with(out, **settings):
        return torch.equal(out, expected(query, key, value, **settings))

    registered = {"strategy": "lsh", "group_size": 2, "block_size": 16}
    assert is_with(run(module()), **registered)
    of_layer_0 = {0: Settings(**ENERGY)}
    assert is_with(run(module(layer_idx=0), of_layer_0), **ENERGY)
    assert is_with(run(module(layer_idx=1), of_layer_0), **registered)
    assert is_with(run(module(depth=0), lambda layer: of_layer_0.get(layer.depth)), **ENERGY)
    assert is_with(run(module(depth=1), lambda layer: of_layer_0.get(layer.depth)), **registered)
    own = module(layer_idx=0, distr_settings=Settings(strategy="exact"))
    assert is_with(run(own, of_layer_0), strategy="exact")
    assert is_with(run(own, of_layer_0, strategy="lsh", block_size=16, seed=3), **registered, seed=3)
    everything = {"strategy": "lsh", "group_size": 3, "block_size": 8, "estimator": "sample", "order_from": "previous"}
    assert is_with(run(module(), **everything, seed=7), **everything, seed=7)
    with pytest.raises(ValueError, match="layer_idx"):
        run(module(), of_layer_0)
    with pytest.raises(ValueError, match="distr_settings|settings of"):
        run(module(distr_settings="exact"))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    ("attributes", "call", "grad", "order_from"),
    [
        ({}, {}, False, "previous"),
        ({}, {}, True, "previous"),
        ({"training": True}, {}, False, "previous"),
        ({"is_causal": True}, {}, True, "previous"),
        ({"is_causal": False}, {}, True, "own"),
        ({"is_causal": False}, {"is_causal": True}, True, "previous"),
        ({"is_causal": True}, {"is_causal": False}, True, "own"),
        ({"is_causal": False, "is_decoder": True}, {}, True, "previous"),  # attention to an encoder
        ({"is_causal": True}, {"order_from": "own"}, True, "own"),
        ({"is_causal": True}, {"order_from": "previous"}, False, "previous"),
    ],
)
def test_order_from_of_causal_modules(attributes, call, grad, order_from, masked):
    query, key, value = tensors()
    query.requires_grad_(grad)
    mask = causal_mask() if masked else None
    out, _ = function(**ENERGY)(module(**attributes), query, key, value, mask, **call)
    causal = not masked and call.get("is_causal", attributes.get("is_causal", True))
    orders = {
        order: expected(query, key, value, attn_mask=mask, is_causal=causal, **ENERGY, order_from=order)
        for order in ("own", "previous")
    }
    assert not torch.equal(orders["own"], orders["previous"])
    assert torch.equal(out, orders[order_from])


def test_a_chunk_of_a_prompt_has_the_near_keys_of_its_place():
    """Its mask says where it stands, also where a static cache is longer than what is filled, and under padding."""
    near = {"strategy": "energy", "group_size": 4, "block_size": 64, "order_from": "own", "window": 0, "skip": 1e-30}
    query, key, value = tensors(128, 600)
    attend = function(**near)
    for keys in (300, 600):  # of the cache; 300 are filled
        mask = torch.zeros(B, 1, 128, keys, dtype=torch.bool)
        mask[..., :300] = causal_mask(128, 300)
        some = key[:, :, :keys], value[:, :, :keys]
        wanted = expected(query, *some, attn_mask=mask, key_offset=172, **near)
        assert torch.equal(attend(module(), query, *some, mask)[0], wanted)
        added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        torch.testing.assert_close(attend(module(), query, *some, added)[0][1], wanted[1], atol=1e-5, rtol=0)
    assert not torch.equal(expected(query, *some, attn_mask=mask, **near), wanted)


def test_sinks_of_a_model_are_refused_and_ours_are_a_setting():
    query, key, value = tensors(300, 300)
    attend = function(**{**ENERGY, "window": 0})
    with pytest.raises(NotImplementedError, match="sinks .attention sinks. is not supported"):
        attend(module(), query, key, value, None, sinks=torch.zeros(HQ))
    absent = attend(module(), query, key, value, None, sinks=None)[0]
    assert torch.equal(absent, attend(module(), query, key, value, None)[0])
    settings = {**ENERGY, "window": 0, "sinks": 5, "order_from": "previous"}
    wanted = expected(query, key, value, is_causal=True, **settings)
    assert torch.equal(attend(module(), query, key, value, None, sinks=5)[0], wanted)


def test_a_model_prefills_with_near_keys_and_skipping():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
    model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None)).eval()
    prompt = torch.randint(99, (1, 400))
    register("distr_test", Settings("energy", 4, window=0, sinks=1, skip=1e-4, finish=True))
    model.set_attn_implementation("distr_test")
    with torch.no_grad():
        exact, approximate = model(prompt, strategy="exact", finish=False).logits, model(prompt).logits
        wide = model(prompt, window=400).logits
    torch.testing.assert_close(wide, exact, atol=1e-4, rtol=0)
    assert not torch.equal(approximate, exact) and (approximate - exact).norm() < 0.3 * exact.norm()
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
    assert tokens.shape == (1, 403)
    with pytest.raises(NotImplementedError, match="skip is 0.0001 in a call with gradients"):
        model(prompt)


def test_settings_with_the_order_of_the_block_before_are_made_once():
    settings = Settings("energy", 2)
    found = integration._by_previous(settings)
    assert found == Settings("energy", 2, order_from="previous") and integration._by_previous(settings) is found
    order = torch.arange(8).view(1, 1, 1, 8)
    given = Settings("given", 2, order=order)  # its tensor is not kept
    assert integration._by_previous(given) is not integration._by_previous(given)
    for number in range(1025):
        integration._by_previous(Settings("lsh", 2, seed=number))
    assert len(integration._previous) <= 1024
