# SPDX-License-Identifier: Apache-2.0
"""Runs that end before their time leave no output file; progress is for terminals."""

import os
import pty
import re
import resource
import signal
import subprocess
import time

import numpy as np
import pytest

SECONDS = 2.5  # that a long run should take
ENDLESS = 30  # times as long: a run that is ended before it ends, however slow the machine is just now
PATIENCE = 120  # seconds that a process may take to go


def size_for(binary, folder, seconds):
    """Query heads, and rows of each, that keep one thread of the reference busy for at least so long."""
    heads, rows = 8, 400  # small heads: progress is told after each
    q = np.random.default_rng(1).standard_normal((heads, rows, 16))
    np.save(folder / "q.npy", q)
    np.save(folder / "k.npy", q[:1])
    words = [word for name in "qkv" for word in (f"--{name}", folder / ("q.npy" if name == "q" else "k.npy"))]
    words = [binary, "attend", *words, "--out", folder / "o.npy", "--threads", "1", "--strategy", "exact"]
    busy = []  # seconds of a processor: on a loaded machine a run takes longer, and may be quick the next time
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        busy.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
    return int(heads * seconds / min(busy)) + 1, rows


@pytest.fixture(scope="module")
def folder(binary, tmp_path_factory):
    """Inputs of a run of some seconds (q.npy, k.npy), and keys for one of minutes (many.npy)."""
    folder = tmp_path_factory.mktemp("long")
    heads, rows = size_for(binary, folder, SECONDS)
    np.save(folder / "q.npy", np.random.default_rng(2).standard_normal((heads, rows, 16)))
    np.save(folder / "many.npy", np.tile(np.load(folder / "k.npy"), (1, ENDLESS, 1)))
    return folder


def words_of_run(binary, folder, keys):
    """The words of a run, but for its outputs."""
    words = ["--q", folder / "q.npy", "--k", folder / keys, "--v", folder / keys]
    return [binary, "attend", *words, "--threads", "1", "--strategy", "exact"]


@pytest.fixture
def long_run(binary, folder):
    return words_of_run(binary, folder, "k.npy")


@pytest.fixture
def endless_run(binary, folder):
    return words_of_run(binary, folder, "many.npy")


def snapshot(folder):
    """Name and content of every file in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def has_unnamed_files(folder):
    """Whether the file system can hold files without a name (O_TMPFILE)."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda x: x.name)
def test_ended_run_leaves_the_folder_as_it_was(endless_run, tmp_path, number, existing):
    ended_run_leaves_the_folder(endless_run, tmp_path, number, existing)


def ended_run_leaves_the_folder(endless_run, tmp_path, number, existing):
    if number == signal.SIGKILL and not has_unnamed_files(tmp_path):
        pytest.skip("the file system has no unnamed files, and nothing can clean up after SIGKILL")
    if existing:
        for name in ("o.npy", "l.npy"):
            (tmp_path / name).write_bytes(b"precious")
    before = snapshot(tmp_path)
    words = [*endless_run, "--out", tmp_path / "o.npy", "--lse", tmp_path / "l.npy"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        time.sleep(0.4)
        assert process.poll() is None, "the run was too short"
        process.send_signal(number)
        stdout, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -number
    assert stdout == b""
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda x: x.name)
def test_file_of_a_run_ended_at_any_time_is_whole_or_absent(binary, tmp_path, number):
    """Of short runs that write much: the signal comes while they read, compute, write or have just finished."""
    inputs, outputs = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    outputs.mkdir()
    rows, dim = 200, 512
    np.save(inputs / "q.npy", np.random.default_rng(1).standard_normal((20, rows, dim)).astype("f2"))
    np.save(inputs / "k.npy", np.ones((20, 1, dim), "f2"))
    words = [word for name in "qkv" for word in (f"--{name}", inputs / ("q.npy" if name == "q" else "k.npy"))]
    words = [binary, "attend", *words, "--out", outputs / "o.npy", "--strategy", "exact"]
    start = time.monotonic()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    duration = time.monotonic() - start
    seen = set()
    for step in range(16):
        (outputs / "o.npy").unlink(missing_ok=True)
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(duration * step / 12)
        process.send_signal(number)
        seen.add(process.wait(timeout=PATIENCE))
        names = [path.name for path in outputs.iterdir()]
        assert names in ([], ["o.npy"])
        if names:
            assert np.all(np.load(outputs / "o.npy") == 1)
        else:
            assert process.returncode == -number
    assert -number in seen


def run_in_terminal(words):
    """Runs with stderr on a pseudo-terminal, and returns what appeared there."""
    master, slave = pty.openpty()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=slave, stdin=subprocess.DEVNULL)
    os.close(slave)
    shown = b""
    try:
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
        os.close(master)
    return process.returncode, shown.decode()


def on_screen(text):
    """What a terminal shows in the end, of text with line breaks, carriage returns and erasures."""
    lines = [""]
    for part in re.split(r"(\r\n|\r|\x1b\[K)", text):
        if part == "\r\n":
            lines.append("")
        elif part == "\x1b[K":
            lines[-1] = ""
        elif part != "\r":
            lines[-1] += part
    return lines


@pytest.mark.timeout(5 * PATIENCE)
def test_progress_on_a_terminal_and_not_on_a_pipe(long_run, tmp_path):
    piped = subprocess.Popen(
        [*long_run, "--out", tmp_path / "piped.npy"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    code, shown = run_in_terminal([*long_run, "--out", tmp_path / "o.npy"])
    _, errors = piped.communicate(timeout=PATIENCE)
    assert code == 0 and piped.returncode == 0
    assert errors == b""
    shares = [int(share) for share in re.findall(r"(\d+) %", shown)]
    assert shares and shares == sorted(shares) and 0 < shares[0] < 100 and shares[-1] <= 100
    assert "attention" in shown
    assert "\n" not in shown
    assert shown.endswith("\r\x1b[K")
    assert on_screen(shown) == [""]
    assert (tmp_path / "o.npy").read_bytes() == (tmp_path / "piped.npy").read_bytes()


def test_short_run_shows_no_progress(binary, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((4, 4), "f4"))
    words = [word for name in "qkv" for word in (f"--{name}", tmp_path / "x.npy")]
    code, shown = run_in_terminal([binary, "attend", *words, "--out", tmp_path / "o.npy", "--strategy", "exact"])
    assert (code, shown) == (0, "")


@pytest.mark.timeout(2 * PATIENCE)
def test_interrupt_while_progress_is_shown(endless_run, tmp_path):
    master, slave = pty.openpty()
    process = subprocess.Popen([*endless_run, "--out", tmp_path / "o.npy"], stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    try:
        assert b"%" in os.read(master, 4096)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
        os.close(master)
    assert process.returncode == -signal.SIGINT
    assert snapshot(tmp_path) == {}
