# SPDX-License-Identifier: Apache-2.0
"""The commands of bench/quality on a tiny model, and what they are made of."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
QUALITY = Path(__file__).parents[2] / "bench/quality"


@pytest.fixture
def run(monkeypatch, capsys):
    """run(name, *words): what the command prints, which runs in this process, as imports take longer than the rest."""
    monkeypatch.syspath_prepend(QUALITY)

    def run_command(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        capsys.readouterr()
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return run_command


def test_prefills_are_timed_beside_torchs(run, tmp_path):
    out = tmp_path / "rows.json"
    words = ("--model", "tiny", "--dtype", "float32", "--device", "cpu", "--rounds", 2, "--json-out", out)
    words += ("--batch", 2)
    run("prefill", *words, "--lengths", "700,900")
    rows = json.loads(out.read_text())["rows"]
    by_impl = {(row["length"], row["impl"]): row for row in rows}
    assert len(by_impl) == len(rows) == 2 * 5
    for (length, _), row in by_impl.items():
        assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"] and row["rounds"] == 2
        assert row["loss"] == pytest.approx(by_impl[length, "sdpa"]["loss"], rel=0.01)
    for length in (700, 900):
        assert by_impl[length, "sdpa"]["time_of_sdpa"] == 1
        assert by_impl[length, "exact"]["loss"] == pytest.approx(by_impl[length, "sdpa"]["loss"], rel=1e-5)
    with pytest.raises(SystemExit, match="--lengths has 1000000 and --batch is 2; allowed: up to"):
        run("prefill", *words, "--lengths", 1000000)


def test_perplexities_go_on_where_they_stopped(run, tmp_path):
    out = tmp_path / "rows.json"
    sizes = ("--model", "tiny", "--lengths", 512, "--texts", 1, "--tokens", 520, "--dtype", "float32")
    sizes += ("--device", "cpu")
    words = (*sizes, "--json-out", out, "--only", "G=4 window=0 .*skip=0.001 finish|exact window=512 .*0.0025")
    run("perplexity", *words, "--time-limit", 0)
    assert not out.exists()
    run("perplexity", *sizes, "--json-out", out, "--only", "exact window=512 .*0.0025")
    first = json.loads(out.read_text())["rows"]
    assert "0 settings to measure" not in run("perplexity", *words)
    rows = json.loads(out.read_text())["rows"]
    assert rows[: len(first)] == first and "0 settings to measure, 4" in run("perplexity", *words)
    labels = [(row["setting"], row["rows_together"]) for row in rows]
    alone = "exact window=512 sinks=128 skip=0.0025"
    assert labels == [("exact", 64), (alone, 64), (alone, 1), ("energy G=4 window=0 sinks=128 skip=0.001 finish", 64)]
    assert [row["relative_to_exact"] for row in rows[:1]] == [1] and all(200 < row["perplexity"] < 300 for row in rows)
    assert rows[0]["kept_share"] is None and 0 < rows[3]["kept_share"] <= 1 and len(rows[3]["kept_by_layer"]) == 2
    assert {row["window"] for row in rows} == {None, 512, 0} and rows[3]["finish"] is True
    assert rows[1]["perplexity"] == pytest.approx(rows[2]["perplexity"], rel=1e-5)  # all keys are near


def test_passages_stand_twice(monkeypatch):
    monkeypatch.syspath_prepend(QUALITY)
    perplexity = importlib.import_module("perplexity")
    tokens = {"a": torch.arange(10000), "b": torch.arange(10000, 100000)}
    sequences, starts = perplexity.repetitions(tokens, 4096)
    assert [len(begins) for begins in starts] == [2] * 4 and all(len(sequence) <= 4096 for sequence in sequences)
    seen = set()
    for sequence, begins in zip(sequences, starts):
        for begin in begins:
            first, second = (sequence[at : at + 256] for at in (begin - 1000, begin))
            assert torch.equal(first, second) and (first < 10000).all()
            seen.update(first.tolist())
        assert (sequence >= 10000).sum() == len(sequence) - 4 * 256
    assert len(seen) == 8 * 256


def test_capture_keeps_layers_maps_and_shares(run, tmp_path):
    from safetensors.torch import load_file

    np = pytest.importorskip("numpy")
    words = ("--model", "tiny", "--layers", "1,0", "--length", 1500, "--dtype", "float32", "--device", "cpu")
    outputs = ("--out", tmp_path / "qkv.safetensors", "--maps", tmp_path / "maps.npz", "--shares", tmp_path / "shares")
    run("capture", *words, *outputs, "--skip", 0.001)
    found = load_file(tmp_path / "qkv.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    assert shapes == {"q": (2, 2, 1500, 32), "k": (2, 1, 1500, 32), "v": (2, 1, 1500, 32)}
    assert found["q"].dtype == torch.bfloat16
    maps = np.load(tmp_path / "maps.npz")
    assert maps["kept"].shape == maps["seen"].shape == (2, 2, 24, 24)
    assert not maps["seen"][0, 0, :10].any() and maps["seen"][0, 0, 23, 2:14].all()  # far keys begin behind the sinks
    assert (maps["kept"] <= maps["seen"]).all()
    shares = json.loads((tmp_path / "shares").read_text())["rows"]
    assert [row["layer"] for row in shares] == [0, 1]
    kept, seen = maps["kept"][1, 0], maps["seen"][1, 0]
    assert shares[1]["kept_share"][0] == pytest.approx(kept.sum() / seen.sum(), abs=1e-4)
    far = np.subtract.outer(np.arange(24), np.arange(24)) // 8 == 1  # 8 to 15 halves before their rows
    nearest, next_to_it, *_ = shares[1]["kept_by_distance"][0]
    assert nearest is None and next_to_it == pytest.approx(kept[far].sum() / seen[far].sum(), abs=1e-4)


def test_parts_make_the_file_again(run, tmp_path):
    whole = tmp_path / "whole"
    whole.write_bytes(bytes(range(256)) * 10000)
    run("parts", "split", whole, tmp_path / "parts", "--megabytes", 1)
    names = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert names == ["whole.part0", "whole.part1", "whole.part2", "whole.sha256"]
    run("parts", "join", tmp_path / "parts", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == whole.read_bytes()
    (tmp_path / "parts/whole.part1").unlink()
    with pytest.raises(SystemExit, match="whole.part1 not yet there"):
        run("parts", "join", tmp_path / "parts", tmp_path / "other")
