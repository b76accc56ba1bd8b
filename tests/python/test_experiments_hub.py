# SPDX-License-Identifier: Apache-2.0
"""--data of the paper's evaluation as the package `datasets` of Hugging Face has it: columns found by their types."""

import importlib
import io
import json
import shutil
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import timm

datasets = pytest.importorskip("datasets")
sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from shared import data, hub, models, results  # noqa: E402


@pytest.fixture(autouse=True)
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def pictures(count=8, label="ClassLabel", **others):
    """A Dataset of images of one colour each, brighter by their class of two, in columns that no name gives away."""
    label = datasets.ClassLabel(names=["dark", "bright"]) if label == "ClassLabel" else datasets.Value(label)
    labels = [number % 2 for number in range(count)]
    columns = {"a": [np.full((16, 16, 3), 60 + 120 * of, np.uint8) for of in labels], "b": labels}
    features = {"a": datasets.Image(), "b": label, **{name: datasets.Value("string") for name in others}}
    return datasets.Dataset.from_dict(columns | others, datasets.Features(features))


def read(path, split="test"):
    """(labels, how bright the images are, classes)."""
    images = data.Images(path, 16, "cpu")
    count, batches = images.batches(split, 4)
    x, y = next(iter(batches))
    assert x.shape == (4, 3, 16, 16)
    return y.tolist(), x.mean((1, 2, 3)).tolist(), images.classes


def test_images_of_save_to_disk_are_read_by_the_types_of_their_columns(tmp_path):
    datasets.DatasetDict(train=pictures(), test=pictures(4)).save_to_disk(tmp_path / "both")
    labels, brightness, classes = read(tmp_path / "both")
    assert labels == [0, 1, 0, 1] and brightness[0] == brightness[2] < brightness[1] and classes == 2
    assert read(tmp_path / "both", "train")[2] == 2
    pictures(label="int64").save_to_disk(tmp_path / "one")
    assert read(tmp_path / "one") == (labels, brightness, 2)
    with pytest.raises(ValueError, match="has images to test alone; allowed: with those to train"):
        read(tmp_path / "one", "train")


def test_images_of_files_that_load_dataset_reads(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / "files").mkdir(exist_ok=True)
        pictures().to_parquet(tmp_path / f"files/{name}-00000-of-00001.parquet")
    expected = [0, 1, 0, 1]
    assert read(tmp_path / "files")[0] == expected
    assert read(tmp_path / "files/train-00000-of-00001.parquet")[0] == expected
    data.toy_folder(tmp_path / "images")
    (tmp_path / "images/val").rename(tmp_path / "images/test")
    assert read(tmp_path / "images")[0] == [0] * 4
    shutil.rmtree(tmp_path / "images/test")
    with pytest.raises(ValueError, match="has the splits train; allowed to test: test, validation, val"):
        read(tmp_path / "images")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="empty is neither a path with data nor a name .*; allowed: such"):
        read(tmp_path / "empty")


def test_a_test_set_without_labels_is_passed_over(tmp_path):
    hidden = pictures(4, "int64").map(lambda row: {"b": -1})
    datasets.DatasetDict(validation=pictures(4, "int64"), test=hidden).save_to_disk(tmp_path / "data")
    assert read(tmp_path / "data")[0] == [0, 1, 0, 1]


def test_a_name_of_the_hub_is_looked_up_there_and_stays_in_results(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *words: asked.append(words) or {"test": pictures()})
    assert read(Path("cifar10"))[0] == [0, 1, 0, 1]
    read(Path("owner/some-set:plain"))
    assert asked == [("cifar10", None), ("owner/some-set", "plain")]
    assert results.shown(Path("owner/some-set")) == "owner/some-set"
    assert not any(map(hub.is_name, ("/a/b", "a/b/c", "../a", "a.npz", "a/b.npz", Path(__file__))))

    def offline(*words):
        raise ConnectionError("no such set")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(SystemExit, match=r"cifar is neither .* \(no such set\); allowed: .*experiments/fetch"):
        read(Path("cifar"))


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    pictures().remove_columns("b").save_to_disk(tmp_path / "unlabelled")
    with pytest.raises(ValueError, match=r"no label in the columns a \(Image\); allowed: one ClassLabel or "):
        read(tmp_path / "unlabelled")
    pictures(text=["x"] * 8).remove_columns("a").save_to_disk(tmp_path / "blind")
    with pytest.raises(ValueError, match=r"no image in the columns b \(ClassLabel\), text \(string\); allowed: "):
        read(tmp_path / "blind")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match="blind needs the package datasets, .*; allowed: pip install datasets"):
        read(tmp_path / "blind")


def test_of_several_columns_one_goes_by_its_name():
    both = pictures().add_column("fine_label", [3] * 8).cast_column("fine_label", datasets.ClassLabel(5))
    assert data.HubSplit(both).label == "fine_label"
    with pytest.raises(ValueError, match=r"b \(ClassLabel\), c \(ClassLabel\); allowed: .*label or fine_label among"):
        data.HubSplit(both.rename_column("fine_label", "c"))


def test_a_vit_is_fine_tuned_on_a_data_set(tmp_path, monkeypatch):
    datasets.DatasetDict(train=pictures(), test=pictures()).save_to_disk(tmp_path / "colours")
    models.save_weights(tmp_path / "weights.safetensors", timm.create_model("test_vit", num_classes=5))
    words = ["--model", "test_vit", "--weights", tmp_path / "weights.safetensors", "--data", tmp_path / "colours",
             "--methods", "exact", "--regimes", "r2", "--epochs", "2", "--batch", "4", "--device", "cpu",
             "--out", tmp_path / "table5.json"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["table5.py", *map(str, words)])
    importlib.import_module("table5").main()
    (row,) = json.loads((tmp_path / "table5.json").read_text())["rows"]
    assert (row["data"], row["items"], len(row["losses"])) == ("colours", 8, 2)


def test_items_of_four_choices(tmp_path):
    problems = {"instruction": ["1 + 1?", "no"], "output": ["2", "no"], "source": ["data/PoT/x", "data/CoT/x"]}
    questions = {"question": ["2 + 2?"], "subject": ["algebra"], "choices": [["3", "4", "5", "6"]], "answer": [1]}
    test = datasets.Dataset.from_dict(questions)
    train = datasets.Dataset.from_dict(problems)
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "as_in_the_paper")
    item = {name: values[0] for name, values in questions.items() if name != "subject"}
    found = data.read_items(tmp_path / "as_in_the_paper")
    assert found == {"train": [{"question": "1 + 1?", "text": "2"}], "test": [item]}
    letters = test.cast_column("answer", datasets.ClassLabel(names=list("ABCD")))
    (tmp_path / "files").mkdir()
    for split in ("train", "test"):
        letters.to_parquet(tmp_path / f"files/{split}.parquet")
    assert data.read_items(tmp_path / "files") == {"train": [item], "test": [item]}
    three = datasets.Dataset.from_dict(questions | {"choices": [["3", "4", "5"]]})
    with pytest.raises(ValueError, match="nowhere has an item with 3 choices and the answer 1; allowed: 4 choices"):
        data.items_of(three, "nowhere")
    with pytest.raises(ValueError, match=r"no choices in the columns question \(string\), .*; allowed: one "):
        data.items_of(test.remove_columns("choices"), "nowhere")


def test_speech(tmp_path):
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16000, 0, "NONE", ""))
        sound.writeframes(np.arange(100, dtype="<i2").tobytes())
    (tmp_path / "b.wav").write_bytes(file.getvalue())
    sounds = [{"bytes": file.getvalue(), "path": "a.wav"}, {"bytes": None, "path": str(tmp_path / "b.wav")}]

    def save(name, sounds):  # with an encoder it would be Dataset.from_dict() alone
        columns = {"sound": sounds, "id": ["1", "2"], "text": ["one ", "two"]}
        datasets.Dataset.from_dict(columns).cast_column("sound", datasets.Audio()).save_to_disk(tmp_path / name)

    save("speech", sounds)
    found = data.read_speech(tmp_path / "speech")
    assert [text for _, text in found] == ["one", "two"]
    assert all(np.array_equal(samples, np.arange(100, dtype=np.float32) / 32768) for samples, _ in found)
    save("flac", [{"bytes": b"fLaC", "path": "c.flac"}] * 2)
    with pytest.raises(ValueError, match=r"c.flac is no WAV file \(.*\); allowed: WAV files of 16 kHz, mono, 16 bits"):
        data.read_speech(tmp_path / "flac")
