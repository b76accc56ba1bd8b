#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 8: pretrained models with their attention swapped, not fine-tuned: a task's measure, and its test set's time.

--task vision: a ViT (--model, --weights, --data: a .npz file or a folder in ImageNet's layout), top-1 and top-5.
--task antibody: a BERT (--model antiberty or a folder, --data: a file of sequences), masked residues guessed.
--task speech: a Whisper's encoder (--model whisper-tiny.en or a name, --data: a folder of .wav and .txt), word errors.
output_error: of the model's first output, relative to the one with standard attention, which comes first."""

import copy
from pathlib import Path

import torch
import transformers

from shared import evaluate, models
from shared.data import Images, read_speech, toy_images
from shared.results import DATA, DATA_HELP, Results, arguments, chosen, label, parsed, require
from shared.swap import swap

METHODS = ("standard", "flash2", "cudnn", "exact", "hydra", "hyper-authors", "lsh-sample", "lsh-mean", "energy",
           "lsh-sample-near", "energy-near")  # fmt: skip
DEFAULTS = {  # model and data of a task
    "vision": ("vit-ti-197", "fashion-mnist.npz"),
    "antibody": ("antiberty", "antibodies.txt"),
    "speech": ("whisper-tiny.en", "speech"),
}


def vision(options):
    """(the model, a function of a model that gives its row and first output)."""
    name, data = options.model, options.data
    if options.quick:
        name, data = "tiny", options.out.with_suffix(".npz")
        toy_images(data)
    images = Images(data, models.side_of(name), options.device)
    model = models.vision(name, images.classes, options.weights, options.device)
    return model, lambda model: evaluate.classify(model, images, options.batch, options, options.items)


def antibody(options):
    model, tokenize = models.antibody_bert("tiny" if options.quick else options.model, options.device)
    sequences = ["ACDEFGHIKLMNPQRSTVWY" * 8] if options.quick else require(options.data).read_text().split()
    return model, lambda model: evaluate.guess_residues(model, tokenize, sequences[: options.items], options)


def speech(options):
    model, to_text = models.whisper("tiny" if options.quick else options.model, options.device)
    if options.quick:
        features, texts = [torch.randn(1, 80, 200)], ["one two"]
    else:
        extract = transformers.WhisperFeatureExtractor()
        sounds = read_speech(options.data)[: options.items]
        features = [extract(samples, sampling_rate=16000, return_tensors="pt").input_features for samples, _ in sounds]
        texts = [text for _, text in sounds]
    features = [mel.to(options.device) for mel in features]
    most = 4 if options.quick else 80
    return model, lambda model: evaluate.transcribe(model, to_text, features, texts, models.PROMPT, options, most)


def main():
    parser = arguments(__doc__, methods=METHODS)
    parser.add_argument("--task", choices=DEFAULTS, default="vision")
    parser.add_argument("--model", help="[that of the task]")
    parser.add_argument("--data", type=Path, help=f"{DATA_HELP} [that of the task]")
    parser.add_argument("--weights", type=Path, help="of --task vision: a .safetensors file, of train_vit.py for one")
    parser.add_argument("--batch", type=int, default=250, help="images at once [%(default)s]")
    parser.add_argument("--items", type=int, help="the first so many of the test set [all]")
    parser.add_argument("--no-times", action="store_true", help="on a machine that others use, too")
    model, data = DEFAULTS[parser.parse_known_args()[0].task]
    parser.set_defaults(model=model, data=DATA / data, near="0,0")
    options = parsed(parser)
    whole, measure = {"vision": vision, "antibody": antibody, "speech": speech}[options.task](options)
    results = Results(options, ("task", "model", "method", "group_size", "block", "near"))
    reference = None
    for name in options.methods:
        row = {"task": options.task, "model": options.model, "method": label(name, options.device)}
        row |= {"group_size": options.group_size, "block": options.block, "near": options.near}
        if not results.wants(**row) and reference is not None:
            continue
        model = copy.deepcopy(whole)
        try:
            swap(model, chosen(options, name))
            model.eval()
            found, first = measure(model)
        except (NotImplementedError, ValueError, RuntimeError) as error:  # a method that does not serve the model
            results.add(row | {"error": str(error).splitlines()[0]})
            continue
        reference = first if reference is None else reference
        if results.wants(**row):
            if options.no_times:
                del found["seconds"]
            results.add(row | found | {"output_error": evaluate.relative_error(first, reference)})


if __name__ == "__main__":
    main()
