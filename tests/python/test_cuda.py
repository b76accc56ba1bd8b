# SPDX-License-Identifier: Apache-2.0
"""The operators on CUDA tensors: values, gradients and orders against the CPU, layouts, what is refused."""

import functools

import pytest
import torch

import distrattention
from distrattention import doctor, ops

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(ops.describe().cuda_build == "none", reason="the package was built without CUDA"),
]

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ALL = 1 << 40  # rows: one order for the whole sequence

CASES = {
    "exact": {},
    "exact, causal": {"causal": "top_left"},
    "exact, grouped heads, unlike lengths": {"heads_kv": 1, "n": 130, "m": 201, "causal": "bottom_right"},
    "exact, rows that see nothing": {"n": 200, "m": 70, "causal": "bottom_right"},
    "exact, one row": {"n": 1, "m": 300},
    "exact, a scale": {"scale": 0.3},
    "exact, a negative scale": {"scale": -0.1},
    "lsh": {"strategy": "lsh", "group_size": 2},
    "lsh, sample, causal": {"strategy": "lsh", "group_size": 4, "estimator": "sample", "causal": "top_left"},
    "lsh, one order": {"strategy": "lsh", "group_size": 2, "block_size": ALL},
    "lsh, groups of 3": {"strategy": "lsh", "group_size": 3},
    "lsh, odd columns": {"strategy": "lsh", "group_size": 2, "d": 45, "dv": 71},
    "lsh, short blocks": {"strategy": "lsh", "group_size": 2, "block_size": 24},
    "lsh, grouped heads": {"strategy": "lsh", "group_size": 2, "heads_kv": 1, "causal": "bottom_right", "m": 201},
    "energy": {"strategy": "energy", "group_size": 2},
    "energy, previous, causal": {
        "strategy": "energy",
        "group_size": 4,
        "order_from": "previous",
        "causal": "top_left",
    },
    "energy, one order": {"strategy": "energy", "group_size": 2, "block_size": ALL, "d": 128},
    "near keys": {"strategy": "energy", "group_size": 2, "m": 400, "window": 0},
    "near keys, previous, causal, grouped heads": {
        "strategy": "energy", "group_size": 4, "order_from": "previous", "causal": "bottom_right", "n": 300, "m": 500,
        "heads_kv": 1, "window": 10, "sinks": 5,
    },
    "near keys, lsh, one order, key offset": {
        "strategy": "lsh", "group_size": 2, "block_size": ALL, "m": 400, "window": 10, "key_offset": 200,
    },
    "a boolean mask": {"mask": "boolean"},
    "an additive mask": {"mask": "additive", "strategy": "lsh", "group_size": 2},
    "a mask of a row": {"mask": "row", "strategy": "energy", "group_size": 2},
}
SETTINGS = dict(causal="none", scale=None, strategy="exact", group_size=1, block_size=64, estimator="mean")
SETTINGS |= dict(order_from="own", window=None, sinks=0, key_offset=None, skip=0.0, finish=False)


def mask_of(kind, n, m):
    if kind == "row":
        return torch.randn(1, 1, 1, m)
    hidden = torch.rand(n, m) < 0.3
    if kind == "additive":
        return torch.randn(n, m).masked_fill(hidden, -torch.inf)
    hidden[5] = True  # a query that sees no key
    return ~hidden


def steps_of_an_eighth(*shape):
    """Random numbers that all dtypes hold."""
    return torch.randint(-8, 9, shape) / 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, dtype, problem, textbook, no_worse_than):
    """Against float64 on the CPU with the GPU's order: the error is at most twice that of a plain implementation."""
    case = {"n": 170, "d": 64, **CASES[case]}
    settings = {name: case.get(name, default) for name, default in SETTINGS.items()}
    sizes = {name: case[name] for name in ("n", "m", "d", "dv", "heads_kv") if name in case}
    tensors = list(problem(batch=1, heads=2, **sizes, dtype=dtype))
    n, m = tensors[0].shape[2], tensors[1].shape[2]
    mask = mask_of(case["mask"], n, m) if "mask" in case else None
    additive = mask is not None and mask.dtype != torch.bool
    order = key_means = None
    if settings["strategy"] != "exact":
        q, k = (tensor.to(DEVICE) for tensor in tensors[:2])
        names = ("causal", "strategy", "group_size", "block_size", "order_from")
        near = list(settings.values())[7:]
        order, key_means = ops.make_grouping(q, k, *(settings[name] for name in names), 0, False, *near)
        order, key_means = order.cpu(), key_means.cpu() if key_means.numel() else None
    weight, weight_lse = steps_of_an_eighth(1, 2, n, tensors[2].shape[3]), steps_of_an_eighth(1, 2, n)

    def run(function, device, wide):
        leaves = [tensor.to(device, wide or dtype).requires_grad_() for tensor in tensors]
        other = None if mask is None else mask.to(device).requires_grad_(additive)
        placed = [None if columns is None else columns.to(device) for columns in (order, key_means)]
        if function is textbook:
            out, lse = textbook(*leaves, other, order=placed[0], key_means=placed[1], **settings)
        else:
            out, lse = function(*leaves, other, *placed, *settings.values())
        seen = lse > -torch.inf
        total = (out.double() * weight.to(device)).sum() + (lse[seen] * weight_lse.to(device)[seen]).sum()
        grads = torch.autograd.grad(total, [*leaves, other] if additive else leaves)
        return [tensor.cpu() for tensor in (out, lse, *grads)]

    actual = run(ops.forward, DEVICE, None)
    assert [tensor.dtype for tensor in actual[:5]] == [dtype, torch.float32, dtype, dtype, dtype]
    results = actual, run(ops.forward, "cpu", torch.float64), run(textbook, "cpu", None)
    for name, *values in zip(("out", "lse", "dq", "dk", "dv", "dmask"), *results):
        no_worse_than(*values, what=name)


@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_skipped_is_what_the_cpu_skips(dtype, finish, problem):
    """But for halves of tiles that rounding may decide otherwise; keys are large and small by turns."""
    q, k, v = problem(heads_kv=2, n=700, d=64, dtype=dtype)
    k = k * torch.where(torch.arange(700) // 64 % 3 == 1, 1.5, 0.25)[:, None].to(dtype)
    run = functools.partial(distrattention.scaled_dot_product_attention, is_causal=True, enable_gqa=True,
                            strategy="energy", group_size=2, window=0, sinks=1, skip=0.01, finish=finish,
                            return_halves=True)  # fmt: skip
    out, halves = run(*(tensor.to(DEVICE) for tensor in (q, k, v)))
    wanted, halves_of_cpu = run(*(tensor.double() for tensor in (q, k, v)))
    halves = halves.cpu()
    assert torch.equal(halves[..., 1], halves_of_cpu[..., 1]) and 0 < halves[..., 0].sum() < halves[..., 1].sum()
    assert (halves[..., 0] == halves_of_cpu[..., 0]).float().mean() > 0.9
    error = (out.cpu().double() - wanted).abs().amax(-1)
    assert (error < 0.02).float().mean() > 0.9  # rows whose halves and order are the same


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "exact"},
        {"strategy": "energy", "group_size": 2},
        {"strategy": "energy", "group_size": 2, "block_size": ALL, "order_from": "own"},
    ],
)
def test_what_is_not_a_number_is_kept(dtype, dim, sign, options):
    """A far key that is NaN, of either sign, where all thresholds are above 0, with and without another far key that is
    kept, in the other half of its tile."""
    q = torch.ones(1, 1, 512, dim, dtype=dtype, device=DEVICE)
    k = torch.zeros(1, 1, 2048, dim, dtype=dtype, device=DEVICE)
    k[:, :, :128] = 4  # sinks, scores of 32 or 45
    not_a_number = torch.tensor(float("nan")).copysign(torch.tensor(sign))
    for number, other, kept in ((not_a_number, 0, 1), (0, 0, 0), (not_a_number, 8, 2), (0, 8, 1)):
        k[:, :, 1500, 3] = number
        k[:, :, 1420] = other
        *_, halves = distrattention.scaled_dot_product_attention(
            q, k, k, window=0, sinks=128, skip=0.01, return_halves=True, **options
        )
        assert (halves[..., 0] == kept).all(), (number, other)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize("block_size", [128, ALL])
def test_means_that_are_no_numbers_leave_rows_without_far_keys_alone(dim, finish, block_size):
    """The last row of K makes NaN of the means. Rows before 256 see near keys alone, and share blocks with others."""
    generator = torch.Generator("cpu").manual_seed(3)
    q, k, v = (torch.randn(1, 2, 512, dim, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(3))
    k[:, :, -1] = float("nan")
    options = {"window": 0, "sinks": 128, "is_causal": True, "return_lse": True}
    approximation = {"strategy": "energy", "group_size": 2, "order_from": "own", "skip": 0.01, "finish": finish}
    approximation["block_size"] = block_size
    out, lse = distrattention.scaled_dot_product_attention(q, k, v, **options, **approximation)
    wanted, wanted_lse = distrattention.scaled_dot_product_attention(q, k, v, **options, strategy="exact")
    torch.testing.assert_close(out[:, :, :256], wanted[:, :, :256], rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse[:, :, :256], wanted_lse[:, :, :256], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", ["lsh", "energy"])
@pytest.mark.parametrize("order_from", ["own", "previous"])
@pytest.mark.parametrize("block_size", [32, 128, ALL])
def test_orders_are_the_cpus(dtype, strategy, order_from, block_size, problem):
    """But for columns whose numbers are within rounding of each other, which are rare among random ones."""
    q, k, _ = problem(heads_kv=2, n=700, d=64, dtype=dtype)
    causal = "none" if block_size == ALL else "bottom_right"  # one block by "previous" is refused in causal calls
    arguments = (causal, strategy, 2, block_size, order_from, 5)
    cpu, _ = ops.make_grouping(q, k, *arguments)
    gpu, _ = ops.make_grouping(q.to(DEVICE), k.to(DEVICE), *arguments)
    flat, _ = ops.make_grouping(q.to(DEVICE), k.to(DEVICE), *arguments, flat=True)
    assert torch.equal(flat, gpu.flatten(2)) and gpu.dtype == torch.int32 and gpu.is_cuda == (DEVICE == "cuda")
    assert torch.equal(gpu.sort(3).values.cpu(), torch.arange(64, dtype=torch.int32).expand(gpu.shape))
    if order_from == "own" or block_size != ALL:
        assert not torch.equal(cpu[:, :, -1], cpu.sort(3).values[:, :, -1])
    assert (cpu == gpu.cpu()).all(3).float().mean() >= 0.97


LAYOUTS = {
    "packed": lambda d: torch.randn(2, 150, 3, 2, d).permute(2, 0, 3, 1, 4).unbind(0),
    "rows first": lambda d: [torch.randn(2, 150, 2, d).transpose(1, 2) for _ in range(3)],
    "columns first": lambda d: [torch.randn(2, 2, d, 150).transpose(2, 3) for _ in range(3)],
    "repeated heads": lambda d: [torch.randn(2, 1, 150, d).expand(-1, 4, -1, -1) for _ in range(3)],
    "odd rows": lambda d: [torch.randn(2, 2, 150, d + 1)[..., :d] for _ in range(3)],
    "odd addresses": lambda d: [torch.randn(2, 2, 150, d + 8)[..., 1 : d + 1] for _ in range(3)],
    "odd addresses, no holes": lambda d: [torch.randn(600 * d + 1)[1:].view(2, 2, 150, d) for _ in range(3)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layout_changes_no_bit(layout, dtype):
    """Strides are read in place or copied, as are addresses that no wide load takes."""
    tensors = LAYOUTS[layout](64)
    offsets = [tensor.storage_offset() for tensor in tensors]
    views = [
        torch.as_strided(
            tensor._base.to(DEVICE, dtype) if tensor._base is not None else tensor.to(DEVICE, dtype),
            tensor.shape,
            tensor.stride(),
            offset,
        )
        for tensor, offset in zip(tensors, offsets)
    ]
    assert all(view.stride() == tensor.stride() for view, tensor in zip(views, tensors))
    if "addresses" in layout and DEVICE == "cuda":
        assert all(view.data_ptr() % 16 != 0 for view in views)
    settings = ("top_left", None, "lsh", 2, 64, "mean", "own")
    results = []
    for q, k, v in (views, [tensor.clone(memory_format=torch.contiguous_format) for tensor in views]):
        order, _ = ops.make_grouping(q, k, *("top_left", "lsh", 2, 64, "own", 0))
        out, lse = ops.forward(q, k, v, None, order, None, *settings)
        grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).to(dtype).view(out.shape)
        grads = ops.backward(grad, None, q, k, v, None, order, None, out, lse, False, *settings)
        results.append((order, out, lse, *grads))
    for one, other in zip(*results):
        assert torch.equal(one, other)
    assert results[0][1].transpose(1, 2).is_contiguous()


def test_sizes_of_zero():
    for batch, n, m in ((0, 7, 7), (2, 0, 7), (2, 7, 0)):
        q, k, v = (torch.randn(batch, 2, rows, 64, device=DEVICE, requires_grad=True) for rows in (n, m, m))
        order, _ = ops.make_grouping(q, k, "none", "lsh", 2)
        out, lse = ops.forward(q, k, v, None, order, None, "none", None, "lsh", 2)
        assert out.shape == (batch, 2, n, 64) and (out == 0).all() and (lse == -torch.inf).all()
        for tensor, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v))):
            assert grad.shape == tensor.shape and (grad == 0).all()


@pytest.mark.parametrize("strategy", ["exact", "lsh", "energy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_agree_bit_for_bit(strategy, dtype):
    q, k, v = (torch.randn(2, 4, 1000, 64, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
    results = []
    for _ in range(3):
        out = distrattention.scaled_dot_product_attention(q, k, v, is_causal=True, strategy=strategy)
        results.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_opcheck():
    operators = torch.ops.distrattention
    for dtype, mask in ((torch.bfloat16, None), (torch.float32, torch.randn(33, 33, device=DEVICE))):
        q, k, v = (torch.randn(2, 2, 33, 64, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
        grouping, settings = ("none", "lsh", 2, 32, "own", 0), ("none", None, "lsh", 2, 32, "mean", "own")
        torch.library.opcheck(operators.make_grouping.default, (q, k, *grouping))
        order, _ = ops.make_grouping(q, k, *grouping)
        torch.library.opcheck(operators.forward.default, (q, k, v, mask, order, None, *settings))
        with torch.no_grad():
            out, lse = ops.forward(q, k, v, mask, order, None, *settings)
        saved = [tensor.detach() for tensor in (torch.randn_like(out), torch.randn_like(lse), q, k, v)]
        saved += [mask, order, None, out, lse, mask is not None]
        torch.library.opcheck(operators.backward.default, (*saved, *settings))


def test_float64_is_refused():
    q = torch.randn(1, 2, 9, 8, device=DEVICE, dtype=torch.float64)
    with pytest.raises(TypeError, match="query is torch.float64 on cuda:0; allowed there: float16, bfloat16, float32"):
        distrattention.scaled_dot_product_attention(q, q, q)
    reasons = "no kernel on cuda .*sm80/forward: takes f16 and bf16; .*plain/forward: .*64"
    with pytest.raises(RuntimeError, match=reasons):
        ops.forward(q, q, q)
    with pytest.raises(RuntimeError, match="no kernel on cuda .*cuda/lsh: .*f64"):
        ops.make_grouping(q, q, "none", "lsh", 2)


MIXED = {
    "k": lambda q: (q, q.cpu(), q),
    "v": lambda q: (q, q, q.cpu()),
    "the mask": lambda q: (q, q, q, torch.zeros(9, 9)),
    "the order": lambda q: (q, q, q, None, torch.zeros(1, 2, 1, 8, dtype=torch.int32)),
}


@pytest.mark.parametrize("which", MIXED)
def test_mixed_devices_are_refused(which):
    q = torch.randn(1, 2, 9, 8, device=DEVICE)
    arguments = MIXED[which](q)
    with pytest.raises(RuntimeError, match=f"^{which} is on cpu; allowed: cuda:0, where q is"):
        ops.forward(*arguments)
    if which != "the order":
        with pytest.raises(TypeError, match="is on cpu; allowed: cuda:0"):
            distrattention.scaled_dot_product_attention(*arguments)
    swapped = [None if tensor is None else tensor.cpu() if tensor.is_cuda else tensor.cuda() for tensor in arguments]
    with pytest.raises(RuntimeError, match=f"^{which} is on cuda:0; allowed: cpu, where q is"):
        ops.forward(*swapped)


def test_mixed_dtypes_are_refused():
    q = torch.randn(1, 2, 9, 8, device=DEVICE)
    with pytest.raises(RuntimeError, match="dtype of k is Half; allowed: Float"):
        ops.forward(q, q.half(), q)
    with pytest.raises(TypeError, match="key is torch.float16; allowed: torch.float32"):
        distrattention.scaled_dot_product_attention(q, q.half(), q)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
def test_auto_approximates_on_hopper_only_by_its_own_kernel():
    def choice(n=16384, dtype=torch.bfloat16, d=128, **settings):
        q = torch.empty(1, 1, n, d, device=DEVICE, dtype=dtype)
        return distrattention.explain(q, q, q, group_size=2, **settings)["strategy"]

    assert choice(block_size=ALL) == choice(d=64, block_size=ALL) == "energy"
    assert choice(8192, block_size=ALL) == choice(8192, d=64, block_size=ALL) == "exact"
    assert choice(32768) == choice(32768, dtype=torch.float16, block_size=ALL) == "exact"


def test_explain_and_doctor_name_the_kernels(capsys):
    tensor_cores = "sm90/forward_blocks" if torch.cuda.get_device_capability() == (9, 0) else "sm80/forward"
    for dtype, kernel in ((torch.bfloat16, tensor_cores), (torch.float32, "plain/forward")):
        q = torch.empty(1, 4, 4096, 64, dtype=dtype, device=DEVICE)
        found = distrattention.explain(q, q, q, strategy="lsh")
        assert found["kernel"] == kernel and not found["kernels"][kernel]
        assert all(name.startswith(("sm", "plain/")) for name in found["kernels"])
        assert distrattention.explain(q, q, q, strategy="energy", operation="grouping")["kernel"] == "cuda/energy"
        assert distrattention.explain(q, q, q, strategy="energy", operation="backward")["kernel"]
    assert doctor.main() == 0
    report = capsys.readouterr().out
    for wanted in (
        f"CUDA devices for them: {torch.cuda.get_device_name()}",
        f"CUDA devices that torch sees: {torch.cuda.get_device_name()}",
        "torch.bfloat16 on cuda:0",
        f"  forward, lsh: {tensor_cores}",
    ):
        assert wanted in report


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current_one(problem):
    """The tensors say where the kernels run, in the backward's thread too; the current device stays what it is."""
    tensors = problem(n=200, d=64, dtype=torch.bfloat16)
    results = []
    # A stream of the wrong device would be refused, where both devices' default streams are one null pointer.
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")), torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        for device in ("cuda:0", "cuda:1"):
            q, k, v = (tensor.to(device).requires_grad_() for tensor in tensors)
            out = distrattention.scaled_dot_product_attention(q, k, v, strategy="lsh")
            assert out.device == torch.device(device) and torch.cuda.current_device() == 0
            gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
            results.append([tensor.cpu() for tensor in (out, *gradients)])
    for one, other in zip(*results):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="k is on cuda:1; allowed: cuda:0"):
        ops.forward(tensors[0].to("cuda:0"), tensors[1].to("cuda:1"), tensors[2].to("cuda:0"))
