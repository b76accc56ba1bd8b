# SPDX-License-Identifier: Apache-2.0
"""timm's models with our attention, against timm's own fused attention."""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

from distrattention import Settings, explain, replace_sdpa
from distrattention.integrations.timm import (
    REPLACEMENTS,
    DistrAttention,
    attn_layer,
    replace_attention,
    restore_attention,
)

ENERGY = {"strategy": "energy", "group_size": 4, "block_size": 16}
SIZES = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


@pytest.fixture(autouse=True)
def one_thread(torch_state):
    torch.set_num_threads(1)  # quickest for tensors as small as these


def build(cls, **changes):
    """The model with seeded weights of a spread that shows approximations, in evaluation mode."""
    torch.manual_seed(0)
    model = cls(**{**SIZES, **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


MODELS = {
    "vit": lambda **more: build(VisionTransformer, **more),
    "vit_norms": lambda **more: build(VisionTransformer, qk_norm=True, scale_attn_norm=True, **more),
    "beit": lambda **more: build(Beit, use_rel_pos_bias=True, **more),
    "beit_shared": lambda **more: build(Beit, use_shared_rel_pos_bias=True, **more),
    "eva": lambda **more: build(Eva, use_rot_pos_emb=True, **more),
    "eva_rope": lambda **more: build(Eva, use_rot_pos_emb=True, attn_type="rope", **more),
}
IMAGES = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))  # 37 tokens


def gradients(model):
    model.zero_grad()
    output = model(IMAGES)
    (output * torch.arange(1.0, 6.0)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found, expected, tolerance=1e-3):
    assert found.keys() == expected.keys() and found
    whole = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= tolerance * (gradient.norm() + 1e-5 * whole), name


@pytest.mark.parametrize("name", MODELS)
def test_replaced_attention(name):
    model = MODELS[name]()
    before, before_gradients, state = model(IMAGES), gradients(model), copy.deepcopy(model.state_dict())
    classes = [type(module) for module in model.modules()]

    assert replace_attention(model, strategy="exact") == 2
    torch.testing.assert_close(model(IMAGES), before, rtol=1e-4, atol=1e-5)
    assert_same_gradients(gradients(model), before_gradients)

    assert replace_attention(model, **ENERGY) == 2
    approximate, found = model(IMAGES), gradients(model)
    assert not torch.allclose(approximate, before, rtol=1e-3, atol=1e-3)
    assert found.keys() == before_gradients.keys()
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
    with replace_sdpa(**ENERGY):
        assert restore_attention(model) == 2
        assert torch.equal(model(IMAGES), approximate)  # the block does what the replacement did

    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(IMAGES), before)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(model.state_dict()[key], state[key]) for key in state)


@pytest.mark.parametrize("name", ["beit", "beit_shared"])
def test_the_learned_bias_of_beit_is_trained(name):
    model = MODELS[name]()
    expected = gradients(model)
    with replace_sdpa(strategy="exact"):
        assert_same_gradients(gradients(model), expected)
    with replace_sdpa(**ENERGY):
        approximate = gradients(model)
    tables = [key for key in expected if "relative_position_bias_table" in key]
    assert tables
    for key in tables:
        similar = torch.cosine_similarity(approximate[key].flatten(), expected[key].flatten(), dim=0)
        assert 0.5 < similar < 0.99999 and approximate[key].norm() > 0


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "scale_attn_norm": True}, {"qkv_bias": False}])
def test_attn_layer_has_the_same_state(changes):
    theirs = build(VisionTransformer, **changes)
    ours = VisionTransformer(**SIZES, **changes, attn_layer=attn_layer(strategy="exact")).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(ours(IMAGES), theirs(IMAGES), rtol=1e-4, atol=1e-5)
    approximate = VisionTransformer(**SIZES, **changes, attn_layer=attn_layer(**ENERGY)).eval()
    approximate.load_state_dict(theirs.state_dict(), strict=True)
    replace_attention(theirs, **ENERGY)
    assert torch.equal(approximate(IMAGES), theirs(IMAGES))
    default = VisionTransformer(**SIZES, attn_layer=DistrAttention)
    assert default.blocks[0].attn.distr_settings == Settings()
    assert restore_attention(default) == 2 and type(default.blocks[0].attn) is timm.layers.Attention


@pytest.mark.parametrize("causal", [True, False])
def test_masks_and_causality_of_a_call(causal):
    module = build(VisionTransformer).blocks[0].attn
    tokens = torch.randn(2, 37, 32, generator=torch.Generator().manual_seed(0))
    call = {"is_causal": True} if causal else {"attn_mask": torch.ones(37, 37, dtype=torch.bool).tril(3)}
    before, plain = module(tokens, **call), module(tokens)
    replace_attention(module, strategy="exact")
    torch.testing.assert_close(module(tokens, **call), before)
    assert not torch.allclose(before, plain, atol=1e-3)


def test_gates_are_kept():
    torch.manual_seed(0)
    module, tokens = timm.layers.Attention(32, 2, gated=True).eval(), torch.randn(2, 37, 32)
    before = module(tokens)
    replace_attention(module, strategy="exact")
    torch.testing.assert_close(module(tokens), before)


def test_models_built_without_fused_attention_are_replaced_too():
    set_fused_attn(False)
    try:
        model = build(VisionTransformer)
        ours = VisionTransformer(**SIZES, attn_layer=attn_layer(**ENERGY)).eval()
    finally:
        set_fused_attn(True)
    before = model(IMAGES)
    replace_attention(model, **ENERGY)
    assert not torch.allclose(model(IMAGES), before, rtol=1e-3, atol=1e-3)
    ours.load_state_dict(model.state_dict())
    assert torch.equal(ours(IMAGES), model(IMAGES))
    restore_attention(model)
    assert torch.equal(model(IMAGES), before) and not model.blocks[0].attn.fused_attn


def test_settings_by_part_of_a_model():
    model = build(VisionTransformer)
    before = model(IMAGES)
    replace_attention(model, **ENERGY)
    approximate = model(IMAGES)
    assert replace_attention(model.blocks[0], strategy="exact") == 1
    mixed = model(IMAGES)
    assert not torch.allclose(mixed, approximate, atol=1e-3) and not torch.allclose(mixed, before, atol=1e-3)
    replace_attention(model.blocks[1:], strategy="exact")
    torch.testing.assert_close(model(IMAGES), before, rtol=1e-4, atol=1e-5)
    assert "exact" in repr(model.blocks[0].attn)


@pytest.mark.parametrize(
    ("name", "text"),
    [("xcit_nano_12_p16_224", "XCA"), ("swin_s3_tiny_224", "WindowAttention.*replace_sdpa"), ("resnet10t", "none")],
)
def test_models_without_such_attention_are_refused(name, text):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ValueError, match=text):
        replace_attention(model, **ENERGY)


@pytest.fixture
def fused_xcit():
    """timm's XCiT calls torch's attention only where that is asked for."""
    set_fused_attn(True, experimental=True)
    yield
    set_fused_attn(True)


@pytest.mark.parametrize("size", [112, 64])  # 49 or 16 tokens, 32 channels a head
@torch.no_grad()
def test_xcit_is_refused_in_a_block_too(size, fused_xcit):
    model = timm.create_model("xcit_nano_12_p16_224", depth=1, img_size=size).eval()
    images = torch.randn(1, 3, size, size)
    before = model(images)
    with pytest.raises(NotImplementedError, match="channels .*allowed: strategies 'exact'"), replace_sdpa(**ENERGY):
        model(images)
    attention, tokens = model.blocks[0].attn, torch.randn(1, (size // 16) ** 2, 128)
    with replace_sdpa(**ENERGY, on_unsupported="silent"):
        inside = attention(tokens)
    assert torch.equal(inside, attention(tokens))
    for strategy in ("auto", "exact"):
        with replace_sdpa(strategy=strategy, group_size=2 if strategy == "auto" else None):
            torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_auto_is_exact_over_channels(fused_xcit):
    attention, tokens = timm.models.xcit.XCA(2048, num_heads=1).eval(), torch.randn(1, 100, 2048)
    others = torch.empty(3, 1, 1, 2048, 100)  # tensors of this shape that are no channels
    assert explain(*others, group_size=2)["choice"].startswith("energy")
    before = attention(tokens)
    with replace_sdpa(group_size=2):
        torch.testing.assert_close(attention(tokens), before, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="channels"), replace_sdpa(strategy="lsh"):
        attention(tokens)


def test_bad_settings_leave_the_model_as_it_was():
    model = build(VisionTransformer)
    for settings, error in (({"strategy": "quick"}, ValueError), ({"group_sise": 2}, TypeError)):
        with pytest.raises(error, match=next(iter(settings))):
            replace_attention(model, **settings)
        with pytest.raises(error, match=next(iter(settings))):
            attn_layer(**settings)
    assert type(model.blocks[0].attn) is timm.layers.Attention


def test_dropout_on_the_weights_is_refused_in_training():
    model = build(VisionTransformer, attn_drop_rate=0.1)
    replace_attention(model, **ENERGY)
    assert torch.isfinite(model(IMAGES)).all()
    with pytest.raises(NotImplementedError, match="dropout"):
        model.train()(IMAGES)


def test_training_lowers_the_loss():
    model = build(VisionTransformer, attn_layer=attn_layer(**ENERGY), proj_drop_rate=0.0).train()
    optimizer, labels, losses = torch.optim.SGD(model.parameters(), lr=1e-2), torch.tensor([1, 3]), []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(IMAGES), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_checkpointing_gives_the_same_gradients():
    model = build(VisionTransformer, attn_layer=attn_layer(**ENERGY)).train()
    expected = gradients(model)
    model.set_grad_checkpointing()
    assert_same_gradients(gradients(model), expected, 1e-5)


def test_models_can_be_copied_and_pickled():
    model = build(VisionTransformer)
    replace_attention(model, **ENERGY)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(IMAGES), model(IMAGES))
        assert type(other.blocks[0].attn) is DistrAttention is REPLACEMENTS[timm.layers.Attention]


def test_compiles_as_one_graph():
    torch._dynamo.reset()
    model = build(VisionTransformer)
    replace_attention(model, **ENERGY)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)
