# SPDX-License-Identifier: Apache-2.0
"""Near keys and skipped tiles against NumPy: `distr attend`, and what `compare` and `bench` tell of them."""

import json

import numpy as np
import oracle
import pytest
from oracle import Setting

SETTINGS = {
    "energy": Setting("energy", 2, 64, window=0),
    "energy, previous, sinks": Setting("energy", 3, 64, order_from="previous", window=70, sinks=1),
    "energy, one block": Setting("energy", 2, 1000, window=10),
    "energy, only sinks": Setting("energy", 2, 64, sinks=129),
    "energy, key offset": Setting("energy", 2, 64, window=20, key_offset=-150),
    "lsh": Setting("lsh", 2, 64, window=30),
    "exact, skip": Setting("exact", 1, 64, window=30, skip=0.01),
    "energy, skip": Setting("energy", 2, 64, window=30, sinks=5, skip=0.01),
    "energy, finish": Setting("energy", 4, 100, order_from="previous", window=30, sinks=5, skip=0.01, finish=True),
}
CAUSAL = ("energy, previous, sinks", "exact, skip", "energy, finish")


def with_patches(q, k, v):
    """Keys that are large and small by turns of 64, so that it is clear which of them matter."""
    turns = np.where(np.arange(k.shape[-2]) // 64 % 3 == 1, 3, 0.25)[:, None]
    return q, (k * turns).astype(k.dtype), v


def require_clear(q, k, setting, order, **options):
    """That no score is so near the bound of skipping that rounding could decide."""
    near = oracle.near_keys(setting, q.shape[-2], k.shape[-2], options.get("causal", "none"))
    all_kept = Setting(**{**vars(setting), "skip": 0, "finish": False})
    s = oracle.scores(q, k, all_kept, order, **options)
    _, bound = oracle.probabilities(np.where(near, s, -np.inf))
    distance = np.abs(s - bound[..., None] - np.log(setting.skip))[..., ~near.all(axis=0)]
    return np.nanmin(distance)


@pytest.mark.parametrize(("name", "corner"), [(name, "none") for name in SETTINGS] + [
    (name, corner) for name in CAUSAL for corner in ("top-left", "bottom-right")])
def test_near_keys_and_skipped_tiles(attend, problem, name, corner):
    setting = SETTINGS[name]
    q, k, v = with_patches(*problem((1, 2, 300, 16), (1, 1, 600, 16), dv=4, dtype="f8"))
    outputs = ("--lse", "--order-out", *(("--halves-out",) if setting.skip else ()))
    result = attend(q, k, v, *setting.flags(), "--causal", corner, "--json", outputs=outputs)
    order = result.files["--order-out"]
    o, lse = oracle.attention(q, k, v, setting, order, causal=corner)
    np.testing.assert_allclose(result.files["--out"], o, rtol=0, atol=1e-6)
    np.testing.assert_allclose(result.files["--lse"], lse, rtol=1e-6, atol=2e-6)
    row = json.loads(result.stdout)
    shown = (setting.window, setting.sinks, setting.skip or None, setting.finish if setting.skip else None)
    assert (row["window"], row["sinks"], row["skip"], row["finish"]) == shown
    if not setting.skip:
        assert row["kept_share"] is None
        return
    assert require_clear(q, k, setting, order, causal=corner) > 1e-9
    _, counts = oracle.scores_and_halves(q, k, setting, order, causal=corner)
    assert result.files["--halves-out"].dtype == np.dtype("<i4")
    np.testing.assert_array_equal(result.files["--halves-out"], counts)
    kept, seen = counts.sum(axis=(0, 1, 2))
    share = None if seen == 0 else kept / seen  # few keys of short causal rows are far
    assert row["kept_share"] == share and (corner == "top-left" or 0 < kept < seen)


def test_a_given_order_has_means_too(attend, problem, save):
    q, k, v = problem((1, 2, 200, 16), (1, 1, 400, 16), dtype="f8")
    setting = Setting("energy", 2, 64, window=10, sinks=1)
    order = np.argsort(np.random.default_rng(3).random((1, 2, 4, 16)), axis=-1)
    o, _ = oracle.attention(q, k, v, setting, order)
    for strategy in ("energy", "given"):
        words = [strategy if word == "energy" else word for word in setting.flags()]
        result = attend(q, k, v, *words, "--order", save("order", order))
        np.testing.assert_allclose(result.files["--out"], o, rtol=0, atol=1e-6)


def test_a_window_of_all_keys_is_exact(attend, problem):
    q, k, v = problem((2, 150, 16), (2, 200, 16), dtype="f8")
    result = attend(q, k, v, "--strategy", "energy", "--window", "1000")
    o, lse = oracle.attention(q, k, v)
    np.testing.assert_allclose(result.files["--out"], o, rtol=0, atol=1e-13)
    row = json.loads(attend(q, k, v, "--strategy", "exact", "--window", "5", "--json").stdout)
    assert row["window"] is None  # nothing to act on


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--window", "-1"], ["--window: '-1'", "from 0 to"]),
        (["--window", "few"], ["--window: 'few'", "from 0 to"]),
        (["--sinks", "1.5"], ["--sinks: '1.5'", "from 0 to"]),
        (["--window", "5", "--skip", "1"], ["--skip: '1'", "a probability below 1"]),
        (["--window", "5", "--skip", "nan"], ["--skip: 'nan'", "a finite number"]),
        (["--skip", "0.1"], ["skip is set and neither window nor sinks"]),
        (["--window", "5", "--finish"], ["finish is set without skip"]),
        (["--window", "5", "--skip", "0.1", "--finish", "--strategy", "lsh"], ["finish is set with strategy lsh"]),
        (["--window", "5", "--key-offset", "x"], ["--key-offset: 'x'"]),
        (["--window", "5", "--key-offset", "5", "--causal", "top-left"], ["key_offset is 5 in a causal call"]),
        (["--halves-out", "h.npy"], ["--halves-out", "nothing is skipped"]),
    ],
)
def test_what_does_not_fit_is_refused(run, save, problem, tmp_path, words, expected):
    files = [word for name, x in zip("qkv", problem((1, 10, 8))) for word in (f"--{name}", save(name, x))]
    given = [] if "--strategy" in words else ["--strategy", "energy"]
    result = run("attend", *files, "--out", tmp_path / "o.npy", *given, *words, cwd=tmp_path)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("distr attend: ") and result.stderr.count("\n") == 1
    for part in expected:
        assert part in result.stderr


def rows_of(run, *words):
    result = run("bench", "--json", "--repeats", "1", "--heads", "1", "--seq", "300", "--head-dim", "16", *words)
    assert result.code == 0, result.stderr
    return json.loads(result.stdout)["rows"]


def test_bench_multiplies_windows_and_skips_and_tells_what_is_kept(run):
    words = ("--strategy", "exact,energy,lsh", "--group-size", "4", "--window", "none,0", "--skip", "0,0.1", "--finish")
    rows = rows_of(run, *words)
    found = [(row["strategy"], row["window"], row["skip"], row["finish"]) for row in rows]
    assert found == [
        ("exact", None, None, None), ("exact", 0, 0.1, False),
        ("energy", None, None, None), ("energy", 0, None, None), ("energy", 0, 0.1, True),
        ("lsh", None, None, None), ("lsh", 0, None, None), ("lsh", 0, 0.1, False),
    ]  # fmt: skip
    assert all((row["kept_share"] is not None) == (row["skip"] is not None) for row in rows)
    assert rows[1]["rel_error_out"] > 0 and 0 <= rows[1]["kept_share"] <= 1


def test_tables_have_columns_of_near_keys_where_there_are_some(run, save, problem):
    files = [word for name, x in zip("qkv", problem((1, 300, 16))) for word in (f"--{name}", save(name, x))]
    for command, words in (("compare", files), ("bench", ("--seq", "300", "--head-dim", "16", "--heads", "1"))):
        options = ("--strategy", "energy", "--group-size", "2", "--repeats", "1")
        plain = run(command, *words, *options)
        near = run(command, *words, *options, "--window", "0", "--sinks", "1", "--skip", "0.1")
        assert (plain.code, near.code) == (0, 0), near.stderr
        assert "window" not in plain.stdout and "kept" not in plain.stdout
        assert "window  sinks  skip" in near.stdout and "kept" in near.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--skip", "0.1"], "--skip: without near keys"),
        (["--window", "0", "--finish"], "--finish: without --skip"),
        (["--window", "0,,1"], "--window: ''"),
        (["--window", "0", "--skip", "0.1", "--op", "backward"], "skip is 0.1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(run, words, expected):
    result = run("bench", "--seq", "64", "--head-dim", "16", "--strategy", "energy", *words)
    assert (result.code, result.stdout) == (2, "") and expected in result.stderr
