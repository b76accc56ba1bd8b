# SPDX-License-Identifier: Apache-2.0
"""Errors and times of one attention call against exact attention. Memory does not grow with Nq times Nk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import core, ops
from ..settings import EXACT, STRATEGIES, Settings

_CHUNK = 1 << 22  # scores held at a time, more only where one row of every head has more


@dataclass
class Call:
    """One attention call."""

    query: Tensor  # [..., Hq, Nq, d]
    key: Tensor  # [..., Hkv, Nk, d]
    value: Tensor  # [..., Hkv, Nk, dv]
    mask: Tensor | None = None  # broadcasts to [..., Hq, Nq, Nk]
    causal: str = "none"  # or "top_left", "bottom_right"
    scale: float | None = None

    def run(self, settings: Settings) -> tuple[Tensor, Tensor]:
        """O [..., Hq, Nq, dv] and LSE [..., Hq, Nq]."""
        tensors = (self.query, self.key, self.value, self.mask)
        return core.attend(*tensors, self.causal, self.scale, settings)

    def torch(self) -> Tensor | None:
        """O by torch's own attention; None where that has no such call."""
        if self.causal == "bottom_right" and self.query.shape[-2] != self.key.shape[-2]:
            return None
        gqa = self.query.dim() > 2 and self.query.shape[-3] != self.key.shape[-3]
        tensors = (self.query, self.key, self.value, self.mask)
        return F.scaled_dot_product_attention(
            *tensors, is_causal=self.causal != "none", scale=self.scale, enable_gqa=gqa
        )

    def resolve(self, settings: Settings) -> Settings:
        """The settings with what `auto` takes in its place. Raises ValueError where they do not fit the call."""
        if settings.strategy == "exact":
            return EXACT
        tensors = (self.query, self.key, self.value, self.mask)
        try:
            found = core.explain(*tensors, self.causal, self.scale, settings)
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from None
        if found["strategy"] == "exact":
            return EXACT
        return replace(settings, strategy=found["strategy"], order_from=found["order_from"])

    def order(self, settings: Settings) -> Tensor | None:
        """The columns' order, int32 [B, Hq, blocks, d]; None for exact attention. `settings` are resolved."""
        group_size, block_size = core.resolve(settings, self.query.shape[-1])
        if group_size == 1:
            return None
        q, k = _four(self.query), _four(self.key)
        if settings.order is not None:
            return ops.order_of_caller(settings.order, q, block_size)
        grouping = (settings.strategy, group_size, block_size, settings.order_from, settings.seed)
        return ops.make_grouping(q, k, self.causal, *grouping)


def output_errors(output: Tensor, exact: Tensor) -> tuple[float, float]:
    """|O - O_exact| / |O_exact| (Frobenius norm), and the smallest cosine between a row of O and of O_exact where the
    latter is not 0 (0 where the former is; 1 if no row is left)."""
    output, exact = output.float(), exact.float()
    difference = torch.linalg.vector_norm(output - exact, dtype=torch.float64).item()
    norm = torch.linalg.vector_norm(exact, dtype=torch.float64).item()
    of_exact = torch.linalg.vector_norm(exact, dim=-1)
    norms = torch.linalg.vector_norm(output, dim=-1) * of_exact
    cosines = torch.where(norms == 0, 0, (output * exact).sum(-1) / norms)[of_exact > 0]
    error = difference / norm if norm else torch.inf
    return error if difference else 0.0, cosines.min().item() if cosines.numel() else 1.0


def squares_by_head(tensor: Tensor) -> Tensor:
    """The sum of the squares of O [..., Hq, Nq, dv] for each head, float64 [Hq] ([1] where O has no heads)."""
    norms = torch.linalg.vector_norm(tensor.float(), dim=(-2, -1), dtype=torch.float64)
    return norms.square().reshape(-1, norms.shape[-1] if norms.dim() else 1).sum(0)


def total_variations(
    call: Call, settings: Sequence[Settings], orders: Sequence[Tensor | None], max_rows: int
) -> list[float]:
    """Of each setting, the mean over rows of 1/2 sum_j |P_ij - P_exact_ij|, from 0 to 1.

    settings are resolved, orders are `call.order()` of each. About `max_rows` rows, evenly spread over each head and at
    least one a head, are looked at; a row that sees no key counts as 0. In float32, by the method's equations: with the
    order of its block a row of Q becomes Q~, which is q-hat spread over the d columns, and the approximate scores are
    scale Q~ K^T = scale q-hat k-hat^T.
    """
    q, k = _four(call.query), _four(call.key)
    heads, queries, keys = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    sums = [0.0] * len(settings)
    if heads * queries * keys == 0:
        return sums
    k = k.float()
    per_head = min(queries, max(1, max_rows // heads))
    sampled = torch.arange(per_head, device=q.device) * queries // per_head
    for rows in sampled.split(max(1, _CHUNK // (heads * keys))):
        q_rows = q[:, :, rows].float()  # [B, Hq, rows, d]
        exact = _probabilities(call, q_rows, k, rows)
        for n, (setting, order) in enumerate(zip(settings, orders)):
            if order is not None:
                p = _probabilities(call, _spread(q_rows, order, rows, setting), k, rows)
                sums[n] += p.sub_(exact).abs_().sum(dtype=torch.float64).item() / 2
    return [total / (heads * per_head) for total in sums]


def _four(tensor: Tensor) -> Tensor:
    """[..., H, N, d] as [B, H, N, d]."""
    return tensor[(None,) * (4 - tensor.dim())].flatten(0, -4)


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


def _probabilities(call: Call, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """P [B, Hq, rows, Nk] of the rows `q` [B, Hq, rows, d] with the numbers `rows`; a row that sees no key is 0."""
    batch, heads, count, d = q.shape
    queries, keys = call.query.shape[-2], k.shape[2]
    scale = d**-0.5 if call.scale is None else call.scale
    shared = q.reshape(batch, k.shape[1], -1, d)  # the query heads of a KV head, one below the other
    scores = (shared @ k.mT).mul_(scale).view(batch, heads, count, keys)
    if call.causal != "none":
        shift = keys - queries if call.causal == "bottom_right" else 0
        scores.masked_fill_(torch.arange(keys, device=q.device) > rows[:, None] + shift, -torch.inf)
    if call.mask is not None:
        mask = call.mask.expand(*call.query.shape[:-1], keys)[..., rows, :].reshape(scores.shape)
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
    lse = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(lse.clamp_min(torch.finfo(lse.dtype).min)).exp_()


def times_in_turn(runs: Sequence[Callable[[], object]], repeats: int, device: torch.device) -> list[tuple[float, ...]]:
    """The milliseconds of each run, `repeats` of them; all run in turn, so that a drift of the machine's speed meets
    all alike. They should have run once before."""
    samples = [[_milliseconds(run, device) for run in runs] for _ in range(repeats)]
    return list(zip(*samples))


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return (time.perf_counter() - start) * 1e3
