# SPDX-License-Identifier: Apache-2.0
"""`distr bench`: the rows of a small sweep, and bad usage."""

import json

import pytest


def bench(run, *options):
    """The parsed JSON of a small sweep."""
    result = run("bench", "--json", "--repeats", "2", "--heads", "2", *options)
    assert result.code == 0, result.stderr
    return json.loads(result.stdout)


def test_rows_are_the_cross_product_with_exact_first(run):
    result = bench(run, "--seq", "64,96", "--head-dim", "16,24", "--op", "forward,backward", "--strategy", "energy")
    rows = result["rows"]
    assert len(rows) == 2 * 2 * 2 * 3
    assert [row["strategy"] for row in rows[:3]] == ["exact", "energy", "energy"]
    assert {(row["op"], row["seq_q"], row["head_dim"]) for row in rows} == {
        (op, seq, dim) for op in ("forward", "backward") for seq in (64, 96) for dim in (16, 24)}
    assert {row["kernel"] for row in rows} == {"cpu/forward", "cpu/backward"}


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("--seq", "100,1000000000"), 1, ["--heads 4, --seq 1000000000", "GB do not fit into memory"]),
        (("--heads", "9223372036854775807"), 2, ["--heads 9223372036854775807", "overflows; allowed"]),
        (("--heads", "3", "--heads-kv", "2"), 2, ["--heads 3", "multiple"]),
    ],
)
def test_problems_that_are_too_large_name_the_flags(run, words, code, expected):
    result = run("bench", "--strategy", "energy", *words, timeout=20)
    assert (result.code, result.stdout) == (code, "")
    assert result.stderr.startswith("distr bench: --batch 1, ") and result.stderr.count("\n") == 1
    for word in expected:
        assert word in result.stderr


def test_rates_follow_from_times(run):
    result = bench(run, "--seq", "128", "--head-dim", "32", "--op", "forward,forward-backward", "--causal",
                   "none,top-left")
    peak = result["meta"]["fma_peak_gflops"]
    assert peak > 1
    for row in result["rows"]:
        pairs = 128 * 129 / 2 if row["causal"] else 128 * 128
        products = {"forward": 2, "forward_backward": 7}[row["op"]]
        flops = 2 * row["heads"] * pairs * 32 * products
        assert row["tflops_exact_flops"] == pytest.approx(flops / row["ms"] * 1e-9, rel=1e-9)
        assert row["share_of_fma_peak"] == pytest.approx(row["tflops_exact_flops"] * 1e3 / peak, rel=1e-9)
        assert row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["peak_memory_bytes"] > 0


def test_rates_with_a_sliding_window_count_its_pairs(run):
    result = bench(run, "--seq", "128", "--head-dim", "32", "--causal", "none,top-left", "--window-size", "9,2",
                   "--strategy", "exact")
    for row in result["rows"]:
        assert row["window_size"] == [9, 2]
        right = 0 if row["causal"] else 2
        pairs = sum(-9 <= j - i <= right for i in range(128) for j in range(128))
        flops = 4 * row["heads"] * pairs * 32
        assert row["tflops_exact_flops"] == pytest.approx(flops / row["ms"] * 1e-9, rel=1e-9)


def test_capped_scores_are_told(run):
    words = ("--seq", "64", "--head-dim", "16", "--strategy", "exact")
    assert [row["softcap"] for row in bench(run, *words, "--softcap", "30")["rows"]] == [30]
    assert [row["softcap"] for row in bench(run, *words)["rows"]] == [None]


def test_grouping_has_no_rate(run):
    for row in bench(run, "--seq", "64", "--head-dim", "16", "--op", "grouping")["rows"]:
        assert row["op"] == "grouping" and row["tflops_exact_flops"] is None and row["ratio_to_exact"] is None


def test_meta_says_how_the_run_was_made(run):
    meta = bench(run, "--seq", "32", "--head-dim", "8", "--threads", "1")["meta"]
    assert meta["command"].startswith("distr bench --json") and meta["threads"] == 1
    assert {"date", "commit", "cpu", "gpu", "instruction_set", "version"} <= meta.keys()


def test_json_out_holds_the_same_rows_as_a_table_run(run, tmp_path):
    path = tmp_path / "bench.json"
    result = run("bench", "--seq", "32", "--head-dim", "8", "--repeats", "1", "--json-out", path)
    assert result.code == 0 and "GFLOP/s" in result.stdout
    text = path.read_text()
    written = json.loads(text)
    assert len(written["rows"]) == 5
    assert text.count("\n") == len(written["rows"]) + len(written["meta"]) + 6  # a row a line


@pytest.mark.parametrize("options, value", [
    (["--seq", "0"], "0"), (["--seq", "12,x"], "x"), (["--head-dim", "513"], "513"), (["--op", "sideways"], "sideways"),
    (["--dtypes", "f8"], "f8"), (["--heads", "4", "--heads-kv", "3"], "3"), (["--group-size", "65", "--head-dim", "64"],
                                                                            "65"), (["--repeats", "0"], "0")])
def test_bad_usage(run, options, value):
    result = run("bench", *options)
    assert result.code == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and value in result.stderr and "allowed" in result.stderr


@pytest.mark.parametrize("options", [["--op", "backward"], ["--op", "backward", "--device", "cpu"],
                                     ["--device", "cuda"], ["--op", "grouping,forward", "--device", "cuda"]])
def test_nondeterministic_is_for_the_backward_on_a_gpu(run, options):
    result = run("bench", "--nondeterministic", *options)
    assert result.code == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "--nondeterministic" in result.stderr and "allowed: with --device cuda, and backward" in result.stderr
