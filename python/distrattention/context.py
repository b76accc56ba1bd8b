# SPDX-License-Identifier: Apache-2.0
"""What is under way around a call: compilation, transforms, modes, autocast, and who called."""

import sys

from distrattention import ops  # noqa: F401; first, for it says in words what is missing

import torch  # isort: skip

# Looked up once, as each call asks them all.
_transforms = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_autocast_enabled = torch._C._is_any_autocast_enabled


def is_plain():
    """Whether no transform of torch.func, mode or tracer looks on, which are to meet compiled code's operators."""
    return not (_transforms() or _tracing_state() is not None or _function_modes() or _dispatch_modes())


def is_usual():
    """Whether nothing at all is to be heeded: code is eager and plain, nothing is cast, and there are no tangents."""
    return not (
        torch.compiler.is_compiling()
        or _transforms()  # and all that is_plain() asks
        or _tracing_state() is not None
        or _function_modes()
        or _dispatch_modes()
        or _is_autocast_enabled()
        or torch.autograd.forward_ad._current_level >= 0
    )


def autocast(*tensors):
    """The tensors as PyTorch's SDPA takes them under autocast: all floating-point ones but float64 are cast."""
    if not torch.compiler.is_compiling() and not _is_autocast_enabled():
        return tensors
    if not isinstance(tensors[0], torch.Tensor):  # check() will refuse it
        return tensors
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor):
        floating = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        return tensor.to(dtype) if floating and tensor.dtype != torch.float64 else tensor

    return tuple(map(cast, tensors))


def is_under_way(function):
    """Whether the Python function is on the stack of this thread."""
    code = getattr(function, "__code__", None)
    frame = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
