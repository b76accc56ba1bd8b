# SPDX-License-Identifier: Apache-2.0
"""Meets the attention calls of a model's run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from .. import core, ops  # first, for it says in words what is missing
from ..attention import attention_of_prompts, causality, is_decoding
from ..sdpa_mode import replace_sdpa
from ..settings import Settings, require_int
from .measure import Call, output_errors, times_in_turn, total_variations
from .result import Layer, Measurement, Output, Report

import torch  # isort: skip
import torch.nn.functional as F  # isort: skip
from torch.overrides import TorchFunctionMode  # isort: skip
from torch import Tensor, nn  # isort: skip

DEFAULT = (Settings("lsh", 2), Settings("lsh", 4), Settings("energy", 2), Settings("energy", 4))


def report(
    model: nn.Module,
    batch: Tensor | Mapping | Sequence | Callable[[nn.Module], object],
    settings: Settings | Sequence[Settings] = DEFAULT,
    *,
    repeats: int = 5,
    max_rows: int = 4096,
    end_to_end: bool = True,
) -> Report:
    """Runs `model` on `batch` with exact attention and measures each setting in each attention call.

    model: in evaluation mode; its attention goes through F.scaled_dot_product_attention (torch, timm, transformers
        with attn_implementation "sdpa") or this package (transformers with "distr", whose own settings are left aside).
    batch: a tensor (`model(batch)`), a mapping (`model(**batch)`), a list or tuple (`model(*batch)`), or a function
        that takes the model and runs it (`lambda model: model.encode(images)`), each time on the same inputs.
    settings: what to measure, one or several; an `order_from` of None is `own`, as in every call without gradients. Ask
        for `previous` to see what training of a causal model would meet.
    repeats: timed runs of each setting, in turn; the medians are reported.
    max_rows: about how many rows of P to look at in a call, evenly spread (at least one a head).
    end_to_end: whether to run the model again with each setting in all layers, and compare what it returns.

    Every call gets the inputs that the exact model has there, so errors are those of one layer alone; what they add up
    to is in `outputs`. Nothing needs gradients or keeps a layer's tensors; P is held in chunks of 4 million scores.
    Padded queries count as any others. Calls that this package refuses (dropout, say) run as they are, and are listed
    with the reason. Compiled models run uncompiled here.

    Raises ValueError where the model is in training mode, makes no attention call that can be met, or a setting does
    not fit it; ValueError or TypeError for the other arguments.
    """
    if isinstance(model, nn.Module) and model.training:
        raise ValueError("the model is in training mode; allowed: evaluation mode (model.eval())")
    require_int("repeats", repeats, 1)
    require_int("max_rows", max_rows, 1)
    settings = (settings,) if isinstance(settings, Settings) else tuple(settings)
    for setting in settings:
        if not isinstance(setting, Settings):
            raise TypeError(f"settings has {setting!r}; allowed: distrattention.Settings")
    model = getattr(model, "_orig_mod", model)  # of a compiled model
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        with _module_names(model) as names, _Evaluation(names, settings, repeats, max_rows) as evaluation:
            exact = _tensors(_run(model, batch))
        if not evaluation.layers:
            raise ValueError(
                f"{type(model).__name__} made no call that can be met; allowed: models whose attention goes through "
                "torch.nn.functional.scaled_dot_product_attention or this package"
            )
        outputs, left_out = (), "not asked for"
        if end_to_end:
            outputs, left_out = _outputs(model, batch, settings, exact, evaluation.layers)
    return Report(settings, tuple(evaluation.layers), outputs, left_out, _meta(evaluation.device))


class _Meeting(replace_sdpa):
    """Meets the calls of torch's attention (`_attend`, by the base class) and of this package (`attend_here`)."""

    __enter__, __exit__ = TorchFunctionMode.__enter__, TorchFunctionMode.__exit__  # without a count

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (ops.forward, ops.forward.default):
            return self.attend_here(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


class _Evaluation(_Meeting):
    """Measures every attention call, and answers it exactly: a call of torch's attention by torch itself."""

    def __init__(self, names: list[str], settings: tuple[Settings, ...], repeats: int, max_rows: int):
        super().__init__(Settings("energy"))  # in _attend(): to learn whether a call can be approximated
        self.names = names  # of the modules under way, the innermost last
        self.measured = settings
        self.repeats = repeats
        self.max_rows = max_rows
        self.layers: list[Layer] = []
        self.device = torch.device("cpu")

    def _attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        options = {"scale": scale, "enable_gqa": enable_gqa}
        causal, mask, left_out = "none", None, None
        try:
            causal, mask = causality(query, key, attn_mask, is_causal)
            super()._attend(*arguments, **options)
        except (RuntimeError, TypeError, ValueError) as refusal:
            left_out = str(refusal).splitlines()[0]
        call = Call(*core.autocast(query, key, value, mask), causal, scale)
        if left_out is None:
            self.measure(call)
        else:
            self.layers.append(Layer(**self.facts(call), left_out=left_out))
        return F.scaled_dot_product_attention(*arguments, **options)

    def attend_here(self, q, k, v, mask=None, order=None, causal="none", scale=None, *settings, **more_settings):
        call = Call(q, k, v, mask, causal, scale)
        self.measure(call)
        return call.run(Settings("exact"))

    def facts(self, call: Call) -> dict:
        mask = call.mask
        return {
            "name": self.names[-1] if self.names else "",
            "query": tuple(call.query.shape),
            "key": tuple(call.key.shape),
            "head_dim_v": call.value.shape[-1],
            "dtype": _name(call.query.dtype),
            "causal": call.causal,
            "mask": None if mask is None else f"{_name(mask.dtype)} mask " + "x".join(map(str, mask.shape)),
        }

    def measure(self, call: Call) -> None:
        self.device = call.query.device
        exact, _ = call.run(Settings("exact"))
        torch_has_it = call.torch() is not None
        errors = [output_errors(call.run(setting)[0], exact) for setting in self.measured]
        resolved = [call.resolve(setting) for setting in self.measured]
        orders = [call.order(setting) for setting in resolved]
        variations = total_variations(call, resolved, orders, self.max_rows)
        runs = [call.torch, *(partial(call.run, setting) for setting in (Settings("exact"), *self.measured))]
        torch_ms, exact_ms, *of_settings = times_in_turn(runs, self.repeats, self.device)
        measurements = (
            Measurement(taken.strategy, error, cosine, variation, ms, exact_ms / ms)
            for taken, (error, cosine), variation, ms in zip(resolved, errors, variations, of_settings)
        )
        times = {"exact_ms": exact_ms, "torch_ms": torch_ms if torch_has_it else None}
        self.layers.append(Layer(**self.facts(call), **times, measurements=tuple(measurements)))


class _Approximation(_Meeting):
    """Approximates every attention call, but for decoding where transformers calls this package: that stays exact."""

    def attend_here(self, q, k, v, mask=None, order=None, causal="none", scale=None, *settings, **more_settings):
        decoding = is_decoding(q.shape[2], k.shape[2], self.settings.block_size)
        exact = decoding and core.is_under_way(attention_of_prompts)
        return Call(q, k, v, mask, causal, scale).run(Settings("exact") if exact else self.settings)


@contextlib.contextmanager
def _module_names(model: nn.Module) -> Iterator[list[str]]:
    """The names of the model's modules under way, the innermost last, kept up to date within the block."""
    names = {id(module): name for name, module in model.named_modules()} if isinstance(model, nn.Module) else {}
    under_way: list[str] = []

    def enter(module, inputs):
        if id(module) in names:
            under_way.append(names[id(module)])

    def leave(module, inputs, output):
        if id(module) in names:
            under_way.pop()

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield under_way
    finally:
        for hook in hooks:
            hook.remove()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _run(model, batch):
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*batch)
    if callable(batch):
        return batch(model)
    kind = type(batch).__name__
    raise TypeError(f"batch is of type {kind}; allowed: tensor, mapping, list, tuple, function of the model")


def _outputs(model, batch, settings, exact, layers) -> tuple[tuple[Output, ...], str | None]:
    """The errors of the model's outputs with each setting in all layers, or why there are none."""
    if refused := [layer for layer in layers if layer.left_out]:
        return (), f"{len(refused)} of {len(layers)} calls cannot be approximated"
    if not exact:
        return (), "the model returns no floating-point tensor"
    errors: dict[str, list[float | None]] = {name: [] for name in exact}
    for setting in settings:
        with _Approximation(setting):
            found = _tensors(_run(model, batch))
        for name, tensor in exact.items():
            same = name in found and found[name].shape == tensor.shape
            errors[name].append(output_errors(found[name], tensor)[0] if same else None)
    return tuple(Output(name, tuple(of_name)) for name, of_name in errors.items()), None


def _tensors(value, name: str = "") -> dict[str, Tensor]:
    """The floating-point tensors in nested mappings, lists and tuples, by their path, detached."""
    if isinstance(value, Tensor):
        return {name or "output": value.detach()} if value.is_floating_point() else {}
    if isinstance(value, Mapping):
        items = ((f"{name}.{key}".lstrip("."), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        items = ((f"{name or 'output'}[{n}]", item) for n, item in enumerate(value))
    else:
        return {}
    return {path: tensor for key, item in items for path, tensor in _tensors(item, key).items()}


def _meta(device: torch.device) -> dict:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"torch": torch.__version__, "device": where, "threads": torch.get_num_threads()}
