# SPDX-License-Identifier: Apache-2.0
"""What torch's FlopCounterMode counts: for exact attention what it counts for torch's own, else less by the groups."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from distrattention import scaled_dot_product_attention

B, HQ, HKV, N, M, D, DV = 2, 4, 2, 300, 200, 48, 16


def counted(function, *arguments, **options):
    """(FLOPs of the forward, of the backward)."""
    with FlopCounterMode(display=False) as counter:
        out = function(*arguments, **options)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    return forward, counter.get_total_flops()


def tensors(d=D, heads=HKV):
    shapes = (B, HQ, N, d), (B, heads, M, d), (B, heads, M, DV)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_attention_counts_as_torchs(is_causal):
    inputs = torch.randn(3, B, HQ, N, D, requires_grad=True)
    assert counted(scaled_dot_product_attention, *inputs, is_causal=is_causal) == counted(
        F.scaled_dot_product_attention, *inputs, is_causal=is_causal
    )


@pytest.mark.parametrize(
    ("settings", "columns"),  # of Q-hat, over the rows of a head
    [
        ({"strategy": "exact"}, N * D),
        ({"group_size": 4}, N * D),  # auto, which takes more rows to approximate
        ({"strategy": "energy", "group_size": 5}, N * 10),
        ({"strategy": "lsh", "group_size": 4}, N * 12),
        ({"strategy": "lsh", "group_size": 4, "estimator": "sample", "block_size": 64}, N * 12),
        ({"strategy": "energy", "group_size": 4, "order_from": "previous"}, 128 * D + (N - 128) * 12),
        ({"strategy": "energy", "group_size": 4, "order_from": "previous", "block_size": 999}, N * D),
        ({"strategy": "given", "group_size": 4, "order": torch.arange(D).expand(1, HQ, 1, D)}, N * 12),
    ],
)
def test_approximate_attention_counts_its_groups(settings, columns):
    found = counted(scaled_dot_product_attention, *tensors(), enable_gqa=True, **settings)
    heads = B * HQ
    assert found == (2 * heads * M * (columns + N * DV), 2 * heads * M * (3 * columns + 2 * N * DV))
