# SPDX-License-Identifier: Apache-2.0
"""A Settings goes wherever its fields go, and the two are not mixed."""

import pytest
import torch

import distrattention
from distrattention import Settings, explain, flash_attn_func, flash_attn_varlen_func, replace_sdpa
from distrattention.attention import scaled_dot_product_attention

CHOSEN = Settings("lsh", 3, 16, "sample", "previous", 5)
STARTS = torch.tensor([0, 30, 70], dtype=torch.int32)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def in_a_block(q, k, v, **settings):
    with replace_sdpa(**settings):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


CALLS = {
    "sdpa": lambda **s: scaled_dot_product_attention(*normal(3, 1, 2, 70, 32), **s),
    "sdpa, five axes": lambda **s: scaled_dot_product_attention(*normal(3, 1, 1, 2, 70, 32), **s),
    "flash": lambda **s: flash_attn_func(*normal(3, 1, 70, 2, 32), **s),
    "varlen": lambda **s: flash_attn_varlen_func(*normal(3, 70, 2, 32), STARTS, STARTS, 40, 40, **s),
    "block": lambda **s: in_a_block(*normal(3, 1, 2, 70, 32), **s),
}


@pytest.mark.parametrize("name", CALLS)
def test_settings_do_what_their_fields_do(name):
    call = CALLS[name]
    found = call(settings=CHOSEN)
    assert torch.equal(found, call(**CHOSEN.asdict()))
    assert not torch.allclose(found, call(), atol=1e-3)
    order = torch.arange(31, -1, -1).expand(1, 2, 1, 32)
    given = Settings("given", 4, order=order)
    assert torch.equal(call(settings=given), call(strategy="given", group_size=4, order=order))


@pytest.mark.parametrize("name", CALLS)
def test_settings_and_their_fields_exclude_each_other(name):
    with pytest.raises(TypeError, match="settings and strategy, group_size were both given; allowed: one or the other"):
        CALLS[name](settings=CHOSEN, strategy="energy", group_size=3)
    with pytest.raises(TypeError, match="settings is {'group_size': 3}; allowed: distrattention.Settings"):
        CALLS[name](settings={"group_size": 3})
    with pytest.raises(TypeError, match="group_sise"):
        CALLS[name](group_sise=3)
    if not name.startswith("sdpa"):  # which names its arguments itself
        with pytest.raises(TypeError, match="^group_sise is not known; allowed: the fields of Settings: strategy, "):
            CALLS[name](group_sise=3)


def test_explain():
    q = torch.empty(1).expand(1, 8, 4096, 64)
    assert explain(q, q, q, settings=Settings("auto", 2))["strategy"] == "energy"
    assert explain(q, q, q, settings=Settings("lsh", 2)) == explain(q, q, q, strategy="lsh", group_size=2)


def test_a_compiled_call():
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    q, k, v = normal(3, 1, 2, 70, 32)
    assert torch.equal(compiled(q, k, v, settings=CHOSEN), distrattention.scaled_dot_product_attention(
        q, k, v, settings=CHOSEN
    ))


def test_timm():
    pytest.importorskip("timm")
    from distrattention.integrations.timm import attn_layer, replace_attention
    from timm.models.vision_transformer import VisionTransformer

    size = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    model = VisionTransformer(**size, attn_layer=attn_layer(CHOSEN))
    assert model.blocks[0].attn.distr_settings == CHOSEN
    assert replace_attention(model, Settings("exact")) == 1
    assert model.blocks[0].attn.distr_settings == Settings("exact")


def test_transformers():
    pytest.importorskip("transformers")
    from distrattention.integrations.transformers import register
    from transformers import AttentionInterface

    class Layer:
        is_causal, training = False, False

    def call(**options):
        q, k, v = normal(3, 1, 2, 70, 32)
        return AttentionInterface()["distr_settings_test"](Layer(), q, k, v, None, **options)[0]

    register("distr_settings_test", CHOSEN)
    registered = call()
    register("distr_settings_test", strategy="exact")
    assert torch.equal(call(settings=CHOSEN), registered) and not torch.allclose(call(), registered, atol=1e-3)
    with pytest.raises(TypeError, match="settings and seed were both given"):
        call(settings=CHOSEN, seed=3)
