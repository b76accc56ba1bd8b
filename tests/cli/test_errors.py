# SPDX-License-Identifier: Apache-2.0
"""`distr errors`: both statistics against what a simulation of the paper's experiment gives, JSON, and the picture."""

import json
import os
import shutil
import struct
import xml.etree.ElementTree

import pytest

needs_gnuplot = pytest.mark.skipif(shutil.which("gnuplot") is None, reason="gnuplot is not installed")

# (l, G) at d = 32 with sample: range of the mean of the signed statistic over projections (100 trials each), with a
# tenth of slack, and the mean element by element with sample and mean. In percent.
SIMULATED = {
    (1, 2): (0.6, 1.4, 9.7, 3.4),
    (2, 2): (0.7, 1.25, 7.0, 2.6),
    (4, 2): (0.7, 1.25, 7.1, 2.7),
    (8, 2): (0.7, 1.3, 8.3, 3.0),
    (2, 4): (1.35, 2.9, 12.1, 3.3),
    (2, 8): (2.0, 6.5, 19.7, 3.8),
    (2, 16): (2.8, 17.6, 33.3, 4.2),
}
PAPER = {
    3: {(1, 2): (4e-4, 3.45, 0.9), (2, 2): (2e-3, 3.4, 0.87), (4, 2): (2e-3, 3.4, 0.87), (8, 2): (1e-3, 3.4, 0.87)},
    4: {(2, 2): (2e-3, 3.4, 0.87), (2, 4): (4e-2, 5.4, 1.73), (2, 8): (7e-2, 9.25, 2.48), (2, 16): (6e-3, 16.5, 4.96)},
}


def report_of(run, *options):
    """The JSON object of a run."""
    result = run("errors", "--json", *options)
    assert (result.code, result.stderr) == (0, "")
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def report():
    """The JSON object of a run without options."""
    from conftest import run_binary  # fixtures of modules cannot use run, which is made anew for each test

    return report_of(run_binary)


def setting_of(row):
    """l and G."""
    return row["block"], row["group_size"]


@pytest.mark.values
def test_rows_and_what_the_paper_prints(report):
    assert len(report["rows"]) == 2 * 2 * 4 * 2
    keys = {(row["table"], row["head_dim"], *setting_of(row), row["estimator"]) for row in report["rows"]}
    assert len(keys) == len(report["rows"])
    for row in report["rows"]:
        assert tuple(row["paper"][key] for key in ("min", "max", "mean")) == PAPER[row["table"]][setting_of(row)]
        for statistic in ("signed", "elementwise"):
            assert 0 <= row[statistic]["min"] < row[statistic]["mean"] < row[statistic]["max"]
        assert row["signed"]["mean"] < row["elementwise"]["mean"]
    meta = {"seq": 64, "trials": 100, "seed": 0, "projections": "fresh", "unit": "percent"}
    assert {key: report["meta"][key] for key in meta} == meta


@pytest.mark.values
def test_errors_at_d_32_are_those_of_the_simulation(report):
    for row in report["rows"]:
        low, high, sample, mean = SIMULATED[setting_of(row)]
        if row["head_dim"] != 32:
            continue
        if row["estimator"] == "sample":
            assert low < row["signed"]["mean"] < high
            assert row["elementwise"]["mean"] == pytest.approx(sample, rel=0.06)
        else:
            assert row["signed"]["mean"] < 0.1
            assert row["elementwise"]["mean"] == pytest.approx(mean, rel=0.05)


@pytest.mark.values
def test_errors_at_d_64_are_smaller(report):
    means = {
        (row["table"], setting_of(row), row["estimator"], row["head_dim"]): row["elementwise"]["mean"]
        for row in report["rows"]
    }
    for (table, setting, estimator, head_dim), value in means.items():
        if head_dim == 64:
            assert 0.5 < value / means[table, setting, estimator, 32] < 0.8


@pytest.mark.values
def test_seed_decides_and_shared_projections_differ(run, report):
    words = ("--trials", "5")
    first = report_of(run, *words)["rows"]
    assert first == report_of(run, *words, "--seed", "0")["rows"]
    assert first != report_of(run, *words, "--seed", "1")["rows"]
    shared = report_of(run, "--projections", "shared", "--trials", "100")
    assert shared["meta"]["projections"] == "shared" and shared["rows"] != report["rows"]
    row = next(row for row in shared["rows"] if row["head_dim"] == 32 and setting_of(row) == (2, 2))
    assert 0.6 < row["signed"]["mean"] < 1.4


@pytest.mark.parametrize("rows", ["1", "7", "30"])
def test_numbers_of_rows_that_no_block_divides(run, rows):
    report = report_of(run, "--seq", rows, "--trials", "2")
    assert report["meta"]["seq"] == int(rows)
    assert all(row["elementwise"]["mean"] > 0 for row in report["rows"])


def test_tables(run):
    result = run("errors", "--trials", "3")
    assert (result.code, result.stderr) == (0, "")
    for word in ("Table 3", "Table 4", "signed", "element-wise", "paper", "0.0004", "4.96", "16.5", "3 trials"):
        assert word in result.stdout
    assert sum(line.split()[:1] in (["32"], ["64"]) for line in result.stdout.splitlines()) == 32


def test_json_out_is_what_json_prints(run, tmp_path):
    result = run("errors", "--trials", "2", "--json", "--json-out", tmp_path / "r.json")
    assert (tmp_path / "r.json").read_text() == result.stdout
    assert os.listdir(tmp_path) == ["r.json"]


@needs_gnuplot
def test_plot_png(run, tmp_path):
    result = run("errors", "--trials", "2", "--plot", tmp_path / "p.png")
    assert (result.code, result.stderr) == (0, "")
    content = (tmp_path / "p.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    assert 1200 <= width <= 4000 and 500 <= height <= 4000 and len(content) > 50000
    assert os.listdir(tmp_path) == ["p.png"]


@needs_gnuplot
def test_plot_svg(run, tmp_path):
    assert run("errors", "--trials", "2", "--plot", tmp_path / "p.svg").code == 0
    root = xml.etree.ElementTree.parse(tmp_path / "p.svg").getroot()
    text = " ".join(word.strip() for word in root.itertext() if word.strip())
    for words in ("query", "key", "score", "l = 1, G = 2", "l = 8, G = 2", "l = 2, G = 16", "mean error", "percentile"):
        assert words in text, text
    assert len(root.findall(".//{http://www.w3.org/2000/svg}image")) >= 10  # S, S_hat and eight errors


BAD = [
    (("--seq", "0"), ["--seq", "'0'", "1 to 2048"]),
    (("--trials", "0"), ["--trials", "'0'"]),
    (("--trials", "x"), ["--trials", "'x'"]),
    (("--seed", "-1"), ["--seed", "'-1'"]),
    (("--projections", "old"), ["--projections", "'old'", "fresh, shared"]),
    (("--plot", "p.pdf"), ["--plot", "'p.pdf'", ".png, .svg"]),
    (("--plot", ""), ["--plot", "''"]),
    (("--json-out", "missing/r.json"), ["missing"]),
    (("stray",), ["stray", "--help"]),
]


@pytest.mark.parametrize("words, expected", BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_values(run, tmp_path, words, expected):
    result = run("errors", *words, cwd=tmp_path)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("distr errors: ") and result.stderr.count("\n") == 1
    for word in expected:
        assert word in result.stderr
    assert os.listdir(tmp_path) == []


def test_plot_without_gnuplot_fails_and_leaves_no_file(run, tmp_path):
    words = ("--plot", tmp_path / "p.png", "--json-out", tmp_path / "r.json")
    result = run("errors", *words, env=os.environ | {"PATH": str(tmp_path / "empty")})
    assert (result.code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1 and "gnuplot" in result.stderr
    assert os.listdir(tmp_path) == []
