# SPDX-License-Identifier: Apache-2.0
"""The total variation of P that a report tells, against the kernels' own P."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distrattention import Settings
from distrattention.evaluation.measure import Call
from distrattention.evaluation.probabilities import total_variations

SETTINGS = [
    Settings("lsh", 2, order_from="own"),
    Settings("lsh", 3, estimator="sample", block_size=16, seed=5),
    Settings("lsh", 3, block_size=48, order_from="previous"),
    Settings("energy", 2, block_size=32),
    Settings("energy", 3, block_size=16, order_from="previous"),
    Settings("energy", 20, block_size=500, order_from="own"),
]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_call(kind):
    query, key, value = normal(2, 4, 90, 20), normal(2, 4, 70, 20, seed=1), normal(2, 4, 70, 8, seed=2)
    if kind == "grouped heads":
        return Call(query, key[:, :2], value[:, :2], scale=0.5)
    if kind == "bool mask":
        mask = torch.rand(2, 1, 90, 70, generator=torch.Generator().manual_seed(3)) < 0.5
        mask[:, :, 7] = False  # a row that sees no key
        return Call(query, key, value, mask)
    if kind == "added mask":
        return Call(query, key, value, normal(4, 1, 70, seed=4))
    if kind == "three dimensions":
        return Call(query[0], key[0], value[0], normal(90, 70, seed=4) > 0)
    if kind == "five dimensions":
        return Call(query[:, None], key[:, None], value[:, None], normal(90, 70, seed=4))
    return Call(query, key, value, causal=kind)


CAUSAL = ("none", "top_left", "bottom_right")
KINDS = (*CAUSAL, "grouped heads", "bool mask", "added mask", "three dimensions", "five dimensions")


def probabilities(call, settings):
    """P [..., Hq, Nq, Nk] as the kernels have it: attention's output where V is the identity."""
    keys = call.key.shape[-2]
    identity = torch.eye(keys).expand(*call.key.shape[:-1], keys)
    return Call(call.query, call.key, identity, call.mask, call.causal, call.scale).run(settings)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_total_variation_is_that_of_the_kernels(kind):
    call = make_call(kind)
    resolved = [call.resolve(s) for s in SETTINGS]
    found = total_variations(call, resolved, [call.columns(s) for s in resolved], max_rows=10**6)
    exact = probabilities(call, Settings("exact"))
    for settings, variation in zip(SETTINGS, found):
        expected = ((probabilities(call, settings) - exact).abs().sum(-1) / 2).mean().item()
        assert variation == pytest.approx(expected, abs=2e-6), settings
        assert 0.01 < variation < 1, settings


def test_total_variation_looks_at_evenly_spread_rows_and_at_least_one_a_head():
    call = make_call("none")
    settings = [Settings("energy", 2, block_size=16)]
    columns = [call.columns(s) for s in settings]
    of_rows = (probabilities(call, settings[0]) - probabilities(call, Settings("exact"))).abs().sum(-1) / 2
    seven, one = of_rows[:, :, [n * 90 // 7 for n in range(7)]].mean().item(), of_rows[:, :, 0].mean().item()
    assert total_variations(call, settings, columns, max_rows=8 * 7) == pytest.approx([seven], abs=2e-6)
    assert total_variations(call, settings, columns, max_rows=1) == pytest.approx([one], abs=2e-6)


class Largest(TorchDispatchMode):
    """The most bytes that hold a result within the block."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("masked", [False, True])
def test_nothing_is_as_large_as_the_scores(masked):
    n = 8192
    query = normal(1, 1, n, 16)
    mask = torch.ones(n, 1, dtype=torch.bool).expand(n, n) if masked else None
    call = Call(query, query, query, mask)
    settings = [Settings("lsh", 2), Settings("energy", 2)]
    with Largest() as largest:
        found = total_variations(call, settings, [call.columns(s) for s in settings], max_rows=1024)
    assert min(found) > 0
    assert largest.bytes == 4 << 22 < n * n


NEAR = {
    "energy": Settings("energy", 2, 64, window=10, sinks=1),
    "energy, previous": Settings("energy", 3, 64, order_from="previous", window=10),
    "energy, one block": Settings("energy", 2, 500, order_from="own", window=10),
    "lsh": Settings("lsh", 2, 64, window=10),
    "exact, skip": Settings("exact", window=10, skip=0.03),
    "energy, skip": Settings("energy", 2, 64, sinks=5, skip=0.03),
    "energy, finish": Settings("energy", 4, 64, window=10, sinks=5, skip=0.03, finish=True),
}


@pytest.mark.parametrize("offset", [None, 150])
@pytest.mark.parametrize("name", NEAR)
def test_total_variation_with_near_keys_is_that_of_the_kernels(name, offset):
    causal = "bottom_right" if offset is None else "none"
    query, key = normal(1, 2, 200, 16), normal(1, 1, 400, 16, seed=1)
    key = key * torch.where(torch.arange(400) // 64 % 3 == 1, 1.5, 0.25)[:, None]  # some halves are skipped
    call = Call(query, key, torch.eye(400).expand(1, 1, 400, 400), None, causal, None, offset)
    resolved = call.resolve(NEAR[name])
    (found,) = total_variations(call, [resolved], [call.columns(resolved)], max_rows=10**6)
    expected = ((call.run(NEAR[name])[0] - call.run(Settings("exact"))[0]).abs().sum(-1) / 2).mean().item()
    assert found == pytest.approx(expected, abs=2e-6) and 0.001 < found < 1
