# SPDX-License-Identifier: Apache-2.0
"""`distr attend`: exact attention against NumPy, and what the command writes and prints."""

import json
import os
import resource
import stat

import numpy as np
import oracle
import pytest

EXACT = ("--strategy", "exact")
TOLERANCE = {"f2": 2e-3, "f4": 3e-6, "f8": 1e-13}


def check(result, expected, dtype):
    """The O and LSE of a run against those of the oracle, within what the type can hold."""
    o, lse = expected
    assert result.files["--out"].dtype == np.dtype(f"<{dtype}")
    assert result.files["--out"].shape == o.shape
    np.testing.assert_allclose(result.files["--out"], o, rtol=0, atol=TOLERANCE[dtype] * max(1, abs(o).max(initial=0)))
    assert result.files["--lse"].dtype == np.dtype("<f4")
    assert result.files["--lse"].shape == lse.shape
    np.testing.assert_allclose(result.files["--lse"], lse, rtol=1e-6, atol=1e-3 if dtype == "f2" else 2e-6)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=["rank2", "rank3", "rank4"])
def test_ranks_and_types(attend, problem, lead, dtype):
    q, k, v = problem((*lead, 37, 12), (*lead, 53, 12), dv=5, dtype=dtype)
    check(attend(q, k, v, *EXACT), oracle.attention(q, k, v), dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (6, 3)])
def test_query_heads_share_kv_heads(attend, problem, heads, dtype):
    q, k, v = problem((2, heads[0], 19, 8), (2, heads[1], 23, 8), dv=16, dtype=dtype)
    check(attend(q, k, v, *EXACT), oracle.attention(q, k, v), dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("corner", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize("lengths", [(20, 20), (17, 40), (40, 17)])
def test_causal_corners(attend, problem, lengths, corner, dtype):
    q, k, v = problem((2, lengths[0], 8), (2, lengths[1], 8), dtype=dtype)
    result = attend(q, k, v, *EXACT, "--causal", corner)
    check(result, oracle.attention(q, k, v, causal=corner), dtype)
    hidden = 23 if corner == "bottom-right" and lengths == (40, 17) else 0
    assert np.all(result.files["--out"][:, :hidden] == 0)
    assert np.isneginf(result.files["--lse"]).sum() == 2 * hidden


@pytest.mark.parametrize("corner", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize("size", [(0, 0), (5, 2), (-1, 3), (4, -1), (99, 99)])
@pytest.mark.parametrize("lengths", [(20, 20), (17, 40), (40, 17)])
def test_sliding_windows(attend, problem, lengths, size, corner):
    q, k, v = problem((2, lengths[0], 8), (2, lengths[1], 8))
    options = ["--window-size", "{},{}".format(*size), "--causal", corner]
    offset = lengths[1] - lengths[0] if corner == "bottom-right" else 0
    if corner == "none" and lengths[1] > 20:
        options += ["--key-offset", str(offset := 12)]
    distance = np.arange(lengths[1]) - np.arange(lengths[0])[:, None] - offset
    left, right = size
    seen = ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))
    check(attend(q, k, v, *EXACT, *options), oracle.attention(q, k, v, causal=corner, mask=seen), "f4")


@pytest.mark.parametrize("softcap", [0.5, 3, 1000])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_capped_scores(attend, problem, dtype, softcap):
    q, k, v = problem((2, 4, 40, 16), (2, 2, 60, 16), dtype=dtype)
    mask = np.random.default_rng(3).standard_normal((40, 60)).astype("f4")
    result = attend(q, k, v, *EXACT, "--softcap", str(softcap), mask=mask)
    check(result, oracle.attention(q, k, v, mask=mask, softcap=softcap), dtype)


@pytest.mark.parametrize("strategy", ["lsh", "energy"])
def test_capped_scores_of_approximations(attend, problem, strategy):
    q, k, v = problem((1, 2, 300, 16), (1, 2, 500, 16))
    setting = oracle.Setting(strategy, window=40, sinks=10)
    result = attend(q, k, v, *setting.flags(), "--softcap", "1.5", outputs=("--lse", "--order-out"))
    check(result, oracle.attention(q, k, v, setting, result.files["--order-out"], softcap=1.5), "f4")


MASK_SHAPES = [(2, 4, 9, 11), (1, 4, 9, 11), (2, 1, 1, 11), (4, 9, 1), (9, 11), (11,), (1, 1), ()]


@pytest.mark.parametrize("kind", ["b1", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_broadcast(attend, problem, shape, kind):
    q, k, v = problem((2, 4, 9, 8), (2, 2, 11, 8))
    generator = np.random.default_rng(2)
    mask = np.asarray(generator.random(shape) < 0.6 if kind == "b1" else generator.standard_normal(shape).astype(kind))
    if mask.ndim == 2 and mask.size > 1:
        mask[3] = False if kind == "b1" else -np.inf
    result = attend(q, k, v, *EXACT, mask=mask)
    check(result, oracle.attention(q, k, v, mask=mask), "f4")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("strategy", ["exact", "lsh", "energy"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_fully_masked_rows_are_zero(attend, problem, kind, strategy, dtype):
    q, k, v = problem((1, 2, 6, 8), dtype=dtype)
    mask = np.ones((6, 6), bool)
    mask[[0, 4]] = False
    mask = mask if kind == "bool" else np.where(mask, np.float32(0), np.float32(-np.inf))
    result = attend(q, k, v, "--strategy", strategy, mask=mask)
    assert np.all(result.files["--out"][:, :, [0, 4]] == 0)
    assert np.all(result.files["--out"][:, :, 1] != 0)
    assert np.all(np.isneginf(result.files["--lse"][:, :, [0, 4]]))
    assert np.all(np.isfinite(result.files["--lse"][:, :, [1, 2, 3, 5]]))


@pytest.mark.parametrize("scale", ["0.5", "-0.25", "0", "1e-3", "2"])
def test_scale(attend, problem, scale):
    q, k, v = problem((2, 15, 8), (2, 18, 8))
    check(attend(q, k, v, *EXACT, "--scale", scale), oracle.attention(q, k, v, scale=float(scale)), "f4")


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("strategy", ["auto", "exact", "lsh", "energy"])
def test_no_keys(attend, problem, strategy, dtype):
    q, k, v = problem((2, 3, 5, 8), (2, 3, 0, 8), dv=6, dtype=dtype)
    result = attend(q, k, v, "--strategy", strategy)
    assert result.files["--out"].shape == (2, 3, 5, 6)
    assert np.all(result.files["--out"] == 0)
    assert np.all(np.isneginf(result.files["--lse"]))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 3, 4, 8)], ids=str)
@pytest.mark.parametrize("strategy", ["auto", "exact", "lsh", "energy"])
def test_no_queries(attend, problem, shape, strategy):
    q, k, v = problem(shape, dv=6)
    result = attend(q, k, v, "--strategy", strategy, outputs=("--lse", "--order-out"))
    assert result.files["--out"].shape == (*shape[:-1], 6)
    assert result.files["--lse"].shape == shape[:-1]
    assert result.files["--order-out"].size == 0


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("strategy", ["exact", "lsh", "energy"])
def test_many_heads_of_nothing_take_no_time(run, tmp_path, strategy, dtype):
    """A file of 128 bytes must not keep the command busy for minutes, or take all memory."""
    batch = 2**40
    np.save(tmp_path / "x.npy", np.empty((batch, 1, 0, 8), dtype))
    words = [word for name in "qkv" for word in (f"--{name}", tmp_path / "x.npy")]
    busy = 5  # seconds of a processor, which a loaded machine does not stretch
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_CPU, (busy, busy))}
    result = run("attend", *words, "--out", tmp_path / "o.npy", "--strategy", strategy, **limited)
    assert result.code == 0, result.stderr
    assert np.load(tmp_path / "o.npy").shape == (batch, 1, 0, 8)


def test_one_column_has_one_group(attend, problem):
    q, k, v = problem((2, 9, 1), dv=3)
    for strategy in ("lsh", "energy"):
        check(attend(q, k, v, "--strategy", strategy), oracle.attention(q, k, v), "f4")


def test_group_size_one_is_exact_bit_for_bit(attend, problem):
    q, k, v = problem((2, 33, 16))
    exact = attend(q, k, v, *EXACT)
    for strategy in ("lsh", "energy", "auto"):
        other = attend(q, k, v, "--strategy", strategy, "--group-size", "1")
        for name, array in exact.files.items():
            assert array.tobytes() == other.files[name].tobytes()


@pytest.mark.parametrize(
    ("shape", "reason"), [((2, 33, 64), "33 rows or keys"), ((2100, 32), "head_dim 32")], ids=["short", "small_heads"]
)
def test_auto_where_nothing_pays_is_exact_and_says_so(attend, problem, shape, reason):
    q, k, v = problem(shape)
    result = attend(q, k, v, "--group-size", "2")
    assert result.stderr.count("\n") == 1
    assert "auto" in result.stderr and "exact" in result.stderr and reason in result.stderr
    exact = attend(q, k, v, *EXACT)
    assert exact.stderr == ""
    assert exact.files["--out"].tobytes() == result.files["--out"].tobytes()


def test_auto_groups_the_columns_of_a_long_problem_if_asked_to(attend, problem):
    q, k, v = problem((2100, 64))
    result, default = attend(q, k, v, "--json", "--group-size", "2"), attend(q, k, v)
    assert "exact" in default.stderr and "a larger one is asked for" in default.stderr
    assert default.files["--out"].tobytes() == attend(q, k, v, *EXACT).files["--out"].tobytes()
    chosen = json.loads(result.stdout)
    assert chosen["strategy"] in ("lsh", "energy") and chosen["strategy_asked"] == "auto"
    assert chosen["strategy"] in result.stderr and result.stderr.count("\n") == 1
    named = attend(q, k, v, "--strategy", chosen["strategy"])
    assert named.files["--out"].tobytes() == result.files["--out"].tobytes()


@pytest.mark.parametrize("strategy", ["lsh", "energy"])
def test_defaults_are_the_documented_ones(attend, problem, strategy):
    q, k, v = problem((2, 200, 16))
    outputs = ("--lse", "--order-out")
    short = attend(q, k, v, "--strategy", strategy, outputs=outputs)
    assert short.files["--order-out"].shape == (2, 2, 16)
    setting = oracle.Setting(strategy, 2, 128, "mean", "own", 0)
    full = attend(q, k, v, *setting.flags(), "--causal", "none", "--scale", "0.25", "--device", "cpu", outputs=outputs)
    for name, array in short.files.items():
        assert array.tobytes() == full.files[name].tobytes()
    different = ("--group-size", "4"), ("--block", "64"), ("--order-from", "previous")
    for flag, value in (*different, ("--estimator", "sample"), ("--seed", "1")) if strategy == "lsh" else different:
        other = attend(q, k, v, "--strategy", strategy, flag, value)
        assert not np.array_equal(other.files["--out"], short.files["--out"]), flag


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("strategy", ["exact", "lsh", "energy"])
def test_threads_do_not_change_a_byte(attend, problem, strategy, dtype):
    q, k, v = problem((3, 300, 16), dtype=dtype)
    results = [
        attend(q, k, v, "--strategy", strategy, "--threads", threads, outputs=("--lse", "--order-out"))
        for threads in ("1", "2")
    ]
    for name, array in results[0].files.items():
        assert array.tobytes() == results[1].files[name].tobytes()


def test_json_describes_the_run(attend, problem, tmp_path):
    q, k, v = problem((2, 4, 30, 16), (2, 2, 40, 16), dv=8)
    result = attend(q, k, v, "--json", "--strategy", "lsh", "--group-size", "3", "--block", "7", "--seed", "9")
    report = json.loads(result.stdout)
    expected = {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 30, "seq_k": 40, "head_dim": 16, "head_dim_v": 8}
    expected |= {"dtype": "f32", "strategy": "lsh", "estimator": "mean", "group_size": 3, "block": 7, "seed": 9}
    expected |= {"order_from": "own", "causal": False, "scale": 0.25, "device": "cpu", "num_groups": 6}
    assert {key: report[key] for key in expected} == expected
    assert report["outputs"] == {"o": str(tmp_path / "out--out.npy"), "lse": str(tmp_path / "out--lse.npy")}
    assert report["kernel"] and report["version"]
    assert 0 <= report["seconds_forward"] <= report["seconds_total"] < 60
    assert result.stderr == ""


def test_summary_names_the_output(attend, problem, tmp_path):
    q, k, v = problem((30, 16))
    result = attend(q, k, v, *EXACT)
    assert str(tmp_path / "out--out.npy") in result.stdout and "exact" in result.stdout


@pytest.mark.parametrize("old", [b"", b"old" * 100000])
def test_existing_output_is_replaced(attend, problem, tmp_path, old):
    q, k, v = problem((30, 16))
    output = tmp_path / "out--out.npy"
    output.write_bytes(old)
    output.chmod(0o640)
    check(attend(q, k, v, *EXACT), oracle.attention(q, k, v), "f4")
    assert stat.S_IMODE(output.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["q.npy", "k.npy", "v.npy", "out--out.npy", "out--lse.npy"]
    )


def test_output_may_replace_an_input(run, save, problem):
    q, k, v = problem((30, 16))
    paths = [save(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    result = run("attend", "--q", paths[0], "--k", paths[1], "--v", paths[2], "--out", paths[0], *EXACT)
    assert result.code == 0, result.stderr
    np.testing.assert_allclose(np.load(paths[0]), oracle.attention(q, k, v)[0], atol=3e-6)


def test_new_output_has_the_usual_permissions(attend, problem, tmp_path):
    q, k, v = problem((5, 4))
    mask = os.umask(0o027)
    try:
        attend(q, k, v, *EXACT)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "out--out.npy").stat().st_mode) == 0o640
