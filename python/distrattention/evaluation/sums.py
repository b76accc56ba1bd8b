# SPDX-License-Identifier: Apache-2.0
"""What batches add up to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .result import Layer, Measurement, Time, Whole, speed

Samples = Sequence[float]  # milliseconds of one run, repeated


class Clock:
    """Times of one thing with torch or as it is, with exact attention twice, and with each setting."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Samples]] = []

    def add(self, torch: Samples, exact: Samples, again: Samples, *of_settings: Samples) -> None:
        """The samples of one batch."""
        self.batches.append((torch, [*exact, *again], exact, again, *of_settings))

    def times(self) -> tuple[Time, Time, tuple[float, float], tuple[Time, ...]]:
        """(torch or as it is, exact, the medians of its two runs, the settings)."""
        torch, exact, first, again, *of_settings = (
            Time(*(statistics.fmean(map(of, samples)) for of in (statistics.median, min, max)))
            for samples in zip(*self.batches)
        )
        return torch, exact, (first.ms, again.ms), tuple(of_settings)


@dataclass
class SettingSums:
    """The errors of one setting in one call."""

    strategy: str
    squares: Tensor | float = 0.0  # of O - O_exact, [Hq]
    exact_squares: Tensor | float = 0.0  # of O_exact, [Hq]
    cosine: float = 1.0
    variations: list[float] = field(default_factory=list)
    kept: int = 0  # far halves of tiles
    halves: int = 0  # of so many

    def count(self, kept: int, halves: int) -> None:
        self.kept, self.halves = self.kept + kept, self.halves + halves

    def kept_share(self) -> float | None:
        return self.kept / self.halves if self.halves else None

    def add(self, squares: Tensor, exact_squares: Tensor, cosine: float, variation: float) -> None:
        self.squares, self.exact_squares = self.squares + squares, self.exact_squares + exact_squares
        self.cosine = cosine if cosine != cosine else min(self.cosine, cosine)  # not a number stays
        self.variations.append(variation)


@dataclass
class LayerSums:
    """One call of the model in several batches."""

    facts: dict  # the fields of Layer that tell calls apart
    left_out: str | None = None
    batches: int = 0
    has_torch: bool = True
    clock: Clock = field(default_factory=Clock)
    settings: list[SettingSums] = field(default_factory=list)

    def layer(self, per_head: bool) -> Layer:
        if self.left_out is not None:
            return Layer(**self.facts, batches=self.batches, left_out=self.left_out)
        torch, exact, twins, times = self.clock.times()
        measurements = tuple(
            Measurement(
                sums.strategy,
                relative(sums.squares.sum(), sums.exact_squares.sum()),
                sums.cosine,
                statistics.fmean(sums.variations),
                time,
                speed(exact.ms, time.ms, twins),
                tuple(map(relative, sums.squares, sums.exact_squares)) if per_head else None,
                sums.kept_share(),
            )
            for sums, time in zip(self.settings, times)
        )
        times = {"exact": exact, "twins": twins, "torch": torch if self.has_torch else None}
        return Layer(**self.facts, batches=self.batches, **times, measurements=measurements)


def relative(squares: Tensor, exact_squares: Tensor) -> float:
    """|O - O_exact| / |O_exact| of the sums of their squares."""
    difference, exact = float(squares) ** 0.5, float(exact_squares) ** 0.5
    return difference / exact if exact else float("inf") if difference else 0.0


def whole(clock: Clock, layers: Sequence[Layer], batches: int) -> Whole:
    """The model's time, and the share that the calls of `layers`, each by itself, have in it."""
    as_it_is, exact, twins, times = clock.times()

    def share(of_layers: Sequence[Time], time: Time) -> float:
        calls = zip(of_layers, layers)
        return sum(of_layer.ms * layer.batches / batches for of_layer, layer in calls) / time.ms

    shares = (share([layer.measurements[n].time for layer in layers], time) for n, time in enumerate(times))
    speeds = tuple(speed(exact.ms, time.ms, twins) for time in times)
    return Whole(as_it_is, exact, twins, times, speeds, share([layer.exact for layer in layers], exact), tuple(shares))
