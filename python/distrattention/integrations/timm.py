# SPDX-License-Identifier: Apache-2.0
"""timm: a class for attn_layer, and a replacement of the attention of models that exist.

    from distrattention.integrations.timm import attn_layer, replace_attention, restore_attention

    model = VisionTransformer(attn_layer=attn_layer(strategy="energy", group_size=2))  # or attn_layer(Settings(...))
    count = replace_attention(model, strategy="energy", group_size=2)  # of any timm model with such attention
    replace_attention(model.blocks[0], strategy="exact")               # of a part: settings by layer
    restore_attention(model)

Parameters, buffers and their names stay what they are. The classes below run timm's own forward (norms, gates, rotary
embeddings, learned biases) with its scaled_dot_product_attention calls replaced, so a dropout on the attention weights
above 0 is refused in training (attn_drop_rate=0), and a bias is trained as before. Models whose attention is of
another class go with `distrattention.replace_sdpa`.
"""

from typing import Any

import timm.layers
import timm.models.beit
import timm.models.eva
import timm.models.xcit
from torch import Tensor, nn
from typing_extensions import Unpack

from distrattention.sdpa_mode import replace_sdpa
from distrattention.settings import Fields, Settings, chosen


class _Replaced:
    """Before a timm attention class: its forward, within replace_sdpa. `distr_settings` is the module's Settings."""

    distr_settings = Settings()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.distr_unfused = not self.fused_attn
        self.fused_attn = True  # without it, timm multiplies Q and K itself

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with replace_sdpa(self.distr_settings):
            return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        return repr(self.distr_settings)


class DistrAttention(_Replaced, timm.layers.Attention):
    """timm.layers.Attention: x [B, N, C] -> [B, N, C]."""


class DistrAttentionRope(_Replaced, timm.layers.AttentionRope):
    """timm.layers.AttentionRope; the groups are those of the rotated Q and K."""


class DistrBeitAttention(_Replaced, timm.models.beit.Attention):
    """timm.models.beit.Attention, with its learned bias on the scores."""


class DistrEvaAttention(_Replaced, timm.models.eva.EvaAttention):
    """timm.models.eva.EvaAttention; the groups are those of the rotated Q and K."""


REPLACEMENTS = {
    replacement.__bases__[1]: replacement
    for replacement in (DistrAttention, DistrAttentionRope, DistrBeitAttention, DistrEvaAttention)
}


def attn_layer(settings: Settings | None = None, **fields: Unpack[Fields]) -> type[nn.Module]:
    """A class for VisionTransformer(attn_layer=...), with the given Settings or the given fields of one.

    Raises ValueError or TypeError for a setting that is not allowed.
    """
    return type("DistrAttention", (DistrAttention,), {"distr_settings": chosen(settings, fields)})


def replace_attention(model: nn.Module, settings: Settings | None = None, **fields: Unpack[Fields]) -> int:
    """Lets every self-attention in `model` of the classes in REPLACEMENTS run with the given Settings or the given
    fields of one, in place, and returns how many there are. Those replaced before get the new settings.

    Raises ValueError where there are none, or where the model attends over channels (XCiT), which cannot be grouped;
    ValueError or TypeError for a setting that is not allowed.
    """
    settings = chosen(settings, fields)
    modules = list(model.modules())
    if any(isinstance(module, timm.models.xcit.XCA) for module in modules):
        raise ValueError(
            f"{type(model).__name__} attends over channels (XCA): its Q and K have tokens in the last dimension, which "
            "are no features to group; allowed: models that attend over tokens"
        )
    found = [module for module in modules if type(module) in REPLACEMENTS or isinstance(module, _Replaced)]
    if not found:
        others = sorted({type(module).__qualname__ for module in modules if hasattr(module, "fused_attn")})
        allowed = ", ".join(f"{known.__module__}.{known.__name__}" for known in REPLACEMENTS)
        raise ValueError(
            f"{type(model).__name__} has no attention that can be replaced (it has: {', '.join(others) or 'none'}); "
            f"allowed: {allowed}; for others, see distrattention.replace_sdpa"
        )
    for module in found:
        if not isinstance(module, _Replaced):
            module.__class__ = REPLACEMENTS[type(module)]
            module.distr_unfused = not module.fused_attn
            module.fused_attn = True
        module.distr_settings = settings
    return len(found)


def restore_attention(model: nn.Module) -> int:
    """Undoes replace_attention() (and attn_layer()) in place: timm's own classes again. Returns how many there were."""
    found = [module for module in model.modules() if isinstance(module, _Replaced)]
    for module in found:
        module.__class__ = next(base for base in type(module).__mro__ if base in REPLACEMENTS)
        module.fused_attn = not module.distr_unfused
        del module.distr_unfused
        vars(module).pop("distr_settings", None)
    return len(found)
