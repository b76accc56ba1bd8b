# SPDX-License-Identifier: Apache-2.0
"""What all entries share: the check of their tensors, and attention of tensors that have passed it."""

import functools
import logging
import numbers

from distrattention import ops  # first, for it says in words what is missing
from distrattention import flops, vmap  # noqa: F401; they register what torch counts, and what it maps
from distrattention.context import is_plain, is_usual
from distrattention.determinism import is_nondeterministic_backward_allowed
from distrattention.settings import DEFAULT_BLOCK, MAX_DISTANCE, Settings, chosen, counted, require_int

import torch  # isort: skip

MAX_HEAD_DIM = 512  # of the operators
_DTYPES_ANYWHERE = (torch.float16, torch.bfloat16, torch.float32)
_DTYPES = (*_DTYPES_ANYWHERE, torch.float64)
_NUMBERS = (numbers.Real, torch.SymInt, torch.SymFloat)
_LEAST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_LOG, _logged = logging.getLogger("distrattention"), set()
_SCALES = (type(None), float, int)


NO_WINDOW = (None, None)


def sides_of(window_size):
    """(left, right) of a sliding window, None where it is unlimited, as -1 and None in a pair are; None: no window."""
    if window_size is None:
        return NO_WINDOW
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}; allowed: (left, right), or None")
    sides = tuple(None if side is None else require_int("window_size", side, -1, MAX_DISTANCE) for side in window_size)
    return tuple(None if side == -1 else side for side in sides)


def softcap_of(softcap):
    """What scores are capped with, 0.0 for None, which as 0 says that they are not. Raises, unless it may be that."""
    check_scale(softcap, "softcap")
    if softcap is not None and softcap != 0 and not softcap >= _LEAST:
        raise ValueError(f"softcap is {softcap}; allowed: 0 (scores are not capped), or a positive number")
    return 0.0 if softcap is None else softcap


def settings_of(*fields, **named):
    """Settings(*fields, **named), which eager code looks up rather than makes in each call."""
    if torch.compiler.is_compiling():
        return Settings(*fields, **named)
    try:
        return _known_settings(*fields, **named)
    except TypeError:  # they cannot be looked up, or are no settings, which Settings says in words
        pass
    return chosen(None, named) if named else Settings(*fields)


@functools.lru_cache(typed=True)
def _known_settings(*fields, **named):
    if any(isinstance(field, torch.Tensor) for field in (*fields, *named.values())):  # which may change
        raise TypeError
    return Settings(*fields, **named)


def attend_simply(query, key, value, is_causal, scale, grouped_heads, window_size, softcap, fields, with_lse):
    """attend() by the shortest way, for the usual call: eager code, four axes, nothing to broadcast or to cast, and no
    mask. None where the call is not that, which the operator itself finds out by refusing it: what the tensors or the
    settings lack is then said on the long way. `fields`: of Settings.
    """
    if (
        not is_usual()
        or not (type(query) is type(key) is type(value) is torch.Tensor)  # others may have a will of their own
        or query.dim() != 4
        or query.is_meta  # nothing refuses those that do not fit
        or type(scale) not in _SCALES
        or type(softcap) not in (float, int)
        or fields[-1] is not None  # the caller's order
        or _LOG.isEnabledFor(logging.INFO)
    ):
        return None
    try:
        numbers = _packed("top_left" if is_causal else "none", bool(grouped_heads), window_size, *fields)
    except (TypeError, ValueError):  # they cannot be looked up, or are no settings
        return None
    deterministic = not is_nondeterministic_backward_allowed()
    try:
        return ops.attend_eagerly(query, key, value, None, scale, numbers, deterministic, with_lse, softcap)
    except RuntimeError:
        return None


@functools.lru_cache(maxsize=1024, typed=True)
def _packed(causal, grouped_heads, window_size, *fields):
    """The numbers of ops.attend_eagerly()."""
    settings = _known_settings(*fields)
    options = options_of(settings, MAX_HEAD_DIM)  # a smaller d is the operator's to refuse
    return _numbers(causal, options, settings.seed, sides_of(window_size), grouped_heads)


def _numbers(causal, options, seed, sides, grouped_heads=True):
    window, sinks, key_offset, skip, finish = options[_NEAR:]
    near = ops.pack_near(window, sinks, finish)
    sliding = ops.pack_window_size(*sides)
    return ops.pack(causal, *options[:_NEAR], grouped_heads), near, key_offset, skip, seed, sliding


def attend(
    query, key, value, mask, causal, scale, settings, deterministic=False, with_lse=True, key_offset=None,
    counting=False, sides=NO_WINDOW, softcap=0.0,
):  # fmt: skip
    """(out [..., Hq, N, dv], lse [..., Hq, N]) of tensors that check() lets pass, with any number of axes from 2 on;
    `counting`, also the counts of halves, int32 [..., Hq, ceil(N / 64), 2].

    causal: "none", "top_left" or "bottom_right"; anything but "none" excludes a mask. Hq may be a multiple of H.
    deterministic: whether the backward is, whatever the process allows. Without with_lse lse may be None. sides: of a
    sliding window, as sides_of() returns them; queries stand beside keys as `causal` or key_offset says. softcap: as
    softcap_of() returns it.
    """
    eager = not torch.compiler.is_compiling()
    plain = eager and is_plain()
    if eager:
        ops.refuse_tangents((query, key, value, mask))
    if settings.skip and torch.is_grad_enabled() and ops.any_requires_grad((query, key, value, mask)):
        ops.refuse_gradients(settings.skip)
    (q, k, v), mask = four_axes((query, key, value), mask)
    options = options_of(settings, query.shape[-1], key_offset)
    deterministic = deterministic or not is_nondeterministic_backward_allowed()
    if settings.strategy == "auto" and eager and _LOG.isEnabledFor(logging.INFO):
        _log_choice(q, k, v, mask, "forward", causal, scale, "auto", *options[1:], deterministic, *sides, softcap)
    if plain and settings.order is None and not counting:
        numbers = _numbers(causal, options, settings.seed, sides)
        results = ops.attend_eagerly(q, k, v, mask, scale, numbers, deterministic, with_lse, softcap)
    else:
        tensors = (q, k, v, mask, *columns_of(q, k, causal, settings, options))
        if counting:
            results = ops.forward_counting(*tensors, causal, scale, *options, *sides, softcap)
        else:
            plainly = not eager or not torch._C._are_functorch_transforms_active()
            run = ops.forward if plainly else ops.forward_of_func
            others = () if sides == NO_WINDOW and softcap == 0 else (None, None, *sides, softcap)
            results = run(*tensors, causal, scale, *options, deterministic, *others)
    if query.dim() == 4:
        return results
    out, *others = results
    leading = query.shape[:-2]
    others = (None if other is None else other.reshape(*leading, *other.shape[2:]) for other in others)
    return out.reshape(*query.shape[:-1], value.shape[-1]), *others


def columns_of(q, k, causal, settings, options, flat=True):
    """(order, means of the keys) as forward takes them, None where it reads none, for q and k with four axes."""
    strategy, group_size, block_size, _, order_from, *near = options
    if strategy == "exact":
        return None, None
    order = None
    if settings.order is not None:
        order = ops.order_of_caller(settings.order, q, block_size)
        strategy = "given"
    needs_means = ops.needs_key_means(options[0], group_size, *near)
    if order is not None and not needs_means:
        return order, None
    grouping = (strategy, group_size, block_size, order_from, settings.seed, flat)
    computed, key_means = ops.make_grouping(q, k, causal, *grouping, *near)
    return computed if order is None else order, key_means if needs_means else None


def explain(
    query, key, value, mask, causal, scale, settings, operation="forward", key_offset=None, sides=NO_WINDOW, softcap=0.0
):  # fmt: skip
    """What attend() would do with these tensors, as the dict that attention.explain() describes."""
    four, mask = four_axes((query, key, value), mask)
    options = options_of(settings, query.shape[-1], key_offset)[1:]
    deterministic = not is_nondeterministic_backward_allowed()
    others = (deterministic, *sides, softcap)
    return _explanation(*ops.explain(*four, mask, operation, causal, scale, settings.strategy, *options, *others))


def _explanation(strategy, order_from, choice, kernel, kernels, reasons):
    found = {"strategy": strategy, "order_from": order_from, "choice": choice, "kernel": kernel}
    return found | {"kernels": dict(zip(kernels, reasons))}


_NEAR = 5  # where what is near begins among the options


def options_of(settings, head_dim, key_offset=None):
    """(strategy, group_size, block_size, estimator, order_from, window, sinks, key_offset, skip, finish) as the
    operators take them, "exact" where there is nothing to group."""
    group_size, block_size = resolve(settings, head_dim)
    strategy = settings.strategy if group_size > 1 else "exact"
    near = (settings.window, settings.sinks, key_offset, settings.skip, settings.finish and strategy != "exact")
    return strategy, group_size, block_size, settings.estimator, settings.order_from, *near


def resolve(settings, head_dim):
    """(group_size, block_size) as the operators take them: group_size 1 where there is nothing to group."""
    if settings.strategy == "exact" or head_dim <= 1:
        return 1, settings.block_size or DEFAULT_BLOCK if settings.skip else DEFAULT_BLOCK
    group_size = settings.taken_group_size
    if group_size > head_dim:
        raise ValueError(f"group_size is {group_size}; allowed: 1 to {head_dim}, the last size of query")
    return group_size, settings.block_size or DEFAULT_BLOCK


def is_exact(settings, head_dim):
    """Whether attention is exact where lengths are data, as "auto" then is; near keys that nothing skips are exact."""
    group_size, _ = resolve(settings, head_dim)
    return not settings.skip and (settings.strategy == "auto" or group_size == 1)


def four_axes(tensors, mask):
    """The tensors with four axes, [batch, heads, rows, columns], and the mask to go with them."""
    rank = tensors[0].dim()
    if rank == 4:
        return tensors, mask
    if rank < 4:
        return tuple(tensor[(None,) * (4 - rank)] for tensor in tensors), mask
    leading = tensors[0].shape[:-3]
    if mask is not None and mask.dim() > 3:
        mask = mask[(None,) * (rank - mask.dim())]
        if all(size == 1 for size in mask.shape[:-3]):
            mask = mask.flatten(0, -4)
        else:
            mask = mask.expand(*leading, *mask.shape[-3:]).flatten(0, -4)
    return tuple(tensor.flatten(0, -4) for tensor in tensors), mask


def broadcast(tensors, grouped_heads):
    """The tensors with the sizes of 1 before the last two expanded to the others'. What does not fit is check()'s."""
    if any(tensor.is_nested for tensor in tensors):  # which have no sizes
        return tensors
    kept = 3 if grouped_heads or _have_one_head(*tensors[1:]) else 2
    leading = [tensor.shape[:-kept] for tensor in tensors]
    if leading[0] == leading[1] == leading[2] or len({len(sizes) for sizes in leading}) > 1:
        return tensors
    shape = [next((size for size in sizes if size != 1), 1) for sizes in zip(*leading)]
    if any(size not in (1, wanted) for sizes in leading for size, wanted in zip(sizes, shape)):
        return tensors
    return tuple(tensor.expand(*shape, *tensor.shape[-kept:]) for tensor in tensors)


def _have_one_head(key, value):
    """Whether all heads of the query share one, which is left as it is: the operators know how to share."""
    return key.dim() > 2 and value.dim() > 2 and key.shape[-3] == value.shape[-3] == 1


def fit(query, key, value, grouped_heads=False):
    """Whether broadcast() and check() have nothing to do, by the few looks that the usual call needs."""
    if query.is_nested or key.is_nested or value.is_nested or not query.dim() == key.dim() == value.dim() == 4:
        return False
    batch, heads, _, d = query.shape
    batch_k, heads_k, rows, d_k = key.shape
    batch_v, heads_v, rows_v, d_v = value.shape
    return (
        batch == batch_k == batch_v
        and heads_k == heads_v
        and (heads == heads_k or (grouped_heads and heads_k > 0 and heads % heads_k == 0))
        and rows == rows_v
        and 1 <= d == d_k <= MAX_HEAD_DIM
        and 1 <= d_v <= MAX_HEAD_DIM
        and query.dtype is key.dtype is value.dtype
        and query.dtype in _DTYPES_ANYWHERE
        and query.layout is key.layout is value.layout is torch.strided
        and query.device == key.device == value.device
    )


def check(tensors, names, grouped_heads=False):
    """Raises, naming the argument, unless query, key and value fit each other and can be served."""
    query, key, value = tensors
    require_tensors(tensors, names)
    for tensor, name in zip(tensors, names):
        _check_place(tensor, name, query, names[0])
    for name, tensor in zip(names, tensors):
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}; allowed: float16, bfloat16, float32, float64")
        if tensor.dtype == torch.float64 and tensor.is_cuda:
            raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}; allowed there: float16, bfloat16, float32")
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} is {tensor.dtype}; allowed: {query.dtype}, which {names[0]} has")
        if tensor.dim() != query.dim() or tensor.dim() < 2:
            allowed = "2 or more" if query.dim() < 2 else f"{query.dim()}, as many as {names[0]}"
            raise ValueError(f"{name} has {counted(tensor.dim(), 'axis', 'axes')}; allowed: {allowed}")
        if tensor.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"the leading sizes of {name} are {tuple(tensor.shape[:-3])}; "
                f"allowed: {tuple(query.shape[:-3])}, those of {names[0]}"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"the last size of {names[1]} is {key.shape[-1]}; allowed: {query.shape[-1]}, as {names[0]}")
    for name, tensor in ((names[0], query), (names[2], value)):
        if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"the last size of {name} is {tensor.shape[-1]}; allowed: 1 to {MAX_HEAD_DIM}")
    if value.shape[-2] != key.shape[-2]:
        rows = counted(value.shape[-2], "row")
        raise ValueError(f"{names[2]} has {rows}; allowed: {key.shape[-2]}, as many as {names[1]}")
    if query.dim() > 2:
        _check_heads(*(tensor.shape[-3] for tensor in tensors), names, grouped_heads)


def check_mask(mask, query, key):
    """Raises unless the mask is a tensor that fits a query and a key that check() lets pass."""
    require_tensors((mask,), ("attn_mask",))
    _check_place(mask, "attn_mask", query, "query")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise TypeError(f"attn_mask is {mask.dtype}; allowed: bool, float32 or {query.dtype}, the query's")
    target = (*query.shape[:-1], key.shape[-2])
    fits = mask.dim() <= len(target) and all(
        size == 1 or size == wanted for size, wanted in zip(reversed(mask.shape), reversed(target))
    )
    if not fits:
        raise ValueError(f"the shape of attn_mask is {tuple(mask.shape)}; allowed: what broadcasts to {target}")


def _check_place(tensor, name, query, name_of_query):
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"of layout {tensor.layout}"
        raise NotImplementedError(f"{name} is {kind}; allowed: dense tensors (layout torch.strided)")
    if tensor.device != query.device:
        raise TypeError(f"{name} is on {tensor.device}; allowed: {query.device}, where {name_of_query} is")


def require_tensors(tensors, names):
    """Raises TypeError, naming the argument, for what is no tensor."""
    for tensor, name in zip(tensors, names):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is of type {type(tensor).__name__}; allowed: torch.Tensor")


def check_scale(scale, name="scale"):
    """Raises, naming it, unless the scale is None or a number (also as a tensor without axes) that float32 holds."""
    if isinstance(scale, torch.Tensor) and scale.dim() == 0 and not scale.requires_grad:
        scale = scale.item()
    if scale is None:
        return
    if not isinstance(scale, _NUMBERS):
        raise TypeError(f"{name} is of type {type(scale).__name__}; allowed: None or a number, which gets no gradient")
    if not -_LARGEST <= scale <= _LARGEST:
        raise ValueError(f"{name} is {scale}; allowed: a finite number that float32 holds")


def _check_heads(heads_q, heads_k, heads_v, names, grouped):
    if heads_v != heads_k:
        raise ValueError(f"{names[2]} has {counted(heads_v, 'head')}; allowed: {heads_k}, as many as {names[1]}")
    if heads_q == heads_k:
        return
    if not grouped and heads_k != 1:
        found = counted(heads_k, "head")
        raise ValueError(f"{names[1]} has {found}; allowed: {heads_q}, as {names[0]}, or enable_gqa=True")
    if heads_k == 0 or heads_q % heads_k != 0:
        found = counted(heads_k, "head")
        raise ValueError(f"{names[1]} has {found}; allowed: a divisor of {heads_q}, the heads of {names[0]}")


def _log_choice(q, k, v, mask, *arguments):
    """Says once for each kind of problem what strategy `auto` came to."""
    problem = (q.shape, k.shape, v.shape[-1], q.dtype, q.device, *arguments)
    if problem not in _logged:
        _logged.add(problem)
        found = _explanation(*ops.explain(q, k, v, mask, *arguments))
        text = f"choice: {found['choice']}; kernel: {found['kernel']}"
        reasons = "; ".join([text, *(f"{name}: {reason}" for name, reason in found["kernels"].items())])
        _LOG.info("q %s, k %s: %s", tuple(q.shape), tuple(k.shape), reasons)
