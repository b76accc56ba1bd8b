# SPDX-License-Identifier: Apache-2.0
"""Evaluation: what each setting does to a model's attention, layer by layer, against exact attention.

    from distrattention import Settings, report

    found = report(model.eval(), batch, [Settings("energy", 2), Settings("lsh", 2)])
    print(found)
    found.to_json("report.json")
    found.plot("report.png")
"""

from .capture import report
from .result import Layer, Measurement, Output, Report, label

__all__ = ["Layer", "Measurement", "Output", "Report", "label", "report"]
