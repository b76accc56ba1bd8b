# SPDX-License-Identifier: Apache-2.0
"""Primal-Attention (arXiv 2305.19798): the kernel SVD of attention in its primal form."""

import torch
import torch.nn.functional as F
from torch import nn

from baselines.shape import repeat_heads, require_whole, split, widen, zero_padding


class Primal(nn.Module):
    """O = Wcat [e ; r], e = phi(q) Fe, r = phi(k) Fr [B, H, N, s], phi(x) = x / ||x|| by head (its Equation 6); V is
    not used.

    Not causal: Fe = Xs^T We and Fr = Xs^T Wr, where Xs [B, H, p, d] are p rows of the layer's input X [B, N, C], spread
    evenly. swap() puts the input into `x` before each call. Causal: Fe = We and Fr = Wr are independent of the data,
    and q and k are running means over the tokens up to each. Padding is in neither rows nor means.

    rank: s. multiple: p = min(N, s * multiple). `penalty` is the layer's term of the KSVD loss, of its last call."""

    needs_input = True

    def __init__(self, shape, rank=20, multiple=10):
        super().__init__()
        if not shape.causal and shape.tokens is None:
            raise ValueError(f"Primal has no fixed number of tokens ({shape}); allowed: one, unless causal")
        self.shape = shape
        rows = shape.head_dim if shape.causal else min(shape.tokens, rank * multiple)
        self.we, self.wr = (nn.Parameter(torch.empty(shape.heads, rows, rank)) for _ in range(2))
        for weight in (self.we, self.wr):
            nn.init.orthogonal_(weight)
        self.strengths = nn.Parameter(torch.rand(shape.heads, rank))  # Lambda
        self.concatenation = nn.Linear(2 * rank, shape.head_dim)
        self.x = self.penalty = None

    def _features(self, q, k, keys):
        """(phi(q), phi(k), Fe, Fr)."""
        if self.shape.causal:
            count = torch.arange(1, q.shape[2] + 1, device=q.device)[:, None]  # of all: phi takes any factor away
            q, k = ((zero_padding(x, keys).cumsum(2) / count).to(q.dtype) for x in widen(q, k))
            factors = self.we, self.wr
        else:
            sampled = split(self._sampled(keys), self.shape.heads).to(self.we.dtype).transpose(2, 3)  # [B, H, d, p]
            factors = sampled @ self.we, sampled @ self.wr
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1), *(factor.to(q.dtype) for factor in factors)

    def _sampled(self, keys):
        """Xs [B, p, C]: rows of X, or of those that count, from the first to the last."""
        last = self.x.shape[1] - 1
        places = torch.linspace(0, last, self.we.shape[1], device=self.x.device)
        if keys is None:
            return self.x[:, places.round().long()]
        places = places * ((keys.sum(1, keepdim=True) - 1) / max(last, 1))  # [B, p], among the tokens that count
        rows = (~keys).to(torch.int8).argsort(dim=1, stable=True).gather(1, places.round().long())
        return self.x.gather(1, rows[..., None].expand(-1, -1, self.x.shape[2]))

    def forward(self, q, k, v, keys=None, causal=False, scale=None):
        require_whole(q, k)
        if causal != self.shape.causal:
            raise ValueError(f"causal is {causal}; allowed: {self.shape.causal}, which this layer was made for")
        if not causal and self.x is None:
            raise ValueError("Primal was called without the layer's input in `x`; allowed: after it is set")
        q, k, fe, fr = self._features(q, repeat_heads(k, q.shape[1]), keys)
        self.x = None  # of this call alone
        e, r = q @ fe, k @ fr
        if self.training:
            scaled = (zero_padding(y, keys) * self.strengths[:, None].to(y.dtype) for y in (e, r))
            share = 1 if keys is None else keys.float().mean()
            of_e, of_r = (y.square().sum(-1).mean() / share for y in scaled)
            product = self.we.transpose(1, 2) @ self.wr
            self.penalty = (of_e / 2 + of_r / 2 - product.mean(0).trace()) ** 2
        return self.concatenation(torch.cat((e, r), -1))


def ksvd_loss(model):
    """The mean penalty of the model's Primal layers in their last call; 0.0 where there are none."""
    found = [layer.penalty for layer in model.modules() if isinstance(layer, Primal) and layer.penalty is not None]
    return sum(found) / len(found) if found else 0.0
