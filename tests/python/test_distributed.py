# SPDX-License-Identifier: Apache-2.0
"""Attention of several processes is that of one: results, gradients and errors, with gloo on the CPU."""

import distributed_cases
import pytest
import torch
from distributed_cases import BY_OTHER_TRANSPORT, CASES, DTENSORS, FAULTS, SECONDS, ranks_of

from distrattention import ops
from distrattention.core import columns_of, options_of

NAMES = ("out", "lse", "gradient of q", "gradient of k", "gradient of v")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of the processes found."""
    results = distributed_cases.run_all(tmp_path_factory.mktemp("processes"))
    for rank, of_rank in enumerate(results):
        assert "failed" not in of_rank, f"rank {rank}: {of_rank['failed']}"
    return results


def of_one_process(case, function, dtype):
    """(out, lse, gradients of q, k, v) of `function` of the whole sequence in the dtype."""
    q, k, v, grad_out, grad_lse = (tensor.to(dtype) for tensor in case.tensors())
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out, lse = function(q, k, v)
    return (out, lse, *torch.autograd.grad((out, lse), (q, k, v), (grad_out, grad_lse.to(lse.dtype))))


def by_textbook(case, textbook):
    """A function of q, k and v: textbook attention with the order and the means that one process finds."""
    q, k, v, *_ = case.tensors()
    causal = "top_left" if case.causal else "none"
    options = options_of(case.settings, case.d)
    strategy, order_from, *_ = ops.explain(q, k, v, None, "forward", causal, case.scale, *options)
    options = (strategy, *options[1:4], order_from, *options[5:])
    order, means = columns_of(q, k, causal, case.settings, options, flat=False)
    _, group_size, block, estimator, _, window, sinks, *_ = options
    near = {} if strategy == "exact" else {"window": window, "sinks": sinks}
    return lambda q, k, v: textbook(
        q, k, v, causal=causal, scale=case.scale, order=order, strategy=strategy, group_size=group_size,
        block_size=block, estimator=estimator, order_from=order_from, key_means=means, **near,
    )  # fmt: skip


def check(found, name, textbook, no_worse_than, key=None):
    """The results of every rank are those of textbook attention, and of each other. key: under which they were found,
    the name of the case unless given."""
    case = CASES[name]
    attention = by_textbook(case, textbook)
    truth = of_one_process(case, attention, torch.float64)
    plain = of_one_process(case, attention, case.dtype)
    everyone = [of_rank[key or name] for of_rank in found[: ranks_of(case)]]
    for of_rank in everyone:
        assert of_rank["same bits"]
        for actual, exact, rough, what in zip(of_rank["results"], truth, plain, NAMES):
            no_worse_than(actual, exact, rough, what)
    assert all(torch.equal(*pair) for one in everyone[1:] for pair in zip(everyone[0]["results"], one["results"]))


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(found, name, textbook, no_worse_than):
    check(found, name, textbook, no_worse_than)


@pytest.mark.parametrize("name", BY_OTHER_TRANSPORT)
def test_peer_memory_equals_one_process(found, name, textbook, no_worse_than):
    check(found, name, textbook, no_worse_than, ("other transport", name))


def test_a_sequence_without_rows_has_none(found):
    for of_rank in found[:3]:
        assert of_rank["of no rows"] == [[1, 2, 0, 16]] * 4


@pytest.mark.parametrize("name", DTENSORS)
def test_dtensors_give_what_tensors_give(found, name):
    for of_rank in found[:4]:
        results, expected, placements = of_rank["dtensor"][name]
        for actual, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, wanted)
        axes = DTENSORS[name][3]
        assert [placement.is_shard(axis) for placement, axis in zip(placements, axes)] == [axis < 2 for axis in axes]


def test_after_errors_the_group_goes_on(found):
    for of_rank in found[:3]:
        assert all(map(torch.equal, of_rank["after faults"]["results"], of_rank["exact"]["results"]))


EXPECTED = {  # of the ranks 0 and 2, and where it differs, of rank 1, whose fault it is
    "dtype": ["dtype is torch.bfloat16 on rank 1 of the group and torch.float32 on rank 0; allowed: the same on all"],
    "heads": ["the shape of query but for its rows is [1, 4, 16] on rank 1 of the group and [1, 2, 16] on rank 0"],
    "window": ["window is 128 on rank 1 of the group and None on rank 0"],
    "is_causal": ["is_causal is True on rank 1 of the group and False on rank 0"],
    "gradients": ["whether gradients are recorded is True on rank 1 of the group and False on rank 0"],
    "rows": ["rank 1 of the ring ends after 124 rows of the sequence; allowed: a multiple of 16, the rows of a block"],
    "a bad key": ["rank 1 of the group cannot take part: ValueError: the last size of key is 3; allowed: 16, as query",
                  "the last size of key is 3; allowed: 16, as query"],
    "an order of other blocks": ["cannot take part: ValueError: order has the shape (1, 2, 3, 16); allowed: [1 or 1, 2",
                                 "order has the shape (1, 2, 3, 16)"],
    "no such setting": ["rank 1 of the group cannot take part: TypeError: windows is not known",
                        "windows is not known"],
    "skip": ["cannot take part: NotImplementedError: skip is 0.1 in a ring, where near keys may be on another rank",
             "skip is 0.1 in a ring"],
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_every_rank_is_told_what_differs(found, name):
    for rank in range(3):
        kind, message, seconds = found[rank]["faults"][name]
        assert EXPECTED[name][-1 if rank == 1 else 0] in message
        assert kind in ("DifferenceError", "ValueError") or rank == 1
        assert seconds < SECONDS


@pytest.mark.parametrize(("when", "ranks"), [("before the call", (0, 2)), ("in the ring", (4, 6))])
def test_the_others_are_told_of_a_death(found, when, ranks):
    for rank in ranks:
        kind, message, seconds = found[rank][f"death {when}"]
        assert kind == "RuntimeError" and seconds < 2 * SECONDS
        assert ("not all 3 ranks of the group took part" if when == "before the call" else "the ring broke") in message
