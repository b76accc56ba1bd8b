# SPDX-License-Identifier: Apache-2.0
"""What test_distributed.py asks of several processes: the problems, and what each process runs. Eight processes are
started once and run all cases, with gloo, in groups of as many as a case wants; and for test_cuda_distributed.py as
many as there are GPUs, with NCCL."""

import collections
import dataclasses
import datetime
import os
import time
import traceback
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distrattention import Settings, ops, scaled_dot_product_attention
from distrattention.distributed import attention, peer_memory, register_sharding_rules, shard, travel, unshard

WORLD = 8
SECONDS = 180  # the time limit of the groups
BFLOAT16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, whose tensors are normal and from one seed, and the ranks that share it: a number of them, or the
    numbers of a mesh."""

    ranks: int | tuple[int, int]
    n: int
    settings: Settings = Settings("exact")
    causal: bool = False
    layout: str = "contiguous"
    multiple: int = 128
    heads: int = 2
    heads_kv: int = 2
    batch: int = 1
    d: int = 16
    dv: int = 8
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    by_columns: bool = False  # q, k and v lie in memory column by column

    def tensors(self):
        """q, k and v of the whole sequence, and the gradients of out and lse."""
        generator = torch.Generator().manual_seed(7)
        q_shape, k_shape = (self.batch, self.heads, self.n), (self.batch, self.heads_kv, self.n)
        shapes = (*q_shape, self.d), (*k_shape, self.d), (*k_shape, self.dv), (*q_shape, self.dv), q_shape
        found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        found[1] += 2 * torch.randn((1, 1, 1, self.d), generator=generator, dtype=torch.float64)  # keys have a mean
        lse = found[4].to(torch.float64 if self.dtype == torch.float64 else torch.float32)
        return [tensor.to(self.dtype) for tensor in found[:4]] + [lse]

    @property
    def call(self):
        """Keywords of a call of attention() but for the group."""
        return {
            "layout": self.layout, "multiple": self.multiple, "is_causal": self.causal, "scale": self.scale,
            "enable_gqa": True, "settings": self.settings, "return_lse": True,
        }  # fmt: skip


def energy(**others):
    return Settings("energy", group_size=2, **others)


def lsh(**others):
    return Settings("lsh", group_size=2, **others)


_ORDER = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(h)) for h in range(2)])[None, :, None]
_ZIGZAG = {"causal": True, "layout": "zigzag"}
CASES = {
    "exact": Case(3, 100, heads=4, batch=2, dv=24),
    "exact, causal": Case(4, 101, causal=True, multiple=8, scale=0.5),
    "exact, zigzag": Case(8, 205, **_ZIGZAG, multiple=4, heads=6),
    "exact, zigzag, 2 ranks": Case(2, 77, **_ZIGZAG, multiple=1, d=7, dv=5),
    "exact, zigzag, not causal": Case(3, 90, layout="zigzag", multiple=16),
    "exact, fewer chunks than ranks": Case(8, 40, **_ZIGZAG, multiple=8),
    "exact, bf16": Case(4, 200, **_ZIGZAG, multiple=8, dtype=BFLOAT16, d=32),
    "exact, bf16, by columns": Case(8, 205, **_ZIGZAG, multiple=4, dtype=BFLOAT16, by_columns=True),
    "exact, float64": Case(3, 50, **_ZIGZAG, multiple=4, dtype=torch.float64),
    "lsh": Case(3, 250, lsh(block_size=32), multiple=32, heads=4),
    "lsh, sample, causal": Case(4, 250, lsh(block_size=16, estimator="sample", seed=3), True, multiple=16),
    "lsh, zigzag": Case(4, 250, lsh(block_size=16), **_ZIGZAG, multiple=16, heads=4),
    "lsh, own, zigzag": Case(2, 250, lsh(block_size=16, order_from="own"), **_ZIGZAG, multiple=32),
    "lsh, near, zigzag": Case(2, 700, lsh(block_size=64, window=40, sinks=100), **_ZIGZAG),
    "energy": Case(3, 250, energy(block_size=32), multiple=32, heads=4),
    "energy, previous": Case(3, 250, energy(block_size=32, order_from="previous"), multiple=32),
    "energy, causal": Case(8, 500, energy(block_size=16), True, multiple=32, heads=4),
    "energy, zigzag": Case(4, 250, energy(block_size=16), **_ZIGZAG, multiple=16, heads=6, d=15),
    "energy, own, zigzag": Case(8, 500, energy(block_size=16, order_from="own"), **_ZIGZAG, multiple=16),
    "energy, bf16, zigzag": Case(2, 500, energy(block_size=64), **_ZIGZAG, multiple=64, dtype=BFLOAT16, d=32),
    "energy, float64, zigzag": Case(2, 100, energy(block_size=16), **_ZIGZAG, multiple=16, dtype=torch.float64),
    "energy, chunks of one block": Case(4, 600, energy(block_size=160), True, multiple=160),
    "energy, window": Case(3, 700, energy(block_size=64, window=150)),
    "energy, sinks, previous": Case(3, 700, energy(block_size=64, sinks=130, order_from="previous")),
    "energy, near, causal": Case(4, 520, energy(block_size=128, window=100, sinks=1), True, heads=4, heads_kv=1),
    "energy, near, zigzag": Case(2, 520, energy(block_size=32, window=100, sinks=200), **_ZIGZAG, heads=4),
    "energy, window, zigzag": Case(4, 1000, energy(block_size=64, window=0), **_ZIGZAG),
    "energy, sinks, zigzag": Case(3, 700, energy(block_size=128, sinks=100), **_ZIGZAG),
    "energy, near, own, zigzag": Case(2, 1000, energy(block_size=256, window=10, order_from="own"), **_ZIGZAG,
                                      multiple=256),
    "energy, near, chunks of one block": Case(3, 700, energy(block_size=256, window=10), multiple=256),
    "energy, near, one block": Case(2, 300, energy(block_size=1 << 40, window=0), multiple=300),
    "energy, near, float64, zigzag": Case(2, 600, energy(block_size=64, window=5), **_ZIGZAG, dtype=torch.float64),
    "given": Case(3, 250, Settings("given", 2, 32, order=_ORDER), causal=True, multiple=32),
    "given, near, zigzag": Case(2, 600, Settings("given", 2, 32, order=_ORDER, window=8), **_ZIGZAG),
    "auto": Case(4, 1100, Settings("auto", 2, block_size=64), **_ZIGZAG, d=64, dv=64),
    "ulysses": Case(3, 100, heads=6, heads_kv=3, layout="ulysses", causal=True),
    "ulysses, energy": Case(4, 300, energy(block_size=50, window=70), True, "ulysses", heads=8, heads_kv=4),
    "ulysses, given": Case(2, 100, Settings("given", 2, 32, order=_ORDER), layout="ulysses"),
    "hybrid": Case((2, 2), 101, heads=4),
    "hybrid, zigzag": Case((4, 2), 500, energy(block_size=16), **_ZIGZAG, multiple=16, heads=4),
    "hybrid, near, zigzag": Case((2, 4), 520, energy(block_size=64, window=100), **_ZIGZAG, heads=8, heads_kv=4),
}  # fmt: skip


# Cases that also run by the transport that the device's ring does not take: on GPUs by messages, and on the CPU by the
# memory of peers, which files stand for.
BY_OTHER_TRANSPORT = [
    "exact, causal", "exact, zigzag", "exact, zigzag, 2 ranks", "exact, fewer chunks than ranks", "exact, bf16",
    "exact, bf16, by columns", "energy, causal", "energy, float64, zigzag", "energy, window", "energy, near, causal",
    "energy, near, zigzag", "hybrid, zigzag",
]  # fmt: skip


def ranks_of(case):
    """How many ranks the case wants."""
    return case.ranks if isinstance(case.ranks, int) else case.ranks[0] * case.ranks[1]


def cases_for(world, kind):
    """The names of the cases that so many processes, on "cpu" or "cuda", can run."""
    return [
        name
        for name, case in CASES.items()
        if ranks_of(case) <= world and (kind == "cpu" or case.dtype != torch.float64)
    ]


def run(rank, folder, world, kind):
    """What a process does: runs every case that it has a part in, and leaves what it found in the folder."""
    torch.set_num_threads(1)
    found = {}
    try:
        _run(rank, folder, world, kind, found)
    except BaseException:  # the test shows it
        found["failed"] = traceback.format_exc()
    _leave(found, rank, folder)


def _leave(found, rank, folder):
    torch.save(found, folder / f"{rank}.pt")
    os._exit(0)  # without the group's end, which would wait for those that are gone


def _run(rank, folder, world, kind, found):
    limit = datetime.timedelta(seconds=SECONDS)
    store = f"file://{folder}/store"
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"  # by gloo processes agree, and learn of a death
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=limit)
    names = cases_for(world, kind)
    names.sort(key=lambda name: ranks_of(CASES[name]), reverse=True)  # so the ranks of each group were in as many
    groups = {}
    for ranks in dict.fromkeys(CASES[name].ranks for name in names):
        if isinstance(ranks, int):
            groups[ranks] = dist.new_group(list(range(ranks)), timeout=limit)
        else:
            groups[ranks] = DeviceMesh(kind, torch.arange(ranks[0] * ranks[1]).view(ranks))
    for name in names:
        if rank < ranks_of(CASES[name]):
            found[name] = _shards(CASES[name], groups[CASES[name].ranks], kind)
    found["transports"] = {type(each).__name__ for of in peer_memory._found.values() for each in of.values()}
    with _messages() if kind == "cuda" else _files_of_peers(folder):
        for name in names:
            if name in BY_OTHER_TRANSPORT and rank < ranks_of(CASES[name]):
                found["other transport", name] = _shards(CASES[name], groups[CASES[name].ranks], kind)
    if kind == "cpu":
        _run_the_rest(rank, folder, limit, groups, found)
    elif world > 1:
        pair = dist.new_group([0, 1], timeout=limit)
        if rank < 2:
            found["faults"] = {name: _fault(rank, FAULTS[name], pair, kind) for name in FAULTS_OF_PAIRS}
            _call_as_one_dies("before the call", rank, 1, found, pair, folder, kind)


def _run_the_rest(rank, folder, limit, groups, found):
    """DTensors, and faults, after which some ranks are gone."""
    register_sharding_rules()
    if rank < 4:
        found["dtensor"] = {name: _of_dtensors(case, groups[(2, 2)]) for name, case in DTENSORS.items()}
    if rank < 3:
        found["faults"] = {name: _fault(rank, fault, groups[3]) for name, fault in FAULTS.items()}
        found["after faults"] = _shards(CASES["exact"], groups[3], "cpu")
        found["of no rows"] = _of_no_rows(groups[3])
        _call_as_one_dies("before the call", rank, 1, found, groups[3], folder)
    others = dist.new_group([4, 5, 6], timeout=limit, use_local_synchronization=True) if rank in (4, 5, 6) else None
    if others:
        _call_as_one_dies("in the ring", rank, 5, found, others, folder)


def _messages():
    return mock.patch.object(peer_memory, "transport_of", lambda *_: travel.Messages())


def _files_of_peers(folder):
    """Rings go by PeerMemory, whose memory is that of files. The lane does what it is given as early as it may, and the
    next as late: neither must find other values."""
    made = collections.Counter()

    def shared(mine, group):
        made[group.group_name] += 1
        names = [f"{group.group_name}.{made[group.group_name]}.{rank}" for rank in range(group.size())]
        files = [torch.from_file(str(folder / name), True, len(mine), dtype=torch.uint8) for name in names]
        return files, lambda: dist.barrier(group), None

    class EarlyAndLate:
        def __init__(self, device):
            self._is_late, self._waiting = False, []

        def give(self, function, behind=None):
            self._waiting.append(function)
            if not self._is_late:
                self.finish()
            self._is_late = not self._is_late
            return self.finish

        empty, follow = staticmethod(torch.Tensor.new_empty), staticmethod(lambda: None)

        def finish(self):
            while self._waiting:
                self._waiting.pop(0)()

    def reach(call, q, k, v):
        if call.group is None:
            return travel.Messages()
        transport = found.setdefault(call.group, peer_memory.PeerMemory(k.device))
        assert transport.reserve(k, v, call, any(tensor.requires_grad for tensor in (q, k, v)))
        return transport

    found = {}
    return mock.patch.multiple(
        peer_memory, room=lambda count, device: torch.empty(count, dtype=torch.uint8), shared=shared, Lane=EarlyAndLate,
        transport_of=reach, now=lambda _: None, barriers_of=lambda of, _: found[of].barriers if of in found else None,
    )  # fmt: skip


def _shards(case, group, kind):
    """(out, lse, gradients of q, k, v), whole, as this process sees them, of the case."""
    where = {"group": group, "layout": case.layout, "multiple": case.multiple}
    tensors = [shard(tensor.to(kind), 2, **where) for tensor in case.tensors()]
    if case.by_columns:
        tensors[:3] = [tensor.mT.contiguous().mT for tensor in tensors[:3]]
    q, k, v, grad_out, grad_lse = (tensor.requires_grad_(n < 3) for n, tensor in enumerate(tensors))
    call, order = case.call, case.settings.order
    if order is not None:
        call["settings"] = dataclasses.replace(case.settings, order=order.to(kind))
    results = []
    for _ in range(2):
        out, lse = attention(q, k, v, group=group, **call)
        results.append((out, lse, *torch.autograd.grad((out, lse), (q, k, v), (grad_out, grad_lse))))
    same = _takes_any_gradient(q, k, v, group, call) and all(torch.equal(*pair) for pair in zip(*results))
    return {"results": [unshard(tensor, 2, **where).cpu() for tensor in results[0]], "same bits": same}


def _takes_any_gradient(q, k, v, group, call):
    """Whether a sum's gradient, which is one number without strides, is as good as one of its own memory."""
    found = []
    for dense in (False, True):
        out, _ = attention(q, k, v, group=group, **call)
        loss, weight = (out, torch.ones_like(out)) if dense else (out.sum(), None)
        found.append(torch.autograd.grad(loss, (q, k, v), weight))
    return all(torch.equal(*pair) for pair in zip(*found))


def _of_no_rows(group):
    """The shapes of what calls of an empty sequence give."""
    nothing = [torch.zeros(1, 2, 0, 16)] * 3
    call = {"group": group, "layout": "zigzag", "is_causal": True}
    settings = Settings("exact"), lsh(block_size=16), energy(block_size=16), energy(block_size=64, window=0)
    return [list(attention(*nothing, **call, settings=each).shape) for each in settings]


# Calls of scaled_dot_product_attention() with DTensors: (settings, heads of key, shape of the mask, which axes of Q the
# axes of the mesh shard).
DTENSORS = {
    "exact": (Settings(), 4, None, (0, 1)),
    "a mask of all": (Settings(), 4, (9, 9), (0, 1)),
    "a mask of heads": (energy(block_size=4), 2, (4, 9, 9), (0, 1)),
    "a mask of batches, one head of key": (lsh(block_size=4, window=0), 1, (2, 1, 9, 9), (0, 1)),
    "a mask of each": (energy(block_size=4, window=0), 4, (2, 4, 9, 9), (0, 1)),
    "heads by both": (energy(block_size=4), 4, None, (1, 1)),
    "rows": (energy(block_size=4), 4, None, (0, 2)),
    "given, skip": (Settings("given", 2, 4, window=0, skip=0.3, order=_ORDER[:, [0, 1, 0, 1]]), 4, None, (0, 1)),
    "lsh, skip": (lsh(block_size=4, window=0, skip=0.3), 4, None, (0, 1)),  # as the last one, but for the strategy
}


def _of_dtensors(case, mesh):
    """(The results with DTensors, whole, and those without; the placements of out)."""
    settings, heads_kv, shape, axes = case
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(2, heads, 9, 16, generator=generator) for heads in (4, heads_kv, heads_kv)]
    if shape is not None:
        tensors.append(torch.randn(shape, generator=generator))

    def run(tensors, settings):
        leaves = [tensor.detach().requires_grad_(not settings.skip) for tensor in tensors]
        counting = bool(settings.skip)
        out = scaled_dot_product_attention(*leaves, enable_gqa=True, settings=settings, return_halves=counting)
        if settings.skip:
            return list(out)
        out.square().sum().backward()
        return [out, *(leaf.grad for leaf in leaves)]

    def placements(n):
        if n == 3:
            return [Replicate(), Replicate()]
        return [Replicate() if axis == 1 and tensors[n].shape[1] == 1 else Shard(axis) for axis in axes]

    expected = run(tensors, settings)
    if settings.order is not None:
        settings = Settings(**{**settings.asdict(), "order": distribute_tensor(settings.order, mesh, placements(3))})
    found = run([distribute_tensor(tensor, mesh, placements(n)) for n, tensor in enumerate(tensors)], settings)
    return [tensor.full_tensor() for tensor in found], expected, found[0].placements


def _small(**others):
    tensors = Case(1, 64, **others).tensors()[:3]
    return [tensor.clone() for tensor in tensors]


# What rank 1 of 3 calls with while the others call with _small() and energy: (tensors, keywords).
FAULTS = {
    "dtype": lambda: (_small(dtype=BFLOAT16), {}),
    "heads": lambda: (_small(heads=4), {"enable_gqa": True}),
    "window": lambda: (_small(), {"window": 128}),
    "is_causal": lambda: (_small(), {"is_causal": True}),
    "gradients": lambda: ([tensor.requires_grad_() for tensor in _small()], {}),
    "rows": lambda: ([tensor[:, :, :60] for tensor in _small()], {}),
    "a bad key": lambda: ([_small()[0], torch.zeros(1, 2, 64, 3), _small()[2]], {}),
    "an order of other blocks": lambda: (_small(), {"order": _ORDER.expand(1, 2, 3, 16)}),
    "no such setting": lambda: (_small(), {"windows": 3}),
    "skip": lambda: (_small(), {"window": 128, "skip": 0.1}),
}  # fmt: skip


# Of two ranks the second is the last one, which may have fewer rows.
FAULTS_OF_PAIRS = [name for name in FAULTS if name != "rows"]


def _fault(rank, fault, group, kind="cpu"):
    tensors, keywords = fault() if rank == 1 else (_small(), {})
    keywords = {"strategy": "energy", "group_size": 2, "block_size": 16, **keywords}
    if "order" in keywords:
        keywords["order"] = keywords["order"].to(kind)
    started = time.monotonic()
    try:
        attention(*(tensor.to(kind) for tensor in tensors), group=group, **keywords)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "none", "", time.monotonic() - started


def _call_as_one_dies(when, rank, dying, found, group, folder, kind="cpu"):
    """Rank `dying` of all dies, and leaves what it has found; what the others of the group get, and after how long."""
    tensors = [tensor.to(kind) for tensor in _small()]
    attention(*tensors, group=group)  # now all of them are connected
    if rank == dying and when == "before the call":
        _leave(found, rank, folder)
    if rank == dying:
        ops.forward = lambda *_: _leave(found, rank, folder)
    started = time.monotonic()
    try:
        attention(*tensors, group=group)
        found[f"death {when}"] = ("none", "", time.monotonic() - started)
    except Exception as error:
        found[f"death {when}"] = (type(error).__name__, str(error), time.monotonic() - started)


def run_all(folder: Path, world=WORLD, kind="cpu"):
    """Runs all cases in so many processes; what each of them found."""
    from programs import SERVER

    processes = [SERVER.Process(target=run, args=(rank, folder, world, kind), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    end = time.monotonic() + 600
    for process in processes:
        process.join(max(0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
