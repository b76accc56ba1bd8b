# SPDX-License-Identifier: Apache-2.0
"""What the result files say of the machine's processor."""

import re


def cpu_name():
    """The first processor's name, with its family and model, as several kinds share a name; None where it has none."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        lines = [line for line in file.read().split("\n\n")[0].splitlines() if ": " in line]
    facts = dict(re.split(r"\s*: ", line, maxsplit=1) for line in lines)
    if "model name" not in facts:
        return None
    return f"{facts['model name'].strip()}, family {facts.get('cpu family')}, model {facts.get('model')}"
