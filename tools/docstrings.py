# SPDX-License-Identifier: Apache-2.0
"""For tools/docs: docstrings as Markdown. A line `name: what it is` begins an entry of a list."""

import re

import griffe

ENTRY = re.compile(r"(?P<names>\w+(, \w+)*): ")


def as_markdown(text):
    """The docstring with its arguments as a list; indented examples stay code."""
    lines, within, entries = [], False, False  # within a paragraph; within a list
    for line in text.splitlines():
        entry = ENTRY.match(line) if not within or entries else None
        if entry:
            line = f"- `{entry['names']}`: {line[entry.end() :]}"
            entries = True
        elif not line.strip():
            entries = False
        within = bool(line.strip())
        lines.append(line)
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj, **others):
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
