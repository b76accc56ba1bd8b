# SPDX-License-Identifier: Apache-2.0
"""tools/paper_tables.py: cells tell what was measured, what failed, and what was not."""

import importlib.util
import unittest
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "paper_tables.py"
spec = importlib.util.spec_from_file_location("paper_tables", TOOL)
paper_tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(paper_tables)


class PaperTables(unittest.TestCase):
    def test_cells(self):
        rows = [{"method": "hydra", "seed": seed, "top1": 10.0 + seed} for seed in range(3)]
        rows += [{"method": "primal", "error": "out of memory"}, {"method": "flash-cpu", "top1": 5.0}]
        cells = {method: paper_tables.cell(rows, "top1", ".1f", method=method)
                 for method in ("hydra", "primal", "flash2", "energy")}  # fmt: skip
        self.assertEqual(cells, {"hydra": "11.0 ± 1.0", "primal": "out of memory", "flash2": "5.0 (flash-cpu)",
                                 "energy": "not measured yet"})  # fmt: skip
        self.assertEqual(paper_tables.cell(rows, "seconds", ".1f", method="hydra"), "not timed")
        self.assertEqual(paper_tables.percent([{"n": 1, "share": 0.5}], "share", n=1), "50 %")

    def test_every_table_names_where_its_numbers_come_from(self):
        for name, table in paper_tables.TABLES.items():
            text = table()
            self.assertRegex(text, r"\(`\w+`: (not measured yet: `experiments/run|.+, commit)", name)
            widths = {line.count(" | ") for line in text.splitlines() if line.startswith("|")}
            self.assertEqual(len(widths), 1, name)

    def test_methods_that_results_have_besides_come_last(self):
        rows = [{"method": "energy"}, {"method": "hydra"}, {"method": "flash-cpu"}]
        self.assertEqual(paper_tables.methods_of(("standard", "hydra"), rows), ["standard", "hydra", "energy"])


if __name__ == "__main__":
    unittest.main()
