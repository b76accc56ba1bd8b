# SPDX-License-Identifier: Apache-2.0
"""The old name of distrattention.evaluation, until version 0.2."""

import warnings

from . import evaluation
from .evaluation import *  # noqa: F403

__all__ = evaluation.__all__

warnings.warn("distrattention.gauge is distrattention.evaluation now; the old name goes with version 0.2",
              DeprecationWarning, stacklevel=2)
