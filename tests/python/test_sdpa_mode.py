# SPDX-License-Identifier: Apache-2.0
"""replace_sdpa: which calls it meets, and what becomes of those that are refused."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from distrattention import flash_attn_func, replace_sdpa, scaled_dot_product_attention, sdpa_mode

ENERGY = {"strategy": "energy", "group_size": 4, "block_size": 16}


@pytest.fixture(autouse=True)
def one_thread(torch_state):
    torch.set_num_threads(1)  # quickest for tensors as small as these


def tensors(*shape, seed=0):
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=random) for _ in range(3))


QUERY, KEY, VALUE = tensors(2, 2, 48, 32)


def attention(**arguments):
    return F.scaled_dot_product_attention(QUERY, KEY, VALUE, **arguments)


def ours(**arguments):
    return scaled_dot_product_attention(QUERY, KEY, VALUE, **arguments)


def encoder_layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True).eval()


@pytest.mark.parametrize(
    "settings", [ENERGY, {"strategy": "lsh", "group_size": 3, "block_size": 24, "seed": 5, "estimator": "sample"}]
)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.randn(48, 48), "scale": 0.3},
        {"attn_mask": torch.ones(48, 48).tril(5) > 0},
    ],
    ids=["plain", "causal", "additive", "boolean"],
)
def test_calls_in_the_block_are_ours(settings, arguments):
    before = attention(**arguments)
    with replace_sdpa(**settings):
        inside = attention(**arguments)
    assert torch.equal(inside, ours(**arguments, **settings))
    assert torch.equal(attention(**arguments), before) and not torch.allclose(inside, before, atol=1e-2)


def test_positional_arguments_and_gqa():
    query = torch.cat([QUERY, QUERY.flip(1)], 1)
    with replace_sdpa(**ENERGY):
        masked = F.scaled_dot_product_attention(QUERY, KEY, VALUE, None, 0.0, True)
        grouped = F.scaled_dot_product_attention(query, KEY, VALUE, enable_gqa=True)
    assert torch.equal(masked, ours(is_causal=True, **ENERGY))
    assert torch.equal(grouped, scaled_dot_product_attention(query, KEY, VALUE, enable_gqa=True, **ENERGY))


def test_a_causal_bias_of_torch_is_met():
    query, key, value = tensors(2, 2, 40, 32)
    query = query[:, :, :33]
    with replace_sdpa(**ENERGY):
        inside = F.scaled_dot_product_attention(query, key, value, causal_lower_right(33, 40))
    flash = flash_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), causal=True, **ENERGY).transpose(1, 2)
    torch.testing.assert_close(inside, flash)


def test_blocks_nest_and_may_be_entered_again():
    outer, inner = replace_sdpa(**ENERGY), replace_sdpa(strategy="lsh")
    for _ in range(2):
        with outer:
            assert torch.equal(attention(), ours(**ENERGY))
            with inner:
                assert torch.equal(attention(), ours(strategy="lsh"))
                with outer:
                    assert torch.equal(attention(), ours(**ENERGY))
            assert torch.equal(attention(), ours(**ENERGY))
    assert torch.equal(attention(), F.scaled_dot_product_attention(QUERY, KEY, VALUE))


def test_an_exception_ends_the_block():
    before = attention()
    with pytest.raises(KeyError), replace_sdpa(**ENERGY):
        raise KeyError
    assert torch.equal(attention(), before)


def test_a_block_holds_for_its_thread_only():
    found, entered, done = {}, threading.Event(), threading.Event()

    def other():
        entered.wait(30)
        found["outside"] = attention()
        with replace_sdpa(strategy="lsh"):
            found["its own"] = attention()
        done.set()

    before = attention()
    thread = threading.Thread(target=other)
    thread.start()
    with replace_sdpa(**ENERGY):
        entered.set()
        assert done.wait(30)
        assert torch.equal(attention(), ours(**ENERGY))
    thread.join()
    assert torch.equal(found["outside"], before)
    assert torch.equal(found["its own"], ours(strategy="lsh"))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"on_unsupported": "ignore"}, ValueError, "on_unsupported.*ignore"),
        ({"strategy": "quick"}, ValueError, "quick"),
        ({"group_sise": 2}, TypeError, "group_sise"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        replace_sdpa(**arguments)


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ((2, 2, 16, 49), {"dropout_p": 0.5}),
        ((2, 2, 16, 49), {"scale": 1.0}),  # wider than long, as XCiT's are
        ((1, 2, 16, 600), {}),
        ((1, 2, 600, 600), {"is_causal": True}),
    ],
    ids=["dropout", "channels", "columns", "more columns"],
)
def test_refused_calls_raise_or_pass_on(shape, arguments):
    query, key, value = tensors(*shape)

    def call():
        torch.manual_seed(0)
        return F.scaled_dot_product_attention(query, key, value, **arguments)

    expected = call()
    with pytest.raises((NotImplementedError, ValueError), match="allowed"), replace_sdpa(**ENERGY):
        call()
    with warnings.catch_warnings(record=True) as caught, replace_sdpa(on_unsupported="warn", **ENERGY):
        warnings.simplefilter("always")
        assert torch.equal(call(), expected) and torch.equal(call(), expected)
        assert torch.equal(attention(), ours(**ENERGY))
    assert len(caught) == 1 and "refuses" in str(caught[0].message) and caught[0].filename == __file__
    with warnings.catch_warnings(record=True) as caught, replace_sdpa(on_unsupported="silent", **ENERGY):
        warnings.simplefilter("always")
        assert torch.equal(call(), expected)
    assert not caught


def test_refused_calls_go_to_the_next_block_outside():
    query, key, value = tensors(2, 2, 16, 49)
    with replace_sdpa(strategy="exact"), replace_sdpa(on_unsupported="silent", **ENERGY):
        inside = F.scaled_dot_product_attention(query, key, value, scale=1.0)
    assert torch.equal(inside, scaled_dot_product_attention(query, key, value, scale=1.0, strategy="exact"))
    with pytest.raises(NotImplementedError), replace_sdpa(**ENERGY), replace_sdpa(on_unsupported="silent", **ENERGY):
        F.scaled_dot_product_attention(query, key, value, scale=1.0)


@pytest.mark.parametrize("settings", [ENERGY, {"strategy": "exact"}], ids=["energy", "exact"])
@pytest.mark.parametrize("disabled", ["cpu/,reference/", "cpu/grouping,reference/grouping"])
def test_what_no_kernel_serves_is_passed_on(settings, disabled, monkeypatch):
    before = attention()
    monkeypatch.setenv("DISTR_DISABLE_KERNELS", disabled)
    with replace_sdpa(on_unsupported="silent", **settings) as calls:
        found = attention()
    if settings is ENERGY or disabled.startswith("cpu/,"):
        assert torch.equal(found, before) and calls.left == 1
        with pytest.raises(RuntimeError, match="no kernel"), replace_sdpa(**settings):
            attention()
    else:
        assert calls.taken == 1


def test_settings_that_the_library_refuses_are_passed_on():
    query, key, value = tensors(1, 2, 200, 64)
    one_block = {**ENERGY, "block_size": 200}  # of a causal call: it would be exact
    before = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    with pytest.raises(RuntimeError, match="block is 200"), replace_sdpa(**one_block):
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
    with replace_sdpa(on_unsupported="silent", **one_block) as calls:
        assert torch.equal(F.scaled_dot_product_attention(query, key, value, is_causal=True), before)
    assert calls.left == 1


def test_a_variable_that_no_call_could_heed_is_no_refusal(monkeypatch):
    monkeypatch.setenv("DISTR_DISABLE_KERNELS", "nothing/")
    with pytest.raises(RuntimeError, match="DISTR_DISABLE_KERNELS"), replace_sdpa(on_unsupported="silent", **ENERGY):
        attention()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no kernel on cpu serves this problem"),  # what is said decides nothing
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_only_refusals_are_passed_on(error, monkeypatch):
    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr(sdpa_mode, "scaled_dot_product_attention", fails)
    with pytest.raises(type(error), match=str(error)), replace_sdpa(on_unsupported="silent", **ENERGY):
        attention()


@pytest.mark.parametrize("strategy", ["exact", "auto"])
def test_attention_over_channels_stays_exact(strategy):
    query, key, value = tensors(2, 2, 16, 49)
    with replace_sdpa(strategy=strategy, group_size=2 if strategy == "auto" else None):
        inside = F.scaled_dot_product_attention(query, key, value, scale=1.0)
    torch.testing.assert_close(inside, F.scaled_dot_product_attention(query, key, value, scale=1.0))


@pytest.mark.parametrize("grad", [True, False])
def test_multi_head_attention_is_met(grad):
    """nn.MultiheadAttention calls attention behind a function that modes see first."""
    torch.manual_seed(0)
    module, inputs = nn.MultiheadAttention(32, 2, batch_first=True).eval(), tensors(2, 48, 32)
    with torch.set_grad_enabled(grad):
        before, _ = module(*inputs, need_weights=False)
        with replace_sdpa(strategy="exact"):
            exact, _ = module(*inputs, need_weights=False)
        with replace_sdpa(**ENERGY):
            inside, _ = module(*inputs, need_weights=False)
            _, weights = module(*inputs, need_weights=True)
    torch.testing.assert_close(exact, before)
    assert not torch.allclose(inside, before, atol=1e-3)
    heads = (x.unflatten(-1, (2, 16)).transpose(1, 2) for x in _projected(module, inputs))
    by_hand = scaled_dot_product_attention(*heads, **ENERGY).transpose(1, 2).flatten(2)
    torch.testing.assert_close(inside, module.out_proj(by_hand))
    assert weights.shape == (2, 48, 48)


def _projected(module, inputs):
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases)]


def test_the_encoder_of_torch_is_met_in_training_and_evaluation():
    layer, (inputs, _, _) = encoder_layer(), tensors(2, 48, 32)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            before = layer(inputs)
            with replace_sdpa(strategy="exact"):
                torch.testing.assert_close(layer(inputs), before)
            with replace_sdpa(**ENERGY):
                assert not torch.allclose(layer(inputs), before, atol=1e-3)


def test_gradients_and_the_order_of_causal_calls():
    found = {}
    for order in ("auto", "previous", "own"):
        query = QUERY.clone().requires_grad_()
        with replace_sdpa(**ENERGY, order_from=order):
            out = F.scaled_dot_product_attention(query, KEY, VALUE, is_causal=True)
        found[order] = torch.autograd.grad(out.square().sum(), query)[0]
    assert torch.equal(found["auto"], found["previous"]) and not torch.equal(found["auto"], found["own"])


@pytest.mark.parametrize(
    ("reentrant", "backward"),  # torch has no autograd.grad through reentrant checkpoints
    [(True, "Tensor.backward"), (True, "autograd.backward"), (False, "Tensor.backward"), (False, "autograd.grad")],
)
def test_checkpointing_within_the_block(reentrant, backward):
    layer, found = encoder_layer().train(), []
    weight = layer.linear1.weight
    for checkpointed in (False, True):
        inputs = tensors(2, 48, 32)[0].requires_grad_()
        weight.grad = None
        with replace_sdpa(**ENERGY):
            out = checkpoint(layer, inputs, use_reentrant=reentrant) if checkpointed else layer(inputs)
            loss = (out * tensors(2, 48, 32, seed=1)[0]).sum()
            if backward == "autograd.grad":
                found += torch.autograd.grad(loss, weight)
            else:
                loss.backward() if backward == "Tensor.backward" else torch.autograd.backward([loss])
                found.append(weight.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("place", ["inside", "around"])
def test_compiled_code_follows_the_block(place):
    torch._dynamo.reset()

    def inside(query, settings):
        with replace_sdpa(**settings):
            return F.scaled_dot_product_attention(query, KEY, VALUE)

    compiled_inside = torch.compile(inside, fullgraph=True, backend="aot_eager")
    compiled = torch.compile(lambda query: F.scaled_dot_product_attention(query, KEY, VALUE), fullgraph=True)

    def around(query, settings):
        with replace_sdpa(**settings):
            return compiled(query)

    run = compiled_inside if place == "inside" else around
    for settings in (ENERGY, {"strategy": "exact"}, {"strategy": "lsh"}, ENERGY):  # settings change, graphs follow
        torch.testing.assert_close(run(QUERY, settings), ours(**settings))


@torch.no_grad()
def test_a_fused_encoder_layer_in_compiled_code_is_refused():
    torch._dynamo.reset()
    layer, (inputs, _, _) = encoder_layer(), tensors(2, 48, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    before = compiled(inputs)
    with pytest.raises(NotImplementedError, match="fastpath"), replace_sdpa(**ENERGY):
        compiled(inputs)
    with replace_sdpa(**ENERGY, on_unsupported="silent"):
        torch.testing.assert_close(compiled(inputs), before)


@torch.no_grad()
def test_a_model_of_transformers_with_sdpa():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    model = transformers.BertModel(config).eval()
    model.set_attn_implementation("sdpa")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.mul_(8)
    ids = torch.randint(3, 61, (2, 48))
    mask = torch.ones_like(ids)
    mask[0, -7:] = 0
    before = model(ids, attention_mask=mask).last_hidden_state
    with replace_sdpa(strategy="exact"):
        torch.testing.assert_close(model(ids, attention_mask=mask).last_hidden_state, before)
    with replace_sdpa(**ENERGY):
        inside = model(ids, attention_mask=mask).last_hidden_state
    assert torch.isfinite(inside).all() and not torch.allclose(inside, before, atol=1e-3)
