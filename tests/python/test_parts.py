# SPDX-License-Identifier: Apache-2.0
"""The operators on parts of a longer call, as the ranks of a ring make them, here all by one process: on the CPU and,
where there is one, on a GPU, where it is the kernels of the GPU that are to know where a part lies."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from distrattention import flops, ops  # noqa: F401; flops: what is counted
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


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("heads", [2, 4])  # of Q; those of K and V: 2
@pytest.mark.parametrize("odd", [0, 1])  # an address that nothing divides
def test_gradients_are_written_to_the_callers_memory(odd, heads, device, dtype, problem):
    """The bits of backward(), between numbers that stay as they are."""
    q, k, v = (tensor.to(device) for tensor in problem(batch=1, heads=heads, heads_kv=2, n=N, d=64, dtype=dtype))
    grad_out, options = torch.randn_like(q), settings_of("exact", "own", "none", 128)
    call = "top_left", None, *options, True, None, None
    out, lse = ops.forward(q, k, v, None, None, None, *call)
    wanted = ops.backward(grad_out, None, q, k, v, None, None, None, out, lse, False, *call)
    larger = [tensor.new_full((tensor.numel() // N * (N + 9) + odd,), 7.0) for tensor in (q, k, v)]
    larger = [flat[odd:].view(*like.shape[:2], N + 9, -1) for flat, like in zip(larger, (q, k, v))]
    into = [tensor[:, :, 4 : N + 4] for tensor in larger]
    ops.backward_into(grad_out, None, q, k, v, None, None, out, lse, *into, *call)
    for tensor, found, same in zip(larger, into, wanted):
        assert torch.equal(found, same)
        assert (tensor[:, :, :4] == 7).all() and (tensor[:, :, N + 4 :] == 7).all()


def inputs_of_backward_into(problem):
    """All tensors but those that are written to, and the settings."""
    q, k, v = problem(batch=1, heads=2, heads_kv=1, n=20, d=8, dtype=torch.float32)
    call = "none", None, *settings_of("exact", "own", "none", 128), True, None, None
    out, lse = ops.forward(q, k, v, None, None, None, *call)
    return [torch.randn_like(out), torch.randn_like(lse), q, k, v, None, None, out, lse], call


def test_backward_into_is_what_its_schema_says(problem):
    tensors, call = inputs_of_backward_into(problem)
    into = [torch.empty_like(tensor) for tensor in tensors[2:5]]
    torch.library.opcheck(ops.backward_into.default, (*tensors, *into, *call))


@pytest.mark.parametrize(
    ("which", "wrong", "message"),
    [
        (0, lambda q: q[:, :1], r"grad_q is \[1, 1, 20, 8\]; allowed: \[1, 2, 20, 8\]"),
        (1, lambda k: k.double(), "grad_k is .*; allowed: .*"),
        (2, lambda v: v.mT.contiguous().mT, "the last stride of grad_v is 20; allowed: 1, as it is written to"),
    ],
)
def test_memory_that_does_not_fit_is_refused(which, wrong, message, problem):
    tensors, call = inputs_of_backward_into(problem)
    into = [torch.empty_like(tensor) for tensor in tensors[2:5]]
    into[which] = wrong(into[which])
    with pytest.raises(RuntimeError, match=message):
        ops.backward_into(*tensors, *into, *call)


def test_backward_into_counts_as_backward(problem):
    tensors, call = inputs_of_backward_into(problem)
    counts = []
    for run in (
        lambda: ops.backward(*tensors[:5], None, *tensors[5:], False, *call),
        lambda: ops.backward_into(*tensors, *(torch.empty_like(tensor) for tensor in tensors[2:5]), *call),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
