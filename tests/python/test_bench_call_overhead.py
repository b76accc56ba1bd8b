# SPDX-License-Identifier: Apache-2.0
"""Runs bench/call_overhead.py, in a short form, and looks at what it writes."""

import itertools
import json
from pathlib import Path

from programs import run_python

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "call_overhead.py"
CONTENDERS = ("torch", "auto", "exact", "auto G=2", "energy G=2", "lsh G=2")


def run(*arguments):
    return run_python(SCRIPT, "--calls", "2", "--rounds", "3", *arguments, timeout=300)


def test_every_contender_has_a_time_in_every_operation(tmp_path):
    path = tmp_path / "call_overhead.json"
    done = run("--json-out", path)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    rows = result["rows"]
    wanted = list(itertools.product(("no_grad", "forward", "forward_backward"), CONTENDERS))
    assert [(row["op"], row["contender"]) for row in rows] == wanted
    assert all(row["us"] > 0 and row["ratio_to_torch"] > 0 for row in rows)
    assert all(row["ratio_to_torch"] == 1 for row in rows if row["contender"] == "torch")
    assert len(done.stdout.splitlines()) == len(rows)
    assert result["meta"]["threads"] == 1 and result["meta"]["rounds"] == 3


def test_what_is_not_allowed_is_named():
    done = run("--seq", "0")
    assert done.returncode == 2 and "--seq is 0; allowed: 1 and above" in done.stderr
