# SPDX-License-Identifier: Apache-2.0
"""`distr tune` as far as it needs no GPU; bench/gpu/cli_check has the rest."""

import json

import pytest

BAD = [
    (["--head-dim", "0"], ["--head-dim", "'0'", "1 to"]),
    (["--head-dim", "64,x"], ["--head-dim", "'x'", "1 to"]),
    (["--group-size", "0"], ["--group-size", "'0'", "1 to"]),
    (["--block", ""], ["--block", "''", "1 to"]),
    (["--seq", "-1"], ["--seq", "'-1'", "1 to"]),
    (["--strategy", "exact"], ["--strategy", "'exact'", "allowed: lsh, energy"]),
    (["--causal", "left"], ["--causal", "'left'", "allowed: none, top-left, bottom-right"]),
    (["--dtype", "f32"], ["--dtype", "'f32'", "allowed: f16, bf16"]),
    (["--heads", "0"], ["--heads", "'0'", "1 to"]),
    (["--repeats", "0"], ["--repeats", "'0'", "1 to"]),
    (["--json-out", ""], ["--json-out", "''", "allowed"]),
]


@pytest.mark.parametrize("words, expected", BAD, ids=[" ".join(case[0]) for case in BAD])
def test_bad_usage(run, tmp_path, words, expected):
    result = run("tune", *words, cwd=tmp_path)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("distr tune: ") and result.stderr.count("\n") == 1
    for word in expected:
        assert word in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_needed(run, tmp_path):
    reason = json.loads(run("info", "--json").stdout)["cuda_unusable"]
    if reason is None:
        pytest.skip("this machine has a CUDA device")
    result = run("tune", "--json-out", "tune.json", cwd=tmp_path)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr == f"distr tune: a CUDA device is needed: {reason}\n"
    assert list(tmp_path.iterdir()) == []
