#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Result files: {"meta": {...}, "rows": [...]} as JSON with a line for each entry of the meta and for each row.

So a file can be read and compared line by line, and stays as long as it has rows. cli/result_file.h writes the same
for the command and for distr_gpu.

As a command, writes the given JSON files anew in this form, those of `examples/` for instance. No value changes.
"""

import json
import sys
from pathlib import Path


def text(result):
    """The text of a result: a line for each entry of its objects and for each element of its lists."""

    def line(value):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    parts = []
    for key, value in result.items():
        if isinstance(value, dict):
            inner = ",\n".join(f" {line(name)}: {line(entry)}" for name, entry in value.items())
            parts.append(f"{line(key)}: {{\n{inner}\n}}")
        elif isinstance(value, list):
            inner = ",\n".join(f" {line(entry)}" for entry in value)
            parts.append(f"{line(key)}: [\n{inner}\n]")
        else:
            parts.append(f"{line(key)}: {line(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write(path, result):
    Path(path).write_text(text(result), encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(name, json.loads(Path(name).read_text(encoding="utf-8")))
