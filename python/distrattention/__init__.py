# SPDX-License-Identifier: Apache-2.0
"""Exact attention for PyTorch, and approximate attention that groups the columns of Q and K (arXiv 2507.17245).

Importing never fails: where torch or the library does not fit, the first use says why (UnavailableError), and so does
`python -m distrattention doctor`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from distrattention._tables import VERSION as __version__
from distrattention.settings import Settings

if TYPE_CHECKING:  # the names of _HOMES
    from distrattention.attention import explain, scaled_dot_product_attention
    from distrattention.determinism import allow_nondeterministic_backward, is_nondeterministic_backward_allowed
    from distrattention.evaluation import Report, report
    from distrattention.flash import flash_attn_func, flash_attn_varlen_func
    from distrattention.flash_kvcache import flash_attn_with_kvcache
    from distrattention.flash_packed import (
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from distrattention.sdpa_mode import replace_sdpa


class UnavailableError(ImportError):
    """torch is missing or too old, or the library with the operators does not load; the message says which and why."""


_HOMES = {  # imported on first use
    "scaled_dot_product_attention": "attention",
    "flash_attn_func": "flash",
    "flash_attn_varlen_func": "flash",
    "flash_attn_qkvpacked_func": "flash_packed",
    "flash_attn_kvpacked_func": "flash_packed",
    "flash_attn_varlen_qkvpacked_func": "flash_packed",
    "flash_attn_varlen_kvpacked_func": "flash_packed",
    "flash_attn_with_kvcache": "flash_kvcache",
    "explain": "attention",
    "allow_nondeterministic_backward": "determinism",
    "is_nondeterministic_backward_allowed": "determinism",
    "replace_sdpa": "sdpa_mode",
    "report": "evaluation",
    "Report": "evaluation",
}

__all__ = ["Settings", "UnavailableError", "__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'distrattention' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"distrattention.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
