# SPDX-License-Identifier: Apache-2.0
"""`distr info`: the build, the machine, and every kernel with the reason why it would not serve."""

import json
import os
import re

import pytest

KERNELS = {
    "cpu/grouping": "grouping",
    "cpu/forward_bf16": "forward",
    "cpu/forward": "forward",
    "reference/grouping": "grouping",
    "reference/forward": "forward",
    "reference/backward": "backward",
}


@pytest.fixture
def info(run):
    """info(*options) -> the JSON object."""

    def run_info(*options):
        result = run("info", "--json", *options)
        assert (result.code, result.stderr) == (0, "")
        return json.loads(result.stdout)

    return run_info


def verdicts(report):
    """name -> kernel."""
    return {kernel["name"]: kernel for kernel in report["kernels"]}


def test_every_kernel_is_listed(info):
    found = verdicts(info())
    assert KERNELS.items() <= {name: kernel["operation"] for name, kernel in found.items()}.items()
    for kernel in found.values():
        assert kernel["device"] in ("cpu", "cuda")
        assert kernel["serves"] == (kernel["reason"] is None)


def test_version_build_and_machine(info, run):
    report = info()
    assert report["version"] == run("--version").stdout.split()[-1]
    assert report["build"]["type"] and report["build"]["compiler"]
    assert report["instruction_set"]
    assert report["threads"] == len(os.sched_getaffinity(0))
    assert set(report["devices"]) == {"cpu", "cuda"} and len(report["devices"]["cpu"]) == 1


def test_threads_are_those_that_the_process_may_use(info, run):
    one = min(os.sched_getaffinity(0))
    result = run("info", "--json", preexec_fn=lambda: os.sched_setaffinity(0, {one}))
    assert json.loads(result.stdout)["threads"] == 1


def test_fast_kernels_serve_f32_and_say_why_not_f64(info):
    found = info("--dtype", "f32")
    assert found["would_run"] | {"backward": None} == {
        "grouping": "cpu/grouping",
        "forward": "cpu/forward",
        "backward": None,
    }
    found = info("--dtype", "f64")
    assert found["would_run"] == {
        "grouping": "reference/grouping",
        "forward": "reference/forward",
        "backward": "reference/backward",
    }
    for name in ("cpu/forward", "cpu/grouping"):
        assert "f64" in verdicts(found)[name]["reason"] and not verdicts(found)[name]["serves"]
    assert verdicts(found)["reference/forward"]["serves"]


def test_text_says_the_same(run):
    result = run("info", "--dtype", "f64")
    assert (result.code, result.stderr) == (0, "")
    for name in KERNELS:
        assert name in result.stdout
    line = next(line for line in result.stdout.splitlines() if "cpu/forward " in line)
    assert re.search(r"no: .*f64", line)
    assert "would run" in next(line for line in result.stdout.splitlines() if "reference/forward" in line)
    for word in ("version", "build", "instruction set", "threads", "CUDA devices"):
        assert word in result.stdout


def test_problem_is_the_one_given(info):
    options = {
        "--batch": 2,
        "--heads": 6,
        "--kv-heads": 3,
        "--seq-q": 100,
        "--seq-k": 200,
        "--head-dim": 32,
        "--head-dim-v": 16,
    }
    report = info(*[word for pair in options.items() for word in pair], "--dtype", "bf16", "--causal", "bottom-right")
    expected = {option[2:].replace("-", "_"): value for option, value in options.items()}
    expected |= {"dtype": "bf16", "causal_corner": "bottom-right", "mask": "none"}
    assert {key: report["problem"][key] for key in expected} == expected
    sliding = info("--window-size", "255,-1", "--group-size", "4")
    assert sliding["problem"]["window_size"] == [255, -1] and report["problem"]["window_size"] is None
    assert sliding["choice"] == "exact, as there is a sliding window, with which no approximation was measured"
    capped = info("--softcap", "50", "--group-size", "2", "--seq-q", "4096")
    assert capped["problem"]["softcap"] == 50 and report["problem"]["softcap"] is None
    assert capped["choice"] == "exact, as no approximation has been measured with capped scores"
    masked = info("--mask", "float", "--strategy", "lsh", "--group-size", "4", "--block", "64")
    assert masked["problem"]["mask"] == "float"
    grouping = {"strategy": "lsh", "group_size": 4, "block": 64, "estimator": "mean", "order_from": "own"}
    assert {key: masked["grouping"][key] for key in grouping} == grouping


def test_auto_says_what_it_chose_and_why(info):
    default = info("--seq-q", "100000")
    short, long = (info("--seq-q", n, "--group-size", "2") for n in ("16", "100000"))
    assert default["grouping"]["strategy"] == "exact" and "the group size is 1" in default["choice"]
    assert short["grouping"]["strategy"] == "exact" and "16" in short["choice"]
    assert long["grouping"]["strategy"] in ("lsh", "energy") and long["grouping"]["strategy"] in long["choice"]


def test_agrees_with_what_attend_runs(info, attend, problem):
    for dtype, name in (("f4", "f32"), ("f8", "f64")):
        q, k, v = problem((2, 30, 16), dtype=dtype)
        report = info("--heads", "2", "--seq-q", "30", "--head-dim", "16", "--dtype", name)
        run = json.loads(attend(q, k, v, "--json").stdout)
        assert run["kernel"] == report["would_run"]["forward"]
        assert run["choice"] == report["choice"]


def test_cuda_is_explained_where_there_is_none(run, info):
    if info()["devices"]["cuda"]:
        pytest.skip("this machine has a CUDA device")
    result = run("info", "--device", "cuda", "--json")
    assert result.code == 0
    report = json.loads(result.stdout)
    assert report["would_run"]["forward"] is None and report["cuda_unusable"]
    assert f"CUDA devices     none; {report['cuda_unusable']}\n" in run("info").stdout
