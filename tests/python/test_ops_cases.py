# SPDX-License-Identifier: Apache-2.0
"""The shared list of problems, tests/cases.json, in float64: the operators, which take the C++ reference, against the
textbook, values and gradients. The C++ tests hold the other dtypes against that reference."""

import json
from pathlib import Path

import pytest
import torch

from distrattention import ops
from distrattention.settings import STRATEGIES

LISTS = json.loads((Path(__file__).parents[1] / "cases.json").read_text())
CASES, NEAR = LISTS["cases"], LISTS["near"]
VALUES = {
    "heavy": lambda x: x**3,
    "huge": lambda x: 100 * x,
    "tiny": lambda x: x / 1000,
    "constant": lambda x: 0 * x + 0.5,
}


def test_the_lists_are_there():
    assert len(CASES) >= 60 and len(NEAR) >= 25


def laid_out(layout, tensor):
    """The values of a tensor [B, H, N, d] in another layout."""
    if layout == "bnhd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "gaps":
        wide = tensor.new_full((*tensor.shape[:3], tensor.shape[3] + 5), torch.nan)
        wide[..., : tensor.shape[3]] = tensor
        return wide[..., : tensor.shape[3]]
    return tensor


def tensors_of(case):
    """q, k, v of the case, in its layout."""
    batch, heads, d = case.get("batch", 1), case.get("heads", 1), case["dim"]
    heads_kv, n, m = case.get("heads_kv", heads), case["seq_q"], case.get("seq_k", case["seq_q"])
    values = case.get("values", "normal")
    shapes = (batch, heads, n, d), (batch, heads_kv, m, d), (batch, heads_kv, m, case.get("dim_v", d))
    tensors = [VALUES.get(values, lambda x: x)(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    if values == "patches":  # of three halves of tiles one with large keys and two with small ones
        tensors[1] = tensors[1] * torch.where(torch.arange(m) // 64 % 3 == 1, 3, 0.25)[:, None]
    if values.startswith("best"):  # all queries lean to where one key points
        tensors[0] = tensors[0] / 4 + 1
        tensors[1][:, :, {"best_first": 0, "best_last": m - 1, "best_middle": m // 2}[values]] = 4
    if case.get("layout") == "packed":
        return torch.stack([tensor.transpose(1, 2) for tensor in tensors], 2).permute(2, 0, 3, 1, 4).unbind(0)
    return [laid_out(case.get("layout"), tensor) for tensor in tensors]


def mask_of(case, q, k):
    mask = case.get("mask")
    if mask is None:
        return None
    full = (*q.shape[:3], k.shape[2])[4 - len(mask["shape"]) :]
    shape = [size or length for size, length in zip(mask["shape"], full)]
    if mask.get("transposed"):
        shape.reverse()
    if mask["kind"] == "hidden":
        values = torch.zeros(shape, dtype=torch.bool)
    elif mask["kind"] == "boolean":
        values = torch.rand(shape) > 0.3
    else:
        values = torch.randn(shape, dtype=torch.float32 if mask.get("dtype") == "f32" else torch.float64)
        values = values.masked_fill(torch.rand(shape) > 0.8, -torch.inf)
    return values.permute(*reversed(range(values.dim()))) if mask.get("transposed") else values


NEAR_DEFAULTS = {"window": None, "sinks": 0, "key_offset": None, "skip": 0.0, "finish": False}


def settings_of(case):
    strategy = case.get("strategy", "exact")
    return dict(
        strategy=strategy,
        group_size=case.get("group_size", 1 if strategy == "exact" else 2),
        block_size=case.get("block", 128),
        estimator=case.get("estimator", "mean"),
        order_from=case.get("order_from", "own"),
        **{name: case.get(name, default) for name, default in NEAR_DEFAULTS.items()},
    ) | ({"key_offset": case["window_offset"]} if "window_offset" in case else {})


def others_of(case):
    """What the operator has behind the settings for a sliding window and a cap, and what the textbook has."""
    found = {name: case[name] for name in ("window_size", "softcap") if name in case}
    sides = (None if side < 0 else side for side in found.get("window_size", (-1, -1)))
    return (True, None, None, *sides, found.get("softcap", 0.0)) if found else (), found


def columns_of(case, q, k, settings):
    """The order of the case, random where the caller brings it, and the means of the keys."""
    near = [settings[name] for name in NEAR_DEFAULTS]
    grouping = (settings["strategy"], settings["group_size"], settings["block_size"], settings["order_from"])
    is_callers = STRATEGIES[settings["strategy"]].order == "caller"
    order = key_means = None
    if not is_callers or ops.needs_key_means(*grouping[:2], *near):
        seed = case.get("seed", 0)
        order, key_means = ops.make_grouping(q, k, case.get("causal", "none"), *grouping, seed, False, *near)
    if is_callers:
        order = torch.rand(*q.shape[:2], -(-q.shape[2] // settings["block_size"]), q.shape[3]).argsort(-1).int()
    return order, key_means if key_means is not None and key_means.numel() else None


@pytest.mark.parametrize("case", CASES + NEAR, ids=[case["name"] for case in CASES + NEAR])
def test_case(case, textbook):
    """Values, and gradients where nothing is skipped, which has none."""
    settings, causal, scale = settings_of(case), case.get("causal", "none"), case.get("scale")
    with_gradients = not settings["skip"]
    q, k, v = (tensor.detach().requires_grad_(with_gradients) for tensor in tensors_of(case))
    mask = mask_of(case, q, k)
    leaves = (q, k, v)
    if mask is not None and mask.dtype != torch.bool and with_gradients:
        leaves = (q, k, v, mask.requires_grad_())
    order, key_means = columns_of(case, q, k, settings)
    others, of_textbook = others_of(case)
    inputs = (q, k, v, mask, order, key_means, causal, scale, *settings.values(), *others)
    options = dict(causal=causal, scale=scale, order=order, key_means=key_means) | settings | of_textbook
    expected = textbook(q, k, v, mask, **options)
    weight = torch.randn(*q.shape[:3], v.shape[3], dtype=q.dtype)
    results = []
    for out, lse in (ops.forward(*inputs), expected[:2]):
        seen = lse > -torch.inf
        total = (out * weight).sum() + (lse[seen] * weight[..., 0][seen]).sum()
        results.append((out, lse, *(torch.autograd.grad(total, leaves) if with_gradients else ())))
    # Probabilities are exp(S - LSE): what rounds LSE is a relative error of everything behind it. Means are float32.
    rounding = 1e-13 * (1 + results[1][1][seen].abs().max().item() if seen.any() else 1)
    for what, actual, exact in zip(("out", "lse", "dq", "dk", "dv", "dmask"), *results):
        size = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 0
        torch.testing.assert_close(
            actual, exact, rtol=0, atol=rounding * max(size, 1), msg=lambda text: f"{what}: {text}"
        )
    if settings["skip"]:
        out, _, halves = ops.forward_counting(*inputs[: len(inputs) - len(others)], *others[3:])  # of no part
        assert torch.equal(out, results[0][0]) and halves.dtype == torch.int32
        assert halves.shape == (*q.shape[:2], -(-q.shape[2] // 64), 2)
        assert halves.sum((0, 1, 2)).tolist() == list(expected[2:])
