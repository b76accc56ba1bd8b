# SPDX-License-Identifier: Apache-2.0
"""Help, version, and calls without a command or with a wrong one."""

import re

import pytest
from conftest import ROOT
from strategies import STRATEGIES

INPUTS = ["--q", "--k", "--v", "--mask", "--input"]
GROUPING = ["--strategy", "--group-size", "--block", "--estimator", "--order-from",
            "--window", "--sinks", "--key-offset", "--skip", "--finish"]
RUN = ["--causal", "--window-size", "--softcap", "--scale", "--seed", "--threads", "--device", "--dtype"]
ATTEND = [*INPUTS, *GROUPING, *RUN, "--out", "--lse", "--order-out", "--halves-out", "--order", "--json",
          "--devices", "--chunk-heads"]
COMPARE = [*INPUTS, *GROUPING, *RUN, "--plot", "--json", "--json-out"]
INFO = ["--batch", "--heads", "--kv-heads", "--seq-q", "--seq-k", "--head-dim", "--head-dim-v", "--dtype", "--json"]
BENCH = ["--seq", "--head-dim", "--dtypes", "--causal", "--window-size", "--softcap", "--op", "--heads", *GROUPING,
         "--threads", "--json-out", "--nondeterministic", "--stream", "--devices", "--chunk-heads"]
COMMANDS = {
    "attend": ATTEND, "bench": BENCH, "blocks": ["--gpu", "--shared-memory", "--head-dim", "--json"],
    "compare": COMPARE, "errors": ["--trials", "--seed", "--plot", "--json", "--json-out"],
    "info": [*INFO, *GROUPING, "--causal", "--window-size", "--softcap", "--device", "--mask"],
    "tune": ["--head-dim", "--group-size", "--block", "--seq", "--strategy", "--dtype", "--json", "--json-out"],
}
WORDS = {
    "|".join(STRATEGIES): ["attend", "info"],
    "sample|mean": ["attend", "compare", "info"],
    "own|previous": ["attend", "compare", "info"],
    "none|top-left|bottom-right": ["attend", "compare", "info"],
    "auto|cpu|cuda": ["attend", "compare", "info"],
    "min(2, d); auto: 1": ["attend", "info"],
    "=128": ["attend", "compare", "info"],
    "=mean": ["attend", "info"],
    "|previous=auto": ["attend", "info"],
    "|previous,...=auto": ["compare"],
    "FILE.png|svg": ["compare"],
}


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_the_command(run, flag):
    result = run(flag)
    assert (result.code, result.stderr) == (0, "")
    for word in (*COMMANDS, "--help", "--version", "Usage"):
        assert word in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_a_subcommand(run, command, flag):
    result = run(command, flag)
    assert (result.code, result.stderr) == (0, "")
    documented = set(re.findall(r"^ +(?:-\w,)?(--[\w-]+)", result.stdout, re.M))
    assert set(COMMANDS[command]) <= documented
    assert all(len(line) <= 120 for line in result.stdout.splitlines())
    for word, commands in WORDS.items():
        if command in commands:
            assert word in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_wins_over_the_rest(run, command):
    assert run(command, "--help", "--block", "64").code == 0


def test_version(run):
    result = run("--version")
    assert (result.code, result.stderr) == (0, "")
    assert re.fullmatch(r"distr \d+\.\d+\.\d+\n", result.stdout)
    header = (ROOT / "include" / "distr" / "version.h").read_text()
    parts = re.findall(r"#define DISTR_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)
    assert len(parts) == 3 and result.stdout.split()[1] == ".".join(parts)


USAGE = [
    ([], ["subcommand", "--help"]),
    (["attention"], ["'attention'", "attend, bench, blocks, compare, errors, info, tune"]),
    ([""], ["''", "attend, bench, blocks, compare, errors, info, tune"]),
    (["Attend"], ["'Attend'", "attend, bench, blocks, compare, errors, info, tune"]),
    (["--nonsense"], ["--nonsense"]),
    (["--nonsense", "info"], ["--nonsense"]),
    (["attend", "--out", "o.npy", "--nonsense"], ["--nonsense", "--help"]),
    (["attend"], ["--out", "required", "--help"]),
    (["compare"], ["--q", "missing", "needed"]),
    (["compare", "--out", "o.npy"], ["--out", "--help"]),
    (["info", "--nonsense"], ["--nonsense", "--help"]),
    (["info", "stray"], ["stray", "--help"]),
    (["info", "--heads"], ["--heads", "missing"]),
    (["info", "attend"], ["attend"]),
    (["info", "a\nb\x1b[31m\x07"], ["a\\x0ab\\x1b[31m\\x07"]),
]


@pytest.mark.parametrize("words, expected", USAGE, ids=[" ".join(case[0]) or "nothing" for case in USAGE])
def test_bad_usage(run, tmp_path, words, expected):
    result = run(*words, cwd=tmp_path)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("distr") and result.stderr.count("\n") == 1
    assert result.stderr[:-1].isprintable()
    for word in expected:
        assert word in result.stderr
    assert list(tmp_path.iterdir()) == []
