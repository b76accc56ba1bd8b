# SPDX-License-Identifier: Apache-2.0
"""Images, items of four choices and speech, out of files that experiments/fetch or anyone else brings."""

import csv
import io
import json
import wave
from pathlib import Path

import numpy as np
import timm.data
import torch
import torch.nn.functional as F

from shared import hub

MEAN, STD = timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD


class Images:
    """Labelled images of two splits, "train" and "test", that a device holds.

    path: a .npz file with train_images and test_images, uint8 [n, height, width] or [n, height, width, 3], train_labels
    and test_labels [n]; or a folder of folders of image files, train/CLASS/ and val/CLASS/ (ImageNet's layout), or what
    shared/hub.py reads, whose images are decoded as they are needed. side: images are resized to side x side."""

    def __new__(cls, path, side, device):
        if Path(path).suffix == ".npz":
            return super().__new__(cls)
        return super().__new__(FolderImages if (Path(path) / "val").is_dir() else HubImages)

    def __init__(self, path, side, device):
        self.side, self.device, self.splits = side, device, {}
        with np.load(path) as file:
            for split in ("train", "test"):
                images = torch.from_numpy(file[f"{split}_images"])
                images = images.unsqueeze(-1).expand(-1, -1, -1, 3) if images.dim() == 3 else images
                labels = torch.from_numpy(file[f"{split}_labels"]).long()
                self.splits[split] = images.permute(0, 3, 1, 2).contiguous().to(device), labels.to(device)
        self.classes = 1 + max(labels.max().item() for _, labels in self.splits.values())

    def batches(self, split, size, seed=None, items=None):
        """(how many, an iterable of (float images [B, 3, side, side], labels [B])). seed: of a shuffled epoch with
        shifts and flips, whose last batch has to be whole; None: all in order. items: the first so many alone."""
        images, labels = (x[:items] for x in self.splits[split])
        order = torch.arange(len(labels))
        if seed is not None:
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
            order = order[: len(order) // size * size]
        parts = order.to(self.device).split(size)
        return len(parts), (self._batch(images[part], labels[part], seed is not None) for part in parts)

    def _batch(self, images, labels, augmented):
        images = images.float() / 255
        if images.shape[-1] != self.side:
            images = F.interpolate(images, (self.side, self.side), mode="bilinear", antialias=True)
        if augmented:
            images = shifted_and_flipped(images, self.side // 14)
        mean, std = (torch.tensor(x, device=self.device).view(3, 1, 1) for x in (MEAN, STD))
        return (images - mean) / std, labels


class FolderImages(Images):
    def __init__(self, path, side, device):
        from torchvision.datasets import ImageFolder

        self.side, self.device = side, device
        self.splits = {
            split: ImageFolder(Path(path) / folder, timm.data.create_transform(side, is_training=split == "train"))
            for split, folder in (("train", "train"), ("test", "val"))
            if (Path(path) / folder).is_dir()  # Table 8 needs no images to train on
        }
        self.classes = len(self.splits["test"].classes)

    def batches(self, split, size, seed=None, items=None):
        if split not in self.splits:
            raise ValueError(f"the data has images to {', '.join(self.splits)} alone; allowed: with those to {split}")
        images = self.splits[split]
        images = images if items is None else torch.utils.data.Subset(images, range(min(items, len(images))))
        random = None if seed is None else torch.Generator().manual_seed(seed)
        loader = torch.utils.data.DataLoader(images, size, seed is not None, generator=random, num_workers=2,
                                             drop_last=seed is not None)  # fmt: skip
        return len(loader), ((x.to(self.device), y.to(self.device)) for x, y in loader)


class HubImages(FolderImages):
    def __init__(self, path, side, device):
        self.side, self.device = side, device
        found = {name: HubSplit(dataset) for name, dataset in hub.splits_of(path).items()}
        found = {name: split for name, split in found.items() if split.is_labelled()}
        self.splits = {"test": hub.pick(found, "test", path)}
        if any(name in found for name in hub.SPLITS["train"]):
            self.splits["train"] = hub.pick(found, "train", path)
        for name, split in self.splits.items():
            split.transform = timm.data.create_transform(side, is_training=name == "train")
        self.classes = max(split.classes() for split in self.splits.values())


class HubSplit(torch.utils.data.Dataset):
    """(image, label) of a Dataset."""

    def __init__(self, dataset):
        self.image = hub.column(dataset, "image", "Image", names=("image",))
        self.label = hub.column(dataset, "label", "ClassLabel", hub.INTEGER, names=("label", "fine_label"))
        self.dataset = dataset

    def is_labelled(self):
        """ImageNet's test set, whose labels nobody has, has -1."""
        return len(self.dataset) > 0 and self.dataset[0][self.label] >= 0

    def classes(self):
        return getattr(self.dataset.features[self.label], "num_classes", None) or 1 + max(self.dataset[self.label])

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, number):
        row = self.dataset[number]
        return self.transform(row[self.image].convert("RGB")), row[self.label]


def shifted_and_flipped(images, most):
    """Each image [B, C, S, S] moved by up to `most` pixels each way, and half of them mirrored."""
    batch, side = len(images), images.shape[-1]
    padded = F.pad(images, (most,) * 4)
    by = torch.randint(0, 2 * most + 1, (2, batch, 1), device=images.device)
    rows, columns = (torch.arange(side, device=images.device) + shift for shift in by)
    columns = torch.where(torch.rand(batch, 1, device=images.device) < 0.5, columns, columns.flip(1))
    of = torch.arange(batch, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[of, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def toy_images(path, classes=4, side=8, train=256, test=64):
    """Writes a .npz of noise that is brighter by its class: easy to learn."""
    random = np.random.default_rng(0)
    parts = {}
    for split, count in (("train", train), ("test", test)):
        labels = random.integers(0, classes, count)
        images = random.integers(0, 100, (count, side, side), dtype=np.uint8)
        for image, label in zip(images, labels):
            image += np.uint8(150 * label // (classes - 1))
        parts |= {f"{split}_images": images, f"{split}_labels": labels}
    np.savez(path, **parts)


def toy_folder(path, classes=2, side=16, images=4):
    """Writes a folder in ImageNet's layout, of a few images of one colour a class."""
    from PIL import Image

    for split in ("train", "val"):
        for label in range(classes):
            folder = Path(path) / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(images):
                colour = np.full((side, side, 3), 60 + 120 * label + number, np.uint8)
                Image.fromarray(colour).save(folder / f"{number}.png")


def read_items(path):
    """{"train": [...], "test": [...]} of items of four choices: {"question", "choices": [4 texts], "answer": 0 to 3},
    with "open": true where the model is not shown the choices (evaluate.item_text).

    path: a folder with train.jsonl and test.jsonl of such items; or with MathInstruct.json to train on (rows of
    "instruction", "output" and "source", those with PoT), and MMLU's test/*.csv (question, A, B, C, D, letter) to test
    on; or what shared/hub.py reads, of the columns of either."""
    folder = Path(path)
    if (folder / "MathInstruct.json").exists():
        train = instructions(json.loads((folder / "MathInstruct.json").read_text(encoding="utf-8")))
        test = []
        for path in sorted((folder / "test").glob("*.csv")):
            with path.open(newline="", encoding="utf-8") as file:
                test += [{"question": question, "choices": choices, "answer": "ABCD".index(letter)}
                         for question, *choices, letter in csv.reader(file)]  # fmt: skip
        return {"train": train, "test": test}
    if (folder / "train.jsonl").exists():
        return {
            split: [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
            for split in ("train", "test")
        }
    splits = hub.splits_of(path)
    return {split: items_of(hub.pick(splits, split, path), path) for split in ("train", "test")}


def instructions(rows):
    """Items to train on, of MathInstruct."""
    return [{"question": row["instruction"], "text": row["output"]} for row in rows if "PoT" in row["source"]]


def items_of(dataset, path):
    """The items of a Dataset."""
    if {"instruction", "output", "source"} <= dataset.features.keys():
        return instructions(dataset)
    question = hub.column(dataset, "question", hub.STRING, names=("question",))
    choices = hub.column(dataset, "choices", rf"\w+\({hub.STRING}\)", names=("choices",))
    answer = hub.column(dataset, "answer", "ClassLabel", hub.INTEGER, names=("answer",))
    items = [{"question": row[question], "choices": row[choices], "answer": row[answer]} for row in dataset]
    for item in items:
        if len(item["choices"]) != 4 or not 0 <= item["answer"] < 4:
            found = f"an item with {len(item['choices'])} choices and the answer {item['answer']}"
            raise ValueError(f"{path} has {found}; allowed: 4 choices, and 0 to 3")
    return items


def toy_items(count=64):
    """Items whose answer is mostly the second: easy to learn."""
    answers = np.random.default_rng(0).choice(4, 2 * count, p=(0.1, 0.7, 0.1, 0.1)).tolist()
    items = [{"question": f"Which is {'abcd'[of]}?", "choices": list("abcd"), "answer": of, "open": True}
             for of in answers]  # fmt: skip
    return {"train": items[:count], "test": items[count:]}


def read_speech(path):
    """[(samples float32 at 16 kHz, what is said)] of a folder's NAME.wav files with NAME.txt beside them, or of the
    test set of what shared/hub.py reads, with a column of audio and one of text."""
    files = sorted(Path(path).glob("*.wav"))
    if files:
        return [(samples_of(file, file), file.with_suffix(".txt").read_text(encoding="utf-8").strip())
                for file in files]  # fmt: skip
    dataset = hub.pick(hub.splits_of(path), "test", path)
    audio = hub.column(dataset, "audio", "Audio", names=("audio",))
    text = hub.column(dataset, "text", hub.STRING, names=("text", "sentence", "transcription"))
    feature = type(dataset.features[audio])(decode=False)  # which needs no decoder
    rows = ((row[audio], row[text]) for row in dataset.cast_column(audio, feature))
    return [(samples_of(io.BytesIO(of["bytes"]) if of["bytes"] else of["path"], of["path"]), said.strip())
            for of, said in rows]  # fmt: skip


def samples_of(file, name):
    """float32 [n] of an open WAV file or its path."""
    allowed = "allowed: WAV files of 16 kHz, mono, 16 bits"
    try:
        with wave.open(file if hasattr(file, "read") else str(file)) as sound:
            if (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) != (16000, 1, 2):
                raise ValueError(f"{name} is not of 16 kHz, mono, 16 bits; {allowed}")
            return np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.float32) / 32768
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{name} is no WAV file ({error}); {allowed}") from None
