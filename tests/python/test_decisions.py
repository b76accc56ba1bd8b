# SPDX-License-Identifier: Apache-2.0
"""A call is validated, resolved and its kernel chosen once, on every path from Python, and its like not again."""

import itertools
import threading

import pytest
import torch

from distrattention import flash_attn_func, ops, scaled_dot_product_attention

_rows = itertools.count(33)  # a number of rows that no call of this process had


def decisions_of(call):
    before = ops.decisions()
    call()
    return tuple(now - then for now, then in zip(ops.decisions(), before))


@pytest.mark.parametrize("settings", [{}, {"strategy": "exact"}, {"group_size": 2}, {"strategy": "lsh"}])
@pytest.mark.parametrize("entry", [scaled_dot_product_attention, flash_attn_func])
def test_a_forward_decides_once(problem, entry, settings):
    q, k, v = problem(n=next(_rows), dtype=torch.float32)
    grouped = settings.get("strategy") == "lsh"
    assert decisions_of(lambda: entry(q, k, v, **settings)) == (1, 1, 2 if grouped else 1)  # an order has a kernel too
    assert decisions_of(lambda: entry(q, k, v, **settings)) == (0, 0, 0)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("settings", "operators"), [({}, 1), ({"strategy": "lsh"}, 2)])
def test_each_operator_of_compiled_code_decides_once(problem, settings, operators, grad):
    """Orders are made by an operator of their own there."""
    qkv = problem(n=next(_rows), dtype=torch.float32, grad=grad)
    compiled = torch.compile(lambda *qkv: scaled_dot_product_attention(*qkv, **settings), backend="aot_eager")
    assert decisions_of(lambda: compiled(*qkv)) == (operators,) * 3
    assert decisions_of(lambda: compiled(*qkv)) == (0, 0, 0)


@pytest.mark.parametrize("strategy", ["exact", "energy"])
def test_a_backward_decides_once(problem, strategy):
    qkv = problem(n=next(_rows), dtype=torch.float32, grad=True)
    out = scaled_dot_product_attention(*qkv, strategy=strategy)
    assert decisions_of(lambda: torch.autograd.grad(out, qkv, torch.ones_like(out), retain_graph=True)) == (1, 1, 1)
    assert decisions_of(lambda: torch.autograd.grad(out, qkv, torch.ones_like(out))) == (0, 0, 0)


def test_what_differs_is_decided_anew(problem):
    """Calls that share all but one of the things that a plan depends on get what they would get without the others."""
    rows = next(_rows)
    q, k, v = problem(n=rows, dtype=torch.float32)
    calls = [
        {},
        {"strategy": "lsh"},
        {"strategy": "lsh", "group_size": 4},
        {"strategy": "lsh", "seed": 1},
        {"strategy": "energy"},
        {"strategy": "energy", "block_size": 16},
        {"is_causal": True},
        {"scale": 0.5},
        {"attn_mask": torch.rand(rows, rows) > 0.5},
    ]
    results = []
    for settings in calls:
        assert decisions_of(lambda: results.append(scaled_dot_product_attention(q, k, v, **settings)))[0] == 1
    for settings, result in zip(calls, results):
        assert torch.equal(scaled_dot_product_attention(q, k, v, **settings), result)
    for a, b in itertools.combinations(results, 2):
        assert not torch.equal(a, b)


def test_strides_are_part_of_a_plan(problem):
    q, k, v = problem(n=next(_rows), dtype=torch.float32)
    out = scaled_dot_product_attention(q, k, v)
    apart = [torch.cat((tensor, tensor), dim=-1)[..., : tensor.shape[-1]] for tensor in (q, k, v)]
    assert torch.equal(scaled_dot_product_attention(*apart), out)
    assert torch.equal(scaled_dot_product_attention(q, k, v), out)


def test_disabled_kernels_are_asked_for_in_every_call(problem, monkeypatch):
    q, k, v = problem(n=next(_rows), dtype=torch.float32)
    scaled_dot_product_attention(q, k, v)
    monkeypatch.setenv("DISTR_DISABLE_KERNELS", "cpu/")
    assert decisions_of(lambda: scaled_dot_product_attention(q, k, v)) == (1, 1, 1)
    monkeypatch.delenv("DISTR_DISABLE_KERNELS")
    assert decisions_of(lambda: scaled_dot_product_attention(q, k, v)) == (0, 0, 0)


def test_many_shapes_push_out_the_oldest(problem):
    problems = [problem(batch=1, heads=1, n=next(_rows), dtype=torch.float32) for _ in range(40)]
    results = [scaled_dot_product_attention(*qkv) for qkv in problems]
    for qkv, result in zip(problems, results):
        assert torch.equal(scaled_dot_product_attention(*qkv), result)
    assert decisions_of(lambda: scaled_dot_product_attention(*problems[0])) == (1, 1, 1)
    assert decisions_of(lambda: scaled_dot_product_attention(*problems[0])) == (0, 0, 0)


def test_threads_have_plans_of_their_own(problem):
    q, k, v = problem(n=next(_rows), dtype=torch.float32)
    out = scaled_dot_product_attention(q, k, v)
    found = []
    thread = threading.Thread(target=lambda: found.append(scaled_dot_product_attention(q, k, v)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], out)
