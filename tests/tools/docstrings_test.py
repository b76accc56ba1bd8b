# SPDX-License-Identifier: Apache-2.0
"""tools/docstrings.py, without griffe: arguments become a list, and the rest stays as it is."""

import importlib.util
import sys
import types
import unittest
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "docstrings.py"
DOCSTRING = """What it does.

    model(images)

name: of the thing, which
    goes on here.
first, second: two.

Returns x. As a rule: nothing.
not_an_argument: as a paragraph is under way.
"""
MARKDOWN = """What it does.

    model(images)

- `name`: of the thing, which
    goes on here.
- `first, second`: two.

Returns x. As a rule: nothing.
not_an_argument: as a paragraph is under way."""


class Docstrings(unittest.TestCase):
    def setUp(self):
        sys.modules["griffe"] = types.SimpleNamespace(Extension=object)
        self.addCleanup(sys.modules.pop, "griffe")
        spec = importlib.util.spec_from_file_location("docstrings", TOOL)
        self.docstrings = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.docstrings)

    def test_arguments_become_a_list(self):
        self.assertEqual(self.docstrings.as_markdown(DOCSTRING), MARKDOWN)

    def test_every_object_with_a_docstring_is_changed(self):
        has, has_not = types.SimpleNamespace(docstring=types.SimpleNamespace(value="x: y")), types.SimpleNamespace()
        has_not.docstring = None
        for obj in (has, has_not):
            self.docstrings.Docstrings().on_instance(obj=obj)
        self.assertEqual(has.docstring.value, "- `x`: y")


if __name__ == "__main__":
    unittest.main()
