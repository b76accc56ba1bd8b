# SPDX-License-Identifier: Apache-2.0
"""The settings of the operator `attend` in three numbers, which take less time to pass than their names."""

import functools

from distrattention.settings import ESTIMATORS, ORDERS_FROM, STRATEGIES

_CORNERS = ("none", "top_left", "bottom_right")
_NAMES = (_CORNERS, tuple(STRATEGIES), ESTIMATORS, ORDERS_FROM, (False, True))  # as in python/tensors.cpp
_GROUP_SIZES, _BLOCK_SIZES = 2**10, 2**40
_LARGEST_WINDOW = _LARGEST_SINKS = 2**30 - 1  # a longer one is that long, which no sequence exceeds
_WINDOWS = 2**31


def pack(causal, strategy, group_size, block_size, estimator, order_from, grouped_heads=True):
    """The settings but for near keys in one number. A block of more than 2^40 - 1 rows is one of so many.
    grouped_heads: whether Hq may be a multiple of H."""
    packed, place = 0, 1
    for name, names in zip((causal, strategy, estimator, order_from, grouped_heads), _NAMES):
        packed += names.index(name) * place
        place *= len(names)
    return packed + place * (group_size + _GROUP_SIZES * min(block_size, _BLOCK_SIZES - 1))


@functools.lru_cache
def unpack(packed):
    """(causal, strategy, group_size, block_size, estimator, order_from) of what pack() returned."""
    found = []
    for names in _NAMES:
        packed, index = divmod(packed, len(names))
        found.append(names[index])
    causal, strategy, estimator, order_from, _ = found
    block_size, group_size = divmod(packed, _GROUP_SIZES)
    return causal, strategy, group_size, block_size, estimator, order_from


def pack_near(window, sinks, finish):
    """What is near in one number; 0: nothing."""
    return finish + 2 * (_distance(window) + _WINDOWS * min(sinks, _LARGEST_SINKS))


def unpack_near(packed):
    """(window, sinks, finish) of what pack_near() returned."""
    packed, finish = divmod(packed, 2)
    sinks, of_window = divmod(packed, _WINDOWS)
    return _undistance(of_window), sinks, bool(finish)


def pack_window_size(left, right):
    """A sliding window in one number; 0: none."""
    return _distance(left) + _WINDOWS * _distance(right)


def unpack_window_size(packed):
    """(left, right) of what pack_window_size() returned."""
    right, left = divmod(packed, _WINDOWS)
    return _undistance(left), _undistance(right)


def _distance(window):
    return 0 if window is None else 1 + min(window, _LARGEST_WINDOW)


def _undistance(packed):
    return packed - 1 if packed else None
