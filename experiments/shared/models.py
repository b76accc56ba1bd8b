# SPDX-License-Identifier: Apache-2.0
"""The models of the evaluation: by the names of timm and Hugging Face, by a path, or those named here.

"tiny" is one with random weights, to try a script.
"""

import importlib.util
import json
import math
import struct
from pathlib import Path

import numpy as np
import timm
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from shared.results import DATA, ROOT, require

VITS = {  # ViT-Ti: heads of d = 64, with the token counts of ViT at 224 and 384 pixels
    "vit-ti-197": {"img_size": 28, "patch_size": 2, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "vit-ti-577": {"img_size": 48, "patch_size": 2, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "tiny": {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2},
}
LLAMAS = {  # width, of the feed-forward part, layers, heads, KV heads, vocabulary
    "llama-1b": (2048, 8192, 16, 32, 8, 128256),  # Llama 3.2 1B's geometry, d = 64, with random weights
    "llama-7b-layer": (4096, 11008, 1, 32, 32, 32000),  # one layer of Llama 2 7B, d = 128, with random weights
    "tiny": (64, 128, 2, 4, 2, 256),
}


def vision(name, classes, weights=None, device="cpu"):
    """A ViT with so many classes, of VITS or timm (pretrained there unless weights are named). name: also
    hf-hub:OWNER/NAME, of the hub of Hugging Face, or a folder of such. weights: a .safetensors file; a position
    embedding of other images is resized, and a head of other classes left out."""
    if name in VITS:
        model = timm.models.VisionTransformer(num_classes=classes, **VITS[name])
    else:
        model = timm.create_model(of_timm(name), pretrained=weights is None, num_classes=classes)
    if weights:
        state = {key: tensor.float() for key, tensor in load_file(require(weights)).items()}
        grid = model.patch_embed.grid_size
        state["pos_embed"] = timm.layers.resample_abs_pos_embed(state["pos_embed"], list(grid), num_prefix_tokens=1)
        if state["head.bias"].shape[0] != classes:
            del state["head.weight"], state["head.bias"]
        model.load_state_dict(state, strict=False)
    return model.eval().to(device)


def side_of(name):
    """The pixels of a side of the images that a ViT takes."""
    if name in VITS:
        return VITS[name]["img_size"]
    with torch.device("meta"):
        return timm.create_model(of_timm(name)).patch_embed.img_size[0]


def of_timm(name):
    """timm's name of a model, which may be a folder with timm's config.json and weights."""
    return f"local-dir:{name}" if Path(name).is_dir() else name


def save_weights(path, model):
    """Writes the weights in float16, as a .safetensors file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.detach().cpu().half().contiguous() for key, tensor in model.state_dict().items()}, path)


def llama(name, dtype, device):
    """(model, its tokenizer of texts to lists of numbers): of LLAMAS (bytes for tokens), "smollm2", or of a path."""
    if name in LLAMAS:
        width, feed_forward, layers, heads, kv_heads, vocabulary = LLAMAS[name]
        config = transformers.LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=feed_forward, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=1 << 17,
            rope_theta=500000.0, tie_word_embeddings=True,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config)
        return model.to(dtype).eval(), lambda text: list(text.encode())
    if name == "smollm2":
        loader = bench_models()
        path = DATA / loader.SMOLLM2
        model, _ = loader.load("smollm2", path if path.exists() else None, dtype, device)
        from gguf import GGUFReader

        tokenizer = loader._tokenizer(GGUFReader(path if path.exists() else loader._installed()))
        return model.requires_grad_(True), lambda text: tokenizer.encode(text).ids
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    return model, lambda text, of=transformers.AutoTokenizer.from_pretrained(name): of(text)["input_ids"]


def bench_models():
    """bench/quality/models.py, which reads SmolLM2."""
    spec = importlib.util.spec_from_file_location("bench_quality_models", ROOT / "bench/quality/models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def antibody_bert(name, device):
    """(BertForMaskedLM, its tokenizer of lists of residues): "antiberty", "tiny", or a folder of Hugging Face."""
    if name == "tiny":
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEFGHIKLMNPQRSTVWY"]
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2}
        config = transformers.BertConfig(vocab_size=len(words), **sizes)
        torch.manual_seed(0)
        model = transformers.BertForMaskedLM(config)
    else:
        folder = require(DATA / name if name == "antiberty" else Path(name))
        words = (folder / "vocab.txt").read_text().split()
        settings = json.loads((folder / "config.json").read_text())
        known = transformers.BertConfig().to_dict().keys() & settings.keys()
        model = transformers.BertForMaskedLM(transformers.BertConfig(**{name: settings[name] for name in known}))
        state = {key: tensor.float() for key, tensor in load_file(folder / "model.safetensors").items()}
        missing = set(model.load_state_dict(state, strict=False).missing_keys)
        if missing - {"cls.predictions.decoder.bias", "cls.predictions.decoder.weight"}:
            raise ValueError(f"{folder} has no {sorted(missing)}; allowed: all weights of BertForMaskedLM")
        model.tie_weights()
    numbers = {word: number for number, word in enumerate(words)}
    return model.eval().to(device), lambda residues: [numbers[x] for x in ("[CLS]", *residues, "[SEP]")]


WHISPER_SIZES = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
                 "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "vocab_size": 51864,
                 "decoder_start_token_id": 50257, "eos_token_id": 50256, "pad_token_id": 50256,
                 "bos_token_id": 50256}  # fmt: skip
PROMPT = [50257, 50362]  # <|startoftranscript|>, <|notimestamps|>


def whisper(name, device):
    """(WhisperForConditionalGeneration, its function of numbers to text): "whisper-tiny.en", "tiny", or of a path."""
    if name == "tiny":
        sizes = WHISPER_SIZES | {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
                                 "decoder_attention_heads": 2, "max_source_positions": 100}  # fmt: skip
        torch.manual_seed(0)
        model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes))
        return model.eval().to(device), lambda numbers: " ".join(map(str, numbers))
    if name != "whisper-tiny.en":
        processor = transformers.WhisperProcessor.from_pretrained(name)
        model = transformers.WhisperForConditionalGeneration.from_pretrained(name).to(device).eval()
        return model, lambda numbers: processor.decode(numbers, skip_special_tokens=True)
    folder = require(DATA / "whisper")
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER_SIZES))
    model.load_state_dict(dict(_whisper_tensors(read_ctranslate2(folder / "model.bin"))), strict=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return model.eval().to(device), lambda numbers: tokenizer.decode(list(numbers), skip_special_tokens=True)


def read_ctranslate2(path):
    """{name: float32 tensor} of a CTranslate2 model file whose weights are float32 or float16."""
    data, at = Path(path).read_bytes(), 0

    def number(kind):
        nonlocal at
        (value,) = struct.unpack_from("<" + kind, data, at)
        at += struct.calcsize(kind)
        return value

    def text():
        nonlocal at
        length = number("H")
        at += length
        return data[at - length : at].rstrip(b"\0").decode()

    version = number("I")
    if version < 5:
        raise ValueError(f"{path} is of CTranslate2's binary version {version}; allowed: 5 and above")
    text(), number("I")  # the model's specification and its revision
    tensors = {}
    for _ in range(number("I")):
        name, rank = text(), number("B")
        sizes = [number("I") for _ in range(rank)]
        kind, length = number("B"), number("I")
        dtype = {0: "<f4", 4: "<f2"}.get(kind)
        if dtype:
            values = np.frombuffer(data, dtype, math.prod(sizes), at).astype(np.float32)
            tensors[name] = torch.from_numpy(values.reshape(sizes))
        at += length
    for _ in range(number("I")):
        alias, name = text(), text()
        tensors[alias] = tensors[name]
    return tensors


def _whisper_tensors(of):
    """(transformers' name, tensor) of CTranslate2's Whisper."""

    def named(target, source, parts=("weight", "bias")):
        yield from ((f"{target}.{part}", of[f"{source}/{part}"]) for part in parts if f"{source}/{part}" in of)

    def norm(target, source):
        return [(f"{target}.weight", of[f"{source}/gamma"]), (f"{target}.bias", of[f"{source}/beta"])]

    def fused(target, source, names):
        for part in ("weight", "bias"):
            for name, tensor in zip(names, of[f"{source}/{part}"].chunk(len(names))):
                if (name, part) != ("k_proj", "bias"):  # which Whisper does not have: it is 0
                    yield f"{target}.{name}.{part}", tensor

    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", of[f"{side}/position_encodings/encodings"]
        yield from norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for layer in range(4):
            target, source = f"model.{side}.layers.{layer}", f"{side}/layer_{layer}"
            yield from norm(f"{target}.self_attn_layer_norm", f"{source}/self_attention/layer_norm")
            yield from fused(f"{target}.self_attn", f"{source}/self_attention/linear_0", ("q_proj", "k_proj", "v_proj"))
            yield from named(f"{target}.self_attn.out_proj", f"{source}/self_attention/linear_1")
            yield from norm(f"{target}.final_layer_norm", f"{source}/ffn/layer_norm")
            yield from named(f"{target}.fc1", f"{source}/ffn/linear_0")
            yield from named(f"{target}.fc2", f"{source}/ffn/linear_1")
            if side == "decoder":
                yield from norm(f"{target}.encoder_attn_layer_norm", f"{source}/attention/layer_norm")
                yield from named(f"{target}.encoder_attn.q_proj", f"{source}/attention/linear_0")
                yield from fused(f"{target}.encoder_attn", f"{source}/attention/linear_1", ("k_proj", "v_proj"))
                yield from named(f"{target}.encoder_attn.out_proj", f"{source}/attention/linear_2")
    for number in (1, 2):
        yield from named(f"model.encoder.conv{number}", f"encoder/conv{number}")
    yield "model.decoder.embed_tokens.weight", of["decoder/embeddings/weight"]
    yield "proj_out.weight", of["decoder/embeddings/weight"]
