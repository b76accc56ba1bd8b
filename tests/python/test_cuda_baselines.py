# SPDX-License-Identifier: Apache-2.0
"""The baselines that are torch's fused kernels, on a GPU: against eager attention in float32."""

import sys
from pathlib import Path

import pytest
import torch

from distrattention import ops

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from baselines import Shape, make  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(ops.describe().cuda_build == "none", reason="the package was built without CUDA"),
]
KEYS = torch.arange(300)[None] < torch.tensor([[300], [170]])


@pytest.mark.parametrize(
    ("name", "causal", "padded"),
    [("flash2", False, False), ("flash2", True, False), ("cudnn", False, False), ("cudnn", True, False),
     ("cudnn", False, True)],
)  # fmt: skip
def test_fused_kernels_are_exact_attention(name, causal, padded):
    shape = Shape(8, 2, 64, causal)
    leaves = [torch.randn(2, heads, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
              for heads in (8, 2, 2)]  # fmt: skip
    keys = KEYS.cuda() if padded else None
    out = make(name, shape)(*leaves, keys=keys, causal=causal)
    wanted = make("standard", shape)(*(x.float() for x in leaves), keys=keys, causal=causal)
    torch.testing.assert_close(out.float(), wanted, rtol=0.02, atol=0.02)
    weight = torch.randn_like(wanted)
    gradients = [torch.autograd.grad((of * weight).sum(), leaves) for of in (out, wanted)]
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=0.06, atol=0.06)


def test_flash2_takes_no_padding():
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(ValueError, match="keys were given to FlashAttention-2, which takes no mask"):
        make("flash2", None)(q, k, v, keys=KEYS.cuda())
