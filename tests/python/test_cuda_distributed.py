# SPDX-License-Identifier: Apache-2.0
"""Attention of several processes on GPUs, by NCCL: on one GPU what a group of one can do, and on more the cases of
test_distributed.py that so many processes can run."""

import importlib
import itertools
import os

import distributed_cases
import pytest
import torch
import torch.distributed as dist
from test_distributed import EXPECTED, check
from test_distributed_parts import check_merge

from distrattention import Settings, ops, scaled_dot_product_attention
from distrattention.distributed import attention, layout, peer_memory, ring

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(ops.describe().cuda_build == "none", reason="the package was built without CUDA"),
]
GPUS = min(torch.cuda.device_count(), distributed_cases.WORLD)
NAMES = distributed_cases.cases_for(GPUS, "cuda")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of as many processes as there are GPUs found."""
    results = distributed_cases.run_all(tmp_path_factory.mktemp("processes"), GPUS, "cuda")
    for rank, of_rank in enumerate(results):
        assert "failed" not in of_rank, f"rank {rank}: {of_rank['failed']}"
    return results


@pytest.mark.skipif(not NAMES, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(found, name, textbook, no_worse_than):
    check(found, name, textbook, no_worse_than)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_gpus_that_reach_each_other_read_from_memory(found):
    pairs = itertools.permutations(range(GPUS), 2)
    if os.environ.get(peer_memory.SWITCH) == "0" or not all(torch.cuda.can_device_access_peer(*pair) for pair in pairs):
        pytest.skip("needs GPUs that reach each other's memory")
    assert [of_rank["transports"] for of_rank in found] == [{"PeerMemory"}] * GPUS


@pytest.mark.skipif(not NAMES, reason="needs two GPUs")
@pytest.mark.parametrize("name", [name for name in NAMES if name in distributed_cases.BY_OTHER_TRANSPORT])
def test_messages_equal_one_process(found, name, textbook, no_worse_than):
    check(found, name, textbook, no_worse_than, ("other transport", name))


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", distributed_cases.FAULTS_OF_PAIRS)
def test_both_ranks_are_told_what_differs(found, name):
    for rank in range(2):
        kind, message, seconds = found[rank]["faults"][name]
        assert EXPECTED[name][-1 if rank == 1 else 0] in message
        assert kind in ("DifferenceError", "ValueError") or rank == 1
        assert seconds < distributed_cases.SECONDS


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_the_other_is_told_of_a_death(found):
    kind, message, seconds = found[0]["death before the call"]
    assert kind == "RuntimeError" and seconds < 2 * distributed_cases.SECONDS
    assert "not all 2 ranks of the group took part" in message


@pytest.fixture
def alone(tmp_path):
    """NCCL's group of this process."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_ring_of_one_by_nccl(alone, problem, monkeypatch):
    """A group of one is made a ring of one: it agrees with itself, and gathers sums over its keys."""
    module = importlib.import_module("distrattention.distributed.attention")
    monkeypatch.setattr(module, "ranks_of", lambda group, kind: layout.Ranks(alone, None, kind))
    tensors = [tensor.cuda().requires_grad_() for tensor in problem(n=700, d=64, dtype=torch.bfloat16)]
    settings = Settings("energy", 2, 64, window=100)
    results = []
    for attend in (scaled_dot_product_attention, attention):
        out, lse = attend(*tensors, is_causal=True, settings=settings, return_lse=True)
        results.append((out, lse, *torch.autograd.grad((out, lse), tensors, (out.detach(), lse.detach()))))
    for one, other in zip(*results):
        torch.testing.assert_close(other, one, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_merging_gives_attention_over_all_keys(dtype, problem):
    tensors = [tensor.cuda() for tensor in problem(batch=2, heads=4, heads_kv=2, n=60, d=12, dtype=dtype)]
    check_merge(*tensors)
