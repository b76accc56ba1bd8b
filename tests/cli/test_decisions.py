# SPDX-License-Identifier: Apache-2.0
"""A call of the command is validated, resolved and its kernel chosen once."""

import os

import numpy as np
import pytest

COUNTER = os.environ.get("DISTR_DECISIONS")  # tests/cli/decisions.cpp


@pytest.mark.skipif(COUNTER is None, reason="the library is linked into the command, which has no counts to read")
@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ([], 1),
        (["--strategy", "exact"], 1),
        (["--group-size", 2], 1),  # auto, which comes to exact attention here
        (["--strategy", "lsh", "--group-size", 2], 2),  # an order has a kernel too
        (["--strategy", "energy", "--group-size", 2, "--causal", "bottom-right"], 2),
    ],
    ids=["default", "exact", "auto", "lsh", "energy"],
)
def test_attend_decides_once(run, save, tmp_path, problem, options, kernels):
    words = [word for name, x in zip("qkv", problem((1, 2, 200, 64))) for word in (f"--{name}", save(name, x))]
    result = run("attend", *words, "--out", tmp_path / "o.npy", *options, env={**os.environ, "LD_PRELOAD": COUNTER})
    assert result.code == 0, result.stderr
    assert np.load(tmp_path / "o.npy").shape == (1, 2, 200, 64)
    assert result.stderr.splitlines()[-1] == f"1 1 {kernels}"  # auto says before what it came to
