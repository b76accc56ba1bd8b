# SPDX-License-Identifier: Apache-2.0
"""HyperAttention (arXiv 2310.05869): exact within blocks of rows and keys of like hashes, sampled outside them."""

import torch
from torch import nn

from distrattention import scaled_dot_product_attention

from baselines.shape import repeat_heads, require_whole


def exact(q, k, v, mask=None, causal=False, scale=None):
    """(O, LSE [B, H, N]): exact attention with the logarithm of its denominators, differentiable, by this library."""
    return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, strategy="exact", return_lse=True)


def merged(first, second):
    """Two results (O, LSE) over disjoint keys as one: O = c O1 + (1 - c) O2, c = 1 / (1 + exp(LSE2 - LSE1))."""
    (o1, lse1), (o2, lse2) = first, second
    share = torch.sigmoid(lse1 - lse2)[..., None].to(o1.dtype)
    return share * o1 + (1 - share) * o2, torch.logaddexp(lse1, lse2)


def take(x, index):
    """Rows of [B, H, N, d] by [B, H, M]."""
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))


class HyperAttention(nn.Module):
    """Its Algorithms 1 to 3, forward: the defaults are those of its published code. Up to `least_length` tokens it is
    exact attention. bits: r of the hash. block: b rows and keys that attend to each other exactly. samples: s keys,
    drawn uniformly with replacement for all rows of a head, each of which stands for N / s keys."""

    def __init__(self, shape, bits=7, block=256, samples=256, least_length=4096):
        super().__init__()
        self.bits, self.block, self.samples, self.least_length = bits, block, samples, least_length
        self.register_buffer("projections", torch.randn(1, 1, shape.head_dim, bits))

    def extra_repr(self):
        return f"bits={self.bits}, block={self.block}, samples={self.samples}, least_length={self.least_length}"

    def forward(self, q, k, v, keys=None, causal=False, scale=None):
        require_whole(q, k)
        if causal and keys is not None:
            raise ValueError("keys were given to a causal HyperAttention; allowed: batches of one length")
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
        if causal:
            return self._causal(q, k, v, scale)[0]
        if q.shape[2] <= self.least_length:
            return exact(q, k, v, None if keys is None else keys[:, None, None], scale=scale)[0]
        return self.core(q, k, v, keys, scale)[0]

    def _causal(self, q, k, v, scale):
        """(O, LSE): each half by itself, causally, and the later rows on the earlier keys (its Algorithm 4).

        No row sees a later key; but which earlier keys it sees depends on the order of its half's rows, later ones too.
        """
        heads, n = q.shape[1:3]
        if n <= max(self.least_length, 1):
            return exact(q, k, v, causal=True, scale=scale)
        half = -(-n // 2)
        q, k, v = (nn.functional.pad(x, (0, 0, 0, 2 * half - n)) for x in (q, k, v))  # no row sees the one behind
        halves = [torch.cat((x[:, :, :half], x[:, :, half:]), 1) for x in (q, k, v)]  # [B, 2 H, N / 2, d]
        (first, later), (lse_first, lse_later) = (x.split(heads, 1) for x in self._causal(*halves, scale))
        before = self.core(q[:, :, half:], k[:, :, :half], v[:, :, :half], None, scale)
        later, lse_later = merged((later, lse_later), before)
        return torch.cat((first, later), 2)[:, :, :n], torch.cat((lse_first, lse_later), 2)[:, :, :n]

    @torch.no_grad()
    def hashes(self, x):
        """int64 [B, H, N]: the Gray code of the signs of r projections."""
        bits = (x @ self.projections.to(x.dtype) > 0).long()
        number = (bits << torch.arange(self.bits, device=x.device)).sum(-1)
        return number ^ (number >> 1)

    @torch.no_grad()
    def orders(self, q, k, keys=None):
        """The rows' and the keys' places in the order of their hashes, int64 [B, H, N]; padded ones come last."""
        hashes = self.hashes(q), self.hashes(k)
        if keys is not None:
            hashes = (of.masked_fill(~keys[:, None], 1 << self.bits) for of in hashes)
        return tuple(of.argsort(dim=2, stable=True) for of in hashes)

    @torch.no_grad()
    def draw(self, k, keys=None):
        """int64 [B, H, s]: the sampled keys, none of which is padding."""
        batch, heads, n, _ = k.shape
        if keys is None:
            return torch.randint(n, (batch, heads, self.samples), device=k.device)
        drawn = torch.multinomial(keys.float(), heads * self.samples, replacement=True)
        return drawn.view(batch, heads, self.samples)

    def core(self, q, k, v, keys, scale):
        """(O, LSE) of rows that see all keys."""
        batch, heads, n, _ = q.shape
        by_row, by_key = self.orders(q, k, keys)
        block = min(self.block, n)
        count = -(-n // block)
        padding = count * block - n

        # Within blocks: block i of the sorted rows sees block i of the sorted keys. Blocks are as heads.
        sorted_q = take(q, by_row)
        blocks = [nn.functional.pad(x, (0, 0, 0, padding)) for x in (sorted_q, take(k, by_key), take(v, by_key))]
        blocks = [x.reshape(batch, heads * count, block, x.shape[-1]) for x in blocks]
        mask = None
        if padding or keys is not None:
            real = torch.ones(batch, n, dtype=torch.bool, device=q.device) if keys is None else keys
            real = real[:, None].expand(-1, heads, -1).gather(2, by_key)
            mask = nn.functional.pad(real, (0, padding)).reshape(batch, heads * count, 1, block)
        o, lse = exact(*blocks, mask, scale=scale)
        within = o.reshape(batch, heads, -1, o.shape[-1])[:, :, :n], lse.reshape(batch, heads, -1)[:, :, :n]

        # Outside them: each sampled key that is not of a row's own block stands for N / s keys.
        drawn = self.draw(k, keys)
        block_of_key = by_key.argsort(2).gather(2, drawn) // block  # [B, H, s]
        block_of_row = torch.arange(n, device=q.device) // block
        outside = block_of_key[:, :, None] != block_of_row[:, None]  # [B, H, N, s]
        o, lse = exact(sorted_q, take(k, drawn), take(v, drawn), outside, scale=scale)
        count_of = torch.tensor(float(n)) if keys is None else keys.sum(1)[:, None, None]
        lse = lse + (count_of.to(lse) / self.samples).log()
        o, lse = merged(within, (o, lse))

        back = by_row.argsort(2)
        return take(o, back), lse.gather(2, back)
