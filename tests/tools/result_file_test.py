#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of bench/result_file.py, and of the committed result files: a row a line."""

import importlib.util
import json
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "result_file.py"
MOST_LINES = 10_000  # of all committed result files


def module():
    spec = importlib.util.spec_from_file_location("result_file", SCRIPT)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class ResultFile(unittest.TestCase):
    def test_a_line_for_each_entry_and_row(self):
        result = {"meta": {"cpu": "Zeiß", "skipped": {"a": [1]}}, "count": 2, "rows": [{"ms": 1e-7}, {"ms": None}]}
        expected = """{
"meta": {
 "cpu": "Zeiß",
 "skipped": {"a":[1]}
},
"count": 2,
"rows": [
 {"ms":1e-07},
 {"ms":null}
]
}
"""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "r.json"
            module().write(path, result)
            self.assertEqual(path.read_text(encoding="utf-8"), expected)
        self.assertEqual(json.loads(module().text({"meta": {}, "rows": []})), {"meta": {}, "rows": []})

    def test_the_committed_files_are_in_this_form(self):
        paths = sorted((ROOT / "bench" / "results").rglob("*.json"))
        self.assertGreater(len(paths), 20)
        lines = 0
        for path in paths:
            text = path.read_text(encoding="utf-8")
            result = json.loads(text)
            self.assertIn("meta", result, path)
            # Numbers may be spelt as another writer spells them: only the lines count.
            self.assertEqual(text.count("\n"), module().text(result).count("\n"), path)
            lines += text.count("\n")
            words = (result["meta"].get("command") or "").split()
            self.assertEqual([word for word in words if word.startswith("/")], [], f"{path} names a machine's folders")
        self.assertLessEqual(lines, MOST_LINES)

    def test_a_command_names_paths_of_the_repository_alone(self):
        words = [str(ROOT / "bench" / "near.py"), "--out", "/elsewhere/near.json", "--rows", "a/b"]
        self.assertEqual(module().command(words), "bench/near.py --out near.json --rows a/b")


if __name__ == "__main__":
    unittest.main()
