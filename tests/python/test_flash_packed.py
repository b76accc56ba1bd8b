# SPDX-License-Identifier: Apache-2.0
"""The flash functions of packed tensors are those of the parts, gradients included."""

import pytest
import torch

import distrattention
from distrattention import flash_attn_func, flash_attn_varlen_func

STARTS = torch.tensor([0, 7, 30], dtype=torch.int32)
CALL = {"softmax_scale": 0.3, "causal": True, "strategy": "energy", "block_size": 16, "return_attn_probs": True}


def packed(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def calls():
    """{name: (packed tensors, the packed function's result, the plain one's)}"""
    qkv, q, kv = packed(2, 30, 3, 4, 8), packed(2, 30, 4, 8), packed(2, 40, 2, 2, 8)
    rows, q_rows, kv_rows = packed(30, 3, 4, 8), packed(30, 4, 8), packed(30, 2, 2, 8)
    lengths = STARTS, STARTS, 23, 23
    functions = {name: getattr(distrattention, f"flash_attn_{name}_func")
                 for name in ("qkvpacked", "kvpacked", "varlen_qkvpacked", "varlen_kvpacked")}  # fmt: skip
    return {
        "qkvpacked": ([qkv], functions["qkvpacked"](qkv, **CALL), flash_attn_func(*qkv.unbind(2), **CALL)),
        "kvpacked": ([q, kv], functions["kvpacked"](q, kv, **CALL), flash_attn_func(q, *kv.unbind(2), **CALL)),
        "varlen_qkvpacked": (
            [rows],
            functions["varlen_qkvpacked"](rows, STARTS, 23, **CALL),
            flash_attn_varlen_func(*rows.unbind(1), *lengths, **CALL),
        ),
        "varlen_kvpacked": (
            [q_rows, kv_rows],
            functions["varlen_kvpacked"](q_rows, kv_rows, *lengths, **CALL),
            flash_attn_varlen_func(q_rows, *kv_rows.unbind(1), *lengths, **CALL),
        ),
    }


@pytest.mark.parametrize("name", ["qkvpacked", "kvpacked", "varlen_qkvpacked", "varlen_kvpacked"])
def test_packed_is_its_parts(name):
    leaves, found, wanted = calls()[name]
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1]) and found[2] is None
    weight = torch.randn_like(found[0])
    gradients = [torch.autograd.grad(of[0], leaves, weight, retain_graph=True) for of in (found, wanted)]
    for leaf, one, other in zip(leaves, *gradients):
        assert one.shape == leaf.shape and torch.equal(one, other)


@pytest.mark.parametrize("options", [{"causal": True, "window_size": (5, 0)}, {"softcap": 2.0}])
def test_packed_sequences_compile_as_one_graph(options):
    """Which is not made anew for other lengths."""
    rows = packed(30, 3, 4, 8)
    plain = distrattention.flash_attn_varlen_qkvpacked_func
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for number, starts in enumerate((STARTS, torch.tensor([0, 21, 30], dtype=torch.int32))):
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found, wanted = (function(rows, starts, 23, **options) for function in (compiled, plain))
        assert torch.equal(found, wanted)
        gradients = [torch.autograd.grad(out.sin().sum(), rows)[0] for out in (found, wanted)]
        assert torch.equal(*gradients)


@pytest.mark.parametrize("shape", [(2, 30, 2, 4, 8), (30, 3, 4, 8)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"qkv is \[.*\]; allowed: 5 axes, of which the third last is 3"):
        distrattention.flash_attn_qkvpacked_func(torch.zeros(shape))


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match="kv is list; allowed: a tensor"):
        distrattention.flash_attn_kvpacked_func(torch.zeros(1, 2, 2, 8), [])
