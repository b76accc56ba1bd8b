# SPDX-License-Identifier: Apache-2.0
"""The paper's baselines: each against a naive form of its equations in float64, its gradients, causality, padding."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from baselines import BASELINES, Shape, hyper, ksvd_loss, make  # noqa: E402

HEADS, KV_HEADS, N, D = 4, 2, 13, 8
GRID = (3, 4)  # of patches behind one class token
NAMES = [name for name in BASELINES if name != "cudnn"]
CAUSAL = [name for name in NAMES if name != "flatten-authors"]
BOTH_WAYS = [(name, False) for name in NAMES] + [(name, True) for name in CAUSAL]
PADDED = [(name, causal) for name, causal in BOTH_WAYS if name in CAUSAL and not (causal and "hyper" in name)]


def built(name, causal=False, grid=GRID, n=N):
    """The module in float64, its parameters not as they begin; HyperAttention so small that it approximates."""
    shape = Shape(HEADS, KV_HEADS, D, causal, n, None if causal else grid)
    module = hyper.HyperAttention(shape, 3, 4, 5, 3) if name == "hyper" else make(name, shape)
    module = module.double()
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return module


def inputs(n=N, batch=2, grad=False):
    shapes = (batch, HEADS, n, D), (batch, KV_HEADS, n, D), (batch, KV_HEADS, n, D)
    return [torch.randn(shape, dtype=torch.float64).requires_grad_(grad) for shape in shapes]


def layer_input(q):
    """X [B, N, C], the same for all tensors of one size."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(q.shape[0], q.shape[2], HEADS * D, dtype=torch.float64, generator=random)


def call(module, q, k, v, x=None, **others):
    """The module's answer, where what it draws is always the same, and its layer's input is x."""
    torch.manual_seed(0)
    if getattr(module, "needs_input", False):
        module.x = layer_input(q) if x is None else x
    return module(q, k, v, **others)


def naive_softmax(module, q, k, v, keys, causal):
    out = torch.zeros_like(q)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        seen = [j for j in range(k.shape[2]) if (not causal or j <= i) and (keys is None or keys[b, j])]
        weights = torch.stack([torch.exp(q[b, h, i] @ k[b, h, j] / math.sqrt(D)) for j in seen])
        out[b, h, i] = weights @ v[b, h, seen] / weights.sum()
    return out


def naive_hydra(module, q, k, v, keys, causal):
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for u in range(t + 1 if causal else q.shape[1]):
                if keys is None or keys[b, u]:
                    out[b, t] += q[b, t] / q[b, t].norm() * (k[b, u] / k[b, u].norm()) * v[b, u]
    return out.unflatten(2, (HEADS, D)).transpose(1, 2)


def hyper_weights(module, q, k, keys, causal):
    """What exp(score) counts for each row and key, [B, H, N, N]: 1 within blocks, N / s a draw outside them."""
    n = q.shape[2]
    if causal and n > module.least_length:
        half = -(-n // 2)
        padded = [F.pad(x, (0, 0, 0, 2 * half - n)) for x in (q, k)]
        parts = [torch.cat((x[:, :, :half], x[:, :, half:]), 1) for x in padded]
        diagonal = hyper_weights(module, *parts, None, True)
        weights = q.new_zeros(*q.shape[:2], 2 * half, 2 * half)
        weights[:, :, :half, :half], weights[:, :, half:, half:] = diagonal.split(q.shape[1], 1)
        weights[:, :, half:, :half] = hyper_weights(module, padded[0][:, :, half:], padded[1][:, :, :half], None, False)
        return weights[:, :, :n, :n]
    if causal:
        return torch.ones(n, n, dtype=q.dtype).tril().expand(*q.shape[:2], n, n)
    by_row, by_key = module.orders(q, k, keys)
    drawn = module.draw(k, keys)
    weights = q.new_zeros(*q.shape[:2], n, n)
    for b, h in torch.cartesian_prod(*map(torch.arange, q.shape[:2])).tolist():
        row_block = {row: place // module.block for place, row in enumerate(by_row[b, h].tolist())}
        key_block = {key: place // module.block for place, key in enumerate(by_key[b, h].tolist())}
        real = n if keys is None else keys[b].sum().item()
        for i in range(n):
            for j in range(n):
                if row_block[i] == key_block[j] and (keys is None or keys[b, j]):
                    weights[b, h, i, j] = 1
            for j in drawn[b, h].tolist():
                if row_block[i] != key_block[j]:
                    weights[b, h, i, j] += real / module.samples
    return weights


def naive_hyper(module, q, k, v, keys, causal):
    torch.manual_seed(0)
    weights = hyper_weights(module, q, k, keys, causal) * torch.exp(q @ k.transpose(2, 3) / math.sqrt(D))
    return weights @ v / weights.sum(-1, keepdim=True)


def naive_convolution(conv, v, first, grid):
    """The depth-wise convolution by its sums: over a grid of the tokens from `first` on, or over all tokens."""
    out, weight, bias = torch.zeros_like(v), conv.weight[:, 0], conv.bias
    for t in range(v.shape[2]):
        if grid is None:
            size = weight.shape[-1]
            reach = range(-(size - 1), 1) if conv.padding[0] == size - 1 else range(-(size // 2), size // 2 + 1)
            taps = [(t + by, weight[:, tap]) for tap, by in enumerate(reach) if 0 <= t + by < v.shape[2]]
        elif not first <= t < first + grid[0] * grid[1]:
            continue
        else:
            row, column = divmod(t - first, grid[1])
            taps = [
                (first + y * grid[1] + x, weight[:, y - row + 2, x - column + 2])
                for y in range(max(row - 2, 0), min(row + 3, grid[0]))
                for x in range(max(column - 2, 0), min(column + 3, grid[1]))
            ]
        out[:, :, t] = bias + sum(of_tap * v[:, :, at] for at, of_tap in taps)
    return out


def naive_linear(q, k, v, keys, causal):
    out = torch.zeros_like(v)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        seen = [j for j in range(k.shape[2]) if (not causal or j <= i) and (keys is None or keys[b, j])]
        weights = torch.stack([q[b, h, i] @ k[b, h, j] for j in seen])
        out[b, h, i] = weights @ v[b, h, seen] / (weights.sum() + 1e-6 * (1 if causal else k.shape[2]))
    return out


def naive_flatten(module, q, k, v, keys, causal):
    def focused(x, added=0):
        x = x.transpose(1, 2).flatten(2) + added
        x = (x.clamp_min(0) + 1e-6) / torch.log1p(torch.exp(module.scale))
        norms = [torch.sqrt((y**2).sum(-1, keepdim=True)) for y in (x, x**3)]
        return (norms[0] / norms[1] * x**3).unflatten(2, (HEADS, D)).transpose(1, 2)

    if keys is not None:
        v = v * keys[:, None, :, None]
    out = naive_linear(focused(q), focused(k, 0 if causal else module.positions), v, keys, causal)
    return out + naive_convolution(module.convolution.conv, v, 1, None if causal else GRID)


def naive_flatten_authors(module, q, k, v, keys, causal):
    out = naive_linear(q.clamp_min(0), k.clamp_min(0), v, None, False)
    return out + naive_convolution(module.convolution.conv, v, 0, GRID)


def naive_primal(module, q, k, v, keys, causal):
    x = layer_input(q)
    out = torch.zeros_like(q)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        we, wr = module.we[h], module.wr[h]
        q_i, k_i = q[b, h, i], k[b, h, i]
        real = list(range(N)) if keys is None else keys[b].nonzero()[:, 0].tolist()
        if causal:
            q_i, k_i = (of[b, h, [j for j in real if j <= i]].mean(0) for of in (q, k))
        else:
            taken = [real[round(place * (len(real) - 1) / (N - 1))] for place in range(N)]  # p = N, as N < s * 10
            rows = x[b, taken, h * D : (h + 1) * D]
            we, wr = rows.T @ we, rows.T @ wr
        e, r = q_i / q_i.norm() @ we, k_i / k_i.norm() @ wr
        out[b, h, i] = module.concatenation(torch.cat((e, r)))
    return out


NAIVE = {
    "standard": naive_softmax, "flash2": naive_softmax, "hydra": naive_hydra, "hyper": naive_hyper,
    "hyper-short": naive_softmax, "flatten": naive_flatten, "flatten-authors": naive_flatten_authors,
    "primal": naive_primal, "hyper-authors": naive_softmax,
}  # fmt: skip  # with so few tokens the latter two are exact: by its least length, and as all are of one block


@pytest.mark.parametrize("name, causal", BOTH_WAYS)
def test_is_its_equations(name, causal):
    module = built(name, causal)
    q, k, v = inputs()
    if name == "hyper-authors" and causal:
        module.least_length = N
    out = call(module, q, k, v, causal=causal)
    repeated = [x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v)]
    wanted = NAIVE[name](module, q, *repeated, None, causal)
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name, causal", PADDED)
def test_padding_counts_for_nothing(name, causal):
    keys = torch.arange(N)[None] < torch.tensor([[N], [11]])
    keys[1, 2:4] = False  # not behind the tokens alone
    module = built(name, causal)
    q, k, v = inputs()
    out = call(module, q, k, v, keys=keys, causal=causal).transpose(1, 2)[keys]
    repeated = [x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v)]
    wanted = NAIVE[name](module, q, *repeated, keys, causal).transpose(1, 2)[keys]
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
    changed = [torch.where(keys[:, None, :, None], x, 9.0) for x in (q, k, v)]
    x = torch.where(keys[..., None], layer_input(q), 9.0)
    after = call(module, *changed, x=x, keys=keys, causal=causal).transpose(1, 2)[keys]
    torch.testing.assert_close(after, out, rtol=1e-9, atol=1e-9)


def test_padding_counts_for_nothing_in_the_ksvd_loss():
    keys = torch.arange(N)[None] < torch.tensor([[9], [9]])
    module = built("primal")
    q, k, v = inputs()
    x, losses = layer_input(q), []
    for of in (slice(None), slice(9)):
        call(module, q[:, :, of], k[:, :, of], v[:, :, of], x=x[:, of], keys=keys[:, of])
        losses.append(ksvd_loss(module).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_padding_is_refused_by_name():
    with pytest.raises(ValueError, match="allowed: neither"):
        call(built("flatten-authors"), *inputs(), keys=torch.ones(2, N, dtype=torch.bool))


@pytest.mark.parametrize("name, causal", BOTH_WAYS)
def test_gradients(name, causal):
    n = 7
    module = built(name, causal, grid=(2, 3), n=n)
    tensors = inputs(n=n, batch=1, grad=True)
    checked = [*tensors, layer_input(tensors[0]).requires_grad_(), *module.parameters()]
    assert torch.autograd.gradcheck(lambda q, k, v, x, *_: call(module, q, k, v, x, causal=causal), checked,
                                    fast_mode=True)  # fmt: skip
    call(module, *tensors, causal=causal).square().sum().backward()
    unused = [key for key, of_key in module.named_parameters() if of_key.grad is None and key != "strengths"]
    assert not unused, unused  # Primal's strengths are of its loss alone


@pytest.mark.parametrize("name", CAUSAL)
def test_no_row_sees_a_later_one(name):
    module = built(name, causal=True)
    q, k, v = inputs(n=130 if name == "flatten" else N)
    if "hyper" in name:
        module.least_length = 3
    before = call(module, q, k, v, causal=True)
    at = q.shape[2] - 4
    for x in (q, k, v):
        x[:, :, at:] = torch.randn_like(x[:, :, at:])
    after = call(module, q, k, v, causal=True)
    if "hyper" in name:  # a half's rows are ordered together
        at = -(-N // 2)
    torch.testing.assert_close(after[:, :, :at], before[:, :, :at], rtol=1e-9, atol=1e-9)
    assert (after[:, :, -1] - before[:, :, -1]).abs().max() > 1e-3


def test_hyper_follows_exact_attention_as_samples_grow():
    q, k, v = inputs(n=256, batch=1)
    exact = built("standard")(q, k, v)
    errors = []
    for samples in (16, 4096):
        module = hyper.HyperAttention(Shape(HEADS, KV_HEADS, D), 4, 32, samples, 0).double()
        errors.append((call(module, q, k, v) - exact).norm() / exact.norm())
    assert errors[1] < errors[0] / 4 and errors[1] < 0.2


def test_ksvd_loss_is_the_mean_of_the_layers():
    modules = torch.nn.ModuleList(built("primal") for _ in range(2))
    q, k, v = inputs()
    wanted = 0
    for module in modules:
        call(module, q, k, v)
        x = layer_input(q).unflatten(2, (HEADS, D)).transpose(1, 2)
        e = F.normalize(q, dim=-1) @ (x.transpose(2, 3) @ module.we)
        r = F.normalize(k.repeat_interleave(2, 1), dim=-1) @ (x.transpose(2, 3) @ module.wr)
        halves = [((y * module.strengths[:, None]).norm(dim=-1) ** 2).mean() / 2 for y in (e, r)]
        trace = torch.einsum("hps,hps->hs", module.we, module.wr).mean(0).sum()
        wanted += (sum(halves) - trace) ** 2 / 2
    assert ksvd_loss(modules).item() == pytest.approx(wanted.item(), rel=1e-9)
    ksvd_loss(modules).backward()
    assert all(module.strengths.grad.abs().max() > 0 for module in modules)

    def loss(*_):
        for module in modules:
            call(module, q, k, v)
        return ksvd_loss(modules)

    assert torch.autograd.gradcheck(loss, [q.requires_grad_(), *modules.parameters()], fast_mode=True)


def test_what_is_not_allowed_is_named():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="baseline is 'fnet'; allowed: 'standard'"):
        make("fnet", Shape(HEADS, KV_HEADS, D))
    with pytest.raises(NotImplementedError, match="cuDNN's attention was called on cpu"):
        make("cudnn", None)(q, k, v)
    with pytest.raises(ValueError, match="3 queries meet 13 keys"):
        make("standard", None)(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="keys were given to a causal HyperAttention; allowed: batches of one length"):
        built("hyper")(q, k, v, keys=torch.ones(2, N, dtype=torch.bool), causal=True)
    with pytest.raises(ValueError, match="14 tokens; allowed: at most 13"):
        built("flatten")(*inputs(n=14))
    with pytest.raises(ValueError, match="without the layer's input"):
        built("primal")(q, k, v)
    with pytest.raises(ValueError, match="no grid of patches"):
        make("flatten-authors", Shape(HEADS, KV_HEADS, D))
    with pytest.raises(ValueError, match="no fixed number of tokens"):
        make("primal", Shape(HEADS, KV_HEADS, D))
    with pytest.raises(ValueError, match="causal is True; allowed: False"):
        make("flatten", Shape(HEADS, KV_HEADS, D)).double()(q, k, v, causal=True)
