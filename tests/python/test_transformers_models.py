# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="distr" in transformers' models with small random weights, against "sdpa"."""

import copy

import pytest
import torch
import transformers

from distrattention import Settings
from distrattention.integrations.transformers import register

ENERGY = {"strategy": "energy", "group_size": 4, "block_size": 16}
ROWS = 48  # three blocks
VOCABULARY = 61


@pytest.fixture(autouse=True)
def registered(torch_state):
    torch.set_num_threads(1)  # quickest for tensors as small as these
    register("distr", strategy="exact")  # for each test, as others of this process register it as well
    register("distr_energy", **ENERGY)


def build(cls, config, **changes):
    """The model with seeded weights, in evaluation mode."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = cls(config(**{**sizes, "vocab_size": VOCABULARY, **changes})).eval()
    with torch.no_grad():  # scores that spread, so that an approximation shows
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                parameter.mul_(4)
    return model


def llama(**changes):
    config = {"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None, **changes}
    return build(transformers.LlamaForCausalLM, transformers.LlamaConfig, **config)


def bert(**changes):
    config = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, **changes}
    return build(transformers.BertModel, transformers.BertConfig, **config)


def vit():
    config = {"image_size": 56, "patch_size": 8, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    return build(transformers.ViTModel, transformers.ViTConfig, **config)


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    sizes |= {"decoder_start_token_id": 1, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    return build(transformers.T5ForConditionalGeneration, transformers.T5Config, **sizes)


def whisper():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "num_mel_bins": 8}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_source_positions": 40}
    sizes |= {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dropout": 0.0}
    return build(transformers.WhisperForConditionalGeneration, transformers.WhisperConfig, **sizes)


def tokens(padding=None, rows=ROWS, seed=0):
    """Two sequences; of the first, 7 tokens at the left or right are padding."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, rows), generator=random)
    if padding is None:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[0, slice(7) if padding == "left" else slice(-7, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def images(seed=0):
    return {"pixel_values": torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(seed))}


def speech():
    random = torch.Generator().manual_seed(0)
    return {
        "input_features": torch.randn(2, 8, 80, generator=random),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (2, ROWS), generator=random),
    }


def run(model, inputs, implementation, **call):
    """The model's first output with that implementation, [B, ...]."""
    model.set_attn_implementation(implementation)
    return model(**inputs, **call)[0]


def gradients(model, inputs, implementation):
    """By parameter, of a weighted sum over the outputs of real tokens."""
    model.zero_grad()
    output = run(model, inputs, implementation)
    if "attention_mask" in inputs and len(inputs) == 2:
        output = output * inputs["attention_mask"][..., None]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    (output * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


MODELS = {
    "bert": (bert, tokens),
    "bert_padded": (bert, lambda: tokens("right")),
    "vit": (vit, images),
    "llama_gqa": (llama, tokens),
    "llama_left_padding": (llama, lambda: tokens("left")),
    "llama_right_padding": (llama, lambda: tokens("right")),
    "t5": (t5, lambda: {**tokens("right"), "decoder_input_ids": tokens(seed=1)["input_ids"]}),
    "whisper": (whisper, speech),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-11)])
@pytest.mark.parametrize("name", MODELS)
def test_exact_equals_sdpa_forward_and_backward(name, dtype, tolerance):
    make, inputs = MODELS[name]
    model = make().to(dtype)
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs().items()}
    ours, theirs = (run(model, inputs, implementation) for implementation in ("distr", "sdpa"))
    assert (ours - theirs).norm() <= tolerance * theirs.norm()
    ours, theirs = (gradients(model, inputs, implementation) for implementation in ("distr", "sdpa"))
    assert ours.keys() == theirs.keys() and ours
    whole = torch.cat([gradient.flatten() for gradient in theirs.values()]).norm()
    for parameter, gradient in theirs.items():  # that of a bias of K is 0 but for rounding
        assert (ours[parameter] - gradient).norm() <= tolerance * (gradient.norm() + 1e-6 * whole), parameter


@pytest.mark.parametrize(
    ("name", "strategy"), [*((name, "energy") for name in MODELS), ("bert", "lsh"), ("llama_left_padding", "lsh")]
)
def test_approximations_change_outputs_and_stay_finite(name, strategy):
    make, inputs = MODELS[name]
    model, inputs = make(), inputs()
    exact = run(model, inputs, "distr")
    register("distr_model", strategy=strategy, group_size=4, block_size=16)
    output = run(model, inputs, "distr_model")
    assert torch.isfinite(output).all() and not torch.allclose(output, exact, rtol=1e-3, atol=1e-3)
    found = gradients(model, inputs, "distr_model")
    assert all(torch.isfinite(gradient).all() for gradient in found.values())


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [None, "left"])
def test_greedy_generation_gives_the_same_tokens(cache, padding):
    model, inputs = llama(), tokens(padding)
    found = {}
    for implementation in ("sdpa", "distr", "distr_energy"):
        model.set_attn_implementation(implementation)
        found[implementation] = model.generate(
            **inputs, max_new_tokens=12, do_sample=False, cache_implementation=cache, disable_compile=True
        )
        assert found[implementation].shape == (2, ROWS + 12)
    assert torch.equal(found["distr"], found["sdpa"])
    assert not torch.equal(found["distr_energy"], found["sdpa"])  # the prompt was approximated


@torch.no_grad()
def test_prompt_is_approximate_and_decoding_exact():
    model, inputs = llama(), tokens("left")
    model.set_attn_implementation("distr_energy")
    prompt = model(**inputs, use_cache=True)
    assert not torch.allclose(prompt.logits, run(model, inputs, "sdpa"), rtol=1e-3, atol=1e-3)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 3, dtype=torch.long)], 1)
    for rows in (1, 3):  # one token, and as many as speculative decoding checks at once
        step = {"input_ids": inputs["input_ids"][:, :rows], "attention_mask": mask[:, : ROWS + rows]}
        logits = {}
        for implementation in ("sdpa", "distr_energy"):
            model.set_attn_implementation(implementation)
            logits[implementation] = model(**step, past_key_values=copy.deepcopy(prompt.past_key_values)).logits
        torch.testing.assert_close(logits["distr_energy"], logits["sdpa"], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_prompt_in_chunks_is_attended_from_the_bottom_right():
    model, inputs = llama(), tokens()["input_ids"]
    whole = run(model, {"input_ids": inputs}, "distr")
    cache, chunks = transformers.DynamicCache(config=model.config), []
    for chunk in inputs.split((20, 17, 11), dim=1):
        chunks.append(model(input_ids=chunk, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(chunks, 1), whole, rtol=1e-4, atol=1e-5)


def mistral(**changes):
    config = {"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None, "sliding_window": 20, **changes}
    return build(transformers.MistralForCausalLM, transformers.MistralConfig, **config)


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_sliding_windows_arrive_as_masks(without_gradients):
    with without_gradients():
        outputs = {name: run(mistral(), tokens(), name) for name in ("eager", "distr", "distr_energy")}
    torch.testing.assert_close(outputs["distr"], outputs["eager"], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs["distr_energy"], outputs["eager"], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_near_keys_of_sliding_windows():
    """As many as a window has are exact attention, and fewer come nearer to it than none."""
    model, inputs = mistral(sliding_window=200, num_hidden_layers=1), tokens(rows=400)
    eager = run(model, inputs, "eager")
    errors = []
    for near in ({"window": 200}, {"window": 0}, {"sinks": 1}, {}):
        register("distr_near", **ENERGY, **near)
        errors.append((run(model, inputs, "distr_near") - eager)[:, 200:].norm().item())
    assert errors[0] < 1e-3 < min(errors[1:3]) and max(errors[1:3]) < errors[3]


@pytest.mark.parametrize(
    ("training", "settings", "sees_none"), [(True, {}, True), (False, {}, True), (False, {"order_from": "own"}, False)]
)
@pytest.mark.parametrize("make", [llama, whisper, t5])
@pytest.mark.parametrize("padding", [None, "left"])
def test_rows_see_no_future(make, training, settings, sees_none, padding):
    """The first two thirds of the output do not depend on the last third of the decoder's tokens, in training or not;
    with "own" they do, through the choice of columns in the block where the change begins."""
    model = make().train(training)
    register("distr_model", strategy="energy", group_size=4, block_size=ROWS // 3 + 4, **settings)
    inputs = tokens(padding)
    if make is not llama:
        mask = {"decoder_attention_mask": inputs["attention_mask"]} if padding else {}
        encoder = {"input_features": speech()["input_features"]} if make is whisper else tokens(seed=1)
        inputs = {**encoder, "decoder_input_ids": inputs["input_ids"], **mask}
    name = "input_ids" if make is llama else "decoder_input_ids"
    changed = {**inputs, name: inputs[name].clone()}
    kept = 2 * ROWS // 3
    changed[name][:, kept:] = tokens(seed=5)["input_ids"][:, kept:]
    with torch.set_grad_enabled(training):
        before, after = (run(model, each, "distr_model")[:, :kept] for each in (inputs, changed))
    if sees_none:
        torch.testing.assert_close(after, before, rtol=0, atol=1e-6)
    else:
        assert not torch.allclose(after, before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(reentrant):
    model, inputs = llama(use_cache=False).train(), tokens("left")
    plain = gradients(model, inputs, "distr_energy")
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    for name, gradient in gradients(model, inputs, "distr_energy").items():
        torch.testing.assert_close(gradient, plain[name])


@torch.no_grad()
def test_settings_by_call_and_by_layer():
    for model, inputs in ((llama(), tokens("left")), (bert(), tokens("right")), (vit(), images())):
        energy, exact = (run(model, inputs, name) for name in ("distr_energy", "distr"))
        assert torch.equal(run(model, inputs, "distr", **ENERGY), energy)
        assert torch.equal(run(model, inputs, "distr_energy", strategy="exact"), exact)
        assert torch.equal(run(model, inputs, "distr_energy", group_size=1), exact)

    for model, inputs in ((llama(), tokens("left")), (bert(), tokens("right"))):
        energy, exact = (run(model, inputs, name) for name in ("distr_energy", "distr"))
        register("distr_layers", **ENERGY, per_layer={0: Settings("exact")})
        first_exact = run(model, inputs, "distr_layers")
        register("distr_layers", **ENERGY, per_layer=lambda layer: None if layer.layer_idx else Settings("exact"))
        assert torch.equal(run(model, inputs, "distr_layers"), first_exact)
        register("distr_layers", **ENERGY, per_layer={0: Settings("exact"), 1: Settings("exact")})
        assert torch.equal(run(model, inputs, "distr_layers"), exact)
        assert not torch.equal(first_exact, exact) and not torch.equal(first_exact, energy)

    model, inputs = vit(), images()  # its attention has no layer_idx
    energy, exact = (run(model, inputs, name) for name in ("distr_energy", "distr"))
    attention = [module for module in model.modules() if type(module).__name__ == "ViTAttention"]
    assert len(attention) == 2
    attention[0].distr_settings = Settings("exact")
    mixed = run(model, inputs, "distr_energy")
    assert not torch.equal(mixed, energy) and not torch.equal(mixed, exact)
    attention[1].distr_settings = Settings("exact")
    assert torch.equal(run(model, inputs, "distr_energy"), exact)
    register("distr_layers", **ENERGY, per_layer={0: Settings("exact")})
    del attention[0].distr_settings
    with pytest.raises(ValueError, match="layer_idx"):
        run(model, inputs, "distr_layers")


def test_misspelt_settings_of_a_call_are_refused():
    with pytest.raises(TypeError, match="did you mean group_size"):
        run(llama(), tokens(), "distr", group_sise=2)


def test_the_implementation_may_be_given_to_the_constructor():
    model = transformers.AutoModel.from_config(llama().config, attn_implementation="distr_energy")
    assert model.config._attn_implementation == "distr_energy"
    assert torch.isfinite(model(**tokens())[0]).all()


def gpt_oss():
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    sizes |= {"pad_token_id": 0, "eos_token_id": None, "sliding_window": 20}
    model = build(transformers.GptOssForCausalLM, transformers.GptOssConfig, **sizes)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def gemma2(**changes):
    config = {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 20}
    config |= {"attn_logit_softcapping": 2.0, "pad_token_id": 0, "eos_token_id": None, **changes}
    return build(transformers.Gemma2ForCausalLM, transformers.Gemma2Config, **config)


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_gemma_2_has_its_capped_scores_and_its_windows(padding):
    model, inputs = gemma2(), tokens(padding)
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    real = inputs.get("attention_mask", torch.ones(2, ROWS)) > 0
    ours, eager = (run(model, inputs, name) for name in ("distr", "eager"))
    torch.testing.assert_close(ours[real], eager[real], rtol=1e-4, atol=1e-5)
    uncapped = gemma2(attn_logit_softcapping=None)
    assert not torch.allclose(run(uncapped, inputs, "distr")[real], eager[real], rtol=1e-2, atol=1e-2)
    if padding is None:
        of_ours, of_eager = (gradients(model, inputs, name) for name in ("distr", "eager"))
        for name, gradient in of_ours.items():
            torch.testing.assert_close(gradient, of_eager[name], rtol=1e-3, atol=1e-3, msg=name)


def gemma3():
    config = {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 20}
    config |= {"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0, "eos_token_id": None}
    return build(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, **config)


@pytest.mark.parametrize("make", [mistral, gemma3, gpt_oss])
def test_models_with_sliding_windows_train_as_eager(make):
    model = make()
    torch.testing.assert_close(run(model, tokens(), "distr"), run(model, tokens(), "eager"), atol=1e-4, rtol=1e-4)
    of_ours, of_eager = (gradients(model, tokens(), name) for name in ("distr", "eager"))
    assert sum("sinks" in name for name in of_eager) == (2 if make is gpt_oss else 0)
    for name, gradient in of_eager.items():
        torch.testing.assert_close(of_ours[name], gradient, atol=1e-3, rtol=1e-3, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("make", [mistral, gemma2, gemma3, gpt_oss])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_models_with_sliding_windows_generate_as_eager(make, padding, cache):
    model, inputs = make(), tokens(padding)
    assert make is mistral or model.config.layer_types == ["sliding_attention", "full_attention"]
    found = []
    for name in ("distr", "eager"):
        model.set_attn_implementation(name)
        options = {"cache_implementation": cache, "return_dict_in_generate": True, "output_logits": True}
        found.append(model.generate(**inputs, max_new_tokens=6, do_sample=False, **options))
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(torch.stack(found[0].logits), torch.stack(found[1].logits), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_gemma_2_can_be_approximated():
    energy, eager = (run(gemma2(), tokens(), name) for name in ("distr_energy", "eager"))
    assert torch.isfinite(energy).all() and not torch.allclose(energy, eager, rtol=1e-3, atol=1e-3)


def test_what_models_ask_for_and_we_lack_is_refused():
    model = bert(attention_probs_dropout_prob=0.1).train()
    with pytest.raises(NotImplementedError, match="dropout"):
        run(model, tokens(), "distr")
    assert torch.isfinite(run(model.eval(), tokens(), "distr")).all()


def test_a_training_step_lowers_the_loss():
    model, inputs = llama().train(), tokens("right")
    model.set_attn_implementation("distr_energy")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("make", [llama, bert])
def test_compiles_as_one_graph(make):
    model, inputs = make(), tokens()
    eager = run(model, inputs, "distr_energy")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)[0]
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_compiled_static_cache_gives_the_same_tokens():
    model, inputs = llama(), tokens("left")
    model.set_attn_implementation("distr_energy")
    call = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    eager = model.generate(**inputs, **call)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(**inputs, **call), eager)
