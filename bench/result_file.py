#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Result files: {"meta": {...}, "rows": [...]} as JSON with a line for each entry of the meta and for each row.

So a file can be read and compared line by line, and stays as long as it has rows. cli/result_file.h writes the same
for the command and for distr_gpu.

As a command, writes the given JSON files anew in this form, those of `examples/` for instance. No value changes. With
`--join OUT.json` before them, writes their rows into one file instead, with the meta of the first and all commands.
"""

import json
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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


def command(words=None):
    """The command line that runs, or these words, for the meta: paths in the repository from its root on, of others the
    names alone."""

    def named(word):
        path = Path(word)
        if not path.is_absolute():
            return word
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name

    return shlex.join(map(named, sys.argv if words is None else words))


def write(path, result):
    Path(path).write_text(text(result), encoding="utf-8")


def main(arguments):
    join = arguments[:1] == ["--join"]
    names = arguments[2:] if join else arguments
    results = [json.loads(Path(name).read_text(encoding="utf-8")) for name in names]
    if join:
        meta = results[0]["meta"] | {"command": "; ".join(result["meta"]["command"] for result in results)}
        write(arguments[1], {"meta": meta, "rows": [row for result in results for row in result["rows"]]})
    else:
        for name, result in zip(names, results):
            write(name, result)


if __name__ == "__main__":
    main(sys.argv[1:])
