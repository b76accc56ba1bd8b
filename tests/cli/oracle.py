# SPDX-License-Identifier: Apache-2.0
"""The method in float64 NumPy, written from its description alone: what the command's output is compared with."""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

HASH_BITS = 16


@dataclass(frozen=True)
class Setting:
    """How columns are grouped; the defaults are those of the command."""

    strategy: str = "exact"
    group_size: int = 2
    block: int = 128
    estimator: str = "mean"
    order_from: str = "own"  # the command's "auto", but in causal calls
    seed: int = 0

    def flags(self):
        """The command's options for this setting."""
        if self.strategy == "exact":
            return ["--strategy", "exact"]
        pairs = (
            ("--strategy", self.strategy),
            ("--group-size", self.group_size),
            ("--block", self.block),
            ("--estimator", self.estimator),
            ("--order-from", self.order_from),
            ("--seed", self.seed),
        )
        return [str(word) for pair in pairs for word in pair]

    def is_exact(self, block=1):
        """Whether that block of rows takes exact attention."""
        first_is_exact = self.order_from == "previous" and self.strategy in ("lsh", "energy")
        return self.strategy == "exact" or self.group_size == 1 or (first_is_exact and block == 0)


def as_bf16(values):
    """The bits of values rounded to bf16 (nearest, ties to even), as uint16."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def from_bf16(bits):
    """The float32 values of bf16 bits."""
    return (np.asarray(bits, "<u2").astype("<u4") << 16).view("<f4")


def philox(counter, key):
    """Philox4x32-10."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        products = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            products[1] >> 32 ^ counter[1] ^ key[0],
            products[1] & 0xFFFFFFFF,
            products[0] >> 32 ^ counter[3] ^ key[1],
            products[0] & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def projection(seed, rows):
    """R [rows, 16]: the quantile that byte t of row n's random bits picks."""
    quantiles = from_bf16(as_bf16([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)]))
    result = np.empty((rows, HASH_BITS))
    for n in range(rows):
        words = philox((n & 0xFFFFFFFF, n >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
        for t in range(HASH_BITS):
            result[n, t] = quantiles[words[t // 4] >> 8 * (t % 4) & 0xFF]
    return result


def gray_rank(code):
    """The rank of a Gray code among the Gray codes."""
    rank = 0
    while code:
        rank ^= code
        code >>= 1
    return rank


def lsh_order(q_block, seed):
    """The columns of a block of rows, sorted by hash."""
    positive = projection(seed, len(q_block)).T @ q_block > 0
    codes = (positive * (1 << np.arange(HASH_BITS))[:, None]).sum(axis=0)
    return np.argsort([gray_rank(int(code)) for code in codes], kind="stable")


def energy_order(q_block, keys):
    """The columns of a block of rows, the heaviest first."""
    spread = ((keys - keys.mean(axis=0)) ** 2).sum(axis=0) if len(keys) else np.zeros(q_block.shape[1])
    return np.argsort(-((q_block**2).sum(axis=0) * spread), kind="stable")


def orders(q, k, setting, causal="none"):
    """The order tensor [B, Hq, blocks, d]."""
    batch, heads, seq_q, head_dim = q.shape
    share = heads // k.shape[1]
    starts = range(0, seq_q, setting.block)
    result = np.tile(np.arange(head_dim), (batch, heads, len(starts), 1))
    corner = k.shape[2] - seq_q if causal == "bottom-right" else 0
    for b, h, index in np.ndindex(result.shape[:3]):
        if setting.is_exact(index):
            continue
        source = index - 1 if setting.order_from == "previous" else index
        q_block = q[b, h, source * setting.block : (source + 1) * setting.block]
        if setting.strategy == "lsh":
            result[b, h, index] = lsh_order(q_block, setting.seed)
            continue
        keys = k[b, h // share]
        if setting.order_from == "previous":
            keys = keys[: max(0, min(len(keys), index * setting.block + corner))]
        result[b, h, index] = energy_order(q_block, keys)
    return result


def _approximate(q_block, keys, setting, order):
    """q_hat k_hat^T of one block."""
    head_dim = q_block.shape[1]
    if setting.strategy != "lsh":
        kept = order[: -(-head_dim // setting.group_size)]
        return q_block[:, kept] @ keys[:, kept].T
    product = np.zeros((len(q_block), len(keys)))
    for start in range(0, head_dim, setting.group_size):
        group = order[start : start + setting.group_size]
        estimate = q_block[:, group[0]] if setting.estimator == "sample" else q_block[:, group].mean(axis=1)
        product += np.outer(estimate, keys[:, group].sum(axis=1))
    return product


def scores(q, k, setting, order=None, scale=None, causal="none", mask=None):
    """S [B, Hq, Nq, Nk]; -inf where a key is hidden."""
    batch, heads, seq_q, head_dim = q.shape
    seq_k, share = k.shape[2], heads // k.shape[1]
    result = np.empty((batch, heads, seq_q, seq_k))
    for b, h in np.ndindex(batch, heads):
        keys = k[b, h // share]
        for index, start in enumerate(range(0, seq_q, setting.block)):
            rows = slice(start, min(seq_q, start + setting.block))
            if setting.is_exact(index):
                result[b, h, rows] = q[b, h, rows] @ keys.T
            else:
                result[b, h, rows] = _approximate(q[b, h, rows], keys, setting, order[b, h, index])
    result *= head_dim**-0.5 if scale is None else scale
    if mask is not None:
        result += np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
    if causal != "none":
        corner = seq_k - seq_q if causal == "bottom-right" else 0
        hidden = np.arange(seq_k)[None, :] > np.arange(seq_q)[:, None] + corner
        result[..., hidden] = -np.inf
    return result


def probabilities(s):
    """P and LSE of scores; rows with nothing visible have P = 0 and LSE = -inf."""
    peak = s.max(axis=-1, initial=-np.inf)
    safe = np.where(np.isinf(peak), 0, peak)[..., None]
    weights = np.exp(s - safe)
    total = weights.sum(axis=-1)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, safe[..., 0] + np.log(total), -np.inf)
    return weights / np.where(total > 0, total, 1)[..., None], lse


def widened(x):
    """A tensor of rank 2 to 4 as float64 of rank 4."""
    return np.asarray(x, np.float64).reshape((1,) * (4 - np.ndim(x)) + np.shape(x))


def attention(q, k, v, setting=Setting(), order=None, **options):
    """O and LSE, of the input's rank."""
    rank = np.ndim(q)
    q, k, v = widened(q), widened(k), widened(v)
    p, lse = probabilities(scores(q, k, setting, order, **options))
    o = p @ np.repeat(v, q.shape[1] // k.shape[1], axis=1)
    return o.reshape(o.shape[4 - rank :]), lse.reshape(lse.shape[4 - rank :])
