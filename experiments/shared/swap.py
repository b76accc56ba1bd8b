# SPDX-License-Identifier: Apache-2.0
"""One function, swap(), that puts a method into a model: a baseline, or attention by this library."""

import timm.layers
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from distrattention import Settings, scaled_dot_product_attention
from distrattention.integrations.timm import replace_attention
from distrattention.integrations.transformers import register

import baselines

OURS = {  # the paper's is lsh-sample
    "exact": Settings("exact"),
    "lsh-sample": Settings("lsh", 2, estimator="sample"),
    "lsh-mean": Settings("lsh", 2, estimator="mean"),
    "energy": Settings("energy", 2),
}
METHODS = [*baselines.BASELINES, *OURS, *(f"{name}-near" for name in OURS if name != "exact")]


def method_of(name, near=(512, 128), **fields):
    """A baseline's name as it is, or the Settings of one of ours, with further fields of Settings.

    "-near" behind the name: with near keys, near = (window, sinks) of them."""
    base = name.removesuffix("-near")
    if name not in METHODS:
        raise ValueError(f"method is {name!r}; allowed: {', '.join(METHODS)}")
    if name in baselines.BASELINES:
        return name
    if base == "exact":
        return OURS[base]
    if base != name:
        fields |= {"window": near[0], "sinks": near[1]}
    return Settings(**{**OURS[base].asdict(), **fields})


def swap(model, method):
    """Lets every self-attention of the model run by the method, in place, and returns how many there are.

    model: of timm, or of transformers with its attention interface (of an encoder and decoder, the encoder's alone).
    method: Settings, or the name of a baseline, whose parameters become the model's (`swapped` of each layer) and begin
    anew. Raises ValueError where there is no such attention, or where the baseline does not serve it.
    """
    layers = list(attention_layers(model))
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention to swap; allowed: models of timm and transformers")
    for layer in layers:  # what an earlier swap() left
        if hasattr(layer, "swapped"):
            del layer.swapped
        if hasattr(layer, "left_out"):
            name, projection = layer.left_out
            setattr(layer, name, projection)
            del layer.left_out
        if isinstance(layer, SwappedAttention):
            layer.__class__ = timm.layers.Attention
    if isinstance(method, Settings):
        if isinstance(layers[0], timm.layers.Attention):
            return replace_attention(model, method)
        for layer in layers:
            layer.distr_settings = method
        register("distr", Settings("exact"))  # for the layers without settings of their own
        model.set_attn_implementation("distr")
        return len(layers)
    like = next(model.parameters())
    for layer in layers:
        layer.swapped = baselines.make(method, shape_of(model, layer)).to(like.device, like.dtype)
        if getattr(layer.swapped, "needs_input", False):
            layer.register_forward_pre_hook(_keep_input, with_kwargs=True)
        if getattr(layer.swapped, "skips_projection", False):
            name = "proj" if hasattr(layer, "proj") else "o_proj"
            layer.left_out = name, getattr(layer, name)
            setattr(layer, name, nn.Identity())
        if isinstance(layer, timm.layers.Attention):
            layer.__class__, layer.fused_attn = SwappedAttention, True
    if not isinstance(layers[0], timm.layers.Attention):
        model.set_attn_implementation("baseline")
    return len(layers)


def function_of(method, shape, device="cpu", dtype=torch.float32):
    """The method as a function of (q [B, H, N, d], k, v [B, Hkv, N, d], causal)."""
    if isinstance(method, Settings):
        grouped = shape.heads != shape.kv_heads
        return lambda q, k, v, causal=False: scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=grouped, settings=method
        )
    module = baselines.make(method, shape).to(device, dtype)
    return lambda q, k, v, causal=False: module(q, k, v, causal=causal)


def attention_layers(model):
    """The modules of self-attention: timm's class, and what asks transformers' attention interface."""
    config = getattr(model, "config", None)
    part = model.get_encoder() if getattr(config, "is_encoder_decoder", False) else model
    for module in part.modules():
        if isinstance(module, timm.layers.Attention) or hasattr(module, "scaling") and hasattr(module, "is_causal"):
            yield module


def shape_of(model, layer):
    """The Shape of a layer's attention."""
    if isinstance(layer, timm.layers.Attention):
        patches = model.patch_embed
        tokens = patches.num_patches + model.num_prefix_tokens
        return baselines.Shape(layer.num_heads, layer.num_heads, layer.head_dim, False, tokens, patches.grid_size)
    config = layer.config
    heads = config.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or layer.attention_head_size
    tokens = getattr(config, "max_source_positions", None) or getattr(config, "max_position_embeddings", None)
    grid = None
    if hasattr(config, "patch_size"):  # ViT, with one class token
        grid = (config.image_size // config.patch_size,) * 2
        tokens = grid[0] * grid[1] + 1
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return baselines.Shape(heads, kv_heads, head_dim, layer.is_causal, tokens, grid)


def _keep_input(layer, inputs, keywords):
    if hasattr(layer, "swapped"):
        layer.swapped.x = inputs[0] if inputs else keywords["hidden_states"]


class _Within(TorchFunctionMode):
    """Within the block, torch's attention is the given module."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _attend(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if attn_mask is not None or dropout_p:
            raise NotImplementedError("a baseline was given a mask or dropout; allowed: neither (attn_drop_rate=0)")
        return self.attention(q, k, v, causal=is_causal, scale=scale)


class SwappedAttention(timm.layers.Attention):
    """timm's attention, x [B, N, C] -> [B, N, C], with its call of torch's attention taken by `swapped`."""

    def forward(self, *args, **kwargs):
        with _Within(self.swapped):
            return super().forward(*args, **kwargs)


def _baseline(layer, query, key, value, attention_mask, scaling=None, dropout=0.0, **others):
    """transformers' attention function: query [B, H, N, d], key and value [B, Hkv, N, d] -> ([B, N, H, d], None)."""
    if not hasattr(layer, "swapped"):
        return sdpa_attention_forward(layer, query, key, value, attention_mask, dropout, scaling, **others)
    if dropout:
        raise NotImplementedError(f"dropout on the attention weights is {dropout}; allowed: 0 with a baseline")
    keys = None if attention_mask is None else attention_mask[:, 0, -1]  # the last row sees all tokens but padding
    return layer.swapped(query, key, value, keys, layer.is_causal, scaling).transpose(1, 2), None


AttentionInterface.register("baseline", _baseline)
AttentionMaskInterface.register("baseline", sdpa_mask)
