# SPDX-License-Identifier: Apache-2.0
"""`--devices` and `--chunk-heads`: tensors that go through a device in chunks of heads, here through the CPU."""

import json
import signal

import numpy as np
import pytest
from test_interrupt import endless_run, ended_run_leaves_the_folder, folder  # noqa: F401; fixtures

SETTINGS = [
    ("--strategy", "exact"),
    ("--strategy", "lsh", "--group-size", "2", "--block", "16"),
    ("--strategy", "energy", "--group-size", "2", "--causal", "top-left", "--block", "16"),
    ("--strategy", "energy", "--group-size", "2", "--window", "10", "--skip", "0.3"),
]


@pytest.fixture
def tensors(save):
    """The options of Q with 2 x 6 heads, and K and V with half as many."""
    random = np.random.default_rng(3)
    shapes = {"q": (2, 6, 300, 16), "k": (2, 3, 300, 16), "v": (2, 3, 300, 16)}
    return [word for name, shape in shapes.items()
            for word in (f"--{name}", save(name, random.standard_normal(shape).astype("f4")))]  # fmt: skip


@pytest.mark.parametrize("heads", ["2", "4", "6", "12"])
@pytest.mark.parametrize("setting", SETTINGS, ids=" ".join)
def test_chunks_do_not_change_the_answer(run, tensors, tmp_path, setting, heads):
    flags = ["--out", "--lse", *(["--halves-out"] if "--skip" in setting else [])]
    written = []
    for words in ([], ["--chunk-heads", heads]):
        paths = [tmp_path / f"{len(words)}{flag}.npy" for flag in flags]
        outputs = [word for pair in zip(flags, paths) for word in pair]
        result = run("attend", *tensors, *setting, *outputs, *words, "--json")
        assert result.code == 0, result.stderr
        written.append([path.read_bytes() for path in paths])
    assert written[0] == written[1]
    stream = json.loads(result.stdout)["stream"]
    assert stream["chunks"] == {"2": 6, "4": 4, "6": 2, "12": 1}[heads]
    assert stream["devices"] == "cpu" and stream["device_bytes"] > 0


def test_an_order_goes_with_its_heads(run, tensors, save, tmp_path):
    random = np.random.default_rng(4)
    order = random.permuted(np.tile(np.arange(16, dtype="i4"), (2, 6, 3, 1)), axis=3)
    words = ["--strategy", "given", "--group-size", "2", "--order", save("order", order)]
    for name, more in (("o", []), ("chunks", ["--chunk-heads", "2"])):
        result = run("attend", *tensors, *words, *more, "--out", tmp_path / f"{name}.npy")
        assert result.code == 0, result.stderr
    assert (tmp_path / "o.npy").read_bytes() == (tmp_path / "chunks.npy").read_bytes()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--chunk-heads", "3"], ["chunk_heads is 3; allowed: 0, multiples of 2"]),
        (["--chunk-heads", "0"], ["--chunk-heads", "allowed"]),
        (["--chunk-heads", "2", "--order-out", "order.npy"], ["--order-out", "not kept"]),
        (["--chunk-heads", "2", "--strategy", "given"], ["--strategy: 'given' computes no order"]),
        (["--devices", "0", "--device", "cpu"], ["--devices", "--device is cpu"]),
        (["--devices", "0,x"], ["--devices", "'x'"]),
        (["--devices", "-1"], ["--devices", "-1"]),
    ],
)
def test_what_cannot_be_streamed_is_refused(run, tensors, tmp_path, words, expected):
    result = run("attend", *tensors, "--out", tmp_path / "o.npy", *words, cwd=tmp_path)
    assert result.code == 2
    assert all(word in result.stderr for word in expected), result.stderr
    assert not (tmp_path / "o.npy").exists()


def test_a_mask_is_refused(run, tensors, save, tmp_path):
    mask = save("mask", np.ones((300, 300), dtype=bool))
    result = run("attend", *tensors, "--mask", mask, "--out", tmp_path / "o.npy", "--chunk-heads", "2")
    assert result.code == 2 and "there is a mask, which is not streamed" in result.stderr


def test_a_sliding_window_is_refused(run, tensors, tmp_path):
    words = ("--strategy", "exact", "--window-size", "3,0", "--chunk-heads", "2")
    result = run("attend", *tensors, "--out", tmp_path / "o.npy", *words)
    assert result.code == 2 and "there is a sliding window, which is not streamed" in result.stderr


def test_an_ended_run_leaves_nothing(endless_run, tmp_path):  # noqa: F811
    ended_run_leaves_the_folder([*endless_run, "--chunk-heads", "1000000"], tmp_path, signal.SIGINT, True)


def test_bench_tells_copies_and_computation_apart(run, tmp_path):
    words = ["--heads", "6", "--seq", "128", "--head-dim", "16", "--strategy", "energy", "--group-size", "2"]
    result = run("bench", "--stream", *words, "--chunk-heads", "2", "--repeats", "3", "--json")
    assert result.code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["strategy"] for row in rows] == ["exact", "energy"]
    for row in rows:
        assert row["op"] == "stream_forward" and row["chunks"] == 3 and row["runs"] == 3
        assert row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["ratio_to_larger"] == pytest.approx(row["ms"] / max(row["ms_copies"], row["ms_compute"]))
        assert row["bytes"] == 4 * 6 * 128 * 16 * 4
        assert {(span["chunk"], span["stage"]) for span in row["timeline"]} == {
            (chunk, stage) for chunk in range(3) for stage in ("copy_in", "compute", "copy_out")}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--chunk-heads", "2"], "with --stream"),
        (["--from", "0"], "with --stream"),
        (["--stream", "--op", "backward"], "--stream: another --op"),
        (["--stream", "--from", "0"], "--from without --devices"),
    ],
)
def test_bench_refuses_what_it_would_ignore(run, words, expected):
    result = run("bench", "--seq", "64", "--head-dim", "16", *words)
    assert result.code == 2 and expected in result.stderr
