# SPDX-License-Identifier: Apache-2.0
"""The operators: registration, fake kernels, values and gradients against the textbook."""

import itertools
from functools import partial

import pytest
import torch

import distrattention
from distrattention import ops
from distrattention.settings import ESTIMATORS, ORDERS_FROM, STRATEGIES

OPERATORS = torch.ops.distrattention
EXACT = ("none", None, "exact", 1, 128, "mean", "own")  # causal, scale, strategy, G, l, estimator, order_from
LSH = ("none", None, "lsh", 2, 32, "mean", "own")
GROUPINGS = [
    dict(strategy=strategy, group_size=group_size, block_size=32, estimator=estimator, order_from=order_from)
    for strategy, group_size, estimator, order_from in [
        ("lsh", 2, "mean", "own"),
        ("lsh", 3, "sample", "own"),
        ("lsh", 4, "mean", "previous"),
        ("energy", 2, "mean", "own"),
        ("energy", 5, "mean", "previous"),
    ]
]


def order_of(q, k, grouping, causal="none"):
    arguments = (grouping["strategy"], grouping["group_size"], grouping["block_size"], grouping["order_from"], 0)
    return ops.make_grouping(q, k, causal, *arguments)[0]


def settings_of(grouping, causal="none", scale=None):
    return (causal, scale, *grouping.values())


def views_of_one_tensor(d=8):
    """q, k, v as views of one packed [B, N, 3, H, d], as timm makes them."""
    packed = torch.randn(2, 33, 3, 2, d)
    return packed.permute(2, 0, 3, 1, 4).unbind(0)


LAYOUTS = {
    "contiguous": lambda: [torch.randn(2, 2, 33, 8) for _ in range(3)],
    "packed": views_of_one_tensor,
    "rows first": lambda: [torch.randn(2, 33, 2, 8).transpose(1, 2) for _ in range(3)],
    "columns first": lambda: [torch.randn(2, 2, 8, 33).transpose(2, 3) for _ in range(3)],
    "repeated heads": lambda: [torch.randn(2, 1, 33, 8).expand(-1, 4, -1, -1) for _ in range(3)],
    "gqa": lambda: [torch.randn(2, 4, 33, 8), torch.randn(2, 2, 17, 8), torch.randn(2, 2, 17, 5)],
    "no rows": lambda: [torch.randn(2, 2, 0, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)],
    "no keys": lambda: [torch.randn(2, 2, 7, 8), torch.randn(2, 2, 0, 8), torch.randn(2, 2, 0, 8)],
    "no batch": lambda: [torch.randn(0, 2, 7, 8) for _ in range(3)],
    "no heads": lambda: [torch.randn(2, 0, 7, 8) for _ in range(3)],
    "one column": lambda: [torch.randn(2, 2, 9, 1) for _ in range(3)],
    "half": lambda: [torch.randn(1, 2, 9, 8).half() for _ in range(3)],
    "bfloat16": lambda: [torch.randn(1, 2, 9, 8).bfloat16() for _ in range(3)],
    "double": lambda: [torch.randn(1, 2, 9, 8).double() for _ in range(3)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(layout, grad):
    q, k, v = (tensor.detach().requires_grad_(grad) for tensor in LAYOUTS[layout]())
    settings = EXACT if q.shape[3] == 1 else LSH
    grouping = ("none", *settings[2:5], "own", 0)
    torch.library.opcheck(OPERATORS.make_grouping.default, (q, k, *grouping))
    order, _ = ops.make_grouping(q, k, *grouping)
    torch.library.opcheck(OPERATORS.forward.default, (q, k, v, None, order, None, *settings))
    torch.library.opcheck(OPERATORS.forward.default, (q, k, v))  # with the schema's defaults: exact
    out, lse = ops.forward(q, k, v, None, order, None, *settings)
    # It has no derivative of its own, so its inputs require none.
    saved = [tensor.detach() for tensor in (torch.randn_like(out), torch.randn_like(lse), q, k, v)]
    saved += [None, order, None, out.detach(), lse.detach(), False]
    torch.library.opcheck(OPERATORS.backward.default, (*saved, *settings))


def test_pack_keeps_every_setting():
    for causal, strategy, size, block, estimator, order_from in itertools.product(
        ("none", "top_left", "bottom_right"), STRATEGIES, (1, 512), (1, 2**40 - 1), ESTIMATORS, ORDERS_FROM
    ):
        settings = (causal, strategy, size, block, estimator, order_from)
        assert ops.unpack(ops.pack(*settings)) == settings
    assert ops.unpack(ops.pack("none", "lsh", 2, 2**63 - 1, "mean", "own"))[3] == 2**40 - 1
    for sides in itertools.product((None, 0, 5, 2**30 - 1), repeat=2):
        assert ops.unpack_window_size(ops.pack_window_size(*sides)) == sides
    assert ops.pack_window_size(None, None) == 0


def test_attend_refuses_a_number_that_is_no_settings():
    q, k, v = LAYOUTS["packed"]()
    for numbers in ((-1, 0, None, 0.0, 0, 0), (0, -1, None, 0.0, 0, 0), (0, 0, None, 0.0, 0, -1)):
        with pytest.raises(RuntimeError, match="the settings are -1; allowed: 0 and above"):
            ops.attend(q, k, v, None, None, *numbers, False)


@pytest.mark.parametrize("settings", [EXACT, LSH])
def test_attend_is_make_grouping_and_forward(settings):
    """It has no derivative of its own: autograd is given one where it is called."""
    q, k, v = LAYOUTS["packed"]()
    causal, scale, *others = settings
    packed = ops.pack(causal, *others)
    torch.library.opcheck(OPERATORS.attend.default, (q, k, v, None, scale, packed, 0, None, 0.0, 3, 0, True))
    torch.library.opcheck(OPERATORS.attend.default, (q, k, v, None, scale, packed, 0, None, 0.0, 3, 0, False))
    order = None
    if settings is LSH:
        order, _ = ops.make_grouping(q, k, *("none", *LSH[2:5], "own", 3), flat=True)
    *results, taken, means = ops.attend(q, k, v, None, scale, packed, 0, None, 0.0, 3, 0, True)
    assert all(map(torch.equal, results, ops.forward(q, k, v, None, order, None, *settings)))
    assert means is None and (taken is None) if order is None else torch.equal(taken, order)
    out, *others = ops.attend(q, k, v, None, scale, packed, 0, None, 0.0, 3, 0, False)
    assert torch.equal(out, results[0]) and others == [None] * 3


def test_a_gradient_that_is_undefined_stays_so():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    q, k, v = (tensor.requires_grad_() for tensor in LAYOUTS["packed"]())
    for attend in (distrattention.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention):
        Nothing.apply(attend(q, k, v)).sum().backward()
        assert q.grad is k.grad is v.grad is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_traced_code_has_the_operators_of_compiled_code():
    q, k, v = LAYOUTS["packed"]()
    run = partial(distrattention.scaled_dot_product_attention, strategy="lsh", group_size=2)
    traced = torch.jit.trace(lambda q, k, v: run(q, k, v), (q, k, v), check_trace=False)
    assert torch.equal(traced(q, k, v), run(q, k, v))


MASKS = {
    "boolean": lambda: torch.rand(2, 1, 33, 33) > 0.3,
    "additive": lambda: torch.randn(33, 33),
    "additive, a row": lambda: torch.randn(2, 1, 1, 33),
    "additive, repeated": lambda: torch.randn(33, 1).expand(2, 2, 33, 33),
    "additive, transposed": lambda: torch.randn(33, 33).T,
    "additive, scalar": lambda: torch.randn(()),
}


@pytest.mark.parametrize("mask", MASKS)
def test_opcheck_with_a_mask(mask):
    mask = MASKS[mask]()
    additive = mask.dtype != torch.bool
    q, k, v = LAYOUTS["contiguous"]()
    arguments = (q.requires_grad_(), k, v, mask.requires_grad_(additive), None, None, *EXACT)
    torch.library.opcheck(OPERATORS.forward.default, arguments)
    with torch.no_grad():
        out, lse = ops.forward(*arguments)
    mask, q = mask.detach(), q.detach()
    saved = (torch.randn_like(out), None, q, k, v, mask, None, None, out, lse)
    torch.library.opcheck(OPERATORS.backward.default, (*saved, additive, *EXACT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("grouping", range(len(GROUPINGS)))
def test_narrow_types_err_no_more_than_a_plain_implementation(dtype, grouping, problem, textbook, no_worse_than):
    grouping = GROUPINGS[grouping]
    q, k, v = problem(n=150, d=32, dtype=dtype, grad=True)
    order = order_of(q, k, grouping, "top_left")
    weight = torch.randn(q.shape, dtype=dtype)
    results = []
    for function, tensors in (
        (None, (q, k, v)),
        (textbook, [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]),
        (textbook, (q, k, v)),
    ):
        if function is None:
            out, lse = ops.forward(*tensors, None, order, None, *settings_of(grouping, "top_left"))
        else:
            out, lse = function(*tensors, causal="top_left", order=order, **grouping)
        grads = torch.autograd.grad(out, tensors, weight.to(out.dtype))
        results.append((out, lse, *grads))
    for name, *values in zip(("out", "lse", "dq", "dk", "dv"), *results):
        no_worse_than(*values, what=name)


@pytest.mark.parametrize("grouping", [0, 1, 3])
def test_gradcheck(grouping, problem):
    """The order is held constant: with it recomputed, the function of q and k would jump."""
    grouping = GROUPINGS[grouping]
    q, k, v = problem(batch=1, heads=2, heads_kv=1, n=9, d=6, grad=True)
    mask = torch.randn(2, 9, 9, dtype=torch.float64, requires_grad=True)
    order = order_of(q, k, grouping)
    torch.autograd.gradcheck(lambda *leaves: ops.forward(*leaves, order, None, *settings_of(grouping)), (q, k, v, mask))


def test_gradients_of_lse_alone_and_of_out_alone(problem, textbook):
    q, k, v = problem(grad=True)
    for index in (0, 1):
        actual = torch.autograd.grad(ops.forward(q, k, v, None, None, None, *EXACT)[index].sum(), (q, k))
        wanted = torch.autograd.grad(textbook(q, k, v)[index].sum(), (q, k))
        for x, y in zip(actual, wanted):
            torch.testing.assert_close(x, y)


def test_a_mask_keeps_its_dtype_in_its_gradient(problem):
    q, k, v = problem(dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        mask = torch.randn(70, 70, dtype=dtype, requires_grad=True)
        ops.forward(q, k, v, mask, None, None, *EXACT)[0].sum().backward()
        assert mask.grad.dtype == dtype and mask.grad.abs().max() > 0


def test_second_derivatives_raise(problem):
    q, k, v = problem(grad=True)
    (first,) = torch.autograd.grad(ops.forward(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(first.sum(), q)


@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_raises(grad, problem):
    """Also where no input requires a gradient, without a graph, for the backward, and through torch.func."""
    q, k, v = problem(grad=grad)
    out, lse = (result.detach() for result in ops.forward(q, k, v))
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        for tensors in ((dual, k, v), (q, dual, v), (q, k, dual)):
            with pytest.raises(NotImplementedError, match="forward-mode"):
                OPERATORS.forward(*tensors)
            with torch.no_grad(), pytest.raises(NotImplementedError, match="forward-mode"):
                OPERATORS.forward.default(*tensors)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            OPERATORS.backward(dual, None, q, k, v, None, None, None, out, lse)
        assert ops.forward(q, k, v)[0].shape == q.shape  # without tangents it runs
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: ops.forward(q, k, v)[0], (q,), (q,))


def test_results_are_new_tensors(problem):
    """Functional: no output shares memory with an input, whatever the layout, also where nothing has to be computed."""
    for make in LAYOUTS.values():
        q, k, v = make()
        before = [tensor.clone() for tensor in (q, k, v)]
        out, lse = ops.forward(q, k, v, None, None, None, *EXACT)
        order, _ = ops.make_grouping(q, k, "none", "exact", 1)
        grads = ops.backward(torch.ones_like(out), None, q, k, v, None, None, None, out, lse, False, *EXACT)
        inputs = {tensor.untyped_storage().data_ptr() for tensor in (q, k, v) if tensor.numel()}
        outputs = [tensor.untyped_storage().data_ptr() for tensor in (out, lse, order, *grads) if tensor.numel()]
        assert inputs.isdisjoint(outputs) and len(set(outputs)) == len(outputs)
        assert all(map(torch.equal, before, (q, k, v)))


@pytest.mark.parametrize("layout", ["contiguous", "packed", "rows first", "columns first", "repeated heads"])
def test_layout_changes_no_bit(layout):
    """Strides are read in place or copied; either way the numbers are those of contiguous tensors."""
    tensors = LAYOUTS[layout]()
    results = []
    for q, k, v in (tensors, [tensor.contiguous() for tensor in tensors]):
        order, _ = ops.make_grouping(q, k, *("none", *LSH[2:5], "own", 0))
        out, lse = ops.forward(q, k, v, None, order, None, *LSH)
        grad = torch.linspace(-1, 1, out.numel()).view(out.shape)
        if len(results):  # and so are those of the gradient that arrives
            grad = grad.transpose(2, 3).contiguous().transpose(2, 3)
        grads = ops.backward(grad, None, q, k, v, None, order, None, out, lse, False, *LSH)
        results.append((order, out, lse, *grads))
    for one, other in zip(*results):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("layout", "kind", "copies"), [
    ("contiguous", "as out", 0), ("packed", "as out", 0), ("packed", "contiguous", 1), ("packed", "one number", 1),
])  # fmt: skip
def test_a_backward_copies_what_it_cannot_read_in_place(layout, kind, copies):
    """Views of one packed tensor are read in place; a gradient is laid out like out, which is not copied for that."""
    q, k, v = LAYOUTS[layout]()
    out, lse = ops.forward(q, k, v, None, None, None, *EXACT)
    one = torch.ones((), dtype=out.dtype)
    grads = {"as out": torch.ones_like(out), "contiguous": one.repeat(out.shape), "one number": one.expand(out.shape)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        ops.backward(grads[kind], None, q, k, v, None, None, None, out, lse, False, *EXACT)
    assert [event.name for event in found.events()].count("aten::copy_") == copies


def test_out_lies_rows_first():
    """[B, N, H, dv] in memory: the transpose and reshape that follow attention in models copy nothing."""
    q, k, v = LAYOUTS["contiguous"]()
    out, _ = ops.forward(q, k, v)
    assert out.transpose(1, 2).is_contiguous()


REFUSED = {
    "q has three axes": (lambda q, k, v: (q[0], k, v), "the shape of q"),
    "k has another dtype": (lambda q, k, v: (q, k.double(), v), "dtype of k is Double; allowed: Float"),
    "an integer q": (lambda q, k, v: (q.int(), k.int(), v.int()), "dtype of q is Int"),
    "k has another batch": (lambda q, k, v: (q, k[:1], v), "the shape of k"),
    "k has other columns": (lambda q, k, v: (q, k[..., :4], v), "the shape of k"),
    "v has other rows": (lambda q, k, v: (q, k, v[:, :, :4]), "the shape of v"),
    "heads that do not divide": (lambda q, k, v: (q[:, :1], k, v), "heads_q is 1"),
    "a mask of five axes": (lambda q, k, v: (q, k, v, torch.zeros(1, 1, 1, 33, 33)), "at most 4 axes"),
    "a mask that does not fit": (lambda q, k, v: (q, k, v, torch.zeros(32, 33)), "does not broadcast"),
    "an integer mask": (lambda q, k, v: (q, k, v, torch.zeros(33, 33).int()), "dtype of the mask is Int"),
    "an unknown strategy": (
        lambda q, k, v: (q, k, v, None, None, None, "none", None, "best"),
        "'best'; allowed: auto, exact",
    ),
    "an unknown corner": (lambda q, k, v: (q, k, v, None, None, None, "left"), "causal is 'left'; allowed: none"),
    "groups of no column": (lambda q, k, v: (q, k, v, None, None, None, "none", None, "lsh", 0), "group_size is 0"),
    "groups too large": (lambda q, k, v: (q, k, v, None, None, None, "none", None, "lsh", 9), "allowed: 1 to 8"),
    "blocks of no row": (lambda q, k, v: (q, k, v, None, None, None, "none", None, "lsh", 2, 0), "block is 0"),
    "no order": (lambda q, k, v: (q, k, v, None, None, None, "none", None, "lsh", 2), "the order is null"),
    "an order of floats": (lambda q, k, v: (q, k, v, None, torch.zeros(2, 2, 1, 8)), "dtype of the order is Float"),
    "an order of another shape": (lambda q, k, v: (q, k, v, None, torch.zeros(2, 2, 2, 8).int()), "shape of the order"),
    "an order that is none": (
        lambda q, k, v: (q, k, v, None, torch.zeros(2, 2, 1, 8).int(), None, "none", None, "lsh", 2),
        "no permutation",
    ),
    "mask and causal": (lambda q, k, v: (q, k, v, torch.zeros(33, 33), None, None, "top_left"), "mask and causal"),
    "an infinite scale": (lambda q, k, v: (q, k, v, None, None, None, "none", float("inf")), "scale is inf"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_forward_refuses(what):
    change, message = REFUSED[what]
    with pytest.raises(RuntimeError, match=message):
        ops.forward(*change(*LAYOUTS["contiguous"]()))


@pytest.mark.parametrize("which", ["grad_out", "grad_lse", "out", "lse"])
def test_backward_refuses_what_does_not_fit(which):
    q, k, v = LAYOUTS["contiguous"]()
    out, lse = ops.forward(q, k, v, None, None, None, *EXACT)
    tensors = dict(grad_out=out, grad_lse=lse, q=q, k=k, v=v, mask=None, order=None, means=None, out=out, lse=lse)
    for wrong in (tensors[which][:1], tensors[which].double()):
        with pytest.raises(RuntimeError, match="allowed"):
            ops.backward(*(tensors | {which: wrong}).values(), False, *EXACT)


@pytest.mark.parametrize("name", ["make_grouping", "forward", "backward"])
def test_the_dispatcher_has_an_entry_for_cuda(name):
    """Also in a build without CUDA kernels, where it says what is missing. To see that it is there takes no GPU."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"distrattention::{name}", "CUDA")


def test_every_combination_of_settings_runs(problem):
    q, k, v = problem(batch=1, heads=2, n=40, d=8, dtype=torch.float32)
    combinations = itertools.product(
        ("none", "top_left", "bottom_right"),
        ("auto", "lsh", "energy"),
        (1, 3, 8),
        (1, 16, 1 << 40),
        ("mean", "sample"),
        ORDERS_FROM,
    )
    for causal, strategy, group_size, block_size, estimator, order_from in combinations:
        order, _ = ops.make_grouping(q, k, causal, strategy, group_size, block_size, order_from, 7)
        assert torch.equal(order.sort(3).values, torch.arange(8, dtype=torch.int32).expand(order.shape))
        out, lse = ops.forward(
            q, k, v, None, order, None, causal, None, strategy, group_size, block_size, estimator, order_from
        )
        assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("rows, ordered", [(40, False), (2048, True)])
def test_attend_orders_no_columns_where_auto_is_exact(rows, ordered):
    """On the CPU auto approximates from 2048 rows on (DESIGN.md, "What auto chooses")."""
    q, k, v = (torch.randn(1, 1, rows, 64) for _ in range(3))
    settings = ("auto", 2, 128, "mean", "own")
    numbers = (ops.pack("none", *settings), 0, None, 0.0, 0, 0)
    out, _, order, _ = ops.attend(q, k, v, None, None, *numbers, True)
    assert (order is not None) == ordered
    assert torch.equal(out, ops.attend(q, k, v, None, None, *numbers, False)[0])
    wanted, _ = ops.make_grouping(q, k, "none", "auto", 2, 128, "own", 0, flat=True)
    assert torch.equal(out, ops.forward(q, k, v, None, wanted, None, "none", None, *settings)[0])
    mask = torch.zeros(rows, dtype=torch.float32)
    assert torch.equal(
        ops.attend(q, k, v, mask, None, *numbers, False)[0],
        ops.forward(q, k, v, mask, wanted, None, "none", None, *settings)[0],
    )


def test_gradients_of_auto_where_it_is_exact():
    q, k, v = (torch.randn(1, 2, 40, 64, requires_grad=True) for _ in range(3))
    grads = []
    for settings in (dict(strategy="auto", group_size=2), dict(strategy="exact")):
        out = distrattention.scaled_dot_product_attention(q, k, v, **settings)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert all(map(torch.equal, *grads))
