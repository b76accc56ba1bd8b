# SPDX-License-Identifier: Apache-2.0
"""How attention is approximated: the dial."""

import dataclasses
import operator

STRATEGIES = ("auto", "exact", "lsh", "energy")
ESTIMATORS = ("sample", "mean")
ORDERS_FROM = ("own", "previous")
DEFAULT_BLOCK = 128  # l, the rows of Q that share one order of the columns
_INT64_MAX = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every entry of the package takes as keywords, as one immutable value.

    strategy: "auto" (exact, unless a group_size is given: then "energy" where that pays), "exact", "lsh" (the paper's:
        columns of Q with neighbouring hashes share a group) or "energy" (keep the ceil(d / G) columns that weigh most).
    group_size: G, the columns of a group; 1 is exact attention, at most d. None: 2, and 1 for "auto".
    block_size: l, the rows of Q that share one order of the columns; None: 128. At least the number of queries: one
        order for all.
    estimator: what stands for a group's columns of Q under "lsh", their "mean" or a "sample" (the paper).
    order_from: the rows that a block's order is computed from: "own" (the paper; a row sees a little of its future) or
        "previous" (the block before: strictly causal). None: "previous" for causal calls that require a gradient, else
        "own".
    seed: of the projections of "lsh", 0 to 2^63 - 1.

    Raises ValueError or TypeError naming the value and what is allowed.
    """

    strategy: str = "auto"
    group_size: int | None = None
    block_size: int | None = None
    estimator: str = "mean"
    order_from: str | None = None
    seed: int = 0

    def __post_init__(self):
        _require_name("strategy", self.strategy, STRATEGIES)
        _require_name("estimator", self.estimator, ESTIMATORS)
        if self.order_from is not None:
            _require_name("order_from", self.order_from, ORDERS_FROM)
        for name, low in (("group_size", 1), ("block_size", 1), ("seed", 0)):
            value = getattr(self, name)
            if name == "seed" or value is not None:
                object.__setattr__(self, name, require_int(name, value, low))  # the class is frozen

    @property
    def taken_group_size(self):
        """G, by the default of the strategy where none is named."""
        return self.group_size or (1 if self.strategy == "auto" else 2)

    def asdict(self):
        """The settings as keywords of scaled_dot_product_attention()."""
        return {field: getattr(self, field) for field in FIELDS}


FIELDS = tuple(field.name for field in dataclasses.fields(Settings))


def _require_name(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def require_int(name, value, low):
    """The value as an int, which may be one of numpy's; raises TypeError or ValueError naming it."""
    try:
        number = operator.index(None if isinstance(value, bool) else value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; allowed: an int from {low} on") from None
    if not low <= number <= _INT64_MAX:
        raise ValueError(f"{name} is {number}; allowed: {low} to 2^63 - 1")
    return number
