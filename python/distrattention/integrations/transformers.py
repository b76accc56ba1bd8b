# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: `register()`, then attn_implementation="distr" in any model that takes an interface.

    from distrattention.integrations.transformers import register

    register("distr", strategy="energy", group_size=2)
    model = AutoModel.from_pretrained(name, attn_implementation="distr")  # or model.set_attn_implementation("distr")

Where a call's settings come from, the last one that speaks:
  1. `register(...)`;
  2. its `per_layer`, a mapping of module.layer_idx to Settings, or a function of the attention module;
  3. an attribute `distr_settings` on the attention module, which is the way for modules without layer_idx (ViT):
     model.layers[0].attention.distr_settings = Settings(strategy="exact");
  4. the model call: model(**inputs, strategy="lsh", group_size=4) or model(**inputs, settings=Settings("lsh", 4)), but
     not generate(), which refuses what it does not know. Several names can be registered, and changed at run time.

What is approximated: calls with at least one block of query rows (block_size, 128 unless set), and shorter ones that
have no more keys than rows. Decoding is exact: one row, or fewer rows than a block against more keys (speculative
decoding, short chunks of a prompt, a short padded prompt in a static cache). A chunk of a prompt comes with a mask.

Unless order_from is named, causal attention takes the order of the block before (`previous`), be its causality a flag
or a mask, and so does the attention of a decoder to its encoder where the module says is_decoder. Else it is `own`.

Near keys (`window`) of a chunk of a prompt are found by its mask: its rows stand at the end of the keys that the last
row sees, in compiled code at the end of all keys.

A sliding window (`sliding_window`) arrives in the mask. Unless the strategy is "auto", the keys outside are then not
read, which takes as much less time: on a CPU where the mask shows none of them, on CUDA where it shows the window and
nothing else, so not with padding. Compiled code takes the mask.

A row that sees no key (of padding at the left) is 0.
"""

import difflib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import logging
from typing_extensions import Unpack

from distrattention.attention import attention_of_prompts
from distrattention.context import is_plain
from distrattention.core import settings_of
from distrattention.settings import EXACT, FIELDS, Fields, Settings, chosen

logger = logging.get_logger(__name__)

PerLayer = Mapping[int, Settings] | Callable[[nn.Module], Settings | None]

# What changes the result and is not offered here: refused by name, unless None.
REFUSED = {
    "sinks": "attention sinks",
    "head_mask": "a mask on heads",
    "layer_head_mask": "a mask on heads",
    "alibi": "a bias by distance; allowed: position_bias, or an additive attention_mask",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "cache": "a paged cache",
    "block_table": "a paged cache",
}

# What models hand on to their attention function, and what does not change the result: the mask holds it already, or
# it concerns the model's outputs. Anything else is refused, since a misspelt setting, or a new kind of attention in a
# later version, would otherwise be dropped in silence. That is workable: the 154 architectures of transformers 5.23
# that run here from a small configuration hand on nothing that this file does not name. register(ignore=...) adds some.
HARMLESS = {
    *("position_ids", "cache_position", "position_embeddings", "token_type_ids", "seq_idx"),
    *("encoder_hidden_states", "encoder_attention_mask", "past_key_values", "use_cache", "mm_token_type_ids"),
    *("labels", "num_items_in_batch", "logits_to_keep", "return_dict", "deterministic"),
    *("output_hidden_states", "output_attentions", "output_router_logits", "sliding_window"),
}
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def register(
    name: str = "distr",
    settings: Settings | None = None,
    *,
    per_layer: PerLayer | None = None,
    ignore: Iterable[str] = (),
    **fields: Unpack[Fields],
) -> None:
    """Makes attn_implementation=`name` mean DistrAttention, in the registries of attention functions and of masks.

    name: without "flash", "|" and "/", which transformers reads in its own ways, and not a name that it has already. A
        name registered here before gets the new settings, for models in use too.
    per_layer: settings of single layers, counted from 0; a function may return None for those registered. See the
        module's notes. A layer that the model does not have is warned of in the first call.
    ignore: names of further arguments that a model hands on to its attention and that change nothing there.
    settings, fields: a `Settings`, or the fields of one.

    Raises ValueError for a name, setting or layer that is not allowed.
    """
    known = AttentionInterface().get(name)
    if name == "eager" or any(mark in name for mark in ("flash", "|", "/")) or not name:
        raise ValueError(f"name is {name!r}; allowed: one without 'flash', '|' and '/', and not 'eager'")
    if known is not None and not hasattr(known, "distr_settings"):
        raise ValueError(f"name is {name!r}, which transformers or another package has registered; allowed: a new name")
    registered = chosen(settings, fields)
    if isinstance(per_layer, Mapping):
        for layer, of_layer in per_layer.items():
            is_layer = isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0
            if not is_layer or not isinstance(of_layer, Settings):
                found = f"per_layer has {layer!r}: {of_layer!r}"
                raise ValueError(f"{found}; allowed: an int from 0 on: distrattention.Settings")
    elif per_layer is not None and not callable(per_layer):
        raise ValueError(
            f"per_layer is {per_layer!r}; allowed: a mapping of ints to Settings, or a function of the module"
        )
    AttentionInterface.register(name, _attention_function(registered, per_layer, HARMLESS | set(ignore)))
    AttentionMaskInterface.register(name, sdpa_mask)


_get_correct_attn_implementation = PreTrainedModel.get_correct_attn_implementation


@functools.wraps(_get_correct_attn_implementation)
def _warn_of_models_that_do_not_ask(model: PreTrainedModel, name: str | None, *arguments, **keywords) -> str:
    """transformers' own check of a name, which passes any that is registered, whatever the model makes of it."""
    if hasattr(AttentionInterface().get(name), "distr_settings") and not model._can_set_attn_implementation():
        warnings.warn(
            f"{type(model).__name__} does not ask transformers' attention interface for its attention, so "
            f"attn_implementation={name!r} changes nothing there; allowed: models that do, or distrattention."
            "replace_sdpa for those that call torch's attention",
            stacklevel=2,
        )
    return _get_correct_attn_implementation(model, name, *arguments, **keywords)


PreTrainedModel.get_correct_attn_implementation = _warn_of_models_that_do_not_ask


def _attention_function(registered: Settings, per_layer: PerLayer | None, harmless: set[str]) -> Callable:
    checked: set[int] = set()  # the configurations that per_layer was held to

    def distr_attention_forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """query [B, Hq, L, d], key [B, Hkv, S, d], value [B, Hkv, S, dv] -> ([B, L, Hq, dv], no weights)."""
        of_call = kwargs.pop("settings", None)
        overrides = {name: kwargs.pop(name) for name in FIELDS if name in kwargs and not _is_of_model(kwargs, name)}
        position_bias = kwargs.pop("position_bias", None)
        sink_logits = kwargs.pop("s_aux", None)
        softcap = kwargs.pop("softcap", None)
        _check_arguments(kwargs, harmless, dropout, attention_mask)
        if attention_mask is not None:
            _check_mask(attention_mask, query, key)
        if kwargs.get("output_attentions"):
            logger.warning_once("DistrAttention has no attention weights to return: use attn_implementation='eager'.")

        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        rows = query.shape[2]
        causal_flag = rows > 1 and attention_mask is None and causal
        if causal_flag and key.shape[2] > rows:  # the start of a static cache: the keys behind are not filled yet
            key, value = key[:, :, :rows], value[:, :, :rows]
        if position_bias is not None:
            attention_mask = _biased_mask(position_bias, attention_mask, causal_flag, rows, key.shape[2])
            causal_flag = False
        sliding = kwargs.get("sliding_window")
        hides = sliding is not None and attention_mask is None and key.shape[2] > sliding
        if hides and not causal_flag:
            raise NotImplementedError(
                f"sliding_window is {sliding}, fewer than {key.shape[2]} keys, without a mask that holds it; "
                "allowed: a mask made for this attention implementation, or a causal call"
            )

        if of_call is not None:
            settings = chosen(of_call, overrides)
        else:
            settings = _settings(module, registered, per_layer)
            config = getattr(module, "config", None)
            if isinstance(per_layer, Mapping) and not torch.compiler.is_compiling() and id(config) not in checked:
                checked.add(id(config))
                _warn_of_layers_that_are_not_there(module, config, per_layer)
            if overrides:
                settings = _replaced(EXACT if overrides.get("strategy") == "exact" else settings, **overrides)
        if settings.order_from == "auto" and (causal or getattr(module, "is_decoder", False)):
            settings = _by_previous(settings)
        key_offset = window_size = None
        if settings.window is not None and causal and attention_mask is not None:
            key_offset = _key_offset(attention_mask, rows, key.shape[2])
        if hides:
            window_size = (sliding - 1, -1)
        elif sliding and causal and settings.strategy != "auto" and _shows_a_window(attention_mask, sliding):
            window_size, key_offset = (sliding - 1, 0), _key_offset(attention_mask, rows, key.shape[2])
            if attention_mask.is_cuda:  # the mask shows the window and nothing else: quicker kernels need none
                attention_mask = None
        output = attention_of_prompts(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=causal_flag,
            scale=scaling,
            enable_gqa=getattr(module, "num_key_value_groups", 1) > 1,
            settings=settings,
            window_size=window_size,
            key_offset=key_offset,
            softcap=softcap or 0.0,
            sink_logits=sink_logits,
        )
        return output.transpose(1, 2).contiguous(), None

    distr_attention_forward.distr_settings = registered
    return distr_attention_forward


def _is_of_model(kwargs: dict, name: str) -> bool:
    """Whether the argument is the model's own, of the same name: attention sinks are a tensor, or absent."""
    return name == "sinks" and not isinstance(kwargs[name], int)


_last_offset: tuple = (None, 0, 0)  # of the mask that was asked about last: (a reference to it, its version, offset)


def _version(mask: Tensor) -> object:
    """What differs when the mask's values do: in inference mode, where nothing counts that, always."""
    return object() if mask.is_inference() else mask._version


def _key_offset(mask: Tensor, rows: int, keys: int) -> int:
    """The key that stands beside the first of `rows` queries, by a causal mask [B or 1, Hq or 1, L or 1, S]."""
    global _last_offset
    if rows == keys or mask.shape[2] == 1 or torch.compiler.is_compiling():
        return keys - rows
    known, version, offset = _last_offset
    if known is None or known() is not mask or version != _version(mask):  # once for all layers: it waits for a GPU
        last_row = mask[:, :, -1] if mask.dtype == torch.bool else mask[:, :, -1] > torch.finfo(mask.dtype).min
        seen = last_row.flatten(0, 1).any(0).nonzero()  # in a batch, some row is not padded
        offset = seen[-1].item() + 1 - rows if len(seen) else keys - rows
        _last_offset = weakref.ref(mask), _version(mask), offset
    return offset


_last_shown: tuple = (None, 0, 0, False)  # of the mask that was asked about last: (..., the window, the answer)


def _shows_a_window(mask: Tensor | None, sliding: int) -> bool:
    """Whether no row sees a key behind it or `sliding` keys before it, by a boolean mask [B, H or 1, L, S]; on CUDA,
    whether it sees all between, too. Not where something looks on, as report() does: to it the mask is all."""
    global _last_shown
    if mask is None or mask.dtype != torch.bool or torch.compiler.is_compiling() or not is_plain():
        return False
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():  # nothing can be asked of the mask
        return False
    rows, keys = mask.shape[2:]
    known, version, window, answer = _last_shown
    if known is None or known() is not mask or version != _version(mask) or window != sliding:  # once for all layers
        first = torch.arange(rows, device=mask.device) + _key_offset(mask, rows, keys)
        distance = torch.arange(keys, device=mask.device) - first[:, None]
        band = (distance <= 0) & (distance > -sliding)
        answer = rows > 1 and not (mask & ~band if mask.device.type == "cpu" else mask != band).any()
        _last_shown = weakref.ref(mask), _version(mask), sliding, answer
    return answer


def _settings(module: nn.Module, registered: Settings, per_layer: PerLayer | None) -> Settings:
    """The settings of a layer: the module's own, else those of `per_layer`, else the registered ones."""
    found = getattr(module, "distr_settings", None)
    if found is None and isinstance(per_layer, Mapping):
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise ValueError(
                f"{type(module).__name__} has no layer_idx for per_layer; allowed: a function of the module, or an "
                "attribute distr_settings on the module"
            )
        found = per_layer.get(layer)
    elif found is None and per_layer is not None:
        found = per_layer(module)
    if found is None:
        return registered
    if not isinstance(found, Settings):
        raise ValueError(f"the settings of {type(module).__name__} are {found!r}; allowed: distrattention.Settings")
    return found


def _warn_of_layers_that_are_not_there(module: nn.Module, config: object, per_layer: Mapping[int, Settings]) -> None:
    """A configuration may count the layers of several stacks; the deepest decides."""
    counts = [n for name, n in getattr(config, "__dict__", {}).items() if "layer" in name and type(n) is int]
    if counts and (others := sorted(layer for layer in per_layer if layer >= max(counts))):
        warnings.warn(
            f"per_layer has settings for layers {others}, which the model of {type(module).__name__} does not have; "
            f"allowed: 0 to {max(counts) - 1}",
            stacklevel=2,
        )


def _by_previous(settings: Settings) -> Settings:
    """The settings with order_from="previous", made once: they are asked for in each call of each layer."""
    if torch.compiler.is_compiling() or settings.order is not None:  # whose tensor is not to be kept
        return _replaced(settings, order_from="previous")
    known = _previous.get(id(settings))
    if known is None or known[0] is not settings:
        if len(_previous) >= 1024:  # settings that were made for one call each
            _previous.clear()
        known = _previous[id(settings)] = settings, _replaced(settings, order_from="previous")
    return known[1]


_previous: dict[int, tuple[Settings, Settings]] = {}  # by id: (settings, with order_from="previous")


def _replaced(settings: Settings, **fields: Unpack[Fields]) -> Settings:
    return settings_of(**{**settings.asdict(), **fields})


def _check_arguments(kwargs: dict, harmless: set[str], dropout: float, mask: Tensor | None) -> None:
    """Raises for everything that would change the result and is not offered, by name."""
    if dropout > 0:
        raise NotImplementedError(
            f"dropout on the attention weights is {dropout}; allowed: 0 (attention_dropout or "
            "attention_probs_dropout_prob of the model's configuration), or evaluation mode"
        )
    for name, value in kwargs.items():
        if value is None or name in harmless:
            continue
        if name in REFUSED:
            raise NotImplementedError(f"{name} ({REFUSED[name]}) is not supported; allowed: None")
        if name in PACKED:
            if mask is None and name.startswith("cu_seq_lens") and value.shape[0] > 2:
                raise NotImplementedError(
                    f"{name} packs {value.shape[0] - 1} sequences, without a mask that parts them; allowed: such a mask"
                )
        else:
            close = difflib.get_close_matches(name, FIELDS, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise TypeError(
                f"{name} reached the attention function, where it is not known{hint}; if it does not change "
                f"attention, allow it by register(..., ignore=({name!r},))"
            )


def _check_mask(mask: Tensor, query: Tensor, key: Tensor) -> None:
    """A mask has the shape of the scores, or 1 where it repeats; but one number for all keys would do nothing, and is
    a mask on heads, which old models multiplied with the weights."""
    scores = (*query.shape[:3], key.shape[2])
    shape = tuple(mask.shape)
    fits = len(shape) == 4 and shape[3] == scores[3] and all(n in (1, m) for n, m in zip(shape, scores))
    if not fits:
        raise ValueError(
            f"attention_mask is {list(shape)}; allowed: [B, Hq, L, S] = {list(scores)}, with 1 where it repeats over "
            "B, Hq or L (boolean, True where attended, or added to the scores). Masks on heads are not supported"
        )


def _biased_mask(bias: Tensor, mask: Tensor | None, causal: bool, rows: int, keys: int) -> Tensor:
    """T5's bias on the scores, [1 or B, Hq, L, S], with what the mask or causality hides at -inf."""
    bias = bias[..., :keys]
    if mask is None and causal:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
