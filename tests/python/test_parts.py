# SPDX-License-Identifier: Apache-2.0
"""The operators on parts of a longer call, as the ranks of a ring make them, here all by one process: on the CPU and,
where there is one, on a GPU, where it is the kernels of the GPU that are to know where a part lies."""

import pytest
import torch

from distrattention import ops
from distrattention.distributed import layout, ring

CUDA = pytest.mark.skipif(
    not torch.cuda.is_available() or ops.describe().cuda_build == "none", reason="needs a GPU and its kernels"
)
PLACES = [("cpu", torch.float32), *(pytest.param("cuda", dtype, marks=CUDA)
          for dtype in (torch.bfloat16, torch.float16, torch.float32))]  # fmt: skip
N, MULTIPLE = 700, 128  # 6 of 8 chunks for 4 ranks, the last one shorter
NEAR = {"none": (None, 0), "window": (100, 0), "sinks": (None, 200)}


def settings_of(strategy, order_from, near, block):
    return strategy, 1 if strategy == "exact" else 2, block, "mean", order_from, *NEAR[near], None, 0.0, False


def in_parts(q, k, v, grad_out, grad_lse, order, means, causal, options):
    """(out, lse, dq, dk, dv) as four ranks in zigzag find them, of all rows."""
    pieces = layout.cut(N, 4, "zigzag", MULTIPLE)
    out, lse = torch.zeros_like(grad_out, dtype=torch.float32), torch.full_like(grad_lse, -torch.inf)
    grads = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (q, k, v)]
    for step in ("forward", "backward"):
        for rows in pieces:
            mine, of_rank = positions(rows, q.device), [rows, *(other for other in pieces if other is not rows)]
            call = ring.Call(None, of_rank, causal, None, options, True)
            blocks = (mine // options[2]).unique() if options[0] != "exact" else None
            columns = ring.Columns()
            if order is not None:
                columns = ring.Columns(order[:, :, blocks], means if means is None or means.shape[2] == 1 else
                                       means[:, :, blocks])  # fmt: skip
            for source, keys in enumerate(of_rank):
                theirs = positions(keys, q.device)
                for pair in call.pairs(source):
                    here, there = mine[pair.rows], theirs[pair.keys]
                    tensors = q[:, :, here], k[:, :, there], v[:, :, there], None
                    others = *call.columns(columns, pair), *call.settings(pair)
                    if step == "forward":
                        so_far = out[:, :, here], lse[:, :, here]
                        part = ops.forward(*tensors, *others)
                        ops.merge([so_far[0], part[0]], [so_far[1], part[1]], *so_far)
                        out[:, :, here], lse[:, :, here] = so_far
                    else:
                        merged = out[:, :, here].to(q.dtype), lse[:, :, here]
                        found = ops.backward(grad_out[:, :, here], grad_lse[:, :, here], *tensors, *others[:2], *merged,
                                             False, *others[2:])  # fmt: skip
                        for sums, where, some in zip(grads, (here, there, there), found):
                            sums[:, :, where] += some
    return [tensor.to(q.dtype) if tensor is not lse else lse for tensor in (out, lse, *grads)]


def positions(pieces, device):
    return torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in pieces])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("strategy", "near"), [("exact", "none"), ("lsh", "none"), ("lsh", "window"),
                                                *(("energy", near) for near in NEAR)])  # fmt: skip
@pytest.mark.parametrize("order_from", ["own", "previous"])
@pytest.mark.parametrize("block", [64, 128])
def test_parts_are_the_whole(block, strategy, order_from, near, device, dtype, problem, textbook, no_worse_than):
    causal = "top_left" if order_from == "previous" else "none"
    options = settings_of(strategy, order_from, near, block)
    q, k, v = (tensor.to(device) for tensor in problem(batch=1, heads=2, heads_kv=1, n=N, d=64, dtype=dtype))
    grad_out, grad_lse = torch.randn_like(q), torch.randn(q.shape[:3], device=device)
    order = means = None
    if strategy != "exact":
        grouping = strategy, 2, block, order_from, 0, False, *NEAR[near]
        order, means = ops.make_grouping(q, k, causal, *grouping)
        means = means if means.numel() else None
    actual = in_parts(q, k, v, grad_out, grad_lse, order, means, causal != "none", options)

    def whole(wide):
        leaves = [tensor.cpu().to(wide).requires_grad_() for tensor in (q, k, v)]
        window, sinks = NEAR[near] if strategy != "exact" else (None, 0)
        out, lse = textbook(
            *leaves, causal=causal, order=None if order is None else order.cpu(), strategy=strategy, group_size=2,
            block_size=block, order_from=order_from, key_means=None if means is None else means.cpu(), window=window,
            sinks=sinks,
        )  # fmt: skip
        of_results = grad_out.cpu().to(wide), grad_lse.cpu().to(lse.dtype)
        return out, lse, *torch.autograd.grad((out, lse), leaves, of_results)

    for name, found, exact, plain in zip(("out", "lse", "dq", "dk", "dv"), actual, whole(torch.float64), whole(dtype)):
        no_worse_than(found.cpu(), exact, plain, name)
