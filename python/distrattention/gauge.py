# SPDX-License-Identifier: Apache-2.0
"""The old name of distrattention.evaluation, until version 0.2."""

import warnings

from .evaluation import Layer, Measurement, Output, Report, label, report

__all__ = ["Layer", "Measurement", "Output", "Report", "label", "report"]

warnings.warn("distrattention.gauge is distrattention.evaluation now; the old name goes with version 0.2",
              DeprecationWarning, stacklevel=2)
