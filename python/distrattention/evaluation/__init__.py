# SPDX-License-Identifier: Apache-2.0
"""Evaluation: what each setting does to a model's attention, layer by layer, against exact attention.

    from distrattention import Settings, report

    found = report(model.eval(), batch, [Settings("energy", 2), Settings("lsh", 2)])
    print(found)
    found.to_json("report.json")
    found.plot("report.png")
"""

from .capture import report
from .result import Layer, Measurement, Metric, Output, Report, Time, Whole, label

__all__ = ["Layer", "Measurement", "Metric", "Output", "Report", "Time", "Whole", "label", "report"]
