# SPDX-License-Identifier: Apache-2.0
"""diffusers: `register()`, then `set_attention_backend("distr")` of any of its models.

    from distrattention.integrations.diffusers import register

    calls = register("distr", strategy="energy", group_size=2, scheduler=pipe.scheduler, exact_steps=(2, 2))
    pipe.transformer.set_attention_backend("distr")  # or pipe.unet.set_attention_backend("distr")
    pipe(...)
    print(calls.taken, calls.left, calls.reasons)

What is approximated: self-attention with at least `least_rows` rows. All else is left to torch's own attention: shorter
calls, and calls with other keys than rows, which attend to a text, say. `calls` counts both, with the reasons.

Where a call's settings come from, the last one that speaks:
  1. `register(...)`;
  2. its `per_layer`, by the names of modules;
  3. an attribute `distr_settings` on the attention module:
     transformer.transformer_blocks[0].attn.distr_settings = Settings(strategy="exact");
  4. `per_step`, a function of the denoising step; and `exact_steps` above all.

Both kinds of models are served: those that dispatch their attention (Flux, Wan), and those that call torch's themselves
(UNets, DiT, Stable Diffusion 3), which diffusers' own backends pass over. `reset_attention_backend()`, or another
backend, ends it. diffusers' `attention_backend("distr")` serves models of the first kind, without `per_layer`.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Unpack

from distrattention.attention import scaled_dot_product_attention
from distrattention.integrations import _diffusers_private as private
from distrattention.sdpa_mode import Calls
from distrattention.settings import Fields, Settings, chosen, counted, require_int

PerStep = Callable[[int, int], Settings | None]

_registered: dict[str, "_Backend"] = {}
_here = threading.local()  # .module: the attention module under way in this thread, if it is known


def register(
    name: str = "distr",
    settings: Settings | None = None,
    *,
    least_rows: int = 1024,
    self_attention_only: bool = True,
    per_layer: Mapping[str, Settings] | None = None,
    scheduler: Any = None,
    per_step: PerStep | None = None,
    exact_steps: tuple[int, int] = (0, 0),
    **fields: Unpack[Fields],
) -> Calls:
    """Makes `name` an attention backend of diffusers, and returns the count of its calls from now on.

    name: in lower case, and not one of diffusers' own. One registered here before gets the new settings, for models in
        use too, but for `per_layer`, which set_attention_backend() reads.
    settings, fields: a `Settings`, or the fields of one.
    least_rows: calls with fewer rows are left to torch.
    self_attention_only: whether calls with other keys than rows are left to torch.
    per_layer: settings of modules and of what is in them, by the names of model.named_modules(), as in
        {"transformer_blocks.0": Settings("exact")}. The longest name that fits decides.
    scheduler: the pipeline's, from which the step is known, as its set_timesteps() and step() are called.
    per_step: a function of the step, from 0 on, and their number, that may return None for no other settings.
    exact_steps: how many steps are left to torch at the start and at the end.

    Raises ValueError or TypeError for an argument that is not allowed; set_attention_backend() raises ValueError for a
    name in `per_layer` that the model does not have.
    """
    if not name or name != name.lower() or (private.is_known(name) and name not in _registered):
        raise ValueError(f"name is {name!r}; allowed: a name in lower case that diffusers does not have")
    for layer, of_layer in (per_layer or {}).items():
        if not isinstance(layer, str) or not isinstance(of_layer, Settings):
            found = f"per_layer has {layer!r}: {of_layer!r}"
            raise ValueError(f"{found}; allowed: a module's name: distrattention.Settings")
    if not isinstance(exact_steps, tuple | list) or len(exact_steps) != 2:
        raise ValueError(f"exact_steps is {exact_steps!r}; allowed: (steps at the start, steps at the end)")
    ends = tuple(require_int("exact_steps", steps, 0) for steps in exact_steps)
    if scheduler is None and (per_step is not None or any(ends)):
        asked = "per_step" if per_step is not None else "exact_steps"
        raise ValueError(f"{asked} was given without scheduler; allowed: the pipeline's, which tells the steps")
    backend = _Backend(
        chosen(settings, fields),
        require_int("least_rows", least_rows, 1),
        self_attention_only,
        dict(per_layer or {}),
        scheduler,
        per_step,
        ends,
    )
    if scheduler is not None:
        _count_steps(scheduler)
    if not _registered:
        private.watch_models(_on_backend)
    _registered[name] = backend
    if scheduler is not None:
        _tell_of_step(scheduler)
    private.add_backend(name, _backend_function(name))
    return backend.calls


@dataclass(eq=False)
class _Backend:
    """A registered name."""

    settings: Settings
    least_rows: int
    self_attention_only: bool
    per_layer: Mapping[str, Settings]
    scheduler: Any
    per_step: PerStep | None
    exact_steps: tuple[int, int]
    calls: Calls = field(default_factory=Calls)
    is_exact_step: bool = False  # whether the present step is left to torch
    of_step: Settings | None = None  # those of the present step

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """query [B, Hq, L, d], key [B, H, S, d], value [B, H, S, dv]; the others of F.scaled_dot_product_attention."""
        settings, reason = self.choose(query.shape[-2], key.shape[-2])
        self.calls.count(reason)
        if reason is not None:
            return F.scaled_dot_product_attention(query, key, value, *arguments, **keywords)
        return scaled_dot_product_attention(query, key, value, *arguments, settings=settings, **keywords)

    def choose(self, rows: int, keys: int) -> tuple[Settings, str | None]:
        """The settings of a call, or why it is left to torch."""
        module = getattr(_here, "module", None)
        settings = getattr(module, "distr_settings", None) or getattr(module, "distr_of_layer", None) or self.settings
        if self.self_attention_only and rows != keys:
            return settings, "other keys than rows"
        if rows < self.least_rows:
            return settings, f"fewer than {counted(self.least_rows, 'row')}"
        return self.of_step or settings, "exact steps" if self.is_exact_step else None

    def begin_step(self, step: int, steps: int) -> None:
        """What is to be known of a step is found out here, and not in calls, as a compiled call would be compiled anew
        for each step."""
        self.is_exact_step = step < self.exact_steps[0] or step >= steps - self.exact_steps[1]
        self.of_step = self.per_step(step, steps) if self.per_step is not None and step < steps else None
        if self.of_step is not None and not isinstance(self.of_step, Settings):
            raise TypeError(f"per_step({step}, {steps}) is {self.of_step!r}; allowed: distrattention.Settings or None")


@functools.cache
def _counting(kind: type) -> type:
    """The class of schedulers `kind` whose `distr_step` is the number of step() calls since set_timesteps()."""

    @functools.wraps(kind.set_timesteps)
    def set_timesteps(self, *arguments, **keywords):
        result = kind.set_timesteps(self, *arguments, **keywords)
        self.distr_step = 0
        _tell_of_step(self)
        return result

    @functools.wraps(kind.step)  # pipelines look at its parameters
    def step(self, *arguments, **keywords):
        result = kind.step(self, *arguments, **keywords)
        self.distr_step += 1
        _tell_of_step(self)
        return result

    methods = {"set_timesteps": set_timesteps, "step": step, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), methods)


def _tell_of_step(scheduler: Any) -> None:
    for backend in _registered.values():
        if backend.scheduler is scheduler:
            backend.begin_step(scheduler.distr_step, len(scheduler.timesteps))


def _count_steps(scheduler: Any) -> None:
    if not all(hasattr(scheduler, name) for name in ("set_timesteps", "step", "timesteps")):
        raise TypeError(f"scheduler is of type {type(scheduler).__name__}; allowed: a scheduler of diffusers")
    if not hasattr(scheduler, "distr_step"):
        scheduler.__class__ = _counting(type(scheduler))
        scheduler.distr_step = 0


def _backend_function(name: str) -> Callable:
    def distr_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        """query [B, L, Hq, d], key [B, S, H, d], value [B, S, H, dv] -> [B, L, Hq, dv]."""
        if return_lse or _parallel_config is not None:
            raise NotImplementedError("return_lse and parallel_config are not supported; allowed: False and None")
        if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]  # of keys
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        tensors = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return _registered[name].attend(*tensors, **options, enable_gqa=enable_gqa).transpose(1, 2)

    return distr_attention


def _on_backend(model: nn.Module, name: str | None) -> bool:
    """Makes the model's attention ours, or no longer ours, when it was given a backend; returns which."""
    modules = private.attention_modules(model)
    for module in modules.values():
        private.release(module)
        vars(module).pop("distr_of_layer", None)
    if name not in _registered:
        return False
    per_layer = _registered[name].per_layer
    known = {part for path in modules for part in _paths(path)}
    if others := [layer for layer in per_layer if layer not in known]:
        kind = type(model).__name__
        raise ValueError(f"per_layer names {others}; allowed: modules of {kind} with attention ({', '.join(modules)})")
    for path, module in modules.items():
        for part in _paths(path):  # from the longest on
            if part in per_layer:
                module.distr_of_layer = per_layer[part]
                break
        private.adopt(module, _caller(name))
    return True


def _paths(path: str) -> list[str]:
    """"a.b.c", "a.b" and "a"."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _caller(name: str) -> Callable[[Callable, nn.Module], Any]:
    """How a processor makes its call for a module: with the module known, and torch's attention met."""

    def call(run: Callable, module: nn.Module) -> Any:
        outside = getattr(_here, "module", None)
        _here.module = module
        dispatches = hasattr(module.processor, "_attention_backend")
        try:
            with contextlib.nullcontext() if dispatches else _Meeting(_registered[name]):
                return run()
        finally:
            _here.module = outside

    return call


class _Meeting(TorchFunctionMode):
    """Within the block, torch's attention is that of the backend."""

    def __init__(self, backend: _Backend) -> None:
        super().__init__()
        self.backend = backend

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            return self.backend.attend(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))
