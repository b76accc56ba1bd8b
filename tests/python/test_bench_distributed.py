# SPDX-License-Identifier: Apache-2.0
"""Runs bench/distributed.py with two processes, in a short form, and holds the model of the ring to sums by hand."""

import json
import sys
from pathlib import Path

import pytest
from programs import run_ranks

BENCH = Path(__file__).resolve().parents[2] / "bench"
CALLS = ("exact, causal", "exact, ulysses", "energy, near keys, zigzag")


@pytest.fixture(scope="module")
def model():
    sys.path.insert(0, str(BENCH))
    try:
        import ring_model

        yield ring_model
    finally:
        sys.path.remove(str(BENCH))


def test_times_and_errors_of_each_call(tmp_path):
    sizes = ["--seq", "512", "--head-dim", "16", "--rounds", "1", "--calls", ";".join(CALLS)]
    words = [BENCH / "distributed.py", "--device", "cpu", *sizes, "--json-out", "found.json"]
    environment = {"OMP_NUM_THREADS": "1", "DISTR_COMMIT": "abc"}
    done = run_ranks(2, *words, folder=tmp_path, environment=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "found.json").read_text())
    assert (result["meta"]["ranks"], result["meta"]["backend"], result["meta"]["commit"]) == (2, "gloo", "abc")
    links = [row for row in result["rows"] if row["op"] == "link"]
    rows = result["rows"][len(links) :]
    assert len(links) == 4 and all(row["ms"] > 0 for row in links)
    assert [(row["call"], row["op"]) for row in rows] == [
        (call, op) for call in CALLS for op in ("forward", "forward_backward")
    ]
    for row in rows:
        assert row["rel_error_out"] < 1e-5 and row["ms"] > 0
        assert row["share_of_ideal"] == pytest.approx(row["ms_one"] / (2 * row["ms"]))
        assert row["share_of_busy_ideal"] == pytest.approx(row["ms_one_each"] / (2 * row["ms"]))
        assert ("ms_model" in row) == (row["layout"] != "ulysses")
        assert "ms_model" not in row or row["ms_model"] >= row["ms_compute"]
    assert f"N 512 d 16 {CALLS[0]}, forward: {rows[0]['ms']:.2f} ms" in done.stdout


def test_the_model_adds_up_its_steps(model):
    link = model.Link(1.0, 100.0)
    assert link.ms(400) == 5
    assert model.pass_ms(4, 40.0, 400, link) == 40  # steps of 10, which hide 3 hops of 5
    assert model.pass_ms(4, 8.0, 400, link) == 3 * 5 + 2
    assert model.pass_ms(4, 8.0, 400, link, homing=True) == 2 * 5 + 2 * 5 + 2
    assert model.pass_ms(1, 8.0, 400, link, homing=True) == 8
    gather = 3 * (1 + 4096 / 100)
    assert model.ring_ms(4, 40.0, None, 400, 800, link) == pytest.approx(40 + gather)
    assert model.ring_ms(4, 40.0, 400.0, 400, 800, link) == pytest.approx(40 + 400 + gather)  # hops of 5 and 13 hide
    assert model.bytes_of_keys(10, 2, 8, 2) == 640
    rows = [{"bytes": 100, "ms": 2.0}, {"bytes": 10100, "ms": 12.0}]
    assert model.Link.of_rows(rows) == (2.0, 1010.0)


def test_kernels_grow_with_the_square_beyond_what_was_measured(model):
    setting = {"strategy": "exact", "group_size": 1, "head_dim": 8}
    row = {"impl": "distr", "causal": False, "batch": 4, "heads": 2, **setting}
    result = {"rows": [{**row, "op": op, "seq_q": n, "ms": ms} for op, n, ms in (
        ("forward", 100, 8.0), ("forward", 200, 16.0), ("forward_backward", 200, 80.0))]}  # fmt: skip
    kernels = model.Kernels(result)
    assert kernels.ms("exact", 1, 8, "forward", 100) == 1 and kernels.ms("exact", 1, 8, "forward", 150) == 2.25
    assert kernels.passes("exact", 1, 8, 400) == (8, 32)


def test_committed_rows_are_the_model_s(model):
    committed = json.loads((BENCH / "results" / "model" / "ring.json").read_text())["rows"]
    measured = json.loads(model.KERNELS.read_text())
    assert committed == json.loads(json.dumps(model.rows_of(model.Kernels(measured))))
