# SPDX-License-Identifier: Apache-2.0
"""Ways to run a model's attention that count or emulate what the package's kernels skip."""

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from distrattention import ops
from distrattention.evaluation.measure import Call
from distrattention.evaluation.probabilities import CHUNK, HALF, approximate, probabilities_of, scores_of
from distrattention.settings import Settings

EMULATED = "distr_emulated"
_SKIP = 16  # its place among the arguments of the operator `forward`


class CountHalves(TorchFunctionMode):
    """Within the block, attention by the package that skips counts the halves of tiles that it keeps, by call: int64
    [Hq, 2], kept and all."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (ops.forward, ops.forward.default) and args[_SKIP]:
            out, lse, halves = ops.forward_counting(*args[:-1])
            self.calls.append(halves.sum((0, 2), dtype=torch.int64))
            return out, lse
        return function(*args, **(kwargs or {}))


def emulate(settings: Settings, rows_together: int = HALF):
    """Makes attn_implementation="distr_emulated" the method's equations over chunks of scores, in which `rows_together`
    rows, 1 or 64, decide together what is skipped."""

    def attention(module, query, key, value, attention_mask, scaling=None, **others):
        call = Call(query, key, value, attention_mask, "none" if attention_mask is not None else "top_left", scaling)
        resolved = call.resolve(settings)
        columns = call.columns(resolved)
        k, v = key.float(), value.float().repeat_interleave(query.shape[1] // key.shape[1], 1)
        at_once = max(1, CHUNK // (query.shape[1] * key.shape[2] * HALF)) * HALF
        out = []
        for rows in torch.arange(query.shape[2], device=query.device).split(at_once):
            q = query[:, :, rows].float()
            exact = scores_of(call, q, k, rows)
            scores = approximate(call, resolved, columns, q, k, rows, exact, rows_together)
            out.append(probabilities_of(scores) @ v)
        return torch.cat(out, 2).to(query.dtype).transpose(1, 2), None

    AttentionInterface.register(EMULATED, attention)
    AttentionMaskInterface.register(EMULATED, sdpa_mask)
