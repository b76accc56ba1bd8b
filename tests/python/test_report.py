# SPDX-License-Identifier: Apache-2.0
"""The evaluation: its numbers against independent ones, the models it meets, and what it writes."""

import dataclasses
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import distrattention
from distrattention import Settings, report
from distrattention.evaluation import Time, measure
from distrattention.evaluation.measure import Call, output_errors

def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_output_errors_by_hand():
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    output = torch.tensor([[3.0, 4.0], [9.0, 9.0], [0.0, 1.0], [0.0, 0.0]])
    error, cosine = output_errors(output, exact)
    assert error == pytest.approx(math.sqrt((81 + 81 + 1 + 1 + 4) / 30))
    assert cosine == 0
    assert output_errors(-exact, exact) == pytest.approx((2.0, -1.0))
    assert output_errors(exact, exact) == (0.0, pytest.approx(1.0))
    assert output_errors(torch.zeros(2, 2), torch.zeros(2, 2)) == (0.0, 1.0)
    assert output_errors(torch.ones(2, 2), torch.zeros(2, 2)) == (math.inf, 1.0)
    assert all(math.isnan(x) for x in output_errors(torch.full((2, 2), torch.nan), torch.ones(2, 2)))


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.options = options

    def forward(self, x):  # [B, N, 64]
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)


def tiny(*options):
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(**o) for o in options)).eval()


def errors_by_hand(layer, x, settings):
    """What one layer's attention errs on the input `x` of the exact model."""
    seen = []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        true = F.scaled_dot_product_attention
        patch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: seen.append((a, k)) or true(*a, **k))
        following = layer(x)
    (arguments, options), = seen
    exact = true(*arguments, **options)
    outputs = [distrattention.scaled_dot_product_attention(*arguments, **options, **s.asdict()) for s in settings]
    return [((o - exact).norm() / exact.norm()).item() for o in outputs], following


def test_each_layer_gets_the_exact_inputs_and_the_outputs_add_up():
    model, x = tiny({}, {"is_causal": True}, {}), normal(2, 200, 64)
    settings = [Settings("energy", 2), Settings("lsh", 4, block_size=64)]
    found = report(model, x, settings, repeats=1)
    assert [layer.name for layer in found.layers] == ["0", "1", "2"]
    assert [layer.causal for layer in found.layers] == ["none", "top_left", "none"]
    following = x
    for block, layer in zip(model, found.layers):
        assert layer.query == layer.key == (2, 2, 200, 32) and layer.head_dim_v == 32 and layer.mask is None
        expected, following = errors_by_hand(block, following, settings)
        assert [m.error for m in layer.measurements] == pytest.approx(expected, rel=1e-4)
        assert min(expected) > 0.01
    for n, s in enumerate(settings):
        with torch.no_grad(), distrattention.replace_sdpa(**s.asdict()):
            expected = ((model(x) - following).norm() / following.norm()).item()
        assert found.outputs[0].name == "output"
        assert found.outputs[0].errors[n] == pytest.approx(expected, rel=1e-4)


def test_exact_settings_do_not_err_and_auto_says_what_it_took():
    settings = [Settings("exact"), Settings("lsh", 1), Settings("auto", 2)]
    found = report(tiny({}), normal(1, 64, 64), settings, repeats=1)
    for m in found.layers[0].measurements:
        assert m.strategy != "energy" and m.error == m.total_variation == 0
        assert m.row_cosine_min == pytest.approx(1)
    assert max(found.outputs[0].errors) < 1e-5
    assert "auto G=2 (exact)" in found.table()


def test_times_are_those_of_their_runs_and_speed_is_their_ratio(monkeypatch):
    settings = [Settings("energy", 2), Settings("lsh", 4)]
    times = {"torch": [5.0, 0.1, 7.0], Settings("exact"): [6.0, 3.0, 2.0, 3.0, 2.0, 3.0]}  # exact attention runs twice
    times |= {settings[0]: [1.2, 9.0, 1.0], settings[1]: [4.0, 4.0, 4.5]}

    def milliseconds(run, device):
        return times[run.args[0] if hasattr(run, "args") else "torch"].pop()

    monkeypatch.setattr(measure, "_milliseconds", milliseconds)
    found = report(tiny({}), normal(1, 60, 64), settings, repeats=3, end_to_end=False)
    layer = found.layers[0]
    assert (layer.torch, layer.exact, layer.twins) == (Time(5.0, 0.1, 7.0), Time(3.0, 2.0, 6.0), (3.0, 2.0))
    assert [m.time for m in layer.measurements] == [Time(1.2, 1.0, 9.0), Time(4.0, 4.0, 4.5)]
    assert [m.speed for m in layer.measurements] == [2.5, None]  # 0.75, where two runs of one kernel differ by 1.5
    table = str(found)
    assert re.search(r"3\.00 \(2\.00-6\.00\) +1\.00$", table, re.M) and re.search(r"4\.00-4\.50\) +-$", table, re.M)
    assert "two runs of exact attention differ by 50.0%" in table
    monkeypatch.undo()
    layer = report(tiny({}), normal(1, 60, 64), settings, repeats=1).layers[0]
    assert min(time.ms for time in (layer.torch, layer.exact, *(m.time for m in layer.measurements))) > 0


def test_the_model_runs_as_it_would_and_nothing_stays_behind():
    model, x = tiny({}, {}), normal(1, 50, 64)
    outputs = []
    report(model, lambda m: outputs.append(m(x)) or outputs[-1], [Settings("energy", 2)], repeats=1)
    assert torch.equal(outputs[0], model(x)) and not outputs[0].requires_grad
    assert not torch.equal(outputs[1], model(x))
    hooks = nn.modules.module
    assert not hooks._global_forward_pre_hooks and not hooks._global_forward_hooks

    def fails(module, inputs):
        raise KeyError("inside")

    model[1].register_forward_pre_hook(fails)
    with pytest.raises(KeyError, match="inside"):
        report(model, x, repeats=1)
    assert not hooks._global_forward_pre_hooks and not hooks._global_forward_hooks
    assert torch.overrides._get_current_function_mode() is None


def test_calls_that_cannot_be_approximated_are_listed_with_the_reason():
    model = tiny({}, {"dropout_p": 0.5})
    found = report(model, normal(1, 64, 64), [Settings("energy", 2)], repeats=1)
    assert found.layers[0].left_out is None
    assert "dropout_p is 0.5" in found.layers[1].left_out and found.layers[1].measurements == ()
    assert found.outputs == () and found.whole is None
    assert found.whole_left_out == "1 of 2 calls cannot be approximated"
    assert "left out: dropout_p is 0.5" in found.table()
    assert "at once: left out, as 1 of 2 calls cannot be approximated" in found.table()


@pytest.mark.parametrize("wrong, message", [
    (lambda: report(tiny({}).train(), normal(1, 8, 64)), "the model is in training mode; allowed: evaluation mode"),
    (lambda: report(nn.Linear(4, 4).eval(), normal(1, 4)), "Linear made no call that can be met; allowed"),
    (lambda: report(tiny({}), normal(1, 8, 64), repeats=0), "repeats is 0; allowed: 1 to"),
    (lambda: report(tiny({}), normal(1, 8, 64), max_rows=-1), "max_rows is -1; allowed: 1 to"),
    (lambda: report(tiny({}), normal(1, 8, 64), [Settings("energy", 33)]), "group_size is 33; allowed: 1 to 32"),
])
def test_bad_input(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


def test_a_batch_of_another_type():
    with pytest.raises(TypeError, match="batch is of type int; allowed: tensor, mapping"):
        report(tiny({}), 3)


def test_settings_of_another_type():
    with pytest.raises(TypeError, match="settings has 'energy'; allowed: distrattention.Settings"):
        report(tiny({}), normal(1, 8, 64), "energy")


def bert(implementation):
    transformers = pytest.importorskip("transformers")
    import distrattention.integrations.transformers

    distrattention.integrations.transformers.register()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        initializer_range=0.2, attn_implementation=implementation,
    )
    return transformers.BertModel(config).eval()


def test_transformers_with_sdpa_and_with_distr_give_the_same_errors():
    mask = torch.ones(2, 150, dtype=torch.long)
    mask[1, 100:] = 0
    ids = torch.randint(50, (2, 150), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": mask}
    settings = [Settings("energy", 2), Settings("lsh", 2)]
    by_sdpa, by_distr = (report(bert(name), batch, settings, repeats=1) for name in ("sdpa", "distr"))
    assert [layer.name for layer in by_sdpa.layers] == [f"encoder.layer.{n}.attention.self" for n in (0, 1)]
    assert {layer.mask for layer in by_sdpa.layers} == {"bool mask 2x1x150x150"}
    assert [o.name for o in by_sdpa.outputs] == ["last_hidden_state", "pooler_output"]
    for one, other in zip(by_sdpa.layers, by_distr.layers, strict=True):
        assert (one.name, one.query, one.mask) == (other.name, other.query, other.mask)
        for a, b in zip(one.measurements, other.measurements, strict=True):
            assert a.error == pytest.approx(b.error, rel=1e-3) and a.error > 0.01
            assert a.total_variation == pytest.approx(b.total_variation, rel=1e-3)
    for one, other in zip(by_sdpa.outputs, by_distr.outputs, strict=True):
        assert one.errors == pytest.approx(other.errors, rel=1e-3) and min(one.errors) > 1e-3


def test_llama_with_grouped_heads():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, initializer_range=0.2, attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(50, (1, 200), generator=torch.Generator().manual_seed(0))
    found = report(model, {"input_ids": ids, "use_cache": False}, [Settings("energy", 2)], repeats=1)
    assert [(layer.name, layer.causal) for layer in found.layers] == [
        (f"model.layers.{n}.self_attn", "top_left") for n in (0, 1)
    ]
    assert [o.name for o in found.outputs] == ["logits"]
    assert all(0.01 < layer.measurements[0].error < 1 for layer in found.layers)


def test_flash_style_calls_are_met():
    class Flash(nn.Module):
        def forward(self, x):  # [B, N, H, d]
            return distrattention.flash_attn_func(x[:, -20:], x, x, causal=True, strategy="lsh")

    found = report(Flash().eval(), normal(1, 60, 2, 32), [Settings("energy", 2, 16), Settings("exact")], repeats=1)
    layer, = found.layers
    assert (layer.causal, layer.query, layer.key) == ("bottom_right", (1, 2, 20, 32), (1, 2, 60, 32))
    assert layer.torch is None and layer.measurements[0].error > 0.01
    assert found.outputs[0].errors == (pytest.approx(layer.measurements[0].error, rel=1e-4), 0)
    assert "causal, bottom right" in found.table() and "torch's own" not in found.table()


def test_calls_with_a_sliding_window_run_as_they_are():
    seen = []

    class Sliding(nn.Module):
        def forward(self, x):  # [B, N, H, d]
            seen.append(distrattention.flash_attn_func(x, x, x, window_size=(5, 0)))
            return distrattention.flash_attn_func(seen[-1], x, x)

    x = normal(1, 60, 2, 32)
    found = report(Sliding().eval(), x, [Settings("energy", 2, 16)], repeats=1)
    reason = "it has a sliding window, in which report measures no approximation"
    assert [layer.left_out for layer in found.layers] == [reason, None]
    assert torch.equal(seen[0], distrattention.flash_attn_func(x, x, x, window_size=(5, 0)))


def test_calls_with_capped_scores_run_as_they_are():
    class Capped(nn.Module):
        def forward(self, x):  # [B, N, H, d]
            return distrattention.flash_attn_func(distrattention.flash_attn_func(x, x, x, softcap=1.0), x, x)

    found = report(Capped().eval(), normal(1, 60, 2, 32), [Settings("energy", 2, 16)], repeats=1)
    assert [layer.left_out for layer in found.layers] == ["its scores are capped, which is not measured", None]


@pytest.mark.parametrize("bias, corner", [(causal_upper_left, "top_left"), (causal_lower_right, "bottom_right")])
def test_a_causal_bias_of_torch_is_its_corner(bias, corner):
    class Biased(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x[:, :, -33:], x, x, bias(33, 40))

    x, settings = normal(1, 2, 40, 32), Settings("energy", 2, 16)
    layer, = report(Biased().eval(), x, [settings], repeats=1).layers
    assert (layer.causal, layer.mask, layer.left_out) == (corner, None, None)
    call = Call(x[:, :, -33:], x, x, causal=corner)
    expected = output_errors(call.run(settings)[0], call.run(Settings("exact"))[0])[0]
    assert layer.measurements[0].error == pytest.approx(expected) and expected > 0


def test_timm_and_what_is_no_attention_over_tokens():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    vit = timm.models.VisionTransformer(img_size=32, patch_size=4, embed_dim=64, depth=2, num_heads=2, num_classes=5)
    found = report(vit.eval(), normal(2, 3, 32, 32), [Settings("energy", 2)], repeats=1)
    assert [layer.name for layer in found.layers] == ["blocks.0.attn", "blocks.1.attn"]
    assert all(m.error > 0.01 for layer in found.layers for m in layer.measurements)
    timm.layers.set_fused_attn(True, experimental=True)
    try:
        xcit = timm.create_model("xcit_nano_12_p16_224", num_classes=5, img_size=160).eval()
    finally:
        timm.layers.set_fused_attn(True)
    for size in (160, 64):  # more tokens than channels of a head, and fewer
        found = report(xcit, normal(1, 3, size, size), [Settings("energy", 2)], repeats=1)
        assert sum("attention over channels" in (layer.left_out or "") for layer in found.layers) == 12


def test_torch_encoder_layers_are_met():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    found = report(model, normal(2, 140, 64), [Settings("energy", 2)], repeats=1)
    assert [layer.name for layer in found.layers] == ["layers.0.self_attn", "layers.1.self_attn"]


def test_compiled_models_are_met():
    model = tiny({}, {})
    found = report(torch.compile(model), normal(1, 64, 64), [Settings("energy", 2)], repeats=1)
    assert len(found.layers) == 2 and found.outputs[0].errors[0] > 0


def test_nested_outputs_and_shapes_that_differ():
    class Many(nn.Module):
        calls = 0

        def forward(self, x):
            y = F.scaled_dot_product_attention(x, x, x)
            self.calls += 1
            return {"a": [y, (y.sum(),)], "ids": y.argmax(-1), "grows": y[..., : self.calls]}

    found = report(Many().eval(), normal(1, 2, 40, 32), [Settings("energy", 2), Settings("exact")], repeats=1)
    assert [o.name for o in found.outputs] == ["a[0]", "a[1][0]", "grows"]
    assert found.outputs[0].errors[0] > 0.01 and found.outputs[2].errors == (None, None)


def test_json_and_table(tmp_path):
    settings = [Settings("energy", 2), Settings("lsh", 4, None, "sample", "previous", 3)]
    found = report(tiny({}, {"dropout_p": 0.1}), normal(1, 200, 64), settings, repeats=1)
    found.to_json(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert set(written) == {field.name for field in dataclasses.fields(found)}
    assert written["settings"][0]["strategy"] == "energy" and written["settings"][1]["order_from"] == "previous"
    assert written["layers"][0]["measurements"][0]["error"] == found.layers[0].measurements[0].error
    assert written["layers"][1]["left_out"].startswith("dropout_p")
    table = str(found)
    assert "lsh sample G=4 previous seed=3" in table and f"{found.layers[0].measurements[1].error:.3f}" in table


def test_numbers_that_are_not_finite_are_null_in_json():
    x = normal(1, 2, 64, 32)
    x[0, 0, 3, 3] = torch.nan

    class Plain(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    found = report(Plain().eval(), x, [Settings("lsh", 2)], repeats=1)
    assert math.isnan(found.layers[0].measurements[0].error)
    assert json.loads(found.json(), parse_constant=pytest.fail)["layers"][0]["measurements"][0]["error"] is None
