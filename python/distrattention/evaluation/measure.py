# SPDX-License-Identifier: Apache-2.0
"""Errors and times of one attention call against exact attention. Memory does not grow with Nq times Nk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import core
from ..settings import EXACT, Settings


@dataclass
class Call:
    """One attention call."""

    query: Tensor  # [..., Hq, Nq, d]
    key: Tensor  # [..., Hkv, Nk, d]
    value: Tensor  # [..., Hkv, Nk, dv]
    mask: Tensor | None = None  # broadcasts to [..., Hq, Nq, Nk]
    causal: str = "none"  # or "top_left", "bottom_right"
    scale: float | None = None
    key_offset: int | None = None

    def run(self, settings: Settings) -> tuple[Tensor, Tensor]:
        """O [..., Hq, Nq, dv] and LSE [..., Hq, Nq]."""
        tensors = (self.query, self.key, self.value, self.mask)
        return core.attend(*tensors, self.causal, self.scale, settings, key_offset=self.key_offset)

    def count(self, settings: Settings) -> tuple[int, int]:
        """Of the far halves of tiles in which a row sees a far key: how many `skip` keeps, and how many there are."""
        tensors = (self.query, self.key, self.value, self.mask)
        options = {"key_offset": self.key_offset, "counting": True}
        *_, halves = core.attend(*tensors, self.causal, self.scale, settings, **options)
        return tuple(halves.flatten(0, -2).sum(0, dtype=torch.int64).tolist())

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
        if settings.is_exact:
            return EXACT
        tensors = (self.query, self.key, self.value, self.mask)
        try:
            found = core.explain(*tensors, self.causal, self.scale, settings, key_offset=self.key_offset)
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        if found["strategy"] == "exact" or core.resolve(settings, self.query.shape[-1])[0] == 1:
            of_exact = {"strategy": "exact", "group_size": None, "finish": False, "order": None, "estimator": "mean"}
            return replace(settings, **of_exact) if settings.skip else EXACT
        return replace(settings, strategy=found["strategy"], order_from=found["order_from"])

    def columns(self, settings: Settings) -> tuple[Tensor | None, Tensor | None]:
        """The columns' order, int32 [B, Hq, blocks, d], None for exact attention, and the means of the keys, float32
        [B, H, blocks or 1, d], where far scores keep them. `settings` are resolved."""
        options = core.options_of(settings, self.query.shape[-1], self.key_offset)
        return core.columns_of(four_axes(self.query), four_axes(self.key), self.causal, settings, options, flat=False)


def four_axes(tensor: Tensor) -> Tensor:
    """[..., H, N, d] as [B, H, N, d]."""
    return tensor[(None,) * (4 - tensor.dim())].flatten(0, -4)


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
