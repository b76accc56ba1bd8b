# SPDX-License-Identifier: Apache-2.0
"""The scripts of the paper's evaluation: all of `experiments/run --quick`, and the loaders of real data and models."""

import argparse
import importlib.machinery
import importlib.util
import json
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import tokenizers
import torch
import transformers

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))
from shared import data, evaluate, models, shards, timing, training  # noqa: E402
from shared import results as results_module  # noqa: E402


def command(name):
    """The module of experiments/run or experiments/fetch."""
    loader = importlib.machinery.SourceFileLoader(f"experiments_{name}", str(EXPERIMENTS / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def run(*words):
    arguments, sys.argv = sys.argv, ["run", *map(str, words)]
    try:
        command("run").main()
    finally:
        sys.argv = arguments


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{part: its rows} of one quick run."""
    out = tmp_path_factory.mktemp("quick")
    run("--quick", "--out", out)
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert found.keys() == command("run").QUICK.keys()
    assert all(result["meta"]["command"] and result["meta"]["torch"] for result in found.values())
    return {name: result["rows"] for name, result in found.items()}


def measured(rows, *allowed):
    """The rows without an error; only the methods named may have one, beside cuDNN, which a CPU does not have."""
    failed = {row["method"] for row in rows if any("error" in name and name != "output_error" and
              name != "word_errors" for name in row)}  # fmt: skip
    assert failed <= {"cudnn", *allowed}
    return [row for row in rows if row["method"] not in failed]


@pytest.mark.parametrize("part", ["fig9", "table6", "table9"])
def test_times_are_positive(results, part):
    rows = measured(results[part])
    assert {"flash-cpu", "exact", "lsh-sample", "energy"} <= {row["method"] for row in rows}
    assert all(0 < row["ms_min"] <= row["ms"] <= row["ms_max"] and row["ms_cold"] > 0 for row in rows)


def test_table9_streams_what_it_computes(results):
    for row in measured(results["table9"]):
        assert row["from"] == "host" and 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert row["gb_per_s"] * row["seconds"] == pytest.approx(4 * 10 * 150 * 128 * 4 / 1e9) and row["ms_copies"] > 0


def test_table1_has_a_smaller_d_of_q_and_k_by_ours(results):
    rows = results["table1"]
    times = {(row["method"], row["head_dim"], row["head_dim_v"]): row.get("ms") for row in rows if row["seq"] == 32}
    assert times["exact", 64, 128] > 0 and times["flash-cpu", 128, 128] > 0
    assert times["flash-cpu", 64, 128] is None  # which torch's refuses, and says so
    assert any("error" in row for row in rows if row["method"] == "flash-cpu" and row["head_dim"] != row["head_dim_v"])


def test_shares_of_attention_and_grouping(results):
    rows = measured(results["fig1"])
    assert {row["method"] for row in rows} >= {"standard", "exact", "lsh-sample"}
    assert all(0 < row["share"] and row["layers_ms"] > 0 for row in rows)
    assert all(row["share"] > 0 and row["grouping_ms"] > 0 for row in results["grouping"])


@pytest.mark.parametrize("part", ["table8_vision", "table8_one_column", "table8_antibody", "table8_speech"])
def test_table8_knows_what_is_exact(results, part):
    rows = {row["method"]: row for row in measured(results[part])}
    ours = [name for name in rows if name.startswith(("lsh", "energy"))]
    assert len(ours) == 5 and all(row["seconds"] > 0 for row in rows.values())
    for name in ("flash-cpu", "exact", *(ours if part == "table8_one_column" else ())):
        assert rows[name]["output_error"] < 1e-5, name
    if part == "table8_vision":
        assert rows["exact"]["top1"] == rows["standard"]["top1"] > 60  # chance is 25
        assert all(1e-5 < rows[name]["output_error"] < 0.5 for name in ("lsh-sample", "lsh-mean", "energy"))
        assert rows["hydra"]["output_error"] > 0.5


def test_training_beats_chance(results):
    assert results["vit"][0]["top1"] > 60 and len(results["vit"][0]["losses"]) == 5
    fine_tuned = {row["method"]: row for row in results["table5"]}
    assert len(fine_tuned) == 7 and all(row["top1"] > 60 for row in fine_tuned.values())  # chance is 25
    assert all(row["losses"][-1] < row["losses"][0] for row in fine_tuned.values())


def test_table7_before_and_after(results):
    rows = {(row["method"], row["epochs"]): row for row in measured(results["table7"])}
    for epochs in (0, 3):
        ours, standard = rows["exact", epochs], rows["standard", epochs]
        assert ours["accuracy"] == standard["accuracy"]
        assert ours["perplexity"] == pytest.approx(standard["perplexity"], rel=1e-3)
    for method in ("standard", "lsh-sample", "energy", "primal"):
        assert rows[method, 3]["accuracy"] > 40  # chance is 25
        assert rows[method, 3]["losses"][-1] < rows[method, 3]["losses"][0]
    assert rows["lsh-sample", 0]["perplexity"] != rows["standard", 0]["perplexity"]


def test_a_further_run_keeps_what_is_there_if_it_was_measured_alike(tmp_path, capsys, monkeypatch):
    run("--quick", "--out", tmp_path, "table1", "--time-limit", 0)
    assert not (tmp_path / "table1.json").exists() and "left to a further run" in capsys.readouterr().out
    run("--quick", "--out", tmp_path, "table1")
    first = (tmp_path / "table1.json").read_text()
    run("--quick", "--out", tmp_path, "table1")
    assert (tmp_path / "table1.json").read_text() == first
    monkeypatch.setenv("DISTR_COMMIT", "another")
    with pytest.raises(SystemExit, match="has rows with commit .*; allowed: 'another'"):
        run("--quick", "--out", tmp_path, "table1")


def test_training_goes_on_from_a_checkpoint(tmp_path):
    x = torch.randn(32, 4)

    def trained(epochs, **others):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        losses = training.train(model, epochs, lambda epoch: (2, x.split(16)), lambda m, b: m(b).square().mean(),
                                lambda epoch: 0.1 / (1 + epoch), device="cpu", dtype=torch.float32,
                                log=lambda text: None, **others)  # fmt: skip
        return losses, model.weight

    losses, weight = trained(4)
    path = tmp_path / "checkpoint"
    assert trained(4, checkpoint=path, is_over=lambda: True)[0] == losses[:1]
    again, resumed = trained(4, checkpoint=path)
    assert again == losses and torch.equal(resumed, weight)


def test_the_regimes_are_parts_of_deits_schedule():
    rates = [training.deit_rate(epoch, 512) for epoch in range(300)]
    assert rates[0] == 1e-6 and max(rates) == rates[5] == pytest.approx(5e-4, rel=1e-3)
    assert rates[180] == pytest.approx(1e-5 + 4.9e-4 * 0.3455, rel=1e-3) and rates[299] < 1.1e-5


def test_images_are_read_from_folders_as_from_arrays(tmp_path):
    data.toy_folder(tmp_path / "folder")
    folder = data.Images(tmp_path / "folder", 16, "cpu")
    count, batches = folder.batches("test", 4)
    images, labels = next(iter(batches))
    assert (folder.classes, count) == (2, 2) and images.shape == (4, 3, 16, 16) and labels.tolist() == [0] * 4
    data.toy_images(tmp_path / "toy.npz")
    arrays = data.Images(tmp_path / "toy.npz", 12, "cpu")
    count, batches = arrays.batches("train", 100, seed=1)
    assert count == 2 and [len(labels) for _, labels in batches] == [100, 100] and arrays.classes == 4
    (first, of_first), (second, of_second) = (next(iter(arrays.batches("train", 8, seed)[1])) for seed in (1, 2))
    assert first.shape == (8, 3, 12, 12) and not torch.equal(of_first, of_second)


def test_shifts_move_images_and_keep_their_values():
    images = torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8) + 1
    moved = data.shifted_and_flipped(images, 2)
    assert moved.shape == images.shape
    for image, of in zip(moved, images):
        assert set(image[image > 0].tolist()) <= set(of.flatten().tolist()) and (image[:, 2:6, 2:6] > 0).all()


def test_a_timm_model_is_measured_on_a_folder(tmp_path):
    data.toy_folder(tmp_path / "folder")
    model = timm.create_model("test_vit", num_classes=2)
    models.save_weights(tmp_path / "weights.safetensors", model)
    sys.argv, arguments = ["table8.py", "--model", "test_vit", "--weights", str(tmp_path / "weights.safetensors"),
                           "--data", str(tmp_path / "folder"), "--out", str(tmp_path / "out.json"), "--device", "cpu",
                           "--methods", "standard,exact,hydra"], sys.argv  # fmt: skip
    try:
        importlib.import_module("table8").main()
    finally:
        sys.argv = arguments
    rows = {row["method"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert rows["exact"]["output_error"] < 1e-4 < rows["hydra"]["output_error"] and rows["exact"]["items"] == 8


def test_a_llama_of_hugging_face_is_read_from_its_folder(tmp_path):
    saved, _ = models.llama("tiny", torch.float32, "cpu")
    saved.save_pretrained(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    model, tokenize = models.llama(str(tmp_path), torch.float32, "cpu")
    assert tokenize("b a c") == [1, 0, 2]
    tokens = torch.tensor([[1, 0, 2]])
    torch.testing.assert_close(model(tokens).logits, saved(tokens).logits)


def test_items_are_read_as_published(tmp_path):
    rows = [{"instruction": "1 + 1?", "output": "2", "source": "data/PoT/x.json"},
            {"instruction": "no", "output": "no", "source": "data/CoT/x.json"}]  # fmt: skip
    (tmp_path / "MathInstruct.json").write_text(json.dumps(rows))
    (tmp_path / "test").mkdir()
    (tmp_path / "test/algebra_test.csv").write_text('"2 + 2, is?",3,4,5,6,B\n')
    items = data.read_items(tmp_path)
    assert items["train"] == [{"question": "1 + 1?", "text": "2"}]
    assert items["test"] == [{"question": "2 + 2, is?", "choices": ["3", "4", "5", "6"], "answer": 1}]


def test_a_slow_function_is_called_less_often():
    calls = {name: [] for name in ("slow", "quick")}
    functions = {"slow": lambda: calls["slow"].append(time.sleep(0.1)), "quick": lambda: calls["quick"].append(None)}
    timing.times(functions, "cpu", rounds=5, warm_up=2, seconds=0.15)
    assert {name: len(of) for name, of in calls.items()} == {"slow": 4, "quick": 7}


def test_word_errors():
    assert evaluate.words_of("Mr. Smith, 10 of Clubs!") == ["mister", "smith", "ten", "of", "clubs"]
    said = ["a", "b", "c", "d"]
    for heard, wanted in ((said, 0), (["a", "c", "d"], 1), (["x", "b", "c", "d", "e"], 2), ([], 4)):
        assert evaluate.edits(said, heard) == wanted


def test_a_ctranslate2_file_is_read(tmp_path):
    def text(value):
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    def variable(name, kind, array):
        sizes = b"".join(struct.pack("<I", size) for size in array.shape)
        head = text(name) + struct.pack("<B", array.ndim) + sizes + struct.pack("<BI", kind, array.nbytes)
        return head + array.tobytes()

    half, whole = np.arange(6, dtype="<f2").reshape(2, 3), np.array([1, 2], dtype="<i2")
    body = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, 2)
    body += variable("a/weight", 4, half) + variable("count", 2, whole)
    body += struct.pack("<I", 1) + text("b/weight") + text("a/weight")
    (tmp_path / "model.bin").write_bytes(body)
    found = models.read_ctranslate2(tmp_path / "model.bin")
    assert found.keys() == {"a/weight", "b/weight"} and found["b/weight"].tolist() == half.tolist()
    (tmp_path / "model.bin").write_bytes(struct.pack("<I", 4))
    with pytest.raises(ValueError, match="binary version 4; allowed: 5 and above"):
        models.read_ctranslate2(tmp_path / "model.bin")


def test_the_picture_of_the_method(tmp_path):
    diagrams = importlib.import_module("diagrams")
    sys.argv, arguments = ["diagrams.py", str(tmp_path / "method.png")], sys.argv
    try:
        diagrams.main()
    finally:
        sys.argv = arguments
    assert (tmp_path / "method.png").stat().st_size > 20000
    q, k = torch.randn(2, 16, 8)
    order = {strategy: torch.arange(16) for strategy in ("lsh", "energy")}
    exact = diagrams.estimates(q.repeat_interleave(2, 1), k.repeat_interleave(2, 1), order)
    torch.testing.assert_close(exact["lsh (sample)"], 2 * q @ k.T)  # columns of a group are alike
    torch.testing.assert_close(exact["lsh (mean)"], 2 * q @ k.T)
    block = torch.randn(64, 32)
    by_hash = diagrams.hashes(block)[1].argsort(stable=True)
    assert torch.equal(by_hash, diagrams.orders(block, block)["lsh"][0])
    near = diagrams.near(300, 300)
    assert near[0, :256].all() and not near[0, 256:].any() and near[299].all()


def test_what_is_missing_is_said(tmp_path):
    fetch = command("fetch")
    assert all(part[0].__doc__ for part in fetch.PARTS.values())
    with pytest.raises(SystemExit, match="nowhere is not there; allowed: .*experiments/fetch"):
        words = ["--out", tmp_path / "x.json", "--data", tmp_path / "nowhere"]
        sys.argv, arguments = ["table5.py", *map(str, words)], sys.argv
        try:
            importlib.import_module("table5").main()
        finally:
            sys.argv = arguments


FLITE = """#!/bin/sh
test -f "$LD_LIBRARY_PATH/libflite.so.1" && printf '%s|%s' "$2" "$4" > "$6"
"""


def test_a_synthesiser_speaks_each_sentence_by_each_voice(tmp_path, monkeypatch):
    fetch = command("fetch")

    def debian(name, folder):  # a program in the place of flite
        for place, text in (("usr/bin/flite", FLITE), ("usr/lib/any/libflite.so.1", "")):
            path = Path(folder) / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    monkeypatch.setattr(fetch, "debian", debian)
    fetch.spoken(tmp_path)
    texts = sorted((tmp_path / "speech").glob("*.txt"))
    assert len(texts) == len(fetch.SENTENCES) * len(fetch.VOICES) == 48
    for path in texts:
        voice, said = path.with_suffix(".wav").read_text().split("|")
        assert path.name.startswith(voice) and path.read_text() == said + "\n"
        assert said in fetch.SENTENCES and not any(letter.isdigit() for letter in said)


SHARDED = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--shard")
parser.add_argument("--fail", action="store_true")
options = parser.parse_args()
known = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
number, count = map(int, options.shard.split("/"))
rows = known + [{"row": row} for row in range(len(known), 7) if row % count == number]
options.out.write_text(json.dumps({"meta": {}, "rows": rows}))
assert not (options.fail and number == 1)
"""


def test_shards_share_the_rows_and_lose_none(tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "part.json"
    script.write_text(SHARDED)
    left = out.with_suffix(".shard5.json")  # of a run that was cut off
    left.write_text(json.dumps({"meta": {}, "rows": [{"row": 0}]}))
    with pytest.raises(SystemExit, match=r"the shards \[1\] failed; what the others measured is in"):
        shards.run_shards(script, ["--fail"], out, 3)
    assert sorted(row["row"] for row in json.loads(out.read_text())["rows"]) == list(range(7))
    assert not shards.shard_files(out)


@pytest.mark.parametrize(
    ("count", "visible", "wanted"),
    [(4, None, "01231230"), (2, "5,7", "57755775"), (1, None, None), (0, None, None)],
)
def test_shards_have_all_gpus_in_turn(count, visible, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    expected = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in wanted] if wanted else [{}] * 8
    assert [shards.gpu_of(number) for number in range(8)] == expected


def test_shards_are_checked_and_take_turns(tmp_path):
    of = [results_module.shard(f"{number}/3") for number in range(3)]
    options = argparse.Namespace(out=tmp_path / "x.json", time_limit=9, device="cpu", dtype="float32")
    each = [results_module.Results(argparse.Namespace(shard=shard, **vars(options)), ("row",)) for shard in of]
    assert [[one.takes_turn() for _ in range(6)] for one in each] == [[n % 3 == i for n in range(6)] for i in range(3)]
    for text in ("3/3", "-1/3", "1", "a/b"):
        with pytest.raises(ValueError):
            results_module.shard(text)
