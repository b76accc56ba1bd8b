# SPDX-License-Identifier: Apache-2.0
"""How attention is approximated: the dial."""

import dataclasses
import numbers
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

from distrattention import _tables

_INT64_MAX = 2**63 - 1


class StrategyTraits(NamedTuple):
    """A row of the library's table of strategies (distr/grouping.h)."""

    members: str  # "one": a group is one column, others are dropped; "group_size": so many columns
    order: str  # "none"; "computed": by make_grouping(); "caller": by the caller, who has to bring it
    reads_keys: bool  # make_grouping() reads K
    has_estimator: bool
    group_size: int  # where a call names none


STRATEGIES = {name: StrategyTraits(*row) for name, row in _tables.STRATEGIES.items()}
ESTIMATORS, ORDERS_FROM = _tables.ESTIMATORS, _tables.ORDERS_FROM
DEFAULTS = _tables.DEFAULTS
DEFAULT_BLOCK = DEFAULTS["block_size"]  # l, the rows of Q that share one order of the columns
MAX_DISTANCE = _tables.MAX_DISTANCE  # of window, sinks and key_offset


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """What every entry of the package takes as keywords, or as one immutable value by `settings=`.

    strategy: "auto" (exact, unless a group_size is given: then "energy" where that pays), "exact", "lsh" (the paper's:
        columns of Q with neighbouring hashes share a group), "energy" (keep the ceil(d / G) columns that weigh most) or
        "given" (keep the first ceil(d / G) columns of `order`).
    group_size: G, the columns of a group; 1 is exact attention, at most d. None: 2, and 1 for "auto" and "exact".
    block_size: l, the rows of Q that share one order of the columns; None: 128. At least the number of queries: one
        order for all.
    estimator: what stands for a group's columns of Q under "lsh", their "mean" or a "sample" (the paper).
    order_from: the rows that a block's order is computed from: "own" (the paper; a row sees a little of its future) or
        "previous" (the block before: strictly causal, and the first block is exact). "auto": "previous" in causal calls
        under "lsh", "energy" and "auto", else "own". A mask does not tell whether it is causal.
    seed: of the projections of "lsh", 0 to 2^63 - 1.
    window, sinks: near keys, which are exact whatever the strategy: those at most `window` keys from a row of the
        block, and the first `sinks` keys, in whole tiles of 128 keys. None and 0: none are near. With them, columns
        that "energy" drops keep their mean over the keys. 512 and 128 serve language models well.
    skip: a probability from 0 to below 1, for calls without gradients: 64 far keys are left out for 64 rows where each
        of them would have less, by its score against the row's near keys alone, which window or sinks have to name.
        With "exact", too. None or 0: nothing is left out. Which far keys a row keeps depends on the 63 rows beside it.
    finish: with `skip`, where columns are dropped: far scores only decide what is left out, and what is kept is exact.
    order: an order of the columns to take instead of one that is computed: an integer tensor [B or 1, Hq, blocks or 1,
        d], each row a permutation of 0 to d - 1, for "given" and "energy" the heaviest first. On CUDA a row that is
        none gives wrong results, or an error of the device. It is not copied: do not change it while the settings are
        in use.

    Two settings with an order are equal if their orders are one and the same tensor. Raises ValueError or TypeError
    naming the value and what is allowed.
    """

    strategy: str = DEFAULTS["strategy"]
    group_size: int | None = None
    block_size: int | None = None
    estimator: str = DEFAULTS["estimator"]
    order_from: str = DEFAULTS["order_from"]
    seed: int = DEFAULTS["seed"]
    window: int | None = DEFAULTS["window"]
    sinks: int = DEFAULTS["sinks"]
    skip: float | None = float(DEFAULTS["skip"])
    finish: bool = DEFAULTS["finish"]
    order: Any = None  # a torch.Tensor

    def __post_init__(self) -> None:
        require_name("strategy", self.strategy, STRATEGIES)
        require_name("estimator", self.estimator, ESTIMATORS)
        require_name("order_from", self.order_from, ORDERS_FROM)
        for name, low in (("group_size", 1), ("block_size", 1), ("seed", 0)):
            value = getattr(self, name)
            if name == "seed" or value is not None:
                object.__setattr__(self, name, require_int(name, value, low))  # the class is frozen
        if self.strategy == "exact":
            for name, allowed in (("group_size", (None, 1)), ("estimator", (DEFAULTS["estimator"],))):
                if getattr(self, name) not in allowed:
                    found = f"{name} is {getattr(self, name)!r} with strategy 'exact'"
                    raise ValueError(f"{found}; allowed: {', '.join(map(repr, allowed))}, as nothing is grouped")
        self._check_near_keys()
        if self.order is not None:
            _check_order(self.strategy, self.order)
        elif STRATEGIES[self.strategy].order == "caller":
            allowed = "a tensor, [B or 1, Hq, blocks or 1, d]"
            raise ValueError(f"strategy is {self.strategy!r} and order None; allowed: {allowed}")

    def _check_near_keys(self) -> None:
        window = None if self.window is None else require_int("window", self.window, 0, MAX_DISTANCE)
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "sinks", require_int("sinks", self.sinks, 0, MAX_DISTANCE))
        object.__setattr__(self, "skip", _probability("skip", 0.0 if self.skip is None else self.skip))
        if not isinstance(self.finish, bool):
            raise TypeError(f"finish is {self.finish!r}; allowed: True or False")
        if self.skip and window is None and self.sinks == 0:
            raise ValueError(
                f"skip is {self.skip} without near keys, against which it is measured; allowed: with window or sinks"
            )
        if self.finish and not self.skip:
            raise ValueError("finish is True without skip, which it is about; allowed: with a skip above 0")
        if self.finish and not self.drops_columns:
            found = f"finish is True with strategy {self.strategy!r} and group_size {self.taken_group_size}"
            raise ValueError(f"{found}, which drop no columns; allowed: 'energy', 'given' or 'auto' and 2 and above")

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Settings) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self):
        return (*(getattr(self, field) for field in FIELDS[:-1]), id(self.order))

    @property
    def taken_group_size(self) -> int:
        """G, by the default of the strategy where none is named."""
        return self.group_size or STRATEGIES[self.strategy].group_size

    @property
    def drops_columns(self) -> bool:
        """Whether far scores leave out columns of Q and K, as those of "energy" do ("auto": where it takes that)."""
        row = STRATEGIES[self.strategy]
        return row.members == "one" and row.order != "none" and self.taken_group_size > 1

    @property
    def is_exact(self) -> bool:
        """Whether this is exact attention by its name: strategy "exact", and nothing is skipped."""
        return self.strategy == "exact" and not self.skip

    def asdict(self) -> dict[str, Any]:
        """The settings as keywords of scaled_dot_product_attention()."""
        return {field: getattr(self, field) for field in FIELDS}


FIELDS = tuple(field.name for field in dataclasses.fields(Settings))  # the order is the last
_DEFAULTS = tuple([getattr(Settings, name) for name in FIELDS])


class Fields(TypedDict, total=False):
    """The fields of Settings as keywords."""

    strategy: str
    group_size: int | None
    block_size: int | None
    estimator: str
    order_from: str
    seed: int
    window: int | None
    sinks: int
    skip: float | None
    finish: bool
    order: Any


def chosen(settings: Settings | None, fields: Mapping[str, Any]) -> Settings:
    """What a function was given: `settings`, or the fields of Settings that were named. Raises TypeError for both, and
    for a name that is no field's."""
    if settings is None:
        if others := [name for name in fields if name not in FIELDS]:
            raise TypeError(f"{', '.join(others)} is not known; allowed: the fields of Settings: {', '.join(FIELDS)}")
        return Settings(**fields)
    if not isinstance(settings, Settings):
        raise TypeError(f"settings is {settings!r}; allowed: distrattention.Settings, or its fields by name")
    if fields:
        raise TypeError(f"settings and {', '.join(fields)} were both given; allowed: one or the other")
    return settings


def fields_of(settings: Settings, given: tuple) -> tuple:
    """The fields of `settings`, for a function that has a keyword for each; `given` is what these hold. Raises
    TypeError where one of them is set, too."""
    if given != _DEFAULTS or not isinstance(settings, Settings):
        columns = zip(FIELDS, given, _DEFAULTS)
        settings = chosen(settings, {name: value for name, value, default in columns if value != default})
    return tuple([getattr(settings, name) for name in FIELDS])


def counted(number, noun, plural=None):
    """"1 head" or "2 heads"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def require_name(name, value, allowed):
    """Raises ValueError, naming it, unless the value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def require_int(name, value, low, high=_INT64_MAX):
    """The value as an int, which may be one of numpy's; raises TypeError or ValueError naming it."""
    try:
        number = operator.index(None if isinstance(value, bool) else value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; allowed: an int from {low} on") from None
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}; allowed: {low} to {'2^63 - 1' if high == _INT64_MAX else high}")
    return number


def _probability(name, value):
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; allowed: None, or a probability from 0 to below 1")
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value}; allowed: 0 (nothing is skipped), or a probability below 1")
    return float(value)


def _check_order(strategy, order):
    """Raises unless the order is a tensor that the strategy can take; its sizes are those of a call to check."""
    import torch  # which the order's type has loaded

    if not isinstance(order, torch.Tensor):
        raise TypeError(f"order is of type {type(order).__name__}; allowed: None or a torch.Tensor")
    if order.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"order is {order.dtype}; allowed: int64, int32")
    if order.dim() != 4:
        raise ValueError(f"order has {counted(order.dim(), 'axis', 'axes')}; allowed: 4, [B or 1, Hq, blocks or 1, d]")
    if strategy == "auto" or STRATEGIES[strategy].order == "none":
        takers = ", ".join(name for name, row in STRATEGIES.items() if name != "auto" and row.order != "none")
        raise ValueError(f"order was given with strategy {strategy!r}; allowed: {takers}")


EXACT = Settings("exact")
