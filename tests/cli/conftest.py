# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command share: where it is, how to run it, and problems to give it."""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("DISTR_BINARY", ROOT / "build" / "distr")).absolute()


def pytest_configure(config):
    config.addinivalue_line("markers", "values: a run for its values or files, of code that other tests run too")


@dataclass
class Result:
    """What a run of the command left behind."""

    code: int
    stdout: str
    stderr: str
    files: dict = field(default_factory=dict)  # option -> the array it wrote


def run_binary(*arguments, timeout=120, **options):
    """Runs the command and waits for it."""
    words = [str(BINARY), *map(str, arguments)]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, **options
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture(scope="session", autouse=True)
def _binary_exists():
    if not os.access(BINARY, os.X_OK):
        pytest.exit(f"no command at {BINARY}; build it, or set DISTR_BINARY", returncode=2)


@pytest.fixture(scope="session")
def binary():
    """The path of the command."""
    return BINARY


@pytest.fixture
def run():
    """run(*arguments, timeout=120, **options of subprocess.run) -> Result."""
    return run_binary


@pytest.fixture
def save(tmp_path):
    """save(name, array) -> the path of a new .npy file."""

    def save_array(name, array):
        path = tmp_path / f"{name}.npy"
        np.save(path, array)
        return path

    return save_array


@pytest.fixture
def attend(tmp_path, save):
    """attend(q, k, v, *options, mask=, outputs=) -> Result with the arrays of the outputs; the run must succeed."""

    def attend_arrays(q, k, v, *options, mask=None, outputs=("--lse",)):
        words = [word for name, x in (("q", q), ("k", k), ("v", v)) for word in (f"--{name}", save(name, x))]
        if mask is not None:
            words += ["--mask", save("mask", mask)]
        paths = {name: tmp_path / f"out{name}.npy" for name in ("--out", *outputs)}
        words += [word for pair in paths.items() for word in pair]
        result = run_binary("attend", *words, *options)
        assert result.code == 0, result.stderr
        result.files = {name: np.load(path) for name, path in paths.items()}
        return result

    return attend_arrays


@pytest.fixture
def problem():
    """problem(q_shape, k_shape, dv=None, dtype="f4") -> random q, k and v."""

    def draw(q_shape, k_shape=None, dv=None, dtype="f4", seed=1):
        generator = np.random.default_rng(seed)
        k_shape = q_shape if k_shape is None else k_shape
        v_shape = (*k_shape[:-1], k_shape[-1] if dv is None else dv)
        return tuple(generator.standard_normal(shape).astype(dtype) for shape in (q_shape, k_shape, v_shape))

    return draw
