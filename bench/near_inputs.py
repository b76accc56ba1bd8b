# SPDX-License-Identifier: Apache-2.0
"""Q and K of which it is known which far halves of tiles (64 rows, 64 keys) `skip` keeps, drawn by the shares that
heads of a language model keep (bench/quality/capture.py --shares): on random values nothing is negligible.

Any map of halves can be planted. Row half R stands for a pair (a, b), R = 16 b + a; its queries are u_a + v_b, where
the u are the 16 vectors +-e_i of 8 columns and the v those of 8 others. The keys of half J are, for each b and each
sign, the sum of those u_a of that sign whose rows R are to keep J, and v_b. So a query has 2 UNITs with a key that is
planted for it, and 1 at most with every other. Both are turned, so that all 16 columns weigh alike, and the other
columns hold noise.
"""

import base64
import json
import zlib

import numpy as np
import torch

HALF, NEAR_TILE = 64, 128
DISTANCES = 8  # halves that share one measured share
LONGEST = 256 * HALF
UNIT = 8.0  # nats
NOISE = 0.4  # nats, standard deviation of a score
WINDOW, SINKS = 512, 128


def read_shares(path):
    """{(layer, head): the share of far halves kept, by distance in steps of DISTANCES halves, None where none is}."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {(row["layer"], head): of for row in rows for head, of in enumerate(row["kept_by_distance"])}


def by_distance(shares, halves):
    """float32 [halves]: the share at each distance in halves. On a longer sequence than was measured the distances are
    in proportion, so that as much is kept."""
    nearest = next(share for share in shares if share is not None)
    measured = torch.tensor([nearest if share is None else share for share in shares])
    stretch = max(1, halves / (DISTANCES * len(shares)))
    return measured[(torch.arange(halves) / (DISTANCES * stretch)).long()]


def far_halves(halves, causal):
    """Bool [halves, halves]: whether some of the rows see far keys there, by blocks of 128 rows and the recommended
    near keys."""
    rows, keys = torch.arange(halves)[:, None], torch.arange(halves)
    per_tile = NEAR_TILE // HALF
    low = (rows // per_tile * NEAR_TILE - WINDOW).clamp_min(0) // NEAR_TILE
    high = (rows // per_tile * NEAR_TILE + NEAR_TILE - 1 + WINDOW) // NEAR_TILE
    tiles = keys // per_tile
    near = (tiles < SINKS // NEAR_TILE) | ((tiles >= low) & (tiles <= high))
    return ~near & (keys <= rows) if causal else ~near


def draw(shares, halves, causal, seed):
    """The heads' maps: bool [H, halves, halves]. At each distance so many far halves are drawn as the shares [H,
    distance] say, a head's all together within one half; near halves are kept."""
    random = torch.Generator().manual_seed(seed)
    rows, keys = far_halves(halves, causal).nonzero().unbind(1)
    kept = (~far_halves(halves, causal)).repeat(len(shares), 1, 1)
    for of_head, of_map in zip(shares, kept):
        mixed = torch.randperm(len(rows), generator=random)
        mixed = mixed[(rows - keys)[mixed].abs().sort(stable=True).indices]
        share = of_head[(rows - keys)[mixed].abs()].double()
        until = share.cumsum(0) + torch.rand(1, generator=random, dtype=torch.float64)
        of_map[rows[mixed], keys[mixed]] = until.floor() > (until - share).floor()
    return kept


def choose_heads(shares, count, halves, causal):
    """[(layer, head)] of `count` heads whose expected kept shares are spread as those of all, and these shares."""
    far = far_halves(halves, causal)
    numbers = torch.arange(halves)
    distance = (numbers[:, None] - numbers).abs()[far]
    expected = {head: by_distance(of, halves)[distance].mean().item() for head, of in shares.items()}
    ranked = sorted(expected, key=lambda head: (expected[head], head))
    chosen = [ranked[(2 * n + 1) * len(ranked) // (2 * count)] for n in range(count)]
    return chosen, [expected[head] for head in chosen]


def plant(kept, head_dim, seed):
    """q and k [1, H, N, d], bf16, for maps [H, N / 64, N / 64]."""
    heads, halves, _ = kept.shape
    if halves * HALF > LONGEST or head_dim < 16:
        raise ValueError(f"N is {halves * HALF}, d {head_dim}; allowed: N up to {LONGEST}, d from 16 on")
    random = torch.Generator().manual_seed(seed)
    signed = torch.cat((torch.eye(8), -torch.eye(8)))  # [16, 8]
    row = torch.arange(halves)
    queries = torch.cat((signed[row % 16], signed[row // 16]), 1).repeat_interleave(HALF, 0)  # [N, 16]
    padded = torch.nn.functional.pad(kept, (0, 0, 0, 256 - halves)).float()  # rows that there are not
    wanted = padded.view(heads, 16, 2, 8, halves).permute(0, 4, 2, 1, 3)  # [H, J, sign, b, u]
    wanted = wanted * torch.tensor([1.0, -1.0])[:, None, None]
    of_b = signed.expand(heads, halves, 2, 16, 8)
    keys = torch.cat((wanted, of_b), -1).flatten(2, 3).repeat(1, 1, HALF // 32, 1).flatten(1, 2)  # [H, N, 16]
    hadamard = torch.ones(1, 1)
    for _ in range(3):
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    turn = torch.block_diag(hadamard, hadamard) * (UNIT / 8) ** 0.5 * head_dim**0.25
    noise = NOISE**0.5 * head_dim**0.25 / max(1, head_dim - 16) ** 0.25
    tensors = []
    columns = torch.stack([torch.randperm(head_dim, generator=random) for _ in range(heads)])
    for planted in (queries.expand(heads, -1, -1), keys):
        tensor = torch.randn(heads, halves * HALF, head_dim, generator=random) * noise
        tensor.scatter_(2, columns[:, None, :16].expand(-1, halves * HALF, -1), planted @ turn)
        tensors.append(tensor.to(torch.bfloat16)[None])
    return tensors


def packed(kept):
    """A map [halves, halves] as text: its bits by rows, compressed, in base 64."""
    return base64.b64encode(zlib.compress(np.packbits(kept.numpy()).tobytes(), 9)).decode()


def unpacked(text, halves):
    """The map of packed()."""
    bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8), count=halves**2)
    return torch.from_numpy(bits.reshape(halves, halves).astype(bool))
