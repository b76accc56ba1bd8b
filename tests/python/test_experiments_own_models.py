# SPDX-License-Identifier: Apache-2.0
"""The scripts of the paper's evaluation on models and data given by their paths, as the paper's own would be."""

import importlib
import json
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import timm
import tokenizers
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from shared import data, models  # noqa: E402


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A function of a script's name and words that runs it and returns its rows."""

    def of(script, *words):
        out = tmp_path / f"{script}.json"
        words = ["--out", out, "--device", "cpu", *words]
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, words)])
        importlib.import_module(script).main()
        return json.loads(out.read_text())["rows"]

    return of


@pytest.fixture
def llama(tmp_path):
    """The folder of a Llama with its tokenizer, as transformers saves them."""
    folder = tmp_path / "llama"
    model, _ = models.llama("tiny", torch.float32, "cpu")
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({letter: n for n, letter in enumerate("?ABCD2.:+")}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


def test_a_vit_of_timm_is_fine_tuned_on_a_folder_and_its_losses_are_drawn(tmp_path, rows, monkeypatch):
    data.toy_folder(tmp_path / "folder")
    models.save_weights(tmp_path / "weights.safetensors", timm.create_model("test_vit", num_classes=5))
    words = ["--model", "test_vit", "--weights", tmp_path / "weights.safetensors", "--data", tmp_path / "folder"]
    (row,) = rows("table5", *words, "--methods", "exact", "--regimes", "r2", "--epochs", 2, "--batch", 4)
    assert row["items"] == 8 and len(row["losses"]) == 2 and row["seconds"] > 0
    picture = tmp_path / "losses.png"
    monkeypatch.setattr(sys, "argv", ["fig8.py", str(picture), str(tmp_path / "table5.json")])
    fig8 = importlib.import_module("fig8")
    fig8.main()
    assert picture.stat().st_size > 20000
    one, both = {0: [3.0, 1.0]}, {0: [2.0, 1.0], 1: [8.0, 8.0]}
    assert fig8.means({"one": one, "both": both}) == {"one": [3.0, 1.0], "both": [2.0, 1.0]}
    assert fig8.means({"both": both}) == {"both": [5.0, 4.5]}
    with pytest.raises(SystemExit, match="no seed is of all of one, other; allowed: "):
        fig8.means({"one": one, "other": {1: [8.0]}})


def test_a_vit_of_a_folder_is_measured(tmp_path, rows):
    data.toy_folder(tmp_path / "images")
    saved = timm.create_model("test_vit", num_classes=2)
    timm.models.save_for_hf(saved, tmp_path / "vit", model_config={})
    for one, other in zip(models.vision(str(tmp_path / "vit"), 2).parameters(), saved.parameters()):
        assert torch.equal(one, other)
    words = ["--model", tmp_path / "vit", "--data", tmp_path / "images", "--methods", "standard,exact"]
    found = rows("table8", *words)
    assert [row["items"] for row in found] == [8, 8] and found[1]["output_error"] < 1e-4


def test_times_of_a_llama_of_a_folder(rows, llama):
    found = rows("table6", "--model", llama, "--lengths", "8,20", "--methods", "standard,exact,energy")
    assert len(found) == 6 and all(row["ms"] > 0 and row["ms_cold"] > 0 for row in found)
    shares = rows("fig1", "--model", llama, "--lengths", "20", "--methods", "standard,exact")
    assert all(row["share"] > 0 for row in shares) and len(shares) == 2


def test_a_llama_of_a_folder_is_fine_tuned_on_the_papers_files(tmp_path, rows, llama):
    problems = [{"instruction": "2 + 2", "output": "B", "source": "data/PoT/x.json"}] * 8
    (tmp_path / "MathInstruct.json").write_text(json.dumps(problems))
    (tmp_path / "test").mkdir()
    (tmp_path / "test/algebra_test.csv").write_text('"2 + 2",A,B,C,D,B\n' * 4)
    words = ["--lengths", "48", "--epochs", "0,2", "--rate", "3e-3", "--warm-up", "1", "--text", "64"]
    found = rows("table7", "--model", llama, "--data", tmp_path, *words, "--methods", "exact,lsh-sample")
    assert [row["epochs"] for row in found] == [0, 2, 0, 2] and len({row["method"] for row in found}) == 2
    assert all(row["items"] == 4 and row["perplexity"] > 1 for row in found)
    assert all(row["losses"][1] < row["losses"][0] for row in found if row["epochs"])


def test_a_bert_of_a_folder_guesses_a_files_residues(tmp_path, rows):
    saved, _ = models.antibody_bert("tiny", "cpu")
    saved.save_pretrained(tmp_path / "bert")
    words = "[PAD] [UNK] [CLS] [SEP] [MASK]".split() + list("ACDEFGHIKLMNPQRSTVWY")
    (tmp_path / "bert/vocab.txt").write_text("\n".join(words))
    model, tokenize = models.antibody_bert(str(tmp_path / "bert"), "cpu")
    tokens = torch.tensor([tokenize("ACDY")])
    assert tokens.tolist() == [[2, 5, 6, 7, 24, 3]]
    torch.testing.assert_close(model(tokens).logits, saved(tokens).logits)
    (tmp_path / "sequences.txt").write_text("ACDEFGHIKLMNPQ\nRSTVWYACDE\n")
    words = ["--task", "antibody", "--model", tmp_path / "bert", "--data", tmp_path / "sequences.txt"]
    found = rows("table8", *words, "--methods", "standard,exact")
    assert [row["items"] for row in found] == [4, 4] and found[1]["output_error"] < 1e-5
    weights = {name: x for name, x in saved.state_dict().items() if "query" not in name}
    saved.save_pretrained(tmp_path / "bert", state_dict=weights)
    with pytest.raises(ValueError, match="has no .*query.*; allowed: all weights of BertForMaskedLM"):
        models.antibody_bert(str(tmp_path / "bert"), "cpu")


def test_a_whisper_of_a_folder_hears_a_folders_sounds(tmp_path, rows):
    saved, _ = models.whisper("tiny", "cpu")
    sizes = {**saved.config.to_dict(), "max_source_positions": 1500, "max_target_positions": 90}
    folder = tmp_path / "whisper"
    transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes)).save_pretrained(folder)
    vocabulary = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary | {"<|endoftext|>": 26}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.WhisperTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    transformers.WhisperProcessor(transformers.WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    (tmp_path / "speech").mkdir()
    for name, rate in (("said", 16000), ("slow", 8000)):
        with wave.open(str(tmp_path / f"speech/{name}.wav"), "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes((1000 * np.sin(np.arange(16000) / 9)).astype("<i2").tobytes())
        (tmp_path / f"speech/{name}.txt").write_text("two words\n")
    words = ["--task", "speech", "--model", folder, "--data", tmp_path / "speech", "--methods", "standard,exact"]
    with pytest.raises(ValueError, match="slow.wav is not of 16 kHz, mono, 16 bits"):
        rows("table8", *words)
    (tmp_path / "speech/slow.wav").unlink()
    found = rows("table8", *words)
    assert [row["items"] for row in found] == [2, 2] and found[1]["output_error"] < 1e-5
    assert found[0]["word_errors"] == found[1]["word_errors"]
