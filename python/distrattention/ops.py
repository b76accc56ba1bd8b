# SPDX-License-Identifier: Apache-2.0
"""The operators torch.ops.distrattention.{make_grouping, forward, backward}: library, fake kernels and gradients.
`attend` is make_grouping and forward in one, and `forward_counting` a forward that counts what it keeps; they have no
gradient or vmap of their own.

Schemas and kernels are in C++ (python/ops.cpp, backward.cpp). Tensors are [B, H, N, d] with any strides, a mask of rank
0 to 4 broadcasts to [B, Hq, Nq, Nk]; an order of the columns is int32 [B, Hq, blocks, d] or flat, [B, Hq, blocks * d]
(what torch.export can trace for lengths below and above block_size alike), and the means of the keys are float32 [B, H,
blocks or 1, d] or flat, [0] where there are none. Operators are functional: they return new tensors and change none,
but for merge(outs, lses, out, lse), which merges attention of the same rows over disjoint parts of the keys into out
and lse, which may be a part's, and add_up(parts, total), which makes total [B, H, N, d] the sum of the parts, rounded
once where they are 64 at most, and backward_into, backward without a mask that writes to the memory that it is given;
all without gradients. The settings that follow the tensors are those of distrattention.Settings, resolved.
"""

import functools
import typing
from pathlib import Path

import distrattention
from distrattention.packing import (  # noqa: F401; they belong to `attend`
    pack, pack_near, pack_window_size, unpack, unpack_near, unpack_window_size,
)  # fmt: skip
from distrattention.settings import STRATEGIES

try:
    import torch
except (ImportError, OSError) as error:  # OSError: a library of torch's own does not load
    raise distrattention.UnavailableError(f"torch cannot be imported ({error}); install torch 2.10 or later") from error

OLDEST_TORCH = (2, 10)


def _find_library():
    for folder in distrattention.__path__:  # an editable installation has two: of the sources and of what was built
        for path in Path(folder).glob("libdistrattention_ops.*"):
            return path
    raise distrattention.UnavailableError(
        f"no libdistrattention_ops in {', '.join(distrattention.__path__)}; install the package: pip install ."
    )


def _load():
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        raise distrattention.UnavailableError(f"torch is {torch.__version__}; allowed: 2.10 and later")
    library = _find_library()
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise distrattention.UnavailableError(
            f"torch {torch.__version__} could not load {library.name}: {error}"
        ) from error


_load()
make_grouping = torch.ops.distrattention.make_grouping
forward = torch.ops.distrattention.forward
forward_counting = torch.ops.distrattention.forward_counting
attend = torch.ops.distrattention.attend.default  # not looked up by its arguments
_attend = getattr(attend, "_op", attend)  # the same without a call in Python
backward = torch.ops.distrattention.backward
backward_into = torch.ops.distrattention.backward_into
merge = torch.ops.distrattention.merge
add_up = torch.ops.distrattention.add_up
explain = torch.ops.distrattention.explain


class Description(typing.NamedTuple):
    """What was built and what the machine has for it; the operator describe()."""

    version: str
    instruction_set: str  # of the CPU
    cuda_build: str  # CUDA's version and the architectures that kernels were built for; "none"
    cuda_devices: list[str]  # that could run them
    cuda_unusable: str  # why there is none; "" where there is one
    operations: list[str]  # of each kernel
    kernels: list[str]


def describe():
    """The library's Description."""
    return Description(*torch.ops.distrattention.describe())


class Decisions(typing.NamedTuple):
    """How often this process has validated a problem, resolved a strategy and chosen a kernel."""

    validated: int
    resolved: int
    chosen: int


def decisions():
    """The Decisions up to now: for tests, which hold a call to one of each."""
    return Decisions(*torch.ops.distrattention.decisions())


def order_of_caller(order, q, block_size):
    """The caller's order as the operators take it, int32 [B, Hq, blocks, d], for q [B, Hq, Nq, d]."""
    blocks = -(-q.shape[2] // block_size)
    shape = (q.shape[0], q.shape[1], blocks, q.shape[3])
    sizes = tuple(order.shape)
    if sizes[0] not in (1, shape[0]) or sizes[1] != shape[1] or sizes[2] not in (1, blocks) or sizes[3] != shape[3]:
        allowed = f"[{shape[0]} or 1, {shape[1]}, {blocks} or 1, {shape[3]}]"
        raise ValueError(f"order has the shape {sizes}; allowed: {allowed}")
    if order.device != q.device:
        raise TypeError(f"order is on {order.device}; allowed: {q.device}, where the query is")
    return order.to(torch.int32).expand(shape).contiguous()


def lse_dtype(dtype):
    """The dtype of LSE and of a mask's gradient: float32, and float64 for float64 tensors."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Fake kernels: shapes, strides and dtypes of what the operators return.


def with_defaults(operator, arguments):
    """All arguments of a call of the operator, those that were left out by their defaults."""
    left_out = operator._schema.arguments[len(arguments) :]
    return (*arguments, *(argument.default_value for argument in left_out))


@torch.library.register_fake("distrattention::make_grouping")
def _(*arguments):
    q, k, causal, strategy, group_size, block_size, order_from, _, flat, *near = with_defaults(
        make_grouping.default, arguments
    )
    blocks, d = (q.shape[2] + block_size - 1) // block_size, q.shape[3]

    def empty(heads, count, dtype):
        shape = (q.shape[0], heads, count * d) if flat else (q.shape[0], heads, count, d)
        return q.new_empty(shape, dtype=dtype)

    is_callers = STRATEGIES[strategy].order == "caller" and group_size > 1
    order = q.new_empty((0,), dtype=torch.int32) if is_callers else empty(q.shape[1], blocks, torch.int32)
    if not needs_key_means(strategy, group_size, *near):
        return order, q.new_empty((0,), dtype=torch.float32)
    is_previous = order_from == "previous" or (order_from == "auto" and causal != "none")
    return order, empty(k.shape[1], blocks if is_previous else 1, torch.float32)


def needs_key_means(strategy, group_size, window=None, sinks=0, *_):
    """Whether far scores keep the means of dropped columns; under `auto`, where it takes such a strategy."""
    row = STRATEGIES[strategy]
    return (window is not None or sinks > 0) and row.members == "one" and row.order != "none" and group_size > 1


@torch.library.register_fake("distrattention::forward")
def _(q, k, v, mask=None, order=None, key_means=None, *settings):
    b, h, n, _ = q.shape
    return q.new_empty((b, n, h, v.shape[3])).transpose(1, 2), q.new_empty((b, h, n), dtype=lse_dtype(q.dtype))


@torch.library.register_fake("distrattention::forward_counting")
def _(q, k, v, *others):
    halves = q.new_empty((*q.shape[:2], (q.shape[2] + 63) // 64, 2), dtype=torch.int32)
    return *forward(q, k, v), halves


@torch.library.register_fake("distrattention::attend")
def _(q, k, v, mask, scale, settings, near, key_offset, skip, seed, window_size, lse, softcap=0.0):
    if not q.device == k.device == v.device:  # one of them a meta tensor beside real ones
        raise RuntimeError(f"q, k and v are on {q.device}, {k.device} and {v.device}; allowed: one device")
    causal, strategy, group_size, block_size, estimator, order_from = unpack(settings)
    order = key_means = None  # under `auto` there may be none, too, but that is for a device to say
    if lse and strategy != "exact" and group_size > 1:
        window, sinks, finish = unpack_near(near)
        grouping = (strategy, group_size, block_size, order_from, seed, True)
        order, key_means = make_grouping(q, k, causal, *grouping, window, sinks, key_offset, skip, finish)
        key_means = key_means if needs_key_means(strategy, group_size, window, sinks) else None
    out, lse_of_all = forward(q, k, v, mask)
    return out, lse_of_all if lse else None, order, key_means


def dense_like(tensor):
    dense = torch.empty_like(tensor)
    return dense if dense.shape[-1] <= 1 or dense.stride(-1) == 1 else tensor.new_empty(tensor.shape)


@torch.library.register_fake("distrattention::backward")
def _(grad_out, grad_lse, q, k, v, mask, order, key_means, out, lse, mask_gradient=False, *settings):
    shape = mask.shape if mask is not None and mask_gradient else (0,)
    return dense_like(q), dense_like(k), dense_like(v), q.new_empty(shape, dtype=lse_dtype(q.dtype))


@torch.library.register_fake("distrattention::backward_into")
def _(*arguments):
    pass


@torch.library.register_fake("distrattention::merge")
def _(outs, lses, out, lse):
    pass


@torch.library.register_fake("distrattention::add_up")
def _(parts, total):
    pass


# Gradients: of O and LSE with respect to Q, K, V and an additive mask, the order and the means of the keys held
# constant; no forward mode.


def refuse_tangents(arguments):
    """Raises NotImplementedError where a tensor among the arguments has a tangent."""
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level >= 0:  # which takes no time to ask
        tensors = (argument for argument in arguments if isinstance(argument, torch.Tensor))
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
            refuse_forward_mode()


def refuse_forward_mode(*_):
    raise NotImplementedError("there is no forward-mode differentiation of attention; allowed: reverse mode")


_autograd_kernels = torch.library.Library("distrattention", "IMPL")  # they last as long as it does
# Orders and means are constants; without this, autograd would take the means for a result that lacks a derivative.
_autograd_kernels.impl(make_grouping.default, torch.library.fallthrough_kernel, "Autograd")


def _register_autograd(operator, function, tensors):
    """Gives the operator, whose first arguments are so many tensors, the gradient that the autograd.Function has.
    Returns the kernel that does so: the operator, without the way through the dispatcher.

    torch.library.register_autograd() would do the same, but takes longer in each call, and where no input requires a
    gradient its kernel drops tangents silently.
    """

    def kernel(*arguments):
        refuse_tangents(arguments)
        if torch.is_grad_enabled() and any_requires_grad(arguments[:tensors]):
            return function.apply(*arguments)
        return _below_autograd(operator, *arguments)

    _autograd_kernels.impl(operator, kernel, "Autograd")
    return kernel


def any_requires_grad(tensors):
    """Whether one of the tensors, some of which may be None, requires a gradient."""
    for tensor in tensors:  # sooner done than any() of a list
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _below_autograd(operator, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        return _below_autograd(backward, *arguments)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "distrattention has no second derivatives: the gradient of attention was differentiated"
        )


_backward = _register_autograd(backward.default, _Backward, 10)


_SKIP, _DETERMINISTIC = 10, 12  # their places among the settings of forward and backward


def refuse_gradients(skip):
    """Raises NotImplementedError where a call that records gradients is to skip keys."""
    if skip:
        raise NotImplementedError(
            f"skip is {skip} in a call with gradients; allowed: 0, as skipping is for the forward alone, or a call in "
            "torch.no_grad()"
        )


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask=None, order=None, key_means=None, *settings):
        refuse_gradients(*settings[_SKIP : _SKIP + 1] or (0,))
        out, lse = _below_autograd(forward, q, k, v, mask, order, key_means, *settings)
        _save(ctx, (q, k, v, mask, order, key_means, out, lse), settings)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse=None):
        q, k, v, mask, order, key_means, out, lse = ctx.saved_tensors
        inputs = len(ctx.needs_input_grad)
        if grad_out is None and grad_lse is None:
            return (None,) * inputs
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        mask_gradient = mask is not None and ctx.needs_input_grad[3]
        tensors = (grad_out, grad_lse, q, k, v, mask, order, key_means, out, lse)
        settings = ctx.settings
        if torch.are_deterministic_algorithms_enabled() and len(settings) > _DETERMINISTIC:
            settings = (*settings[:_DETERMINISTIC], True, *settings[_DETERMINISTIC + 1 :])
        run = _backward
        if torch.compiler.is_compiling():  # compiled autograd traces this
            run = backward
        elif torch._C._are_functorch_transforms_active():
            run = _BackwardOfFunc.apply
        *grads, grad_mask = run(*tensors, mask_gradient, *settings)
        grads = (*grads, grad_mask.to(mask.dtype) if mask_gradient else None)
        return (*grads, *(None,) * (inputs - 4))[:inputs]


class _Attend(_Forward):
    @staticmethod
    def forward(ctx, q, k, v, mask, others):
        scale, numbers, deterministic, with_lse, softcap = others  # in one, as every argument costs time
        causal, settings = _settings_of(numbers, deterministic, softcap)
        out, lse, order, key_means = _attend(q, k, v, mask, scale, *numbers, True, softcap)
        ctx.save_for_backward(q, k, v, mask, order, key_means, out, lse)
        ctx.settings = (causal, scale, *settings)
        ctx.set_materialize_grads(False)
        return (out, lse) if with_lse else out  # every output costs time, too


@functools.lru_cache(maxsize=1024)  # as many as core._packed()
def _settings_of(numbers, deterministic, softcap):
    """(causal, the other settings of forward and backward but for the scale). Raises where they are to skip keys."""
    packed, near, key_offset, skip, _, window_size = numbers
    refuse_gradients(skip)
    causal, *settings = unpack(packed)
    window, sinks, finish = unpack_near(near)
    settings += (window, sinks, key_offset, skip, finish, deterministic)
    if window_size or softcap:
        settings += (None, None, *unpack_window_size(window_size), softcap)
    return causal, tuple(settings)


def _save(ctx, tensors, settings):
    ctx.save_for_backward(*tensors)
    ctx.settings = settings
    ctx.set_materialize_grads(False)


_register_autograd(forward.default, _Forward, 4)


class _ForwardOfFunc(_Forward):
    """The operator with its gradient for torch.func, which looks for these methods."""

    generate_vmap_rule = True
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(*arguments):
        return forward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, mask, order, key_means, *settings = inputs
        _save(ctx, (q, k, v, mask, order, key_means, *output), settings)


class _BackwardOfFunc(_Backward):
    generate_vmap_rule = True
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(*arguments):
        return backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


forward_of_func = _ForwardOfFunc.apply


# _Attend.apply() without what Function.apply() does for torch.func and for setup_context(), which are not there.
_record_attend = super(torch.autograd.Function, _Attend).apply


def attend_eagerly(q, k, v, mask, scale, numbers, deterministic, with_lse, softcap=0.0):
    """(out, lse) by `attend`, with gradients: the shortest way in eager code, unless torch.func transforms it. Without
    with_lse lse may be None. numbers: (what pack() and pack_near() make of the settings, key_offset, skip, seed,
    what pack_window_size() makes of the window)."""
    of_tensors = q.requires_grad or k.requires_grad or v.requires_grad or (mask is not None and mask.requires_grad)
    if of_tensors and torch.is_grad_enabled():
        results = _record_attend(q, k, v, mask, (scale, numbers, deterministic, with_lse, softcap))
        return results if with_lse else (results, None)
    out, lse, _, _ = _attend(q, k, v, mask, scale, *numbers, with_lse, softcap)
    return out, lse
