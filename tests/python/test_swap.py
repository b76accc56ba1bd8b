# SPDX-License-Identifier: Apache-2.0
"""Every method in a ViT, a BERT, a Llama and a Whisper's encoder."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from baselines import BASELINES, ksvd_loss  # noqa: E402
from shared import models  # noqa: E402
from shared.swap import METHODS, attention_layers, method_of, swap  # noqa: E402

NAMES = [name for name in METHODS if name != "cudnn"]
EXACT = {"standard", "flash2", "hyper", "exact"}  # hyper is, by its least length
IMAGES = [name for name in NAMES if name != "flatten-authors"]


def hf_vit():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **sizes), add_pooling_layer=False)


CASES = {  # a model, its input, what of its output counts
    "timm": (lambda: models.vision("tiny", 5), lambda m: m(torch.randn(2, 3, 8, 8)), NAMES),
    "vit": (hf_vit, lambda m: m(torch.randn(2, 3, 16, 16)).last_hidden_state, NAMES),
    "bert": (lambda: models.antibody_bert("tiny", "cpu")[0],
             lambda m: m(torch.randint(25, (2, 150))).logits, IMAGES),
    "llama": (lambda: models.llama("tiny", torch.float32, "cpu")[0],
              lambda m: m(torch.randint(256, (2, 150)), use_cache=False).logits, IMAGES),
    "whisper": (lambda: models.whisper("tiny", "cpu")[0],
                lambda m: m.get_encoder()(torch.randn(1, 80, 200)).last_hidden_state, IMAGES),
}  # fmt: skip


def output(model, run):
    torch.manual_seed(1)
    return run(model)


@pytest.mark.parametrize("kind", CASES)
def test_every_method_runs_and_trains(kind):
    build, run, names = CASES[kind]
    torch.manual_seed(0)
    whole = build().eval()
    for module in whole.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    exact = output(whole, run).detach()
    for name in names:
        model = copy.deepcopy(whole)
        fields = {"block_size": 8 if kind in ("timm", "vit") else 64}
        assert swap(model, method_of(name, (0, 0), **fields)) == len(list(attention_layers(whole))), name
        out = output(model, run)
        error = ((out - exact).norm() / exact.norm()).item()
        assert error < 1e-5 if name in EXACT else 0 <= error < 1e3, (name, error)  # NaN is not
        if name in ("hydra", "flatten", "primal", "lsh-sample", "lsh-mean", "energy"):
            assert error > 1e-6, name
        model.train()
        (output(model, run).square().mean() + ksvd_loss(model)).backward()
        layer = next(attention_layers(model))
        if name in BASELINES:
            new = dict(layer.swapped.named_parameters())
            assert all(of.grad is not None and of.grad.isfinite().all() for of in new.values()), (name, list(new))
            assert bool(new) == name.startswith(("flatten", "primal")), name
        # with one column a group, ours is exact
        if "lsh" in name or "energy" in name:
            swap(model.eval(), method_of(name, (0, 0), group_size=1, **fields))
            torch.testing.assert_close(output(model, run), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["timm", "vit"])
def test_a_further_swap_leaves_nothing_of_the_one_before(kind):
    build, run, names = CASES[kind]
    model = build().eval()
    exact = output(model, run).detach()
    for name in names:
        swap(model, name if name in BASELINES else method_of(name, block_size=8))
        swap(model, "standard")
        torch.testing.assert_close(output(model, run), exact, rtol=1e-4, atol=1e-5, msg=name)


def test_padding_reaches_the_methods():
    whole, _ = models.antibody_bert("tiny", "cpu")
    tokens = torch.randint(25, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 14:] = 0
    alone = tokens[1:, :14]
    for name in ("standard", "flash2", "hydra", "hyper-short", "flatten", "primal"):
        model = copy.deepcopy(whole)
        swap(model, name)
        torch.manual_seed(0)
        for layer in attention_layers(model):
            torch.nn.init.normal_(next(layer.parameters()))
        padded = model(tokens, attention_mask=mask).logits[1, :14]
        tolerance = {"rtol": 1e-3, "atol": 1e-4}
        if name == "flatten":  # its means are over all tokens, padded ones too, against an epsilon
            tolerance = {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(padded, model(alone).logits[0], **tolerance)


def test_only_the_encoder_of_a_whisper_is_swapped():
    model, _ = models.whisper("tiny", "cpu")
    swap(model, "hydra")
    assert [name for name, module in model.named_modules() if hasattr(module, "swapped")] == [
        "model.encoder.layers.0.self_attn"
    ]
    with torch.no_grad():
        model(torch.randn(1, 80, 200), decoder_input_ids=torch.tensor([[1, 2, 3]]))


def test_what_is_not_allowed_is_named():
    with pytest.raises(ValueError, match="Linear has no attention to swap"):
        swap(torch.nn.Linear(2, 2), "hydra")
    with pytest.raises(ValueError, match="method is 'fnet'; allowed: standard, flash2"):
        method_of("fnet")
    model = models.vision("tiny", 5)
    swap(model, "hydra")
    model.blocks[0].attn.attn_drop.p = 0.5
    with pytest.raises(NotImplementedError, match="mask or dropout"):
        model.train()(torch.randn(1, 3, 8, 8))
