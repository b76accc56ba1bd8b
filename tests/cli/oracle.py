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
    window: int | None = None
    sinks: int = 0
    key_offset: int | None = None
    skip: float = 0
    finish: bool = False

    def flags(self):
        """The command's options for this setting."""
        near = [] if self.window is None else ["--window", str(self.window)]
        near += ["--sinks", str(self.sinks)] if self.sinks else []
        near += [] if self.key_offset is None else ["--key-offset", str(self.key_offset)]
        near += ["--skip", str(self.skip)] if self.skip else []
        near += ["--finish"] if self.finish else []
        if self.strategy == "exact":
            return ["--strategy", "exact", "--block", str(self.block), *near]
        pairs = (
            ("--strategy", self.strategy),
            ("--group-size", self.group_size),
            ("--block", self.block),
            ("--estimator", self.estimator),
            ("--order-from", self.order_from),
            ("--seed", self.seed),
        )
        return [str(word) for pair in pairs for word in pair] + near

    def is_exact(self, block=1):
        """Whether that block of rows takes exact attention."""
        first_is_exact = self.order_from == "previous" and self.strategy in ORDERS
        return self.strategy == "exact" or self.group_size == 1 or (first_is_exact and block == 0)

    def has_near_keys(self):
        return self.window is not None or self.sinks > 0


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


def lsh_order(q_block, _, seed):
    """The columns of a block of rows, sorted by hash."""
    positive = projection(seed, len(q_block)).T @ q_block > 0
    codes = (positive * (1 << np.arange(HASH_BITS))[:, None]).sum(axis=0)
    return np.argsort([gray_rank(int(code)) for code in codes], kind="stable")


def energy_order(q_block, keys, _):
    """The columns of a block of rows, the heaviest first."""
    spread = ((keys - keys.mean(axis=0)) ** 2).sum(axis=0) if len(keys) else np.zeros(q_block.shape[1])
    return np.argsort(-((q_block**2).sum(axis=0) * spread), kind="stable")


ORDERS = {"lsh": lsh_order, "energy": energy_order}  # of the strategies that compute one


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
        keys = k[b, h // share]
        if setting.order_from == "previous":
            keys = keys[: max(0, min(len(keys), index * setting.block + corner))]
        result[b, h, index] = ORDERS[setting.strategy](q_block, keys, setting.seed)
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


def near_keys(setting, seq_q, seq_k, causal="none"):
    """Whether a key is near a row, [Nq, Nk]."""
    near = np.zeros((seq_q, seq_k), bool)
    near[:, : min(-(-setting.sinks // 128) * 128, seq_k)] = True
    if setting.window is None:
        return near
    offset = seq_k - seq_q if causal == "bottom-right" else setting.key_offset or 0
    length = 128 if setting.block >= seq_q else setting.block
    for start in range(0, seq_q, length):
        end = min(start + length, seq_q)
        for tile in range(0, seq_k, 128):
            distances = np.arange(tile, min(tile + 128, seq_k)) - offset
            near[start:end, tile : tile + 128] |= np.any(
                (distances >= start - setting.window) & (distances <= end - 1 + setting.window)
            )
    return near


def _of_dropped(q_block, keys, setting, order, index, corner):
    """What the columns that are dropped add to far scores: those of Q with the means of those of K."""
    if setting.strategy == "lsh" or not setting.has_near_keys():
        return 0
    if setting.order_from == "previous":
        keys = keys[: max(0, min(len(keys), index * setting.block + corner))]
    dropped = order[-(-q_block.shape[1] // setting.group_size) :]
    means = keys.mean(axis=0) if len(keys) else np.zeros(q_block.shape[1])
    return (q_block[:, dropped] @ means[dropped])[:, None]


def skipped(s, near, skip):
    """The far keys of each row that are skipped, with its 64 rows, and the counts of halves [B, Hq, rows / 64, 2]."""
    batch, heads, seq_q, seq_k = s.shape
    _, bound = probabilities(np.where(near, s, -np.inf))
    bound = bound + np.log(skip)
    far_seen = ~near & (s != -np.inf)
    keeps = far_seen & ((s > bound[..., None]) | (bound == -np.inf)[..., None])
    result, counts = np.zeros(s.shape, bool), np.zeros((batch, heads, -(-seq_q // 64), 2), int)
    for row in range(0, seq_q, 64):
        for key in range(0, seq_k, 64):
            half = np.s_[:, :, row : row + 64, key : key + 64]
            kept = keeps[half].any(axis=(2, 3))
            result[half] = ~near[row : row + 64, key : key + 64] & ~kept[:, :, None, None]
            counts[:, :, row // 64, 0] += kept
            counts[:, :, row // 64, 1] += far_seen[half].any(axis=(2, 3))
    return result, counts


def scores(q, k, setting, order=None, scale=None, causal="none", mask=None, softcap=0):
    """S [B, Hq, Nq, Nk]; -inf where a key is hidden or skipped."""
    return scores_and_halves(q, k, setting, order, scale, causal, mask, softcap)[0]


def scores_and_halves(q, k, setting, order=None, scale=None, causal="none", mask=None, softcap=0):
    """S, and the counts of halves where keys are skipped."""
    q, k = widened(q), widened(k)
    exact = Setting(block=setting.block)
    s = _scores(q, k, setting, order, scale, causal, mask, softcap)
    if not setting.has_near_keys():
        return s, None
    of_all = _scores(q, k, exact, None, scale, causal, mask, softcap)
    near = near_keys(setting, q.shape[2], k.shape[2], causal)
    s = np.where(near, of_all, s)
    if not setting.skip:
        return s, None
    gone, counts = skipped(s, near, setting.skip)
    return np.where(gone, -np.inf, of_all if setting.finish else s), counts


def _scores(q, k, setting, order, scale, causal, mask, softcap):
    """S with all keys far."""
    batch, heads, seq_q, head_dim = q.shape
    seq_k, share = k.shape[2], heads // k.shape[1]
    corner = seq_k - seq_q if causal == "bottom-right" else 0
    result = np.empty((batch, heads, seq_q, seq_k))
    for b, h in np.ndindex(batch, heads):
        keys = k[b, h // share]
        for index, start in enumerate(range(0, seq_q, setting.block)):
            rows = slice(start, min(seq_q, start + setting.block))
            q_block = q[b, h, rows]
            if setting.is_exact(index):
                result[b, h, rows] = q_block @ keys.T
            else:
                columns = order[b, h, index]
                result[b, h, rows] = _approximate(q_block, keys, setting, columns)
                result[b, h, rows] += _of_dropped(q_block, keys, setting, columns, index, corner)
    result *= head_dim**-0.5 if scale is None else scale
    if softcap:
        result = softcap * np.tanh(result / softcap)
    if mask is not None:
        result += np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
    if causal != "none":
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
