# SPDX-License-Identifier: Apache-2.0
"""What the integration of diffusers needs that diffusers does not offer: its registry of backends is closed, its
`set_attention_backend` passes over models that call torch's attention themselves, and a backend is not told which
module calls it. Written for diffusers 0.42; everything else that the integration touches is public.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from distrattention import UnavailableError

try:
    from diffusers import AttentionBackendName, ModelMixin
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry
    from diffusers.models.attention_processor import Attention, MochiAttention
except ImportError as error:
    raise UnavailableError(f"diffusers cannot be used ({error}); install diffusers 0.42") from error

from torch import nn  # isort: skip

ATTENTION = (Attention, MochiAttention, AttentionModuleMixin)  # those that ModelMixin.set_attention_backend goes by


def is_known(name: str) -> bool:
    return name in AttentionBackendName._value2member_map_


def add_backend(name: str, function: Callable) -> None:
    """Makes `name` a backend, or gives the backend of that name another function."""
    if not is_known(name):
        member = str.__new__(AttentionBackendName, name)
        member._name_, member._value_ = name.upper(), name
        AttentionBackendName._member_names_.append(member._name_)
        AttentionBackendName._member_map_[member._name_] = member
        AttentionBackendName._value2member_map_[name] = member
    _AttentionBackendRegistry.register(AttentionBackendName(name))(function)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose processors compute attention, by name."""
    found = model.named_modules()
    return {name: module for name, module in found if isinstance(module, ATTENTION) and module.processor is not None}


def watch_models(chosen: Callable[[ModelMixin, str | None], bool]) -> None:
    """Calls chosen(model, backend) where a model was given a backend, and chosen(model, None) where it was reset. Where
    it returns that the backend is ours, the model alone has it: diffusers would make it that of all models."""
    given, reset = ModelMixin.set_attention_backend, ModelMixin.reset_attention_backend

    @functools.wraps(given)
    def set_attention_backend(model: ModelMixin, backend: str) -> None:
        active, _ = _AttentionBackendRegistry.get_active_backend()
        given(model, backend)
        ours = True  # also where something is raised
        try:
            ours = chosen(model, str(getattr(backend, "value", backend)).lower())
        except ValueError:
            reset(model)
            raise
        finally:
            if ours:
                _AttentionBackendRegistry.set_active_backend(active)

    @functools.wraps(reset)
    def reset_attention_backend(model: ModelMixin) -> None:
        reset(model)
        chosen(model, None)

    ModelMixin.set_attention_backend = set_attention_backend
    ModelMixin.reset_attention_backend = reset_attention_backend


@functools.cache
def telling(kind: type) -> type:
    """The class of processors `kind`, whose calls are made by `distr_call(call, attention module)`."""

    @functools.wraps(kind.__call__)  # attention modules look at its parameters
    def call(self, module: nn.Module, *arguments, **keywords):
        return self.distr_call(functools.partial(kind.__call__, self, module, *arguments, **keywords), module)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def adopt(module: nn.Module, caller: Callable) -> None:
    """Lets the module's processor make its calls by `caller(call, module)`, in place."""
    release(module)
    processor = module.processor
    processor.distr_call = caller
    processor.__class__ = telling(type(processor))


def release(module: nn.Module) -> None:
    """Undoes adopt()."""
    processor = module.processor
    if "distr_call" in vars(processor):
        processor.__class__ = type(processor).__mro__[1]
        del processor.distr_call
