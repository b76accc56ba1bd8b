# SPDX-License-Identifier: Apache-2.0
"""Approximate self-attention that groups the columns of Q and K (arXiv 2507.17245), for PyTorch.

Importing never fails: where torch or the library does not fit, the first use says why (UnavailableError), and so does
`python -m distrattention doctor`.
"""

import importlib

from distrattention.settings import Settings


class UnavailableError(ImportError):
    """torch is missing or too old, or the library with the operators does not load; the message says which and why."""


_HOMES = {  # imported on first use
    "scaled_dot_product_attention": "attention",
    "flash_attn_func": "flash",
    "flash_attn_varlen_func": "flash",
    "explain": "attention",
    "allow_nondeterministic_backward": "determinism",
    "is_nondeterministic_backward_allowed": "determinism",
    "replace_sdpa": "sdpa_mode",
    "report": "evaluation",
    "Report": "evaluation",
}

__all__ = ["Settings", "UnavailableError", *_HOMES]


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'distrattention' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"distrattention.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
