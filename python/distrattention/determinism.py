# SPDX-License-Identifier: Apache-2.0
"""Whether a backward may sum in an order that changes from run to run."""

from distrattention import ops  # noqa: F401; first, for it says in words what is missing

import torch  # isort: skip

_allowed = False


def allow_nondeterministic_backward(mode: bool = True) -> None:
    """Lets the backward of attention that is called from here on sum dQ in an order that changes from run to run.

    That is quicker on a GPU where there is a kernel for it (explain(..., operation="backward") names it), in float16
    and bfloat16. By default gradients have the same bits in every run, other than those of PyTorch's own attention; on
    the CPU they always have. The choice holds for the process, and for a backward it is made when its forward is
    called. torch.use_deterministic_algorithms(True) overrides it, also with warn_only, and so does deterministic=True
    in flash_attn_func() and flash_attn_varlen_func().

    Raises TypeError unless mode is a bool.
    """
    global _allowed
    if not isinstance(mode, bool):
        raise TypeError(f"mode is {mode!r}; allowed: True or False")
    _allowed = mode


def is_nondeterministic_backward_allowed() -> bool:
    """Whether allow_nondeterministic_backward() was called, and neither taken back nor overridden by torch."""
    return _allowed and not torch.are_deterministic_algorithms_enabled()
