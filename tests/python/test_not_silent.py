# SPDX-License-Identifier: Apache-2.0
"""Nothing is ignored silently: what changes nothing warns, with the reason, and blocks count the calls they met."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distrattention import Settings, replace_sdpa, scaled_dot_product_attention

ENERGY = Settings("energy", 4, 16)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


QKV = normal(3, 2, 2, 48, 32)


def attend(q=QKV[0], k=QKV[1], v=QKV[2], **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.fixture
def caught():
    """The messages of the warnings up to now."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def messages(caught):
    return [str(warning.message) for warning in caught]


def test_a_block_counts_what_it_took_and_left(caught):
    with replace_sdpa(ENERGY, on_unsupported="warn") as calls:
        attend()
        attend(is_causal=True)
        attend(dropout_p=0.5)
        attend(QKV[0][:, :, :1])
        attend(QKV[0][:, :, :15])
    assert (calls.taken, calls.left) == (2, 3)
    assert calls.reasons == {"dropout_p is 0.5; allowed: 0, as there is no dropout": 1, "decoding": 2}
    assert len(caught) == 1 and "dropout_p" in messages(caught)[0]


@pytest.mark.parametrize(("rows", "keys", "exact"), [(1, 48, True), (15, 48, True), (16, 48, False), (15, 15, False)])
def test_decoding_stays_exact(rows, keys, exact):
    q, k, v = QKV[0][:, :, :rows], QKV[1][:, :, :keys], QKV[2][:, :, :keys]
    with replace_sdpa(ENERGY) as calls:
        out = attend(q, k, v)
    assert torch.equal(out, scaled_dot_product_attention(q, k, v)) == exact
    assert torch.equal(out, scaled_dot_product_attention(q, k, v, settings=ENERGY)) == (not exact)
    assert (calls.taken, calls.left) == ((0, 1) if exact else (1, 0))


def test_each_entry_counts_anew():
    block = replace_sdpa(ENERGY)
    with block as outer:
        attend()
        with block as inner:
            attend()
            attend()
        attend()
    with block as later:
        attend()
    assert (outer.taken, inner.taken, later.taken) == (2, 2, 1)


def test_a_block_without_a_call_warns_where_it_ends(caught):
    with replace_sdpa(ENERGY):
        QKV[0] @ QKV[1].mT
    assert "no attention call was met in the block, which so changed nothing" in messages(caught)[0]
    assert caught[0].filename == __file__ and len(caught) == 1
    with replace_sdpa(ENERGY, on_unsupported="silent"):
        pass
    with pytest.raises(KeyError), replace_sdpa(ENERGY):
        raise KeyError
    assert len(caught) == 1


@torch.no_grad()
def test_a_model_of_timm_that_multiplies_itself(caught):
    timm = pytest.importorskip("timm")
    model = timm.models.SwinTransformer(img_size=56, embed_dim=16, depths=(1,), num_heads=(2,), num_classes=3).eval()
    with replace_sdpa(ENERGY) as calls:
        model(normal(1, 3, 56, 56))
    assert calls.taken == 0 and "changed nothing" in messages(caught)[0] and len(caught) == 1
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True  # as timm.layers.set_fused_attn(experimental=True) before the model is built
    with replace_sdpa(ENERGY) as calls:
        model(normal(1, 3, 56, 56))
    assert calls.taken == 1 and len(caught) == 1


def test_weights_of_multi_head_attention_are_said_to_be_left(caught):
    module, x = nn.MultiheadAttention(32, 2, batch_first=True), normal(2, 48, 32)
    with replace_sdpa(ENERGY) as calls:
        module(x, x, x)
        module(x, x, x)
        module(x, x, x, need_weights=False)
    assert (calls.taken, calls.left) == (1, 2) and "need_weights=True" in next(iter(calls.reasons))
    assert len(caught) == 1 and "need_weights=True multiplies Q and K itself" in messages(caught)[0]


def test_compiled_calls_are_not_counted_and_not_taken_for_none(caught):
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: attend(q) + 1, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            with replace_sdpa(ENERGY) as calls:
                compiled(QKV[0])
            assert calls.compiled and (calls.taken, calls.left) == (0, 0)
    assert not [text for text in messages(caught) if "attention" in text]


def small(config, **changes):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return config(**sizes, vocab_size=50, **changes)


@torch.no_grad()
def test_a_model_of_transformers_that_does_not_ask_for_its_attention(caught):
    transformers = pytest.importorskip("transformers")
    from distrattention.integrations.transformers import register

    register("distr_not_silent", ENERGY)
    config = small(transformers.DebertaV2Config)
    model = transformers.AutoModel.from_config(config, attn_implementation="distr_not_silent")
    text = "DebertaV2Model does not ask transformers' attention interface for its attention, so attn_implementation="
    assert [message for message in messages(caught) if text + "'distr_not_silent' changes nothing" in message]
    caught.clear()
    for config in (transformers.LlamaConfig, transformers.BertConfig, transformers.ViTConfig):
        transformers.AutoModel.from_config(small(config), attn_implementation="distr_not_silent")
    transformers.AutoModel.from_config(small(transformers.DebertaV2Config))
    assert not [message for message in messages(caught) if "attention" in message]


@torch.no_grad()
def test_settings_for_layers_that_are_not_there(caught):
    transformers = pytest.importorskip("transformers")
    from distrattention.integrations.transformers import register

    def run(config, layers):
        register("distr_not_silent", per_layer={layer: ENERGY for layer in layers})
        model = transformers.AutoModel.from_config(config, attn_implementation="distr_not_silent").eval()
        ids = torch.randint(3, 50, (1, 40))
        for _ in range(2):
            model(ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {}))
        found = [message for message in messages(caught) if "per_layer" in message]
        caught.clear()
        return found

    llama = small(transformers.LlamaConfig, pad_token_id=0)
    expected = "per_layer has settings for layers [2, 99], which the model of LlamaAttention does not have"
    assert run(llama, (1, 99, 2)) == [f"{expected}; allowed: 0 to 1"] and run(llama, (0, 1)) == []
    sizes = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = transformers.BartConfig(vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=3, **sizes)
    assert run(bart, (2,)) == [] and len(run(bart, (3,))) == 1
