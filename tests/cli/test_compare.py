# SPDX-License-Identifier: Apache-2.0
"""`distr compare`: its numbers against NumPy, its settings, and its plots."""

import itertools
import json
import os
import shutil
import signal
import struct
import subprocess
import time
import xml.etree.ElementTree

import numpy as np
import oracle
import pytest

needs_gnuplot = pytest.mark.skipif(shutil.which("gnuplot") is None, reason="gnuplot is not installed")


@pytest.fixture
def compare(run, save, tmp_path):
    """compare(q, k, v, *options, mask=, code=0, **options of run) -> Result, of a run in its own folder of outputs."""

    def compare_arrays(q, k, v, *options, mask=None, code=0, **run_options):
        words = [word for name, x in (("q", q), ("k", k), ("v", v)) for word in (f"--{name}", save(name, x))]
        if mask is not None:
            words += ["--mask", save("mask", mask)]
        result = run("compare", *words, "--repeats", "1", *options, **run_options)
        assert result.code == code, result.stderr
        return result

    return compare_arrays


@pytest.fixture
def out(tmp_path):
    """A folder for outputs."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def setting_of(row):
    """The oracle's setting of a row of the report."""
    return oracle.Setting(
        row["strategy"], row["group_size"], row["block"], row["estimator"] or "mean", row["order_from"]
    )


def errors(q, k, v, setting, **options):
    """The statistics of a setting, from their definitions."""
    order = oracle.orders(q, k, setting, options.get("causal", "none"))
    s = oracle.scores(q, k, setting, order, **options)
    s_exact = oracle.scores(q, k, oracle.Setting(), **options)
    p, p_exact = oracle.probabilities(s)[0], oracle.probabilities(s_exact)[0]
    values = np.repeat(v, q.shape[1] // k.shape[1], axis=1)
    o, o_exact = p @ values, p_exact @ values
    norms = np.linalg.norm(o, axis=-1) * np.linalg.norm(o_exact, axis=-1)
    visible = np.isfinite(s_exact)
    size = abs(s_exact[visible]).mean()
    difference = s[visible] - s_exact[visible]
    return {
        "rel_error_out": np.linalg.norm(o - o_exact) / np.linalg.norm(o_exact),
        "row_cosine_min": ((o * o_exact).sum(axis=-1)[norms > 0] / norms[norms > 0]).min(),
        "total_variation": (abs(p - p_exact).sum(axis=-1) / 2).mean(),
        "score_error_elementwise": abs(difference).mean() / size,
        "score_error_signed": abs(difference.mean()) / size,
    }


def test_near_keys_of_a_sliding_window(compare, problem):
    q, k, v = problem((2, 300, 8))
    window = ("--window-size", "40,0")
    report = json.loads(compare(q, k, v, "--json", "--strategy", "exact,energy", *window).stdout)
    assert report["meta"]["window_size"] == [40, 0]
    errors = {row["strategy"]: row["rel_error_out"] for row in report["rows"]}
    assert errors["exact"] == 0 and 0.01 < errors["energy"] < 1
    report = json.loads(compare(q, k, v, "--json", "--strategy", "energy", *window, "--window", "40").stdout)
    assert report["rows"][0]["rel_error_out"] == 0  # all that a row sees is near


VARIANTS = [
    {},
    {"softcap": 1.5},
    {"causal": "top-left"},
    {"causal": "bottom-right"},
    {"scale": 0.9},
    {"mask": np.random.default_rng(3).random((26, 31)) < 0.7},
]


@pytest.mark.parametrize("options", VARIANTS, ids=["plain", "softcap", "top-left", "bottom-right", "scale", "mask"])
def test_errors_are_those_of_their_definitions(compare, problem, options):
    q, k, v = problem((2, 4, 26, 8), (2, 2, 31, 8), dv=5, dtype="f8")
    lists = ("--group-size", "2,3", "--block", "8,26", "--order-from", "own,previous")
    flags = [word for name in ("causal", "scale", "softcap") if name in options
             for word in (f"--{name}", options[name])]
    report = json.loads(compare(q, k, v, "--json", *lists, *flags, mask=options.get("mask")).stdout)
    assert len(report["rows"]) == 1 + 2 * 2 * 2 * 3
    for row in report["rows"][1:]:
        expected = errors(q, k, v, setting_of(row), **options)
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert expected["rel_error_out"] > 0 or row["order_from"] == "previous" and row["block"] == 26


def test_errors_in_fp32_are_near_those_of_their_definitions(compare, problem):
    q, k, v = problem((2, 50, 16))
    report = json.loads(compare(q, k, v, "--json", "--group-size", "2").stdout)
    wide = [oracle.widened(x) for x in (q, k, v)]
    for row in report["rows"][1:]:
        expected = errors(*wide, setting_of(row))
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-4)


def test_exact_comes_first_and_is_the_measure(compare, problem):
    report = json.loads(compare(*problem((2, 40, 16)), "--json").stdout)
    exact, *others = report["rows"]
    assert exact["strategy"] == "exact" and exact["ratio_to_exact"] == 1
    errors_of_exact = [exact[key] for key in exact if "error" in key] + [exact["total_variation"]]
    assert errors_of_exact == [0] * 4 and exact["row_cosine_min"] == 1
    assert all(row["strategy"] != "exact" for row in others)
    for row in report["rows"]:
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"] and row["runs"] == 1
        assert row["ratio_to_exact"] == pytest.approx(exact["ms"] / row["ms"], rel=1e-6)
    sizes = {"batch": 1, "heads": 2, "seq_q": 40, "seq_k": 40, "head_dim": 16, "dtype": "f32", "seed": 0}
    assert {key: report["meta"][key] for key in sizes} == sizes


def settings(report):
    """What tells the rows from each other."""
    keys = ("strategy", "group_size", "block", "estimator", "order_from")
    return [tuple(row[key] for key in keys) for row in report["rows"][1:]]


def test_lists_are_multiplied(compare, problem):
    lists = {"--group-size": "2,3,5", "--block": "8,16", "--estimator": "mean,sample", "--order-from": "own,previous"}
    words = [word for pair in lists.items() for word in pair]
    found = settings(json.loads(compare(*problem((40, 16)), "--json", "--strategy", "lsh,energy", *words).stdout))
    common = list(itertools.product((2, 3, 5), (8, 16)))
    orders = ("own", "previous")
    expected = [("lsh", *sizes, e, o) for sizes in common for e in ("mean", "sample") for o in orders]
    expected += [("energy", *sizes, None, o) for sizes in common for o in orders]
    assert len(found) == 36 and sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("dim, sizes", [(16, {2, 4}), (3, {2}), (1, {1})])
def test_default_settings(compare, problem, dim, sizes):
    found = settings(json.loads(compare(*problem((40, dim)), "--json").stdout))
    expected = {("lsh", size, 128, estimator, "own") for size in sizes for estimator in ("sample", "mean")}
    expected |= {("energy", size, 128, None, "own") for size in sizes}
    assert set(found) == expected and len(found) == len(expected)


def test_repeated_settings_are_taken_once(compare, problem):
    words = ("--strategy", "energy,exact,energy", "--group-size", "2,2")
    assert len(json.loads(compare(*problem((40, 16)), "--json", *words).stdout)["rows"]) == 2


def test_repeats(run, save, problem):
    words = [word for name, x in zip("qkv", problem((40, 16))) for word in (f"--{name}", save(name, x))]
    for repeats, flags in ((3, ("--repeats", "3")), (5, ())):
        report = json.loads(run("compare", *words, "--json", *flags).stdout)
        assert report["meta"]["repeats"] == repeats and {row["runs"] for row in report["rows"]} == {repeats}


def test_table_has_a_row_for_each_setting(compare, problem):
    result = compare(*problem((40, 16)))
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    rows = [line.split() for line in lines if line[:1].isdigit()]
    assert [row[0] for row in rows] == [str(i) for i in range(7)]
    assert [row[1] for row in rows] == ["exact"] + 4 * ["lsh"] + 2 * ["energy"]
    head = next(line for line in lines if "strategy" in line)
    for word in ("ms", "ratio", "O error", "min cosine", "TV of P", "|S| error", "signed S error"):
        assert word in head


def test_json_out_is_what_json_prints(compare, problem, out):
    result = compare(*problem((40, 16)), "--json", "--json-out", out / "r.json")
    assert (out / "r.json").read_text() == result.stdout
    table = compare(*problem((40, 16)), "--json-out", out / "r.json").stdout
    assert "strategy" in table and not table.startswith("{")
    assert len(json.loads((out / "r.json").read_text())["rows"]) == 7
    assert os.listdir(out) == ["r.json"]


@pytest.fixture
def own_temporary_folder(tmp_path):
    """The environment of a run whose temporary files come to lie in a folder of its own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder, os.environ | {"TMPDIR": str(folder)}


@needs_gnuplot
@pytest.mark.parametrize("options", [(), ("--causal", "top-left"), ("--plot-setting", "0"), ("--plot-head", "1")])
def test_plot_png(compare, problem, out, own_temporary_folder, options):
    folder, environment = own_temporary_folder
    (out / "p.png").write_bytes(b"old")
    compare(*problem((2, 60, 16)), "--plot", out / "p.png", *options, env=environment)
    content = (out / "p.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    assert 600 <= width <= 4000 and 500 <= height <= 4000 and len(content) > 10000
    assert os.listdir(out) == ["p.png"] and os.listdir(folder) == []


@needs_gnuplot
def test_plot_svg(compare, problem, out, own_temporary_folder):
    folder, environment = own_temporary_folder
    compare(*problem((2, 60, 16)), "--plot", out / "p.svg", "--plot-setting", "2", env=environment)
    root = xml.etree.ElementTree.parse(out / "p.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = " ".join(word.strip() for word in root.itertext() if word.strip())
    for words in ("exact", "ifference", "time", "error", "query", "key", "lsh", "energy", "G=2", "G=4"):
        assert words in text, text
    images = root.findall(".//{http://www.w3.org/2000/svg}image")
    assert len(images) >= 3  # P exact, P approximate, and their difference
    assert os.listdir(out) == ["p.svg"] and os.listdir(folder) == []


@needs_gnuplot
def test_plot_of_fully_masked_rows_and_of_equal_results(compare, problem, out):
    mask = np.ones((20, 20), bool)
    mask[:7] = False
    compare(*problem((20, 8)), "--plot", out / "p.png", mask=mask)
    compare(*problem((20, 1)), "--plot", out / "one.png")
    for name in ("p.png", "one.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_plot_without_gnuplot_fails_and_leaves_no_file(compare, problem, out, own_temporary_folder, tmp_path):
    folder, environment = own_temporary_folder
    (tmp_path / "empty").mkdir()
    words = ("--plot", out / "p.png", "--json-out", out / "r.json")
    result = compare(*problem((40, 16)), *words, code=1, env=environment | {"PATH": str(tmp_path / "empty")})
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and "gnuplot" in result.stderr
    assert os.listdir(out) == [] and os.listdir(folder) == []


def test_plot_with_a_gnuplot_that_fails_leaves_no_file(compare, problem, out, own_temporary_folder, tmp_path):
    folder, environment = own_temporary_folder
    place = tmp_path / "bin"
    place.mkdir()
    fake = place / "gnuplot"
    fake.write_text('#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\necho "line 1: no such terminal" >&2\nexit 3\n')
    fake.chmod(0o755)
    (out / "p.png").write_bytes(b"precious")
    words = ("--plot", out / "p.png", "--json-out", out / "r.json")
    result = compare(*problem((40, 16)), *words, code=1, env=environment | {"PATH": f"{place}:/bin:/usr/bin"})
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and "no such terminal" in result.stderr
    assert os.listdir(out) == ["p.png"] and (out / "p.png").read_bytes() == b"precious"
    assert os.listdir(folder) == []


@pytest.fixture
def ended_while_drawing(binary, save, problem, out, own_temporary_folder, tmp_path):
    """Ends a run with SIGTERM while a gnuplot draws that never finishes: it lives as long as the run."""
    folder, environment = own_temporary_folder
    place = tmp_path / "bin"
    place.mkdir()
    fake = place / "gnuplot"
    fake.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\ntouch {tmp_path}/drawing\n'
        "while kill -0 $PPID; do sleep 0.05; done\n"
    )
    fake.chmod(0o755)
    words = [word for name, x in zip("qkv", problem((40, 16))) for word in (f"--{name}", save(name, x))]
    words = [binary, "compare", *words, "--repeats", "1", "--plot", out / "p.png", "--json-out", out / "r.json"]
    environment |= {"PATH": f"{place}:/bin:/usr/bin"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        for _ in range(12000):
            if (tmp_path / "drawing").exists() or process.poll() is not None:
                break
            time.sleep(0.01)
        assert (tmp_path / "drawing").exists() and process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == -signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


def test_ended_while_drawing_leaves_no_output(ended_while_drawing, out):
    assert os.listdir(out) == []


def test_ended_while_drawing_leaves_no_temporary_folder(ended_while_drawing, own_temporary_folder):
    assert os.listdir(own_temporary_folder[0]) == []
