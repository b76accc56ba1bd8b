# SPDX-License-Identifier: Apache-2.0
"""bench/near.py, and the inputs that it plants."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from distrattention import Settings, scaled_dot_product_attention

NEAR = {"window": 512, "sinks": 128, "skip": 0.0025}


@pytest.fixture
def load(monkeypatch):
    """load(name): the module of bench/."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    return importlib.import_module


@pytest.mark.parametrize("causal", (False, True))
def test_what_is_planted_is_kept(load, causal):
    near_inputs = load("near_inputs")
    halves = 26
    shares = torch.tensor((0.1, 0.45, 1.0))[:, None] * torch.linspace(1, 0.5, halves)
    kept, far = near_inputs.draw(shares, halves, causal, 3), near_inputs.far_halves(halves, causal)
    distance = (torch.arange(halves)[:, None] - torch.arange(halves)).abs()
    for of_head, of_map in zip(shares, kept):
        assert (of_map & far).sum() == pytest.approx(of_head[distance][far].sum(), abs=1)
    for head_dim in (64, 96):
        q, k = near_inputs.plant(kept, head_dim, 5)
        v = torch.randn(k.shape, generator=torch.Generator().manual_seed(1)).to(k.dtype)
        exact = scaled_dot_product_attention(q, k, v, is_causal=causal, strategy="exact")
        for settings in (
            Settings("exact", **NEAR), Settings("energy", 2, **NEAR), Settings("energy", 4, **NEAR, finish=True)
        ):  # fmt: skip
            out, counts = scaled_dot_product_attention(
                q, k, v, is_causal=causal, settings=settings, return_halves=True
            )
            assert torch.equal(counts[0, ..., 0].long(), (kept & far).sum(-1))
            assert torch.equal(counts[0, ..., 1].long(), far.sum(-1).expand(3, -1))
            error = (out - exact).float().norm() / exact.float().norm()
            assert error < (0.3 if settings.strategy == "energy" and not settings.finish else 0.01)


def test_maps_are_read_again(load):
    near_inputs = load("near_inputs")
    kept = near_inputs.draw(torch.full((1, 30), 0.5), 30, True, 1)[0]
    assert torch.equal(near_inputs.unpacked(near_inputs.packed(kept), 30), kept)


def test_shares_are_taken_by_distance(load):
    near_inputs = load("near_inputs")
    shares = [None, 0.5, 0.4, 0.3, 0.1]  # in steps of 8 halves
    found = near_inputs.by_distance(shares, 30)
    assert found[[0, 8, 15, 16, 29]].tolist() == pytest.approx([0.5, 0.5, 0.5, 0.4, 0.3])
    assert torch.equal(near_inputs.by_distance(shares, 80)[::2], near_inputs.by_distance(shares, 40))
    shares = {(0, head): [None] + [head / 10] * 4 for head in range(10)}
    assert near_inputs.choose_heads(shares, 2, 40, True)[0] == [(0, 2), (0, 7)]


def test_the_command_times_every_setting(load, tmp_path, monkeypatch, capsys):
    from safetensors.torch import save_file

    near = load("near")
    random = torch.Generator().manual_seed(1)
    heads = {"q": 2, "k": 1, "v": 1}
    qkv = {name: torch.randn(1, of, 900, 64, generator=random).bfloat16() for name, of in heads.items()}
    save_file(qkv, tmp_path / "qkv.safetensors", metadata={"layers": "5", "text": "a page"})
    rows = [{"layer": 0, "kept_by_distance": [[None, 0.2 * head + 0.1, 0.3] for head in range(4)]}]
    (tmp_path / "shares.json").write_text(json.dumps({"meta": {}, "rows": rows}))
    words = ["--captured", tmp_path / "qkv.safetensors", "--shares", tmp_path / "shares.json", "--device", "cpu"]
    words += ["--head-dims", 64, "--heads", 2, "--seq", 1600, "--rounds", 2, "--json-out", tmp_path / "out.json"]
    monkeypatch.setattr(sys, "argv", ["near", *map(str, words)])
    assert near.main() == 0
    result = json.loads((tmp_path / "out.json").read_text())
    cases = ["captured layer 5 B1 H2 d64 N900 causal", "planted B1 H2 d64 N1600", "planted B1 H2 d64 N1600 causal"]
    assert [of["input"] for of in result["inputs"]] == cases
    assert len(result["rows"]) == len(near.OF_CAPTURED) + 2 * len(near.SETTINGS)
    exact, skips, energy = result["rows"][len(near.OF_CAPTURED) :][:3]
    assert (exact["setting"], exact["time_of_exact"], energy["time_of_energy"]) == ("exact", 1, 1)
    assert skips["rows_off"] == 0 and skips["rel_error_out"] < 0.01 < energy["rel_error_out"]
    expected = result["inputs"][1]["expected_share"]
    assert result["inputs"][1]["heads"] == [[0, 1], [0, 3]]
    assert skips["kept_by_head"] == pytest.approx(expected, abs=0.02)
    kept = load("near_inputs").unpacked(result["inputs"][1]["maps"][0], 25)
    assert kept.sum() < 25**2 and not (kept & load("near_inputs").far_halves(25, False)).all()
    assert "exact window=512" in capsys.readouterr().out
