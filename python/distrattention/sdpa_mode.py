# SPDX-License-Identifier: Apache-2.0
"""A block of code in which torch's own attention is DistrAttention: for models that offer no hook."""

import re
import sys
import types
import warnings
from dataclasses import dataclass, field

from distrattention import context, core  # first, for it says in words what is missing
from distrattention.attention import explain, is_decoding, scaled_dot_product_attention
from distrattention.settings import EXACT, Fields, Settings, chosen

import torch  # isort: skip
import torch.nn.functional as F  # isort: skip
from torch.overrides import TorchFunctionMode  # isort: skip
from typing_extensions import Unpack  # isort: skip  # torch brings it

POLICIES = ("error", "warn", "silent")
_WEIGHTS = "nn.MultiheadAttention with need_weights=True multiplies Q and K itself; allowed: need_weights=False"

# Attention that torch fuses with what is around it. In a mode, eager code leaves these alone, compiled code does not.
_FUSED = (
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
    torch.ops.aten._native_multi_head_attention.default,
    torch.ops.aten._transformer_encoder_layer_fwd.default,
)


@dataclass
class Calls:
    """The attention calls that were met, but for compiled ones, which are not counted."""

    taken: int = 0  # by this package, with the settings
    reasons: dict[str, int] = field(default_factory=dict)  # why others were left exact, and how many of them
    compiled: bool = False  # whether compiled calls were met

    @property
    def left(self) -> int:
        """How many calls were left exact."""
        return sum(self.reasons.values())

    def count(self, reason: str | None) -> None:
        """Counts a call that was taken (None), or left exact for a reason."""
        if torch.compiler.is_compiling():  # where a count would be a constant
            self.compiled = True
        elif reason is None:
            self.taken += 1
        else:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1


class replace_sdpa(TorchFunctionMode):
    """Within the block, every call of torch.nn.functional.scaled_dot_product_attention is this package's.

        with distrattention.replace_sdpa(strategy="energy", group_size=2) as calls:
            model(images)
        print(calls.taken, calls.left, calls.reasons)

    Calls that nn.MultiheadAttention makes are included. Left exact, and counted with the reason, are decoding (one row,
    or fewer rows than a block against more keys), calls that this package refuses (see on_unsupported), and
    nn.MultiheadAttention with need_weights=True (its default), which multiplies Q and K itself. Not met are
    torch.jit.script, calls of torch.ops.aten, and whatever else multiplies Q and K itself: a block that met no call
    warns of it.

    on_unsupported: what happens to a call that this package refuses (dropout, or attention over channels, say).
        "error" raises the refusal; "warn" lets the next block outside, and in the end torch's own function, take the
        call, and warns once for each kind of refusal; "silent" does so without a word, and gives no other warning
        either.
    settings, fields: a `Settings`, or the fields of one. A mask does not tell whether it is causal: pass
        order_from="previous" for a model whose causality arrives as a mask. `window` takes
        key 0 to stand beside query 0 there.

    Blocks nest (the innermost decides), may be entered again, and end with an exception too. A block holds for the
    thread that entered it. Activation checkpointing repeats the forward within the backward: keep both in the block.

    Attention over channels (XCiT) is refused by "lsh" and "energy", and exact under "auto". It is known by its shapes
    and scale, and timm's by its class, too, but not in compiled code: there timm's is missed where a head has as many
    channels as there are tokens, or more.

    torch.compile traces through a block, around the compiled function or inside it. Inside it, turn off
    torch.backends.mha.set_fastpath_enabled() where torch.nn.TransformerEncoderLayer or nn.MultiheadAttention run
    without gradients: compiled code does not ask a mode before it takes their fused operators.

    Raises ValueError for a policy, and ValueError or TypeError for a setting, that is not allowed.
    """

    def __init__(
        self, settings: Settings | None = None, *, on_unsupported: str = "error", **fields: Unpack[Fields]
    ) -> None:
        super().__init__()
        if on_unsupported not in POLICIES:
            raise ValueError(f"on_unsupported is {on_unsupported!r}; allowed: {', '.join(map(repr, POLICIES))}")
        self.on_unsupported = on_unsupported
        self.settings = chosen(settings, fields)
        self.warned = set()
        self.calls = Calls()
        self._outside = []  # the counts of blocks of this object around the present one

    def __enter__(self) -> Calls:
        self._outside.append(self.calls)
        self.calls = Calls()
        super().__enter__()
        return self.calls

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: types.TracebackType | None) -> None:
        super().__exit__(kind, error, traceback)
        ended, self.calls = self.calls, self._outside.pop()
        if kind is None and self.on_unsupported != "silent":
            _warn_of_no_call(ended)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if function in _CALLERS:
            if function is F.multi_head_attention_forward and kwargs.get("need_weights", True):
                self.calls.count(_WEIGHTS)
                self._warn_once(f"a call is left to torch: {_WEIGHTS}")
            super().__enter__()  # a mode is off while it answers
            try:
                return _CALLERS[function](*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        if function in _FUSED:
            self._pass_on(
                NotImplementedError(
                    "torch's fused encoder layer hides its attention; allowed: "
                    "torch.backends.mha.set_fastpath_enabled(False) before the model is compiled"
                )
            )
        return function(*args, **kwargs)

    def _attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        settings, reason = self.settings, None
        try:
            core.require_tensors((query, key, value), ("query", "key", "value"))
            if not settings.is_exact and _is_over_channels(*arguments, scale):
                if settings.strategy != "auto":
                    raise NotImplementedError(
                        f"query {list(query.shape)} is, or looks like, attention over channels (XCiT), whose tokens "
                        "are in the last dimension and cannot be grouped; allowed: strategies 'exact' and 'auto' "
                        f"(exact here) up to {core.MAX_HEAD_DIM} tokens, or on_unsupported"
                    )
                settings, reason = EXACT, "attention over channels"
            elif not settings.is_exact and _is_decoding(query, key, settings.block_size):
                settings, reason = EXACT, "decoding"
            out = scaled_dot_product_attention(*arguments, scale=scale, enable_gqa=enable_gqa, settings=settings)
            self.calls.count(reason)
            return out
        except (RuntimeError, TypeError, ValueError) as error:
            if not _is_refusal(error, arguments, scale, settings):
                raise
            self._pass_on(error)
            self.calls.count(str(error))
        return F.scaled_dot_product_attention(*arguments, scale=scale, enable_gqa=enable_gqa)

    def _pass_on(self, refusal):
        """Returns when the call may go to torch's own function."""
        if self.on_unsupported == "error":
            raise refusal
        self._warn_once(f"torch's own attention takes calls that DistrAttention refuses: {refusal}", 5)

    def _warn_once(self, message, stacklevel=4):
        """Warns once for each kind of message, unless all are to be silent."""
        kind = re.sub(r"\d+", "#", message)
        if self.on_unsupported != "silent" and kind not in self.warned:
            self.warned.add(kind)
            warnings.warn(message, stacklevel=stacklevel)  # at the call of torch's function


def _warn_of_no_call(calls):
    if not (calls.taken or calls.left or calls.compiled):
        message = (
            "no attention call was met in the block, which so changed nothing: what ran in it never calls "
            "torch.nn.functional.scaled_dot_product_attention (timm's Swin, for one, multiplies Q and K itself)"
        )
        warnings.warn(message, stacklevel=3)  # at the end of the block


def _is_decoding(query, key, block_size):
    if query.is_nested or key.is_nested or query.dim() < 2 or key.dim() < 2:
        return False  # the call is refused
    return is_decoding(query.shape[-2], key.shape[-2], block_size)


def _is_refusal(error, arguments, scale, settings):
    """Whether the error is that this package does not serve the call. Others, of memory say, are no refusals."""
    if not isinstance(error, RuntimeError) or isinstance(error, NotImplementedError):
        return True
    try:
        return not _is_served(arguments, scale, settings)
    except RuntimeError:
        try:
            _is_served(arguments, scale, EXACT)
        except RuntimeError:
            return False
        return True  # it is the settings that do not fit the call


def _is_served(arguments, scale, settings):
    """Whether there is a kernel for the order and for attention. Raises where the call is none that could have one."""
    query, key, value, attn_mask, _, is_causal = arguments
    return all(
        explain(query, key, value, attn_mask, is_causal, scale, operation=operation, settings=settings)["kernel"]
        for operation in (["forward"] if settings.is_exact else ["grouping", "forward"])
    )


def _is_over_channels(query, key, value, attn_mask, dropout_p, is_causal, scale):
    """Whether the call is XCiT's cross-covariance attention, which mixes channels: its tensors are [B, H, d, N], and
    tokens are no features to group. In eager mode timm's is known by its function; else such attention is known by its
    looks: it has normalised its rows (scale 1), is square and mostly wider than long, and has no mask."""
    if not torch.compiler.is_compiling():
        xcit = sys.modules.get("timm.models.xcit")
        if xcit is not None and context.is_under_way(xcit.XCA.forward):
            return True
    square = query.shape == key.shape == value.shape
    return square and query.shape[-1] > query.shape[-2] and scale == 1.0 and attn_mask is None and not is_causal


def _unguarded(function):
    """The Python function, less the check by which it would hand its call to a mode instead of running."""
    unchecked = {"has_torch_function": lambda tensors: False, "has_torch_function_unary": lambda tensor: False}
    values = {**function.__globals__, **unchecked}
    copy = types.FunctionType(function.__code__, values, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Functions that a mode meets as a whole, and that call attention: the backward does where checkpoints are recomputed.
_CALLERS = {
    function: _unguarded(function)
    for function in (
        F.multi_head_attention_forward,
        torch.Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
    )
}
