# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache against a softmax that is spelled out: lengths, appending, causality, grouped heads."""

import pytest
import torch

from distrattention import flash_attn_func, flash_attn_with_kvcache

F64 = torch.float64
B, S, HQ, H, D, DV = 3, 40, 6, 2, 8, 5
LENGTHS = torch.tensor([0, 17, 33], dtype=torch.int32)


def drawn(*shape):
    return torch.randn(shape, dtype=F64)


def spelled_out(q, k_cache, v_cache, filled, causal, sink=None, window=(-1, -1)):
    """(out, lse), sequence by sequence and row by row."""
    left, right = (S + 9 if side == -1 else side for side in window)
    out = torch.zeros(*q.shape[:3], v_cache.shape[3], dtype=F64)
    lse = torch.full((B, HQ, q.shape[1]), -torch.inf, dtype=F64)
    for b in range(B):
        for i in range(q.shape[1]):
            beside = int(filled[b]) - q.shape[1] + i
            end = min(beside + min(right, 0 if causal else S) + 1, int(filled[b]))
            seen = slice(max(beside - left, 0), max(end, 0))
            for h in range(HQ if seen.stop > seen.start or sink is not None else 0):
                scores = k_cache[b, seen, h * H // HQ] @ q[b, i, h] / D**0.5
                scores = scores if sink is None else torch.cat((scores, sink[h : h + 1]))
                lse[b, h, i] = scores.logsumexp(0)
                out[b, i, h] = scores.softmax(0)[: max(seen.stop - seen.start, 0)] @ v_cache[b, seen, h * H // HQ]
    return out, lse


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, 21, 2, LENGTHS])
@pytest.mark.parametrize("sink", [False, True])
def test_is_attention_to_the_filled_rows(rows, causal, lengths, sink):
    q, k_cache, v_cache = drawn(B, rows, HQ, D), drawn(B, S, H, D), drawn(B, S, H, DV)
    logits = drawn(HQ) if sink else None
    options = {"cache_seqlens": lengths, "causal": causal, "learnable_sink": logits, "return_softmax_lse": True}
    found = flash_attn_with_kvcache(q, k_cache, v_cache, **options)
    filled = lengths if isinstance(lengths, torch.Tensor) else torch.full((B,), S if lengths is None else lengths)
    for one, other in zip(found, spelled_out(q, k_cache, v_cache, filled, causal, logits)):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [21, LENGTHS])
@pytest.mark.parametrize("window", [(6, 2), (3, -1), (-1, 1)])
def test_windows_count_from_the_filled_rows(rows, causal, lengths, window):
    q, k_cache, v_cache = drawn(B, rows, HQ, D), drawn(B, S, H, D), drawn(B, S, H, DV)
    options = {"cache_seqlens": lengths, "causal": causal, "window_size": window, "return_softmax_lse": True}
    found = flash_attn_with_kvcache(q, k_cache, v_cache, **options)
    filled = lengths if isinstance(lengths, torch.Tensor) else torch.full((B,), lengths)
    for one, other in zip(found, spelled_out(q, k_cache, v_cache, filled, causal, window=window)):
        torch.testing.assert_close(one, other)


def test_what_lies_behind_the_filled_rows_is_not_read():
    q, k_cache, v_cache = drawn(B, 1, HQ, D), drawn(B, S, H, D), drawn(B, S, H, DV)
    wanted = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=LENGTHS)
    for b, length in enumerate(LENGTHS.tolist()):
        k_cache[b, length:] = v_cache[b, length:] = torch.nan
    assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=LENGTHS), wanted)
    with pytest.raises(RuntimeError, match=f"the length of the keys of entry 1 is {S + 1}; allowed: 0 to {S}"):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.tensor([0, S + 1, 0]))


@pytest.mark.parametrize("lengths", [30, LENGTHS])
@pytest.mark.parametrize("causal", [False, True])
def test_new_rows_are_appended_in_place_and_count(lengths, causal):
    q, k_cache, v_cache = drawn(B, 4, HQ, D), drawn(B, S, H, D), drawn(B, S, H, DV)
    k, v = drawn(B, 4, H, D), drawn(B, 4, H, DV)
    wanted_k, wanted_v = k_cache.clone(), v_cache.clone()
    starts = lengths.tolist() if isinstance(lengths, torch.Tensor) else [lengths] * B
    for b, start in enumerate(starts):
        wanted_k[b, start : start + 4], wanted_v[b, start : start + 4] = k[b], v[b]
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=causal)
    assert torch.equal(k_cache, wanted_k) and torch.equal(v_cache, wanted_v)
    filled = torch.tensor([start + 4 for start in starts])
    torch.testing.assert_close(out, spelled_out(q, k_cache, v_cache, filled, causal)[0])
    if isinstance(lengths, torch.Tensor):
        assert torch.equal(lengths, LENGTHS)


def test_lengths_of_a_tensor_are_not_read():
    """They are data to a compiled graph, which has no break, is not made anew, and appends in place."""
    step = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    q, caches = drawn(B, 1, HQ, D), (drawn(B, S, H, D), drawn(B, S, H, DV))
    new = drawn(B, 1, H, D), drawn(B, 1, H, DV)
    for lengths in (LENGTHS, LENGTHS + 3):
        with torch.compiler.set_stance("fail_on_recompile" if lengths is not LENGTHS else "default"):
            found = step(q, *caches, *new, cache_seqlens=lengths, causal=True)
        torch.testing.assert_close(found, spelled_out(q, *caches, lengths + 1, True)[0])
        assert all(torch.equal(cache[b, n], of[b, 0]) for cache, of in zip(caches, new) for b, n in enumerate(lengths))


def test_softcap():
    q, caches = drawn(B, 1, HQ, D), (drawn(B, S, H, D), drawn(B, S, H, DV))
    expected = flash_attn_func(q, *caches, softcap=1.5)
    torch.testing.assert_close(flash_attn_with_kvcache(q, *caches, softcap=1.5), expected)
    assert not torch.allclose(expected, flash_attn_func(q, *caches), atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"block_table": torch.zeros(1)}, NotImplementedError, "block_table was given; allowed: None"),
        ({"softcap": -30.0}, ValueError, "softcap is -30.0; allowed: 0"),
        ({"window_size": (-2, 0)}, ValueError, "window_size is -2; allowed: -1 to"),
        ({"cache_seqlens": S + 1}, ValueError, f"cache_seqlens is {S + 1}; allowed: 0 to {S}"),
        ({"cache_seqlens": LENGTHS[:2]}, ValueError, rf"cache_seqlens is \[2\]; allowed: \[{B}\]"),
        ({"cache_seqlens": LENGTHS.float()}, TypeError, "cache_seqlens is torch.float32 on cpu; allowed"),
        ({"k": drawn(B, 1, H, D)}, ValueError, "v is None; allowed: k and v together"),
        ({"k": drawn(B, 1, H, D), "v": drawn(B, 1, H, DV)}, ValueError, "cache_seqlens is None; allowed"),
        ({"k": drawn(B, 9, H, D), "v": drawn(B, 9, H, DV), "cache_seqlens": 32}, ValueError, "k has 9 rows behind 32"),
        ({"k": drawn(B, 1, H, D + 1), "v": drawn(B, 1, H, DV), "cache_seqlens": 3}, ValueError, "k is .*; allowed"),
        ({"q": drawn(1, HQ, D)}, ValueError, "q has 3 axes; allowed: 4"),
    ],
)
def test_refused_by_name(changes, error, words):
    tensors = {"q": drawn(B, 1, HQ, D), "k_cache": drawn(B, S, H, D), "v_cache": drawn(B, S, H, DV)}
    with pytest.raises(error, match=words):
        flash_attn_with_kvcache(**{**tensors, **changes})
