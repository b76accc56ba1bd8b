# SPDX-License-Identifier: Apache-2.0
"""tools/readme_tables.py: tables go where their marks stand, with links that lead from the page."""

import importlib.util
import unittest
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "readme_tables.py"
spec = importlib.util.spec_from_file_location("readme_tables", TOOL)
readme_tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme_tables)

PAGE = "# A\n\n<!-- x -->\nold\n<!-- /x -->\n\n<!-- test -->\n\ntext\n\n<!-- x -->\n<!-- /x -->\n"


class ReadmeTables(unittest.TestCase):
    def test_tables_are_filled_in_wherever_they_are_marked(self):
        made = {"x": "| 1 |\n[r](bench/results/r.json)", "y": "| 2 |"}
        text, found = readme_tables.with_tables(PAGE, "../", made)
        block = "<!-- x -->\n| 1 |\n[r](../bench/results/r.json)\n<!-- /x -->\n"
        self.assertEqual(text, f"# A\n\n{block}\n<!-- test -->\n\ntext\n\n{block}")
        self.assertEqual(found, {"x"})
        self.assertIn("(bench/results/r.json)", readme_tables.with_tables(PAGE, "", made)[0])

    def test_a_mark_without_a_table_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "x is no table; allowed: y"):
            readme_tables.with_tables(PAGE, "", {"y": ""})

    def test_the_range_of_exact_attention_spans_all_rows(self):
        rows = [row for row in readme_tables.load("cpu/torch.json")["rows"]
                if (row["strategy"], row["op"], row["dtype"]) == ("exact", "forward", "f32")]
        ratios = sorted(row["ratio_to_sdpa"] for row in rows)
        self.assertIn(f"| {ratios[0]:.2f} to {ratios[-1]:.2f} |", readme_tables.exact_speed())


if __name__ == "__main__":
    unittest.main()
