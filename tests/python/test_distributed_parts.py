# SPDX-License-Identifier: Apache-2.0
"""What attention of several processes is made of, each by itself: layouts, pairs, orders, and the calls of one process
alone."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distrattention import Settings, ops, scaled_dot_product_attention
from distrattention.core import columns_of, options_of
from distrattention.distributed import attention, columns, layout, positions, ring, shard, travel, unshard
from distrattention.settings import STRATEGIES

SHAPES = [(1, 7, 1), (2, 64, 16), (3, 100, 8), (4, 1000, 128), (8, 129, 16), (8, 3, 1), (5, 0, 4)]  # ranks, n, multiple


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("ranks", "n", "multiple"), SHAPES)
def test_each_row_is_on_one_rank(ranks, n, multiple, kind):
    pieces = layout.cut(n, ranks, kind, multiple)
    rows = [row for of_rank in pieces for piece in of_rank for row in range(piece.start, piece.stop)]
    assert sorted(rows) == list(range(n))
    assert all(piece.stop % multiple == 0 or piece.stop == n for of_rank in pieces for piece in of_rank)
    for of_rank in pieces:
        assert [piece.at for piece in of_rank] == [0, *(piece.end for piece in of_rank)][: len(of_rank)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("ranks", "n", "multiple"), SHAPES[:-2])
def test_pairs_are_what_rows_see(ranks, n, multiple, kind, causal, fused):
    pieces = layout.cut(n, ranks, kind, multiple)
    where = [[row for piece in of_rank for row in range(piece.start, piece.stop)] for of_rank in pieces]
    seen = torch.zeros(n, n, dtype=torch.int)
    for rows, of_rows in zip(pieces, where):
        for keys, of_keys in zip(pieces, where):
            for pair in layout.pairs_of(rows, keys, causal, fused):
                here, there = torch.tensor(of_rows[pair.rows]), torch.tensor(of_keys[pair.keys])
                assert (here[0], there[0]) == (pair.first_row, pair.first_key)
                if not fused:  # which near keys need
                    assert torch.equal(here, here[0] + torch.arange(len(here))) and (there.diff() == 1).all()
                part = torch.ones(len(here), len(there), dtype=torch.int)
                seen[here[:, None], there] += part.tril() if pair.causal else part
    expected = torch.ones_like(seen)
    assert torch.equal(seen, expected.tril() if causal else expected)


def test_zigzag_gives_all_ranks_the_same_work():
    pieces = layout.cut(1024, 8, "zigzag", 64)
    for step in range(1, 8):
        work = [
            sum((p.rows.stop - p.rows.start) * (p.keys.stop - p.keys.start) for p in pairs)
            for rank in range(8)
            for pairs in [layout.pairs_of(pieces[rank], pieces[(rank - step) % 8], True, True)]
        ]
        assert set(work) == {2 * 64 * 64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("order_from", ["own", "previous"])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("auto", "exact")])
def test_orders_and_means_are_those_of_the_library(strategy, order_from, dtype, problem):
    q, k, _ = problem(batch=2, heads=4, heads_kv=2, n=300, d=12, dtype=dtype)
    k = k + 10  # so that their spread is a small difference of large sums
    given = torch.stack([torch.randperm(12) for _ in range(4)])[None, :, None] if strategy == "given" else None
    settings = Settings(strategy, 2, 32, order_from=order_from, window=0, order=given)
    options = options_of(settings, 12)
    wanted, means = columns_of(q, k, "top_left", settings, options, flat=False)
    pieces = [[layout.Piece(0, 300, 0)]]
    found = columns.columns_of(q, k, pieces, None, options, settings.seed, given)
    assert torch.equal(found.order, wanted)
    assert (means is None) == (found.key_means is None) == (STRATEGIES[strategy].members == "group_size")
    if means is not None:
        torch.testing.assert_close(found.key_means, means, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("order_from", ["own", "previous"])
def test_orders_hold_where_keys_have_large_means(order_from, problem):
    q, k, _ = problem(n=500, d=12, dtype=torch.float64)
    k = k * torch.linspace(0.5, 2, 12, dtype=torch.float64) + 1e8
    options = options_of(Settings("energy", 2, 32, order_from=order_from), 12)
    wanted, _ = columns_of(q, k, "top_left", Settings("energy", 2, 32, order_from=order_from), options, flat=False)
    found = columns.columns_of(q, k, [[layout.Piece(0, 500, 0)]], None, options, 0, None).order
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_columns_that_are_not_finite_come_first(bad, problem):
    q, k, _ = problem(n=40, d=6, dtype=torch.float32)
    k[:, :, 3, 4] = bad
    options = options_of(Settings("energy", 2, 16), 6)[:4] + ("own", *options_of(Settings("energy", 2, 16), 6)[5:])
    found = columns.columns_of(q, k, [[layout.Piece(0, 40, 0)]], None, options, 0, None).order
    assert torch.equal(found, ops.make_grouping(q, k, "none", "energy", 2, 16, "own")[0]) and (found[..., 0] == 4).all()


def test_parts_read_gradients_that_lie_as_their_rows_do(monkeypatch, problem):
    """Else the operator would copy them, for each part anew."""
    strides = []

    def backward_into(grad_out, *others):
        strides.append((grad_out.stride(), others[6].stride()))  # and out's

    monkeypatch.setattr(ring, "ops", SimpleNamespace(**{**vars(ops), "backward_into": backward_into}))
    q, k, v = (tensor.requires_grad_() for tensor in problem(batch=2, heads=2, heads_kv=2, n=20, dtype=torch.float32))
    call = ring.Call(None, [layout.pieces_of([(0, 20)])], True, None, options_of(Settings("exact"), q.shape[3]), True)
    out, _ = ring.attend(q, k, v, ring.Columns(), call)
    out.transpose(1, 2).flatten(2).backward(torch.ones(2, 20, 2 * v.shape[3]))
    assert len(strides) == 1 and strides[0][0] == strides[0][1]


class Transport:
    """Keys of rank 1 beside those of rank 0, which is this one, and nobody else's gradients."""

    def __init__(self, k, v):
        self._others, self.room_of_others, self.found = (k, v), travel.Room([torch.empty_like(x) for x in (k, v)]), None

    def keys(self, k, v, call):
        yield 0, k, v
        yield 1, *self._others

    def gradients(self, k, v, call, dtype):
        return SimpleNamespace(room=lambda source: self.room_of_others, add=self.add, arrived=list)

    def add(self, source, found):
        self.found = found


def test_others_gradients_are_written_where_they_leave(monkeypatch, problem):
    """And own ones where the result is: what is summed is dQ alone, of two parts for either share of the heads."""
    tensors = problem(batch=1, heads=4, heads_kv=2, n=20, dtype=torch.float32)
    q, k, v, *others = (tensor.requires_grad_() for tensor in (*tensors, *(x.detach() + 1 for x in tensors[1:])))
    transport = Transport(*(tensor.detach() for tensor in others))
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    pieces = [layout.pieces_of([bounds]) for bounds in ((0, 20), (20, 40))]
    call = ring.Call(group, pieces, False, None, options_of(Settings("exact"), q.shape[3]), True, transport)
    out, lse = ops.forward(q, torch.cat((k, others[0]), 2), torch.cat((v, others[1]), 2))
    context = SimpleNamespace(saved_tensors=(q, k, v, None, None, out, lse), call=call)
    grads = torch.randn_like(out), torch.randn_like(lse)
    summed, add_up = [], ops.add_up
    monkeypatch.setattr(travel.ops, "add_up", lambda parts, total: summed.append(len(parts)) or add_up(parts, total))
    with torch.no_grad():
        found = ring._Ring.backward(context, *grads)[:3]
    assert summed == [2, 2]
    room = transport.room_of_others._tensors
    assert [part[0] for part in transport.found] == [slice(0, 20)]
    assert all(part.is_set_to(to) for part, to in zip(transport.found[0][1:], room))
    wanted = torch.autograd.grad((out, lse), (q, k, v, *others), grads)
    for one, other in zip((*found, *room), wanted):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_merging_leaves_out_what_has_no_weight():
    lse = torch.tensor([[[-torch.inf, -torch.inf, 0.0, 2000.0]]])
    more = torch.tensor([[[-torch.inf, 1.0, -torch.inf, 0.0]]])
    out, more_out = torch.full((1, 1, 4, 1), 2.0), torch.full((1, 1, 4, 1), 4.0)
    out[0, 0, :2], more_out[0, 0, [0, 2, 3]] = torch.nan, torch.nan  # of rows that see no key, or next to nothing of it
    ops.merge([out, more_out], [lse, more], out, lse)
    assert out.flatten().tolist() == [0, 4, 2, 2] and lse.flatten().tolist() == [-torch.inf, 1, 0, 2000]


def test_adding_up_rounds_once():
    parts = [torch.full((1, 1, 2, 4), value, dtype=torch.bfloat16)[:, :, :, ::2] for value in (256.0, 1.0, 1.0)]
    total = torch.empty(1, 2, 2, 2, dtype=torch.bfloat16)[:, 1:]
    ops.add_up([*parts, torch.zeros(1, 1, 2, 2)], total)
    assert (total == 258).all()  # 256 + 1 is 256
    ops.add_up([], total)
    assert (total == 0).all()


def test_parts_are_written_where_their_sum_will_be():
    """The first part of some rows is; what comes later of the same rows lies beside it."""
    total = torch.full((1, 1, 9, 2), 7.0)[:, :, 1:]
    room = travel.Room([total], 10)  # of the rows 10 to 17
    (first,), (last,), (again,) = (room.take(slice(*rows)) for rows in ((10, 13), (15, 18), (12, 16)))
    assert first.is_set_to(total[:, :, 0:3]) and last.is_set_to(total[:, :, 5:8])
    assert again.shape == (1, 1, 4, 2)
    for value, part in enumerate((first, last, again), 1):
        part.fill_(value)
    assert total[0, 0, :, 0].tolist() == [1, 1, 1, 7, 7, 2, 2, 2]
    parts = [(slice(10, 13), first), (slice(15, 18), last), (slice(12, 16), again)]
    travel.add_up(parts, [total], 10)
    assert total[0, 0, :, 0].tolist() == [1, 1, 4, 3, 3, 5, 2, 2]


def test_a_sum_of_one_part_is_not_made_anew(monkeypatch):
    made = []
    monkeypatch.setattr(travel.ops, "add_up", lambda parts, total: made.append(len(parts)))
    total = torch.zeros(1, 1, 4, 2)
    travel.add_up_rows([total[:, :, 1:3]], total[:, :, 1:3])
    assert made == []
    for parts in ([], [total[:, :, 0:2]], [torch.zeros(1, 1, 2, 2)], [total[:, :, 1:3]] * 2):
        travel.add_up_rows(parts, total[:, :, 1:3])
    assert made == [0, 1, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_merging_gives_attention_over_all_keys(dtype, problem):
    q, k, v = problem(batch=2, heads=4, heads_kv=2, n=60, d=12, dtype=dtype)
    check_merge(q, k, v)


def check_merge(q, k, v):
    """Merges attention over two thirds and one third of the keys into some rows of larger tensors."""
    whole, lse_of_whole = ops.forward(q, k, v)
    wide = ops.lse_dtype(q.dtype)
    out = torch.full((*q.shape[:2], q.shape[2] + 9, v.shape[3]), 7.0, dtype=wide, device=q.device)
    lse = torch.full(out.shape[:3], 7.0, dtype=wide, device=q.device)
    rows = slice(4, 4 + q.shape[2])
    parts = [ops.forward(q, k[:, :, keys], v[:, :, keys]) for keys in (slice(0, 30), slice(30, 40), slice(40, None))]
    so_far = out[:, :, rows], lse[:, :, rows]
    ops.merge(*zip(*parts[:2]), *so_far)
    ops.merge(*zip(so_far, parts[2]), *so_far)
    loose = {"atol": 2e-2, "rtol": 2e-2} if q.dtype.itemsize == 2 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(out[:, :, rows], whole.to(wide), **loose)
    torch.testing.assert_close(lse[:, :, rows], lse_of_whole, **loose)
    for tensor in (out, lse):
        assert (tensor[:, :, :4] == 7).all() and (tensor[:, :, rows.stop :] == 7).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"out": torch.zeros(1, 2, 4, 3).transpose(2, 3)}, "the last stride of out is 3; allowed: 1"),
        ({"lse": torch.zeros(1, 2, 3, dtype=torch.double)}, "the dtype of lse is Double; allowed: Float"),
        ({"lses": [torch.zeros(1, 2, 5)]}, r"the shape of lses\[0\] is \[1, 2, 5\]; allowed: \[1, 2, 3\]"),
        ({"outs": [torch.zeros(1, 2, 3, 5)]}, r"the shape of outs\[0\] is \[1, 2, 3, 5\]; allowed: \[1, 2, 3, 4\]"),
        ({"outs": []}, "outs has 0 tensors and lses 1; allowed: as many"),
    ],
)
def test_merging_refuses_other_sizes(change, words):
    tensors = {"out": torch.zeros(1, 2, 3, 4), "lse": torch.zeros(1, 2, 3)}
    tensors |= {"outs": [torch.zeros(1, 2, 3, 4)], "lses": [torch.zeros(1, 2, 3)]} | change
    with pytest.raises(RuntimeError, match=words):
        ops.merge(**tensors)


def test_without_a_group_there_is_none(problem):
    if dist.is_initialized():
        pytest.skip("another test's group is still there")
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialized; allowed: after init_process_group"):
        attention(*problem(n=20))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A group of this process."""
    store = tmp_path_factory.mktemp("alone") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_process_is_the_whole(alone, problem):
    tensors = problem(n=50, heads=4, heads_kv=2, dtype=torch.float32)
    settings = Settings("energy", 2, 16, window=3, skip=0.2)  # which one process can skip by
    wanted = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True, settings=settings)
    for group, kind in ((alone, "zigzag"), (None, "ulysses"), (DeviceMesh("cpu", [[0]]), "contiguous")):
        assert torch.equal(positions(50, group=group, layout=kind), torch.arange(50))
        where = {"group": group, "layout": kind}
        parts = [shard(tensor, **where) for tensor in tensors]
        found = attention(*parts, **where, is_causal=True, enable_gqa=True, settings=settings)
        assert torch.equal(unshard(found, **where), wanted)


def test_compiled_code_calls_it_as_it_is(alone, problem):
    tensors = problem(n=20, dtype=torch.float32)
    compiled = torch.compile(lambda q, k, v: attention(q + 1, k, v).sin(), backend="aot_eager")
    q, k, v = tensors
    assert torch.equal(compiled(*tensors), scaled_dot_product_attention(q + 1, k, v).sin())


def test_autocast_casts_as_in_one_process(alone, problem):
    tensors = problem(n=20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*tensors).dtype == torch.bfloat16


def test_what_does_not_fit_is_named(alone, problem):
    q, k, v = problem(n=20, dtype=torch.float32)
    with pytest.raises(ValueError, match="layout is 'ring'; allowed: 'contiguous', 'zigzag', 'ulysses'"):
        attention(q, k, v, layout="ring")
    with pytest.raises(TypeError, match="group is of type int; allowed: None, a ProcessGroup, or a DeviceMesh"):
        attention(q, k, v, group=1)
    with pytest.raises(TypeError, match="group is a mesh of 3 axes"):
        attention(q, k, v, group=DeviceMesh("cpu", [[[0]]]))
    with pytest.raises(ValueError, match="layout is 'ulysses' with a mesh of 2 axes"):
        attention(q, k, v, group=DeviceMesh("cpu", [[0]]), layout="ulysses")
    with pytest.raises(ValueError, match="key has 10 rows; allowed: 20, as many as query"):
        attention(q, k[:, :, :10], v[:, :, :10])
    with pytest.raises(ValueError, match="query has 3 axes; allowed: 4"):
        attention(q[0], k[0], v[0])
    with pytest.raises(ValueError, match="multiple is 0; allowed: 1 to"):
        attention(q, k, v, multiple=0)
    with pytest.raises(ValueError, match="multiple is 0"):
        shard(q, multiple=0)
    with pytest.raises(TypeError, match="settings and strategy were both given"):
        attention(q, k, v, settings=Settings(), strategy="lsh")
