# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share: seeds, torch's settings, and an oracle that knows nothing of the library.

Run with the package installed, or with PYTHONPATH on a folder that it was installed into:
    python -m pytest tests/python
"""

import math
import multiprocessing.forkserver

import pytest
import torch

from distrattention.settings import STRATEGIES


@pytest.fixture(autouse=True)
def torch_state():
    """Every test starts from one seed, and leaves torch's threads and compilations as it found them."""
    threads = torch.get_num_threads()
    torch.manual_seed(20)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def problem():
    return make_problem


@pytest.fixture
def textbook():
    return textbook_attention


@pytest.fixture
def no_worse_than():
    return require_no_worse


def make_problem(batch=2, heads=4, heads_kv=None, n=70, m=None, d=16, dv=None, dtype=torch.float64, grad=False):
    """q [batch, heads, n, d], k [batch, heads_kv, m, d] and v [batch, heads_kv, m, dv], normal."""
    heads_kv, m, dv = heads_kv or heads, n if m is None else m, dv or d
    shapes = (batch, heads, n, d), (batch, heads_kv, m, d), (batch, heads_kv, m, dv)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes]


def textbook_attention(
    q,
    k,
    v,
    mask=None,
    *,
    causal="none",
    scale=None,
    order=None,
    strategy="exact",
    group_size=1,
    block_size=128,
    estimator="mean",
    order_from="own",
    key_means=None,
    window=None,
    sinks=0,
    key_offset=None,
    skip=0.0,
    finish=False,
    window_size=(-1, -1),
    softcap=0.0,
):
    """(out, lse) by the method's equations over N x N scores, differentiable in q, k, v and mask; the order and the
    means of the keys are given. With `skip` also how many halves of tiles were kept, and how many there are.

    Works in the dtype of q, with S and the softmax in float32 at least.
    """
    group_heads = q.shape[1] // k.shape[1]
    if key_means is not None:
        key_means = key_means.to(q.dtype).repeat_interleave(group_heads, 1)
    k, v = (tensor.repeat_interleave(group_heads, 1) for tensor in (k, v))
    n, m, d = q.shape[2], k.shape[2], q.shape[3]
    rows = []
    first_is_exact = STRATEGIES[strategy].order == "computed" and order_from == "previous"
    for block, start in enumerate(range(0, max(n, 1), block_size)):
        q_b, k_b = q[:, :, start : start + block_size], k
        if order is not None and n > 0 and not (first_is_exact and block == 0):
            index = order[:, :, block].long().unsqueeze(2)  # [B, H, 1, d]
            q_b = q_b.gather(3, index.expand(-1, -1, q_b.shape[2], -1))
            k_b = k_b.gather(3, index.expand(-1, -1, m, -1))
            groups = math.ceil(d / group_size)
            if STRATEGIES[strategy].members == "one":
                if key_means is not None:  # [B, H, 1, d]
                    means = key_means[:, :, min(block, key_means.shape[2] - 1)].unsqueeze(2).gather(3, index)
                    k_b = torch.cat([k_b[..., :groups], means[..., groups:].expand(-1, -1, m, -1)], 3)
                else:
                    q_b, k_b = q_b[..., :groups], k_b[..., :groups]
            else:
                q_runs, k_runs = q_b.split(group_size, 3), k_b.split(group_size, 3)
                q_b = torch.stack([run.mean(3) if estimator == "mean" else run[..., 0] for run in q_runs], 3)
                k_b = torch.stack([run.sum(3) for run in k_runs], 3)
        rows.append(q_b @ k_b.transpose(2, 3))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = 1 / math.sqrt(d) if scale is None else scale
    scores, of_all = torch.cat(rows, 2).to(wide) * scale, (q @ k.transpose(2, 3)).to(wide) * scale
    if softcap:
        scores, of_all = (softcap * torch.tanh(s / softcap) for s in (scores, of_all))
    near = None
    if window is not None or sinks > 0:
        offset = m - n if causal == "bottom_right" else key_offset or 0
        near = near_keys(n, m, block_size if block_size < n else 128, window, sinks, offset)
        scores = torch.where(near, of_all, scores)
    if causal != "none":
        offset = m - n if causal == "bottom_right" else 0
        mask = torch.ones(n, m, dtype=torch.bool).tril(offset)
    if tuple(window_size) != (-1, -1):
        seen = in_window(n, m, window_size, m - n if causal == "bottom_right" else key_offset or 0)
        scores, of_all = (s.masked_fill(~seen, -math.inf) for s in (scores, of_all))
    if mask is not None and mask.dtype == torch.bool:
        scores, of_all = (s.masked_fill(~mask, -math.inf) for s in (scores, of_all))
    elif mask is not None:
        scores, of_all = scores + mask, of_all + mask
    halves = ()
    if skip:
        gone, *halves = skipped_keys(scores, near, skip)
        scores = torch.where(gone, -math.inf, of_all if finish else scores)
    lse = scores.logsumexp(3)
    seen = lse > -math.inf
    weights = torch.exp(scores - torch.where(seen, lse, 0).unsqueeze(3)) * seen.unsqueeze(3)
    return weights.to(q.dtype) @ v, lse, *halves


def in_window(n, m, window_size, offset):
    """Whether a row sees a key by a sliding window, [n, m]."""
    left, right = window_size
    distance = torch.arange(m) - (torch.arange(n) + offset)[:, None]  # of the key from the one beside the row
    return ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))


def near_keys(n, m, length, window, sinks, offset):
    """Whether a key is near a row, [n, m]; so many rows have the same near keys, and 128 keys are near together."""
    near = torch.zeros(n, m, dtype=torch.bool)
    for first in range(0, n, length):
        low, high = first + offset - (window or 0), min(first + length, n) - 1 + offset + (window or 0)
        for tile in range(0, m, 128):
            keys = range(tile, min(tile + 128, m))
            has_window = window is not None and any(low <= key <= high for key in keys)
            near[first : first + length, tile : tile + 128] = tile < sinks or has_window
    return near


def skipped_keys(scores, near, skip):
    """(the far keys of each row that are skipped with its 64 rows, how many halves of tiles are kept, and of how many).

    Asserts that the largest score of no half is within rounding of its bound."""
    lse = scores.masked_fill(~near, -math.inf).logsumexp(3, keepdim=True)
    seen = ~near & (scores > -math.inf)
    above = scores - lse - math.log(skip)
    kept = seen & ((above > 0) | (lse == -math.inf))
    gone, counts = torch.zeros_like(seen), [0, 0]
    for row in range(0, scores.shape[2], 64):
        for key in range(0, scores.shape[3], 64):
            half = (..., slice(row, row + 64), slice(key, key + 64))
            largest = above[half].masked_fill(~seen[half], -math.inf).amax((2, 3))
            assert not (largest.abs() < 1e-6).any()
            is_kept = kept[half].any(3).any(2)  # [B, H]
            gone[half] = ~near[half[1:]] & ~is_kept[..., None, None]
            counts[0] += is_kept.sum().item()
            counts[1] += seen[half].any(3).any(2).sum().item()
    return gone, *counts


def require_no_worse(actual, exact, plain, what=""):
    """`actual` errs at most twice as much as `plain`, which a plain implementation in the same dtype gives."""
    assert actual.shape == exact.shape and torch.equal(actual.isfinite(), exact.isfinite()), what
    finite = exact.isfinite()
    actual, exact, plain = (tensor.detach()[finite].double() for tensor in (actual, exact, plain))
    if actual.numel() == 0:
        return
    eps = torch.finfo(torch.float32).eps
    bound = 2 * (plain - exact).abs().max() + 4 * eps * exact.abs().max() + eps**2
    worst = (actual - exact).abs().argmax()
    difference = (actual - exact).abs()[worst]
    assert difference <= bound, f"{what}: {actual[worst]} for {exact[worst]} at {worst}, bound {bound}"


def pytest_sessionfinish():
    """The time of the programs that programs.py forked counts as that of the tests, which wait for their server."""
    multiprocessing.forkserver._forkserver._stop()
