# SPDX-License-Identifier: Apache-2.0
"""Meets the attention calls of a model's run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from types import MappingProxyType
from typing import Any

from .. import context, ops  # first, for it says in words what is missing
from ..attention import attention_of_prompts, causality, is_decoding
from ..sdpa_mode import replace_sdpa
from ..settings import EXACT, Settings, require_int
from .measure import Call, output_errors, squares_by_head, times_in_turn
from .probabilities import total_variations
from .progress import Progress
from .result import Metric, Output, Report
from .sums import Clock, LayerSums, SettingSums, relative, whole

import torch  # isort: skip
import torch.nn.functional as F  # isort: skip
from torch.overrides import TorchFunctionMode  # isort: skip
from torch import Tensor, nn  # isort: skip

Batch = Tensor | Mapping | Sequence | Callable[[nn.Module], object]
DEFAULT = (Settings("lsh", 2), Settings("lsh", 4), Settings("energy", 2), Settings("energy", 4))


def report(
    model: nn.Module,
    batch: Batch | None = None,
    settings: Settings | Sequence[Settings] = DEFAULT,
    *,
    batches: Iterable[Batch] | None = None,
    metric: Callable[[Any, Any], float] | Mapping[str, Callable[[Any, Any], float]] = MappingProxyType({}),
    per_head: bool = False,
    repeats: int = 5,
    max_rows: int = 4096,
    end_to_end: bool = True,
    progress: bool | Callable[[str], None] | None = None,
) -> Report:
    """Runs `model` on `batch` with exact attention and measures each setting in each attention call.

    model: in evaluation mode; its attention goes through F.scaled_dot_product_attention (torch, timm, transformers
        with attn_implementation "sdpa") or this package (transformers with "distr", whose own settings are left aside).
    batch: a tensor (`model(batch)`), a mapping (`model(**batch)`), a list or tuple (`model(*batch)`), or a function
        that takes the model and runs it (`lambda model: model.encode(images)`), each time on the same inputs.
    settings: what to measure, one or several. Where causality arrives as a mask, ask for order_from="previous".
    batches: several such batches instead of one, a DataLoader, say. Errors are those over all of them, times the mean.
    metric: a function, or several by name, of what the model returns and the batch (`lambda output, batch:
        output.loss`), whose number is shown beside the errors, the mean over the batches.
    per_head: whether to tell the error of each head, too.
    repeats: timed runs of each setting, in turn; the medians are reported, with the least and the largest.
    max_rows: about how many rows of P to look at in a call, evenly spread (at least one a head).
    end_to_end: whether to run the model again with each setting in all layers, once to compare what it returns, and
        `repeats` times for its time.
    progress: whether to say on standard error what is under way, or a function to be told. None: on a terminal, where
        it takes longer than two seconds.

    Every call gets the inputs that the exact model has there, so errors are those of one layer alone; what they add up
    to is in `outputs`. Exact attention is timed twice: the speed of a time that differs from the nearer of these two by
    no more than they differ from each other is None. Nothing needs gradients or keeps a layer's tensors; P is held in
    chunks of 4 million scores. Padded queries count as any others. Calls that this package refuses (dropout, say) or
    does not measure (sliding windows, capped scores) run as they are, and are listed with the reason. Compiled models
    run uncompiled here.

    Raises ValueError where the model is in training mode, makes no attention call that can be met, or a setting does
    not fit it; ValueError or TypeError for the other arguments.
    """
    if isinstance(model, nn.Module) and model.training:
        raise ValueError("the model is in training mode; allowed: evaluation mode (model.eval())")
    require_int("repeats", repeats, 1)
    require_int("max_rows", max_rows, 1)
    settings = (settings,) if isinstance(settings, Settings | str) else tuple(settings)
    for setting in settings:
        if not isinstance(setting, Settings):
            raise TypeError(f"settings has {setting!r}; allowed: distrattention.Settings")
    if (batch is None) == (batches is None):
        raise TypeError(f"batch and batches were {'neither' if batch is None else 'both'} given; allowed: one of them")
    metrics = metric if isinstance(metric, Mapping) else {getattr(metric, "__name__", "metric"): metric}
    if metrics and not end_to_end:
        raise ValueError("metric was given with end_to_end=False; allowed: end_to_end=True, as the outputs are its own")
    model = getattr(model, "_orig_mod", model)  # of a compiled model
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), Progress(progress) as progress:
        evaluation = _Evaluation(settings, repeats, max_rows, progress)
        together = _Together(model, settings, metrics, repeats, progress)
        for part in [batch] if batches is None else batches:
            exact = evaluation.run(model, part)
            if end_to_end and evaluation.layers and not evaluation.refused():
                together.add(part, exact, evaluation.device)
    if not evaluation.layers:
        raise ValueError(
            f"{type(model).__name__} made no call that can be met; allowed: models whose attention goes through "
            "torch.nn.functional.scaled_dot_product_attention or this package, and one batch at least"
        )
    layers = tuple(sums.layer(per_head) for sums in evaluation.layers.values())
    meta = _meta(evaluation.device)
    found = {"settings": settings, "layers": layers, "batches": evaluation.batches, "meta": meta}
    left_out = "it was not asked for" if not end_to_end else evaluation.refused()
    if left_out:
        return Report(**found, outputs=(), metrics=(), whole=None, whole_left_out=left_out)
    in_all = whole(together.clock, layers, evaluation.batches)
    return Report(**found, outputs=together.outputs(), metrics=together.metrics(), whole=in_all, whole_left_out=None)


class _Meeting(replace_sdpa):
    """Meets the calls of torch's attention (`_attend`, by the base class) and of this package (`attend_here`)."""

    __enter__, __exit__ = TorchFunctionMode.__enter__, TorchFunctionMode.__exit__  # without a count

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (ops.forward, ops.forward.default):
            left_out = None
            if any(side is not None for side in args[_SIDES : _SIDES + 2]):
                left_out = "it has a sliding window, in which report measures no approximation"
            elif any(args[_SIDES + 2 :]):
                left_out = "its scores are capped, which is not measured"
            if left_out is not None:
                self.leave_out(_call_of(*args), left_out)
                return function(*args)
            return self.attend_here(*args)
        return super().__torch_function__(function, types, args, kwargs)

    def leave_out(self, call: Call, reason: str) -> None:
        """Called for a call that runs as it is."""


class _Evaluation(_Meeting):
    """Measures every attention call, and answers it exactly: a call of torch's attention by torch itself."""

    def __init__(self, settings: tuple[Settings, ...], repeats: int, max_rows: int, progress: Progress) -> None:
        super().__init__(Settings("energy"))  # in _attend(): to learn whether a call can be approximated
        self.names: list[str] = []  # of the modules under way, the innermost last
        self.measured = settings
        self.repeats = repeats
        self.max_rows = max_rows
        self.progress = progress
        self.batches = 0
        self.calls_of_batch = 0
        self.layers: dict[tuple, LayerSums] = {}  # in the order of the calls
        self.device = torch.device("cpu")

    def run(self, model: nn.Module, batch: Batch) -> object:
        """What the model returns for a further batch."""
        self.batches += 1
        self.calls_of_batch = 0
        with _module_names(model) as self.names, self:
            return _run(model, batch)

    def refused(self) -> str:
        """That some calls cannot be approximated; "" if all can."""
        refused = sum(sums.left_out is not None for sums in self.layers.values())
        return f"{refused} of {len(self.layers)} calls cannot be approximated" if refused else ""

    def _attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        options = {"scale": scale, "enable_gqa": enable_gqa}
        causal, mask, left_out = "none", None, None
        try:
            causal, mask = causality(query, key, attn_mask, is_causal)
            super()._attend(*arguments, **options)
        except (RuntimeError, TypeError, ValueError) as refusal:
            left_out = str(refusal)
        call = Call(*context.autocast(query, key, value, mask), causal, scale)
        sums = self.sums_of(call, left_out)
        if left_out is None:
            self.measure(call, sums)
        return F.scaled_dot_product_attention(*arguments, **options)

    def attend_here(self, *tensors_and_settings):
        call = _call_of(*tensors_and_settings)
        self.measure(call, self.sums_of(call))
        return call.run(EXACT)

    def leave_out(self, call, reason):
        self.sums_of(call, reason)

    def sums_of(self, call: Call, left_out: str | None = None) -> LayerSums:
        """The sums of the call, which is the same in several batches where it has the same place and facts."""
        mask = call.mask
        facts = {
            "name": self.names[-1] if self.names else "",
            "query": tuple(call.query.shape),
            "key": tuple(call.key.shape),
            "head_dim_v": call.value.shape[-1],
            "dtype": _name(call.query.dtype),
            "causal": call.causal,
            "mask": None if mask is None else f"{_name(mask.dtype)} mask " + "x".join(map(str, mask.shape)),
        }
        place = (self.calls_of_batch, left_out, *facts.values())
        self.calls_of_batch += 1
        self.progress(f"batch {self.batches}, attention call {self.calls_of_batch} ({facts['name'] or '-'})")
        sums = self.layers.setdefault(place, LayerSums(facts, left_out))
        sums.batches += 1
        return sums

    def measure(self, call: Call, sums: LayerSums) -> None:
        self.device = call.query.device
        exact, _ = call.run(EXACT)
        sums.has_torch = call.torch() is not None
        resolved = [call.resolve(setting) for setting in self.measured]
        columns = [call.columns(setting) for setting in resolved]
        variations = total_variations(call, resolved, columns, self.max_rows)
        sums.settings = sums.settings or [SettingSums(setting.strategy) for setting in resolved]
        for setting, of_setting, variation in zip(self.measured, sums.settings, variations):
            output, _ = call.run(setting)
            squares = squares_by_head(output.float() - exact.float())
            if setting.skip:
                of_setting.count(*call.count(setting))
            of_setting.add(squares, squares_by_head(exact), output_errors(output, exact)[1], variation)
        runs = [call.torch, *(partial(call.run, setting) for setting in (EXACT, EXACT, *self.measured))]
        sums.clock.add(*times_in_turn(runs, self.repeats, self.device))


class _Approximation(_Meeting):
    """Approximates every attention call, but for decoding where transformers calls this package: that stays exact."""

    def attend_here(self, *tensors_and_settings):
        call = _call_of(*tensors_and_settings)
        decoding = is_decoding(call.query.shape[2], call.key.shape[2], self.settings.block_size)
        exact = decoding and context.is_under_way(attention_of_prompts)
        return call.run(EXACT if exact else self.settings)


def _call_of(q, k, v, mask=None, order=None, key_means=None, causal="none", scale=None, *settings):
    """The call that the operator `forward` was made for."""
    key_offset = settings[_KEY_OFFSET] if len(settings) > _KEY_OFFSET else None
    return Call(q, k, v, mask, causal, scale, key_offset)


_KEY_OFFSET = 7  # its place among the settings of `forward` that follow the scale
_SIDES = 21  # where those of a sliding window begin among the arguments of `forward`; the cap on scores is behind


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


class _Together:
    """The model with each setting in all layers at once."""

    def __init__(
        self, model: nn.Module, settings: tuple[Settings, ...], metrics: Mapping, repeats: int, progress: Progress
    ) -> None:
        self.model, self.settings, self.functions = model, settings, metrics
        self.repeats, self.progress = repeats, progress
        self.clock = Clock()
        self.squares: dict[str, list[list]] = {}  # of each output and setting, [difference, exact], None where none
        self.values: list[list[list[float]]] = []  # of each batch, of exact and the settings, of each metric

    def add(self, batch: Batch, exact: object, device: torch.device) -> None:
        """A further batch, for which the model returns `exact` with exact attention."""
        values, wanted = [self.measure(exact, batch)], _tensors(exact)
        for n, setting in enumerate(self.settings):
            self.progress(f"the whole model with setting {n + 1} of {len(self.settings)}")
            output = self.run(setting, batch)
            values.append(self.measure(output, batch))
            found = _tensors(output)
            for name, tensor in wanted.items():
                sums = self.squares.setdefault(name, [[0.0, 0.0] for _ in self.settings])
                if sums[n] is None or name not in found or found[name].shape != tensor.shape:
                    sums[n] = None
                    continue
                sums[n][0] += _square(found[name].float() - tensor.float())
                sums[n][1] += _square(tensor.float())
        self.values.append(values)
        del exact, output, wanted, found
        self.progress(f"the whole model's time, {self.repeats} times {3 + len(self.settings)} runs")
        runs = [partial(_run, self.model, batch)]
        runs += [partial(self.run, setting, batch) for setting in (EXACT, EXACT, *self.settings)]
        self.clock.add(*times_in_turn(runs, self.repeats, device))

    def run(self, setting: Settings, batch: Batch) -> object:
        with _Approximation(setting):
            return _run(self.model, batch)

    def measure(self, output: object, batch: Batch) -> list[float]:
        return [float(function(output, batch)) for function in self.functions.values()]

    def outputs(self) -> tuple[Output, ...]:
        return tuple(
            Output(name, tuple(None if sums is None else relative(*sums) for sums in of_settings))
            for name, of_settings in self.squares.items()
        )

    def metrics(self) -> tuple[Metric, ...]:
        found = []
        for place, name in enumerate(self.functions):
            exact, *values = (fmean(values[place] for values in of_run) for of_run in zip(*self.values))
            found.append(Metric(name.replace("<lambda>", "metric"), exact, tuple(values)))
        return tuple(found)


def _square(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2


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
