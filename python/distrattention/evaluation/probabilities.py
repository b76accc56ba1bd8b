# SPDX-License-Identifier: Apache-2.0
"""How far the probabilities of a setting are from exact ones, by the method's equations in float32. Memory does not
grow with Nq times Nk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import core
from ..flops import NEAR_TILE
from ..settings import STRATEGIES, Settings
from .measure import Call, four_axes

CHUNK = 1 << 22  # scores held at a time, more only where one row of every head has more
HALF = 64  # rows, and keys, that are skipped together

Columns = tuple[Tensor | None, Tensor | None]


def total_variations(
    call: Call, settings: Sequence[Settings], columns: Sequence[Columns], max_rows: int
) -> list[float]:
    """Of each setting, the mean over rows of 1/2 sum_j |P_ij - P_exact_ij|, from 0 to 1.

    settings are resolved, columns are `call.columns()` of each. About `max_rows` rows, evenly spread over each head and
    at least one a head, are looked at, where keys are skipped in runs of the 64 rows that are skipped together; a row
    that sees no key counts as 0. With the order of its block a row of Q becomes Q~, which is q-hat spread over the d
    columns, and the approximate scores of far keys are scale Q~ K^T = scale q-hat k-hat^T.
    """
    q, k = four_axes(call.query), four_axes(call.key)
    heads, queries, keys = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    sums, count = [0.0] * len(settings), 0
    if heads * queries * keys == 0:
        return sums
    k = k.float()
    together = HALF if any(setting.skip for setting in settings) else 1
    for rows in _sampled(queries, max(1, max_rows // heads), together, heads * keys, q.device):
        count += heads * len(rows)
        q_rows = q[:, :, rows].float()  # [B, Hq, rows, d]
        exact_scores = scores_of(call, q_rows, k, rows)
        exact = probabilities_of(exact_scores)
        for n, (setting, of_setting) in enumerate(zip(settings, columns)):
            if of_setting[0] is None and not setting.skip:
                continue  # exact
            scores = approximate(call, setting, of_setting, q_rows, k, rows, exact_scores)
            sums[n] += probabilities_of(scores).sub_(exact).abs_().sum(dtype=torch.float64).item() / 2
    return [total / count for total in sums]


def _sampled(queries: int, count: int, together: int, scores: int, device: torch.device) -> Iterator[Tensor]:
    """About `count` of the rows, evenly spread, in runs of `together`, at a time as many as may be held."""
    if together == 1:
        per_head = min(queries, count)
        yield from (torch.arange(per_head, device=device) * queries // per_head).split(max(1, CHUNK // scores))
        return
    runs = -(-queries // together)
    chosen = min(runs, -(-count // together))
    starts = torch.arange(chosen, device=device) * runs // chosen * together
    for some in starts.split(max(1, CHUNK // (scores * together))):
        rows = (some[:, None] + torch.arange(together, device=device)).flatten()
        yield rows[rows < queries]


def approximate(
    call: Call, settings: Settings, columns: Columns, q: Tensor, k: Tensor, rows: Tensor, exact: Tensor,
    together: int = HALF,
) -> Tensor:  # fmt: skip
    """The scores [B, Hq, rows, Nk] of the rows `q`, -inf where keys are hidden or skipped; `exact` are exact ones. So
    many rows are skipped together, of which all or none are among the rows."""
    order, key_means = columns
    scores = exact
    if order is not None:
        spread = _spread(q, order, rows, settings)
        scores = scores_of(call, spread, k, rows)
        if key_means is not None:
            scores = scores + _of_dropped(call, q - spread, key_means, rows, settings)
    if settings.window is None and settings.sinks == 0:
        return scores
    near = is_near(call, settings, rows, k.shape[2])
    scores = torch.where(near, exact, scores)
    if settings.skip:
        kept = near | _is_kept(settings.skip, scores, near, rows // together)
        scores = (exact if settings.finish else scores).masked_fill(~kept, -torch.inf)
    return scores


def _spread(q: Tensor, order: Tensor, rows: Tensor, settings: Settings) -> Tensor:
    """Q~ [B, Hq, rows, d] of `q`, the rows with the numbers `rows`: q-hat of each group on all of its columns."""
    d, (size, length) = q.shape[-1], core.resolve(settings, q.shape[-1])
    block = rows // length
    columns = order[:, :, block].long()  # [B, Hq, rows, d]
    ordered = q.gather(-1, columns)
    position = torch.arange(d, device=q.device)
    group = position // size
    if STRATEGIES[settings.strategy].members == "one":  # the kept columns alone
        spread = torch.where(position < -(-d // size), ordered, 0)
    elif settings.estimator == "sample":
        spread = ordered[..., group * size]
    else:
        sums = torch.zeros_like(ordered).index_add_(-1, group, ordered)
        spread = (sums / torch.bincount(group, minlength=d))[..., group]
    spread = torch.empty_like(q).scatter_(-1, columns, spread)
    is_first_exact = settings.order_from == "previous" and STRATEGIES[settings.strategy].order == "computed"
    exact = (block == 0) & is_first_exact
    return torch.where(exact[:, None], q, spread)


def _of_dropped(call: Call, q: Tensor, key_means: Tensor, rows: Tensor, settings: Settings) -> Tensor:
    """What the dropped columns of `q` [B, Hq, rows, d], 0 elsewhere, add to far scores by the means of the keys."""
    if key_means.shape[2] > 1:
        _, length = core.resolve(settings, q.shape[-1])
        key_means = key_means[:, :, rows // length]
    means = key_means.repeat_interleave(q.shape[1] // key_means.shape[1], 1)  # [B, Hq, rows or 1, d]
    return _scale(call) * (q * means).sum(-1, keepdim=True)


def is_near(call: Call, settings: Settings, rows: Tensor, keys: int) -> Tensor:
    """Whether a key is near a row, [rows, Nk]."""
    queries = call.query.shape[-2]
    _, length = core.resolve(settings, call.query.shape[-1])
    length = NEAR_TILE if length >= queries else length
    tiles = torch.arange(keys, device=rows.device) // NEAR_TILE
    near = tiles < -(-min(settings.sinks, keys) // NEAR_TILE)
    if settings.window is None:
        return near.expand(len(rows), keys)
    first = rows // length * length
    last = (first + length).clamp_max(queries) - 1
    offset = call.key_offset or (keys - queries if call.causal == "bottom_right" else 0)
    low = (first + offset - settings.window).clamp_min(0)
    high = (last + offset + settings.window).clamp_max(keys - 1)
    within = (tiles >= (low // NEAR_TILE)[:, None]) & (tiles <= (high // NEAR_TILE)[:, None])
    return near | (within & (low <= high)[:, None])


def _is_kept(skip: float, scores: Tensor, near: Tensor, run_of_row: Tensor) -> Tensor:
    """Whether far keys are kept, [B, Hq, rows, Nk], where rows of one run are skipped together."""
    lse = scores.masked_fill(~near, -torch.inf).logsumexp(-1, keepdim=True)
    is_small = (scores <= lse + math.log(skip)) & (lse > -torch.inf)  # a row that sees no near key keeps all
    votes = ~near & (scores != -torch.inf) & ~is_small
    keys = scores.shape[-1]
    by_half = F.pad(votes, (0, -keys % HALF)).unflatten(-1, (-1, HALF)).any(-1)  # [B, Hq, rows, halves]
    runs, run = torch.unique_consecutive(run_of_row, return_inverse=True)
    of_runs = by_half.new_zeros((*by_half.shape[:2], len(runs), by_half.shape[-1]), dtype=torch.int32)
    of_runs.index_add_(2, run, by_half.int())
    return (of_runs > 0)[:, :, run].repeat_interleave(HALF, -1)[..., :keys]


def _scale(call: Call) -> float:
    return call.query.shape[-1] ** -0.5 if call.scale is None else call.scale


def scores_of(call: Call, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """S [B, Hq, rows, Nk] of the rows `q` [B, Hq, rows, d] with the numbers `rows`; -inf where a key is hidden."""
    batch, heads, count, d = q.shape
    queries, keys = call.query.shape[-2], k.shape[2]
    shared = q.reshape(batch, k.shape[1], -1, d)  # the query heads of a KV head, one below the other
    scores = (shared @ k.mT).mul_(_scale(call)).view(batch, heads, count, keys)
    if call.causal != "none":
        shift = keys - queries if call.causal == "bottom_right" else 0
        scores.masked_fill_(torch.arange(keys, device=q.device) > rows[:, None] + shift, -torch.inf)
    if call.mask is not None:
        mask = call.mask.expand(*call.query.shape[:-1], keys)[..., rows, :].reshape(scores.shape)
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
    return scores


def probabilities_of(scores: Tensor) -> Tensor:
    """P of scores; a row that sees no key is 0."""
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse.clamp_min(torch.finfo(lse.dtype).min)).exp_()
