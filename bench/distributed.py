#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times attention of one sequence on several processes, and checks it. Run by torchrun, on GPUs or on a CPU's cores:

    torchrun --standalone --nproc-per-node 4 bench/distributed.py --json-out distributed.json
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/distributed.py --device cpu

A time is the median over the rounds, in each of which all contenders run in an order of its own (at the power limit the
clock depends on who came before), of what the slowest process takes from one barrier to the next. Beside the whole
call there are, of the same call, what one process takes for the whole sequence while the others idle (`ms_one`) and
while they do the same (`ms_one_each`), the ring's kernels and merges without what travels (`ms_compute`), what travels
alone (`ms_moving`), and what the model of bench/ring_model.py says (`ms_model`), which knows of this machine
`ms_compute` and the rows of "link": the time of so many bytes from each rank to the next. Exact calls have torch's own
ring beside them (`ms_torch_flash`, `ms_torch_cudnn`: context_parallel on those kernels; on GPUs alone).
share_of_ideal is ms_one / (ranks * ms), and share_of_busy_ideal the same of ms_one_each: GPUs that share a host's power
may all be slower than one alone. rel_error_out is against one process, in the same dtype; bits are compared between two
runs.

The meta's "transport" is how keys go from rank to rank (distrattention/distributed): PeerMemory, or Messages where GPUs
do not reach each other's memory or DISTR_PEER_MEMORY is 0. NCCL's kernels then take SMs from attention's:
NCCL_MAX_CTAS, NCCL_MIN_CTAS and TORCH_NCCL_HIGH_PRIORITY say how many and how soon, and "environment" keeps them.

Rank 0 writes {"meta", "rows"} (bench/results/<gpu or cpu>/distributed.json) and prints a line for each row. Exit
status: 0; 1 where an output errs by more than --tolerance.
"""

import argparse
import contextlib
import datetime
import functools
import inspect
import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import processor
import result_file
import ring_model
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import distrattention
from distrattention import Settings, scaled_dot_product_attention
from distrattention.distributed import attention, layout, peer_memory, ring, shard, travel, unshard

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
LINK_BYTES = (1 << 12, 1 << 20, 1 << 24, 1 << 27)
NEAR = {"window": 512, "sinks": 128}
CALLS = {  # (layout, causal, settings)
    "exact": ("contiguous", False, Settings("exact")),
    "exact, causal": ("contiguous", True, Settings("exact")),
    "exact, zigzag": ("zigzag", True, Settings("exact")),
    "exact, ulysses": ("ulysses", True, Settings("exact")),
    "energy, zigzag": ("zigzag", True, Settings("energy", 2)),
    "energy, near keys, zigzag": ("zigzag", True, Settings("energy", 2, **NEAR)),
    "lsh, zigzag": ("zigzag", True, Settings("lsh", 2)),
}
OPERATIONS = ("forward", "forward_backward")


class Place:
    """The device of this process: how to wait for it and how it is named."""

    def __init__(self, kind):
        self.kind = kind
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # With a backend for the CPU, no GPU waits for what processes tell each other before a call.
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=5))
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def wait(self):
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, call):
        """What the slowest process takes."""
        dist.barrier()
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        took = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=self.kind)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return 1000 * took.item()

    def name(self):
        return torch.cuda.get_device_name() if self.kind == "cuda" else processor.cpu_name()


def nothing_travels(self, k, v, call, since=None):
    """Takes the place of a transport's keys(): the kernels get this rank's K and V in place of the others'."""
    return ((source, k, v) for source in range(layout.size_of(call.group)))


@contextlib.contextmanager
def without_travel():
    def stay(self, leaving, arriving, group, tag):
        self._works, self._from, self._to = [], 0, 0
        arriving.zero_()

    with (
        mock.patch.object(travel.Messages, "keys", nothing_travels),
        mock.patch.object(travel.Moving, "__init__", stay),
        mock.patch.multiple(
            peer_memory.PeerMemory, keys=nothing_travels, barrier=lambda *_: None, fetch=lambda *_: lambda: None
        ),
    ):
        yield


@contextlib.contextmanager
def without_kernels():
    """Parts of a call that see nothing: only K and V, and their gradients, travel."""
    with (
        mock.patch.object(ring.Call, "pairs", lambda self, source: []),
        mock.patch.object(ring, "begin", lambda *_: None),
    ):
        yield


def transport_of(place):
    """How keys go between all ranks."""
    call = ring.Call(dist.group.WORLD, [layout.pieces_of([(0, 1)])] * place.ranks, False, None, ("exact",), True)
    return peer_memory.transport_of(call, *[torch.empty((1, 1, 1, 1), device=place.kind)] * 3)


def link_rows(place, transport, rounds):
    """What so many bytes take from one rank to the next by the ring's transport, while all ranks send as many."""
    group = dist.group.WORLD

    def move(leaving, arriving):
        if isinstance(transport, travel.Messages):
            travel.Moving(leaving, arriving, group, 1).wait()
        else:
            transport.grow("link", max(LINK_BYTES), group)
            lying = transport.buffers("link", leaving.numel(), leaving.dtype)
            transport.fetch(arriving, lying[(place.rank - 1) % place.ranks])()

    rows = []
    for count in LINK_BYTES:
        leaving = torch.zeros(count, dtype=torch.uint8, device=place.kind)
        arriving = torch.empty_like(leaving)
        times = [place.milliseconds(functools.partial(move, leaving, arriving)) for _ in range(rounds + 1)][1:]
        rows.append({"op": "link", "bytes": count, "ms": statistics.median(times), "ms_min": min(times)})
    return rows


def contenders(place, tensors, op, kind, causal, settings):
    """{name: function} of what is timed, all of the same call; the whole call is "ms"."""
    where = {"layout": kind}
    call = {"is_causal": causal, "settings": settings, "enable_gqa": True}
    *parts, grad = (shard(tensor, 2, **where) for tensor in tensors)

    def run(attend, parts, grad):
        leaves = [part.detach().requires_grad_(op != "forward") for part in parts]
        out = attend(*leaves)
        if op != "forward":
            out.backward(grad)
        return out

    def distributed():
        return run(lambda *leaves: attention(*leaves, **where, **call), parts, grad)

    def whole():
        run(lambda *leaves: scaled_dot_product_attention(*leaves, **call), tensors[:3], tensors[3])

    def one():
        if place.rank == 0:
            whole()

    def within(context):
        def wrapped():
            with context():
                distributed()

        return wrapped

    found = {"ms": distributed, "ms_one": one}
    if place.ranks > 1:
        found["ms_one_each"] = whole
    if kind != "ulysses" and place.ranks > 1:
        found |= {"ms_compute": within(without_travel), "ms_moving": within(without_kernels)}
    return found


@contextlib.contextmanager
def torch_ring(place, tensors, op, causal):
    """{name: function} of torch's own context parallelism. It has grouped heads spread out, as its ring wants them."""
    mesh = init_device_mesh(place.kind, (place.ranks,))
    q, k, v, grad = (tensor.clone() for tensor in tensors)
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))

    def call(backend):
        leaves = [tensor.detach().requires_grad_(op != "forward") for tensor in (q, k, v)]
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
            if op != "forward":
                out.backward(grad)

    backends = {"ms_torch_flash": SDPBackend.FLASH_ATTENTION, "ms_torch_cudnn": SDPBackend.CUDNN_ATTENTION}
    # It refuses to balance what is not causal, and has no public option for that.
    options = sys.modules[inspect.unwrap(context_parallel).__module__]._cp_options
    buffers = [q, k, v, grad]
    with (
        mock.patch.object(options, "enable_load_balance", causal),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
    ):
        yield {name: functools.partial(call, backend) for name, backend in backends.items()}


def error_of(place, tensors, kind, causal, settings):
    """|out - out of one process| / |out of one process|, Frobenius norms."""
    q, k, v, _ = tensors
    with torch.no_grad():
        parts = [shard(tensor, 2, layout=kind) for tensor in (q, k, v)]

        def attend():
            return attention(*parts, layout=kind, is_causal=causal, settings=settings, enable_gqa=True)

        out = attend()
        if not torch.equal(out, attend()):
            raise AssertionError(f"rank {place.rank}: two runs of {settings} differ")
        whole = unshard(out, 2, layout=kind).double()
        one = scaled_dot_product_attention(q, k, v, is_causal=causal, settings=settings, enable_gqa=True).double()
    return ((whole - one).norm() / one.norm()).item()


def rounds_of(place, calls, rounds):
    """{name: times} of the rounds but for the first, which warms up."""
    times, order = {key: [] for key in calls}, random.Random(0)  # alike on all ranks
    for number in range(rounds + 1):
        for key in order.sample(list(calls), len(calls)):
            took = place.milliseconds(calls[key])
            if number > 0:
                times[key].append(took)
    return times


def row_of(place, options, n, head_dim, name, op, links, forward, by_messages):
    """`forward`: the row of the forward alone, where there is one."""
    kind, causal, settings = CALLS[name]
    generator = torch.Generator(place.kind).manual_seed(1)  # alike on all ranks
    heads = options.heads, options.kv_heads, options.kv_heads, options.heads
    sizes = {"dtype": DTYPES[options.dtype], "device": place.kind, "generator": generator}
    tensors = [torch.randn(1, h, n, head_dim, **sizes) for h in heads]
    calls = contenders(place, tensors, op, kind, causal, settings)
    row = {}
    balanced = kind == ("zigzag" if causal else "contiguous")  # as torch's ring is
    with contextlib.ExitStack() as stack:
        if place.kind == "cuda" and place.ranks > 1 and settings.strategy == "exact" and balanced:
            try:
                theirs = stack.enter_context(torch_ring(place, tensors, op, causal))
                for call in theirs.values():
                    call()
                calls |= theirs
            except (AttributeError, RuntimeError) as error:  # it is a prototype
                row["torch_ring"] = f"refused: {error}"
        times = rounds_of(place, calls, options.rounds)
    medians = {key: statistics.median(found) for key, found in times.items()}
    row |= {
        "op": op, "call": name, "layout": kind, "ranks": place.ranks, "batch": 1, "heads": options.heads,
        "kv_heads": options.kv_heads, "seq": n, "head_dim": head_dim, "dtype": options.dtype, "causal": causal,
        "strategy": settings.strategy, "group_size": settings.taken_group_size, "window": settings.window,
        "sinks": settings.sinks, **medians, "share_of_ideal": medians["ms_one"] / (place.ranks * medians["ms"]),
        "share_of_busy_ideal": medians.get("ms_one_each", medians["ms_one"]) / (place.ranks * medians["ms"]),
        "rel_error_out": error_of(place, tensors, kind, causal, settings), "runs": options.rounds,
    }  # fmt: skip
    if "ms_compute" in medians:
        bytes_of_keys = ring_model.bytes_of_keys(n / place.ranks, options.kv_heads, head_dim, tensors[0].element_size())
        bytes_of_gradients = bytes_of_keys * (4 / tensors[0].element_size() if by_messages else 1)
        passes = (forward["ms_compute"], row["ms_compute"] - forward["ms_compute"]) if forward else (
            row["ms_compute"], None)  # fmt: skip
        row["ms_model"] = ring_model.ring_ms(
            place.ranks, *passes, bytes_of_keys, bytes_of_gradients, ring_model.Link.of_rows(links)
        )
    return row


def numbers(text):
    return [int(word) for word in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json-out", type=Path)
    parser.add_argument("--seq", type=numbers, help="of the whole sequence; GPUs have 8192 and 32768 each by default")
    parser.add_argument("--head-dim", type=numbers, default=[128])
    parser.add_argument("--heads", type=int, help="of Q")
    parser.add_argument("--kv-heads", type=int, help="of K and V; as many as --heads unless set")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--calls", default=";".join(CALLS), help="with ; between them: %(default)s")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tolerance", type=float, help="of rel_error_out")
    parser.add_argument("--commit", default=os.environ.get("DISTR_COMMIT", ""))
    options = parser.parse_args()
    gpu = options.device == "cuda"
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    options.seq = options.seq or ([8192 * processes, 32768 * processes] if gpu else [4096])
    options.heads = options.heads or (32 if gpu else 4)
    options.kv_heads = options.kv_heads or options.heads
    options.dtype = options.dtype or ("bf16" if gpu else "f32")
    options.tolerance = options.tolerance or (1e-2 if options.dtype == "bf16" else 1e-5)
    place = Place(options.device)
    commit = options.commit or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()  # fmt: skip
    meta = {
        "version": distrattention.__version__, "gpu" if gpu else "cpu": place.name(), "ranks": place.ranks,
        "backend": dist.get_backend(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "commit": commit, "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": result_file.command(["torchrun", "--nproc-per-node", str(place.ranks), *sys.argv]),
        "environment": {key: os.environ[key] for key in sorted(os.environ) if key.startswith(("NCCL_", "TORCH_NCCL_"))},
    }  # fmt: skip
    transport = transport_of(place)
    meta["transport"] = type(transport).__name__
    rows = link_rows(place, transport, options.rounds) if place.ranks > 1 else []
    links, wrong = list(rows), False
    for n, d, name, op in itertools.product(options.seq, options.head_dim, options.calls.split(";"), OPERATIONS):
        if CALLS[name][0] == "ulysses" and options.kv_heads % place.ranks:
            continue
        row = row_of(place, options, n, d, name, op, links, None if op == "forward" else rows[-1],
                     isinstance(transport, travel.Messages))  # fmt: skip
        rows.append(row)
        wrong = wrong or row["rel_error_out"] > options.tolerance
        if place.rank == 0:
            others = ", ".join(f"{key[3:]} {row[key]:.2f}" for key in row if key.startswith("ms_"))
            print(f"N {n} d {d} {name}, {op}: {row['ms']:.2f} ms ({others}), {row['share_of_ideal']:.2f} of ideal, "
                  f"error {row['rel_error_out']:.1e}", flush=True)  # fmt: skip
            if options.json_out:  # anew after each row, as a run may be cut off
                result_file.write(options.json_out, {"meta": meta, "rows": rows})
    dist.barrier()
    dist.destroy_process_group()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
