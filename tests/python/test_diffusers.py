# SPDX-License-Identifier: Apache-2.0
"""The backend of diffusers, in small models that dispatch their attention, and in such that do not."""

import copy
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

import distrattention  # noqa: E402
from distrattention import Settings, replace_sdpa, report  # noqa: E402
from distrattention.integrations import _diffusers_private as private  # noqa: E402
from distrattention.integrations.diffusers import register  # noqa: E402

ENERGY = Settings("energy", 4, 16)
EXACT = Settings("exact")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "diffusion_transformer.py"


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dit():
    """Calls torch's attention itself: 64 tokens, two blocks."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "sample_size": 16}
    model = diffusers.DiTTransformer2DModel(**sizes, norm_num_groups=4, num_embeds_ada_norm=10)
    inputs = {"timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    return model, {"hidden_states": normal(1, 4, 16, 16), **inputs}


def unet():
    """Calls torch's attention itself, among its own 64 or 256 pixels and over 7 words."""
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes = {"block_out_channels": (32,), "layers_per_block": 1, "cross_attention_dim": 32, "attention_head_dim": 2}
    model = diffusers.UNet2DConditionModel(sample_size=16, norm_num_groups=8, **blocks, **sizes)
    return model, {"sample": normal(1, 4, 16, 16), "timestep": 3, "encoder_hidden_states": normal(1, 7, 32, seed=1)}


def flux():
    """Dispatches its attention: 72 tokens, 8 of them of text, a double and a single block."""
    sizes = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    sizes |= {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    model = diffusers.FluxTransformer2DModel(patch_size=1, axes_dims_rope=[4, 4, 8], **sizes)
    inputs = {"hidden_states": normal(1, 64, 4), "encoder_hidden_states": normal(1, 8, 32, seed=1)}
    inputs |= {"pooled_projections": normal(1, 32, seed=2), "timestep": torch.tensor([0.5])}
    return model, {**inputs, "img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(8, 3)}


MODELS = {"dit": dit, "unet": unet, "flux": flux}


def build(name):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.eval(), inputs


@torch.no_grad()
def run(model, inputs):
    return model(**inputs).sample


@pytest.mark.parametrize(("name", "taken", "left"), [("dit", 2, 0), ("unet", 4, 4), ("flux", 2, 0)])
def test_a_model_with_the_backend(name, taken, left):
    model, inputs = build(name)
    before = run(model, inputs)
    classes = [type(module.processor) for module in private.attention_modules(model).values()]
    register("distr", EXACT, least_rows=64)
    model.set_attention_backend("distr")
    torch.testing.assert_close(run(model, inputs), before, rtol=1e-4, atol=1e-5)
    calls = register("distr", ENERGY, least_rows=64)  # for models in use, too
    approximate = run(model, inputs)
    assert (calls.taken, calls.left) == (taken, left), calls
    assert not torch.allclose(approximate, before, rtol=1e-3, atol=1e-3)
    if name != "unet":  # where a block would take the attention to words as well
        with replace_sdpa(ENERGY):
            model.reset_attention_backend()
            torch.testing.assert_close(run(model, inputs), approximate)
    model.reset_attention_backend()
    assert torch.equal(run(model, inputs), before) and (calls.taken, calls.left) == (taken, left)
    assert [type(module.processor) for module in private.attention_modules(model).values()] == classes


def test_another_backend_ends_ours_and_ours_is_no_other_models():
    model, inputs = build("flux")
    other, _ = build("flux")
    before = run(model, inputs)
    calls = register("distr", ENERGY, least_rows=64)
    model.set_attention_backend("distr")
    assert torch.equal(run(other, inputs), before) and calls.taken == 0
    model.set_attention_backend("native")
    assert torch.equal(run(model, inputs), before) and calls.taken == 0
    with diffusers.attention_backend("distr"):
        assert not torch.equal(run(other, inputs), before)
    assert calls.taken == 2 and torch.equal(run(other, inputs), before)
    other.reset_attention_backend()
    model.reset_attention_backend()


def test_by_default_only_long_self_attention_is_approximated():
    model, inputs = build("unet")
    before = run(model, inputs)
    calls = register("distr", ENERGY)
    model.set_attention_backend("distr")
    assert torch.equal(run(model, inputs), before)
    assert calls.taken == 0 and calls.reasons == {"other keys than rows": 4, "fewer than 1024 rows": 4}
    calls = register("distr", ENERGY, least_rows=256)
    run(model, inputs)
    assert calls.taken == 4 and calls.reasons == {"other keys than rows": 4}
    calls = register("distr", ENERGY, least_rows=256, self_attention_only=False)
    run(model, inputs)
    assert (calls.taken, calls.left) == (8, 0)
    model.reset_attention_backend()


@pytest.mark.parametrize("name", ["dit", "flux"])
def test_settings_by_layer(name):
    model, inputs = build(name)
    names = list(private.attention_modules(model))
    found = {}
    for layers in ((), names[:1], [names[0].split(".")[0]], names):
        register("distr", ENERGY, least_rows=64, per_layer={layer: EXACT for layer in layers})
        model.set_attention_backend("distr")
        found[tuple(layers)] = run(model, inputs)
    exact = found[tuple(names)]
    model.reset_attention_backend()
    torch.testing.assert_close(exact, run(model, inputs), rtol=1e-4, atol=1e-5)
    errors = [(out - exact).norm() for out in found.values()]
    assert errors[0] > errors[1] > 0 == errors[3]
    assert (errors[2] == 0) == (name == "dit")  # both of its blocks are in "transformer_blocks"
    register("distr", ENERGY, least_rows=64)
    model.set_attention_backend("distr")
    model.get_submodule(names[0]).distr_settings = EXACT
    assert torch.equal(run(model, inputs), found[tuple(names[:1])])
    model.reset_attention_backend()


def test_the_longest_name_of_a_layer_decides():
    model, inputs = build("dit")
    per_layer = {"transformer_blocks": EXACT, "transformer_blocks.1": ENERGY}
    register("distr", Settings("lsh"), least_rows=64, per_layer=per_layer)
    model.set_attention_backend("distr")
    mixed = run(model, inputs)
    register("distr", ENERGY, least_rows=64, per_layer={"transformer_blocks.0": EXACT})
    model.set_attention_backend("distr")
    assert torch.equal(run(model, inputs), mixed)
    register("distr", ENERGY, per_layer={"transformer_blocks.7": EXACT})
    with pytest.raises(ValueError, match=r"names \['transformer_blocks.7'\]; allowed: modules of DiTTransformer2DM"):
        model.set_attention_backend("distr")
    model_before, _ = build("dit")
    assert torch.equal(run(model, inputs), run(model_before, inputs))


@torch.no_grad()
def denoise(model, inputs, scheduler, steps=4):
    scheduler.set_timesteps(steps)
    latents = inputs["hidden_states"]
    for timestep in scheduler.timesteps:
        predicted = model(**{**inputs, "hidden_states": latents, "timestep": timestep[None]}).sample
        latents = scheduler.step(predicted, timestep, latents).prev_sample
    return latents


def test_settings_by_denoising_step():
    model, inputs = build("dit")
    scheduler = diffusers.DDIMScheduler()
    plain = copy.deepcopy(scheduler)
    exact = denoise(model, inputs, plain)
    calls = register("distr", ENERGY, least_rows=64, scheduler=scheduler, exact_steps=(1, 2))
    model.set_attention_backend("distr")
    for _ in range(2):  # counted anew in each run
        ends = denoise(model, inputs, scheduler)
    assert calls.taken == 2 * 2 and calls.reasons == {"exact steps": 2 * 6}

    def only_second(step, steps):
        assert steps == 4
        return None if step == 1 else EXACT

    register("distr", ENERGY, least_rows=64, scheduler=scheduler, per_step=only_second)
    torch.testing.assert_close(denoise(model, inputs, scheduler), ends)
    register("distr", ENERGY, scheduler=scheduler, per_step=lambda step, steps: EXACT if step < 2 else "exact")
    with pytest.raises(TypeError, match=r"per_step\(2, 4\) is 'exact'; allowed: distrattention.Settings or None"):
        denoise(model, inputs, scheduler)
    calls = register("distr", ENERGY, least_rows=64, scheduler=scheduler, exact_steps=(4, 0))
    torch.testing.assert_close(denoise(model, inputs, scheduler), exact)
    assert calls.taken == 0 and not torch.allclose(ends, exact, rtol=1e-4, atol=1e-4)
    model.reset_attention_backend()


@pytest.mark.parametrize("name", ["dit", "flux"])
def test_steps_of_a_compiled_model_need_no_more_graphs_than_settings(name):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, inputs = build(name)
    scheduler, compiled = diffusers.DDIMScheduler(), torch.compile(model, fullgraph=True, backend="aot_eager")
    register("distr", ENERGY, least_rows=64, scheduler=scheduler, exact_steps=(2, 3))
    model.set_attention_backend("distr")
    expected = denoise(model, inputs, scheduler, 12)
    torch.testing.assert_close(denoise(compiled, inputs, scheduler, 12), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    model.reset_attention_backend()


def test_a_scheduler_that_counts_is_the_scheduler_it_was():
    plain, counting = diffusers.DDIMScheduler(), diffusers.DDIMScheduler()
    register("distr", scheduler=counting, exact_steps=(1, 0))
    assert isinstance(counting, diffusers.DDIMScheduler) and counting.config == plain.config
    assert inspect.signature(counting.step) == inspect.signature(plain.step)
    assert type(diffusers.DDIMScheduler.from_config(counting.config)) is diffusers.DDIMScheduler
    other = copy.deepcopy(counting)
    counting.set_timesteps(5)
    other.set_timesteps(7)
    assert len(counting.timesteps) == 5 and len(other.timesteps) == 7


def test_masks_of_keys_and_what_is_refused():
    register("distr", EXACT, least_rows=1)
    q, k, v = (normal(2, 40, 2, 16, seed=seed) for seed in range(3))
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, 30:] = False
    functions = private._AttentionBackendRegistry._backends
    ours, native = (functions[private.AttentionBackendName(name)] for name in ("distr", "native"))
    for options in ({}, {"attn_mask": mask}, {"attn_mask": mask[:, None, None]}, {"is_causal": True}, {"scale": 0.3}):
        torch.testing.assert_close(ours(q, k, v, **options), native(q, k, v, **options))
    for options in ({"return_lse": True}, {"_parallel_config": object()}):
        with pytest.raises(NotImplementedError, match="return_lse and parallel_config are not supported"):
            ours(q, k, v, **options)
    with pytest.raises(NotImplementedError, match="dropout"):
        ours(q, k, v, dropout_p=0.5)


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ({"name": "native"}, ValueError, "name is 'native'; allowed: a name in lower case that diffusers does not have"),
    ({"name": "Distr"}, ValueError, "name is 'Distr'; allowed"),
    ({"per_layer": {0: EXACT}}, ValueError, "per_layer has 0: .*; allowed: a module's name"),
    ({"exact_steps": 2}, ValueError, r"exact_steps is 2; allowed: \(steps at the start"),
    ({"exact_steps": (1, -1)}, ValueError, "exact_steps is -1; allowed: 0 to"),
    ({"exact_steps": (1, 0)}, ValueError, "exact_steps was given without scheduler"),
    ({"per_step": lambda step, steps: None}, ValueError, "per_step was given without scheduler"),
    ({"scheduler": 5}, TypeError, "scheduler is of type int; allowed: a scheduler"),
    ({"least_rows": 0}, ValueError, "least_rows is 0; allowed: 1 to"),
    ({"group_sise": 2}, TypeError, "group_sise"),
    ({"settings": ENERGY, "group_size": 2}, TypeError, "settings and group_size were both given"),
])
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        register(**arguments)


@pytest.mark.parametrize("name", ["dit", "flux"])
def test_compiles_as_one_graph(name):
    torch._dynamo.reset()
    model, inputs = build(name)
    calls = register("distr", ENERGY, least_rows=64)
    model.set_attention_backend("distr")
    expected = run(model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, inputs), expected)
    assert calls.compiled and calls.taken == 2
    model.reset_attention_backend()


def test_gradients():
    model, inputs = build("dit")
    register("distr", ENERGY, least_rows=64)
    model.set_attention_backend("distr")
    model(**inputs).sample.square().sum().backward()
    with replace_sdpa(ENERGY):
        model.reset_attention_backend()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        model(**inputs).sample.square().sum().backward()
    assert found and all(torch.equal(p.grad, found[name]) for name, p in model.named_parameters() if name in found)


def test_a_report_meets_it():
    model, inputs = build("dit")
    register("distr", ENERGY, least_rows=64)
    model.set_attention_backend("distr")
    found = report(model, inputs, Settings("energy", 2), repeats=1)
    assert [layer.name for layer in found.layers] == [f"transformer_blocks.{n}.attn1" for n in (0, 1)]
    assert all(layer.measurements[0].error > 0.01 for layer in found.layers)
    model.reset_attention_backend()


def test_an_unusable_diffusers_is_named():
    code = "import sys; sys.modules['diffusers'] = None; import distrattention.integrations.diffusers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UnavailableError: diffusers cannot be used" in done.stderr and "install diffusers 0.42" in done.stderr
    assert issubclass(distrattention.UnavailableError, ImportError)


@pytest.mark.timeout(300)
def test_the_example():
    sizes = ("--layers", "2", "--heads", "1", "--steps", "3")
    done = subprocess.run([sys.executable, str(EXAMPLE), *sizes], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {line[:26].strip(): line[26:].split() for line in done.stdout.splitlines()}
    assert len(rows) == 5 and rows["exact"][-1] == "0.0000"
    assert rows["energy"][:3] == ["6", "taken,", "0"] and rows["energy, ends exact"][:3] == ["2", "taken,", "4"]
    errors = {name: float(cells[-1]) for name, cells in rows.items()}
    assert 0 < errors["energy, ends exact"] < errors["energy"] < errors["energy, G = 4 first"]
