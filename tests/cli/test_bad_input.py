# SPDX-License-Identifier: Apache-2.0
"""Bad calls: exit status 2, one clear line on stderr, nothing on stdout, and no output file touched. Where results
cannot be written, exit status 3."""

import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path

import bad_calls
import numpy as np
import pytest

GOOD = {f"--{name}": bad_calls.draw(2, 10, 8) for name in "qkv"} | {"--out": "{out}/o.npy"}


def snapshot(folder):
    """Name and content of every file in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folders(tmp_path):
    """The folders of inputs, with things that are no good outputs, and of outputs."""
    inputs, outputs = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    outputs.mkdir()
    (inputs / "folder.npy").mkdir()
    (inputs / "full.npy").symlink_to("/dev/full")
    os.mkfifo(inputs / "pipe.npy")
    np.save(inputs / "good-q.npy", GOOD["--q"])
    return inputs, outputs


def arguments(changes, inputs, outputs):
    """The words of a call: the good one with changes."""
    words = []
    for option, value in (GOOD | changes).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, np.ndarray | bytes):
                path = inputs / (option[2:] + (".safetensors" if option == "--input" else ".npy"))
                if isinstance(each, bytes):
                    path.write_bytes(each)
                else:
                    np.save(path, each)
                each = path
            if each is not None:
                value = str(each).replace("{in}", str(inputs)).replace("{out}", str(outputs))
                words += [option, value] if option else [value]
    return words


def check_refusal(result, words, inputs, outputs, code=2):
    """The status, one line that has all the words, and no more."""
    assert result.code == code, result
    assert result.stdout == ""
    assert result.stderr.startswith("distr") and result.stderr.endswith("\n"), result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert len(result.stderr) < 1000
    assert all(character.isprintable() for character in result.stderr[:-1]), result.stderr
    for word in words:
        assert word.replace("{in}", str(inputs)).replace("{out}", str(outputs)) in result.stderr


@pytest.mark.parametrize("changes, words", [call[1:] for call in bad_calls.CALLS], ids=[c[0] for c in bad_calls.CALLS])
@pytest.mark.parametrize("existing", [pytest.param(False, marks=pytest.mark.values), True], ids=["", "existing"])
def test_bad_call_is_refused(run, folders, changes, words, existing):
    inputs, outputs = folders
    if existing:
        for name in ("o.npy", "x.npy"):
            (outputs / name).write_bytes(b"precious")
    before = snapshot(outputs)
    result = run("attend", *arguments(changes, inputs, outputs))
    check_refusal(result, words, inputs, outputs)
    assert re.search("allowed|need|must|it has|--help|no CUDA|too long", result.stderr), result.stderr
    assert snapshot(outputs) == before


def test_good_call_is_not_refused(run, folders):
    result = run("attend", *arguments({}, *folders))
    assert result.code == 0, result.stderr
    assert list(snapshot(folders[1])) == ["o.npy"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("existing", [False, True], ids=["", "existing"])
@pytest.mark.parametrize("second", [[], ["--lse", "{out}/l.npy"]], ids=["out", "lse"])
def test_full_disk(run, folders, small_disk, existing, second):
    """O fits beside neither: with --lse it is written first, and must go again."""
    rows = 1000 if not second else 15000
    changes = {f"--{name}": bad_calls.draw(1, rows if name == "q" else 4, 32 if not second else 1) for name in "qkv"}
    words = arguments({**changes, "--strategy": "exact"}, folders[0], small_disk)
    words += [word.replace("{out}", str(small_disk)) for word in second]
    if existing:
        (small_disk / "o.npy").write_bytes(b"precious")
    before = snapshot(small_disk)
    result = run("attend", *words)
    check_refusal(result, ["l.npy" if second else "o.npy", "No space left on device"], folders[0], small_disk, 3)
    assert snapshot(small_disk) == before


@pytest.mark.parametrize("option", ["--out", "--lse", "--order-out"])
def test_limit_on_the_size_of_files(run, folders, option):
    inputs, outputs = folders
    words = arguments({option: "{out}/x.npy"}, inputs, outputs)
    result = run("attend", *words, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (160, 160)))
    check_refusal(result, ["o.npy" if option != "--out" else "x.npy", "File too large"], inputs, outputs, 3)
    assert snapshot(outputs) == {}


@pytest.mark.parametrize("folder", ["/proc", "/sys"])
def test_file_system_that_takes_no_files(run, folders, folder):
    if not os.path.ismount(folder):
        pytest.skip(f"{folder} is no file system of its own here")
    result = run("attend", *arguments({"--out": f"{folder}/o.npy"}, *folders))
    check_refusal(result, [f"{folder}/o.npy", "writable folder"], *folders)


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_unwritable_folder_or_file(run, binary, folders, existing):
    """As another user where this one is root, whom permissions do not bind."""
    nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    place = Path(tempfile.mkdtemp())
    inputs, outputs = place / "in", place / "out"
    try:
        shutil.copytree(folders[0], inputs, ignore=lambda *_: ["pipe.npy", "full.npy"])
        outputs.mkdir()
        words = arguments({}, inputs, outputs)
        if existing:
            (outputs / "o.npy").write_bytes(b"precious")
            (outputs / "o.npy").chmod(0o444)
        for path, mode in ((place, 0o755), (inputs, 0o755), (outputs, 0o777 if existing else 0o555)):
            path.chmod(mode)
        try:
            subprocess.run([binary, "--version"], check=True, stdout=subprocess.DEVNULL, **nobody)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("another user cannot run the command here")
        before = snapshot(outputs)
        result = run("attend", *words, **nobody)
        check_refusal(result, ["o.npy", "Permission denied", "writable"], inputs, outputs)
        assert snapshot(outputs) == before
    finally:
        outputs.chmod(0o755)
        shutil.rmtree(place)


def test_standard_output_that_is_full(folders, binary):
    """The files are whole by then: only the report is lost, and the status says so."""
    with open("/dev/full", "w") as full:
        words = [binary, "attend", *arguments({"--strategy": "exact"}, *folders)]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 3
    assert done.stderr.decode().count("\n") == 1 and b"standard output" in done.stderr


LONG = "a" * 100_000


@pytest.mark.parametrize(
    "words",
    [
        ("attend", "--q", LONG, "--k", "k.npy", "--v", "v.npy", "--out", "o.npy"),
        ("attend", "--strategy", LONG),
        ("attend", "--out", LONG + ".npy"),
        ("attend", "--out", "o.npy", "--" + LONG),
        ("bench", "--seq", LONG),
        ("bench", "--scale=" + LONG),
        ("info", "--head-dim", "1" * 100_000),
        (LONG,),
    ],
    ids=lambda words: " ".join(words)[:16],
)
def test_a_long_value_is_not_echoed_whole(run, words):
    check_refusal(run(*words), ["bytes ...]"], "", "")


def test_the_names_of_a_file_of_many_tensors_are_not_echoed_whole(run, folders):
    tensor = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"layers.{n}.weight": tensor for n in range(20_000)}).encode()
    path = folders[0] / "many.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    result = run("compare", "--input", path, timeout=60)
    check_refusal(result, ["has no tensor 'q'; it has: 'layers.0.weight', ", "and 19992 more"], *folders)


@pytest.mark.parametrize("option", ["--json-out", "--plot"])
@pytest.mark.parametrize("name", ["--q", "--mask"])
def test_compare_replaces_no_input(run, folders, option, name):
    inputs, outputs = folders
    if option == "--plot" and shutil.which("gnuplot") is None:
        pytest.skip("gnuplot is not installed")
    call = arguments({"--out": None, "--mask": np.ones((10, 10), bool)}, inputs, outputs)
    path = outputs / "link.svg"
    path.symlink_to(inputs / f"{name[2:]}.npy")
    before = snapshot(outputs)
    result = run("compare", *call, option, path)
    check_refusal(result, ["link.svg: is the same file as the input ", "path of its own"], *folders)
    assert snapshot(outputs) == before


COMPARE = [
    (["--strategy", "auto"], ["'auto'", "allowed: exact, lsh, energy"]),
    (["--strategy", "lsh,nothing"], ["'nothing'", "allowed"]),
    (["--strategy", "exact", "--group-size", "1,2"], ["--group-size: '2'", "--strategy exact", "allowed: 1"]),
    (["--strategy", "lsh,,energy"], ["''", "allowed"]),
    (["--group-size", "2,0"], ["--group-size", "'0'", "1 to"]),
    (["--group-size", "2,9"], ["group_size", "9", "1 to 8"]),
    (["--block", "16,x"], ["--block", "'x'", "1 to"]),
    (["--estimator", "median"], ["'median'", "allowed: sample, mean"]),
    (["--order-from", "next"], ["'next'", "allowed: auto, own, previous"]),
    (["--repeats", "0"], ["--repeats", "'0'", "1 to"]),
    (["--plot", "{out}/p.pdf"], ["'.pdf'", "allowed: .png, .svg"]),
    (["--plot", "{out}/p"], ["{out}/p", "allowed: .png, .svg"]),
    (["--plot", "{out}/none/p.png"], ["none/p.png", "existing folder"]),
    (["--plot", "{out}/p.png", "--plot-head", "2"], ["--plot-head", "2", "0 to 1"]),
    (["--plot", "{out}/p.png", "--plot-batch", "1"], ["--plot-batch", "1", "0 to 0"]),
    (["--plot", "{out}/p.png", "--plot-setting", "99"], ["--plot-setting", "99", "0 to 6"]),
    (["--json-out", "{out}/none/r.json"], ["none/r.json", "existing folder"]),
    (["--json-out", "/dev/full"], ["/dev/full", "regular file"]),
    (["--json-out", "{out}/p.svg", "--plot", "{out}/p.svg"], ["p.svg", "same file", "own path"]),
    (["--q", "{in}/none.npy"], ["--q"]),
    (["--device", "cuda"], ["--device: cuda cannot be used: ", "allowed: auto, cpu"]),
]


@pytest.mark.parametrize("words, expected", COMPARE, ids=[" ".join(case[0]) for case in COMPARE])
def test_bad_compare_is_refused(run, folders, words, expected):
    inputs, outputs = folders
    if "--plot" in words and shutil.which("gnuplot") is None and not any("allowed: .png" in word for word in expected):
        pytest.skip("gnuplot is not installed")
    call = arguments({"--out": None}, inputs, outputs)
    call += [word.replace("{in}", str(inputs)).replace("{out}", str(outputs)) for word in words]
    check_refusal(run("compare", *call), expected, inputs, outputs)
    assert snapshot(outputs) == {}


@pytest.mark.parametrize("empty", [("q",), ("k", "v")], ids=str)
def test_compare_of_nothing_is_refused(run, folders, empty):
    changes = {"--out": None} | {f"--{name}": bad_calls.draw(2, 0, 8) for name in empty}
    result = run("compare", *arguments(changes, *folders))
    check_refusal(result, ["N" + empty[0] + " 0", "above 0"], *folders)


INFO = [
    (["--head-dim", "0"], ["--head-dim", "'0'", "1 to"]),
    (["--heads", "3", "--kv-heads", "2"], ["3", "multiple", "2"]),
    (["--seq-q", "-1"], ["--seq-q", "'-1'", "0 to"]),
    (["--seq-q", "9223372036854775807"], ["overflows", "allowed"]),
    (["--dtype", "f8"], ["'f8'", "allowed: f16, bf16, f32, f64"]),
    (["--mask", "bool", "--causal", "top-left"], ["mask", "causal", "allowed"]),
    (["--window-size", "8,8", "--causal", "top-left", "--key-offset", "3"], ["window_offset is 3", "allowed: none"]),
    (["--group-size", "65"], ["group_size", "65", "1 to 64"]),
]


@pytest.mark.parametrize("words, expected", INFO, ids=[" ".join(case[0]) for case in INFO])
def test_bad_info_is_refused(run, folders, words, expected):
    check_refusal(run("info", *words), expected, *folders)
