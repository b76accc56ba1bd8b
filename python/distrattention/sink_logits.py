# SPDX-License-Identifier: Apache-2.0
"""Sink logits: one more logit a head in the softmax's denominator, which no value belongs to (GPT-OSS; StreamingLLM's
attention sinks, learned). With L = log sum_j exp(S_j), which attention returns, and the logit s of the head,

    O_s = O exp(L) / (exp(L) + exp(s)) = O sigmoid(L - s)        L_s = log(exp(L) + exp(s))

so it is attention with one more part of the keys, of value 0, merged; gradients follow from those of O and L.
"""

from distrattention import core  # noqa: F401; first, for it says in words what is missing

import torch  # isort: skip


def with_sink_logits(out, lse, logits):
    """out [..., Hq, L, Ev] and lse [..., Hq, L], logits [Hq] in the denominators. A row that sees no key stays 0."""
    logits = logits.to(lse.dtype).unsqueeze(-1)
    share = torch.sigmoid(lse - logits.clamp(min=torch.finfo(lse.dtype).min))  # 0 where both are -inf
    return out * share.unsqueeze(-1).to(out.dtype), torch.logaddexp(lse, logits)


def check_sink_logits(logits, query, name="sink_logits", heads_axis=-3):
    """Raises TypeError or ValueError for what is not a logit of each head of the query."""
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
        found = f"a tensor of {logits.dtype}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise TypeError(f"{name} is {found}; allowed: a tensor of floating-point numbers")
    heads = query.shape[heads_axis] if query.dim() >= -heads_axis else 1
    if logits.shape != (heads,):
        raise ValueError(f"{name} is {list(logits.shape)}; allowed: [{heads}], one for each head of the query")
    if logits.device != query.device:
        raise TypeError(f"{name} is on {logits.device}; allowed: {query.device}, where the query is")
