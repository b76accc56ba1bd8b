# SPDX-License-Identifier: Apache-2.0
"""Exact attention of sequences whose lengths are tensors, which nothing reads on the host: the operators attend_packed,
attend_packed_backward and attend_cache (python/sequences.cpp), their fake kernels, flops and gradients.

attend_packed takes q [Tq, Hq, d], k [Tk, H, d] and v [Tk, H, dv] of S sequences, one behind the other, and where they
start, int32 [S + 1], twice; attend_cache q [B, Hq, N, d], k [B, H, S, d], v [B, H, S, dv] and how many keys of each
there are, int32 [B].
"""

from distrattention import ops  # first, for it says in words what is missing
from distrattention.determinism import is_nondeterministic_backward_allowed

import torch  # isort: skip
from torch.utils.flop_counter import register_flop_formula  # isort: skip

attend_packed = torch.ops.distrattention.attend_packed
attend_packed_backward = torch.ops.distrattention.attend_packed_backward
attend_cache = torch.ops.distrattention.attend_cache


def attend(q, k, v, starts_q, starts_k, longest_q, longest_k, causal, scale, sides, softcap=0.0, deterministic=False):
    """(out [Tq, Hq, dv], lse [Hq, Tq]) by attend_packed, with gradients; sides: of a sliding window."""
    ops.refuse_tangents((q, k, v))
    deterministic = deterministic or not is_nondeterministic_backward_allowed()
    run = _ForwardOfFunc.apply if _is_in_func() else attend_packed
    settings = causal, scale, *sides, softcap, deterministic
    return run(q, k, v, starts_q, starts_k, longest_q, longest_k, *settings)


def _is_in_func():
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


@torch.library.register_fake("distrattention::attend_packed")
def _(q, k, v, starts_q, starts_k, *settings):
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=ops.lse_dtype(q.dtype))


@torch.library.register_fake("distrattention::attend_packed_backward")
def _(grad_out, grad_lse, q, k, v, *others):
    return ops.dense_like(q), ops.dense_like(k), ops.dense_like(v)


@torch.library.register_fake("distrattention::attend_cache")
def _(q, k, v, lengths, *settings):
    b, h, n, _ = q.shape
    return q.new_empty((b, n, h, v.shape[3])).transpose(1, 2), q.new_empty((b, h, n), dtype=ops.lse_dtype(q.dtype))


# As all lengths are data, every sequence counts with the longest.


@register_flop_formula(attend_packed, get_raw=True)
def _(q, k, v, starts_q, starts_k, longest_q, longest_k, *settings, out_val=None):
    scores = (starts_q.shape[0] - 1) * q.shape[1] * longest_q * longest_k
    return 2 * scores * (q.shape[2] + v.shape[2])


@register_flop_formula(attend_packed_backward, get_raw=True)
def _(grad_out, grad_lse, q, k, v, starts_q, starts_k, out, lse, longest_q, longest_k, *settings, out_val=None):
    scores = (starts_q.shape[0] - 1) * q.shape[1] * longest_q * longest_k
    return 2 * scores * (3 * q.shape[2] + 2 * v.shape[2])


@register_flop_formula(attend_cache, get_raw=True)
def _(q, k, v, lengths, *settings, out_val=None):
    return 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])


def _setup(ctx, inputs, output):
    q, k, v, starts_q, starts_k, *settings = inputs
    ctx.save_for_backward(q, k, v, starts_q, starts_k, *output)
    ctx.settings = settings
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_out, grad_lse):
    q, k, v, starts_q, starts_k, out, lse = ctx.saved_tensors
    nothing = (None,) * (2 + len(ctx.settings))
    if grad_out is None and grad_lse is None:
        return None, None, None, *nothing
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    *settings, deterministic = ctx.settings
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    tensors = (grad_out, grad_lse, q, k, v, starts_q, starts_k, out, lse)
    run = _BackwardOfFunc.apply if _is_in_func() else attend_packed_backward
    return *run(*tensors, *settings, deterministic), *nothing


torch.library.register_autograd("distrattention::attend_packed", _gradients, setup_context=_setup)


def _refuse_second_derivatives(ctx, *grads):
    raise NotImplementedError("distrattention has no second derivatives: the gradient of attention was differentiated")


torch.library.register_autograd("distrattention::attend_packed_backward", _refuse_second_derivatives)


class _ForwardOfFunc(torch.autograd.Function):
    """The operator with its gradient for torch.func, which does not take what register_autograd() is given."""

    generate_vmap_rule = True
    jvp = staticmethod(ops.refuse_forward_mode)
    setup_context = staticmethod(_setup)
    backward = staticmethod(_gradients)

    @staticmethod
    def forward(*arguments):
        return attend_packed(*arguments)


class _BackwardOfFunc(torch.autograd.Function):
    generate_vmap_rule = True
    jvp = staticmethod(ops.refuse_forward_mode)
    backward = staticmethod(_refuse_second_derivatives)

    @staticmethod
    def forward(*arguments):
        return attend_packed_backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def _refuse_gradient(ctx, *grads):
    raise NotImplementedError("attention to a cache has no gradients; allowed: torch.no_grad()")


torch.library.register_autograd("distrattention::attend_cache", _refuse_gradient)
