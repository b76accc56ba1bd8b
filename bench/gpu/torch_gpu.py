#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the package on one GPU against PyTorch's own attention, pinned to FlashAttention-2 and to cuDNN.

One process; random data, in bf16 unless --dtype says f16. Each round calls every contender, one after the other, in an
order of its own (at the power limit the clock may depend on who came before), on the next of several sets of inputs,
which together are larger than the L2 cache; a time is the median over the rounds of what CUDA events measure around a
call of the public function: grouping, fusion and attention, and the launches wherever the GPU waits for them. Short
calls come `calls_in_a_row` at a time, about a millisecond: what the GPU has yet to do for the contender before would
else hide the first one's launch, or not, by who that is. What the GPU alone needs, out of a captured graph, is
`ms_graph` (lengths up to --graph-up-to), the contenders by turns as well. "distr_any_order" is a backward that sums in
any order (allow_nondeterministic_backward()), of exact attention, at some lengths, in bf16.

Writes {"meta", "rows"} (bench/results/<gpu>/torch.json), anew after each shape. Exit status: 0; 1 where exact attention
errs more than twice as much as FlashAttention-2 (against float32), or --limit cut the sweep short.
"""

import argparse
import contextlib
import datetime
import itertools
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import distrattention
from distrattention import ops

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import result_file  # noqa: E402

HEADS = ((1, 10), (4, 16))  # B, H
DIMS = (64, 128)
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
SETTINGS = (("exact", 1), ("lsh", 2), ("lsh", 4), ("energy", 2), ("energy", 4))
WHOLE = SETTINGS[1:]  # with one grouping for the whole sequence, too
PEERS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
ANY_ORDER, ANY_ORDER_LENGTHS = "distr_any_order", (4096, 16384)
BLOCK, ESTIMATOR = 128, "mean"
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}

CACHE_BYTES = 128 << 20  # of inputs and outputs that are rotated: more than twice the L2 of an H200
FEWEST, MOST = 5, 60  # rounds
REPLAYS = 7  # of a graph, after one that is not counted
ROW_SECONDS, MOST_IN_A_ROW = 1e-3, 16  # of calls of one contender in a round
TOO_SLOW_MS, TOO_SLOW_RATIO = 150, 4  # a contender is left out where it would take so long and so many times FA2's


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    head_dim: int
    n: int
    causal: bool
    dtype: str = "bf16"

    def __str__(self):
        return f"B{self.batch} H{self.heads} d{self.head_dim} N{self.n}{' causal' if self.causal else ''}"

    def flops(self, op):
        """Of exact attention: two for each multiply-add of its 2 products forward and 5 backward (S again, dP, dQ, dK,
        dV), over the pairs that see each other."""
        pairs = self.n * (self.n + 1) / 2 if self.causal else self.n**2
        products = {"forward": 2, "forward_backward": 7}[op]
        return 2 * products * self.batch * self.heads * self.head_dim * pairs

    def sets(self, gradients):
        """[(q, k, v, dO), ...], as many as the cache does not hold; dO lies rows first, as it comes in models."""
        count = min(max(-(-CACHE_BYTES // (8 * self.batch * self.heads * self.n * self.head_dim)), 2), 32)
        make = partial(torch.randn, device="cuda", dtype=DTYPES[self.dtype])
        inputs = partial(make, self.batch, self.heads, self.n, self.head_dim, requires_grad=gradients)
        grad = partial(make, self.batch, self.n, self.heads, self.head_dim)
        return [(inputs(), inputs(), inputs(), grad().transpose(1, 2)) for _ in range(count)]


@contextlib.contextmanager
def in_any_order():
    distrattention.allow_nondeterministic_backward()
    try:
        yield
    finally:
        distrattention.allow_nondeterministic_backward(False)


@dataclass(frozen=True)
class Contender:
    impl: str
    strategy: str | None = None
    group_size: int | None = None
    whole: bool = False

    def __str__(self):
        name = self.impl if self.strategy is None else f"{self.impl} {self.strategy} G={self.group_size}"
        return f"{name} whole" if self.whole else name

    def block(self, n):
        return n if self.whole else BLOCK

    def order_from(self, causal):
        """The package's default; but one grouping for a whole causal sequence would be exact by it."""
        return "previous" if causal and not self.whole else "own"

    def pinned(self):
        """The block within which its calls are made. Entering it is not timed."""
        if self.impl == ANY_ORDER:
            return in_any_order()
        return sdpa_kernel(PEERS[self.impl]) if self.impl in PEERS else contextlib.nullcontext()

    def attend(self, q, k, v, causal):
        if self.impl in PEERS:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        settings = dict(group_size=self.group_size, block_size=self.block(q.shape[2]), estimator=ESTIMATOR)
        settings["order_from"] = self.order_from(causal)
        attention = distrattention.scaled_dot_product_attention
        return attention(q, k, v, is_causal=causal, strategy=self.strategy, **settings)

    def takes(self, shape, op):
        """Whether it is measured there."""
        if self.impl == ANY_ORDER:
            is_among = shape.n in ANY_ORDER_LENGTHS and shape.head_dim >= 64 and shape.dtype == "bf16"
            return op == "forward_backward" and is_among
        # Training in a causal model needs orders from the block before: there must be one.
        return not (self.whole and op == "forward_backward" and shape.causal)

    def forward(self, q, k, v, grad, causal):
        with torch.no_grad():
            return self.attend(q, k, v, causal)

    def forward_backward(self, q, k, v, grad, causal):
        return torch.autograd.grad(self.attend(q, k, v, causal), (q, k, v), grad)

    def grouping(self, q, k, v, grad, causal):
        """The part of forward() that makes the order."""
        corner = "top_left" if causal else "none"
        settings = self.strategy, self.group_size, self.block(q.shape[2]), self.order_from(causal)
        return ops.make_grouping(q, k, corner, *settings, 0, True)[0]


CONTENDERS = [*map(Contender, PEERS), *(Contender("distr", *setting) for setting in SETTINGS)]
CONTENDERS += [Contender("distr", *setting, whole=True) for setting in WHOLE]
CONTENDERS += [Contender(ANY_ORDER, "exact", 1)]
# G changes no order.
GROUPINGS = [Contender("distr", strategy, 2, whole) for strategy in ("lsh", "energy") for whole in (False, True)]


def elapsed(pairs):
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def timed(contender, call, numbers):
    """The events around call(number) for each of the numbers."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with contender.pinned():
        start.record()
        for number in numbers:
            call(number)
        end.record()
    return start, end


def interleaved(calls, seconds):
    """({name: milliseconds of a call in each round}, calls in a row) of {name: (contender, function of a number)}, for
    about `seconds`."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for contender, call in calls.values():
        timed(contender, call, range(1))
    torch.cuda.synchronize()
    seconds_of_all = time.perf_counter() - begin
    in_a_row = int(min(max(ROW_SECONDS * len(calls) / seconds_of_all, 1), MOST_IN_A_ROW))
    rounds = int(min(max(seconds / seconds_of_all / in_a_row, FEWEST), MOST))
    events = {name: [] for name in calls}
    order = random.Random(0)
    for number in range(rounds):
        numbers = range(number * in_a_row, (number + 1) * in_a_row)
        for name in order.sample(list(calls), len(calls)):
            events[name].append(timed(*calls[name], numbers))
    return {name: [ms / in_a_row for ms in elapsed(pairs)] for name, pairs in events.items()}, in_a_row


def graph_of(contender, call, sets):
    """A graph that holds a call for each set of inputs."""
    graph = torch.cuda.CUDAGraph()
    with contender.pinned(), torch.cuda.graph(graph):
        for number in range(sets):
            call(number)
    return graph


def in_graphs(calls, sets):
    """{name: milliseconds of a call} of {name: (contender, function of a number)} out of graphs, replayed by turns."""
    graphs = {name: (contender, graph_of(contender, call, sets)) for name, (contender, call) in calls.items()}
    replays = {name: (contender, lambda _, g=graph: g.replay()) for name, (contender, graph) in graphs.items()}
    order = random.Random(0)
    events = {name: [] for name in calls}
    for _ in range(1 + REPLAYS):
        for name in order.sample(list(calls), len(calls)):
            events[name].append(timed(*replays[name], range(1)))
    return {name: statistics.median(elapsed(pairs)[1:]) / sets for name, pairs in events.items()}


def float32_head(q, k, v, grad, causal):
    """Attention of the first head in float32, by a kernel without N x N scores."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(*(tensor[:1, :1].float() for tensor in (q, k, v)), is_causal=causal)


def relative_error(out, exact):
    return ((out[:1, :1].float() - exact).norm() / exact.norm()).item()


def kernel_of(contender, operation, q, k, v, causal):
    if contender.strategy is None:
        return None
    block = contender.block(q.shape[2])
    settings = dict(strategy=contender.strategy, group_size=contender.group_size, block_size=block)
    settings["order_from"] = contender.order_from(causal)
    with contender.pinned():
        return distrattention.explain(q, k, v, is_causal=causal, operation=operation, **settings)["kernel"]


def name_of(row):
    return str(Contender(row["impl"], row["strategy"], row["group_size"], row["block"] == row["seq_q"]))


def grouping_of(contender):
    """The name of the grouping that it takes."""
    return f"grouping {contender.strategy}{' whole' if contender.whole else ''}"


def row_of(shape, contender, op, times, kernel):
    grouped = contender.strategy not in (None, "exact")
    ms = statistics.median(times)
    row = {"impl": contender.impl, "kernel": kernel, "op": op, "batch": shape.batch}
    row |= {"heads": shape.heads, "kv_heads": shape.heads, "seq_q": shape.n, "seq_k": shape.n}
    row |= {"head_dim": shape.head_dim, "head_dim_v": shape.head_dim, "dtype": shape.dtype, "causal": shape.causal}
    row |= {"strategy": contender.strategy, "estimator": ESTIMATOR if contender.strategy == "lsh" else None}
    row |= {"group_size": contender.group_size, "block": contender.block(shape.n) if grouped else None}
    row["order_from"] = contender.order_from(shape.causal) if grouped else None
    row |= {"ms": ms, "ms_min": min(times), "ms_max": max(times), "runs": len(times)}
    return row | {"tflops_exact_flops": shape.flops(op) / ms / 1e9}


def measure(shape, op, options, skipped):
    """The rows of one shape and operation."""
    sets = shape.sets(op == "forward_backward")
    calls, errors = {}, {}
    exact = float32_head(*sets[0], shape.causal) if op == "forward" else None
    for contender in CONTENDERS:
        if str(contender) not in skipped and contender.takes(shape, op):
            function = getattr(contender, op)
            calls[str(contender)] = contender, lambda i, f=function: f(*sets[i % len(sets)], shape.causal)
    for name, (contender, call) in list(calls.items()):  # the first call loads kernels and plans
        with contender.pinned():
            result = call(0)
        if exact is not None:
            errors[name] = relative_error(result, exact)
        del result
    if op == "forward":
        for contender in GROUPINGS:
            call = lambda i, f=contender.grouping: f(*sets[i % len(sets)], shape.causal)  # noqa: E731
            calls[grouping_of(contender)] = contender, call
            call(0)
    times, in_a_row = interleaved(calls, options.seconds)
    takes_graphs = shape.n <= options.graph_up_to
    graph_times = in_graphs(calls, len(sets)) if takes_graphs else {}
    rows = []
    for name, (contender, call) in calls.items():
        if name.startswith("grouping"):  # the kernels alone: grouping.json
            continue
        kernel = kernel_of(contender, "backward" if op == "forward_backward" else op, *sets[0][:3], shape.causal)
        row = row_of(shape, contender, op, times[name], kernel)
        row["calls_in_a_row"] = in_a_row
        row["rel_error_out"] = errors.get(name)
        for key, of in (("ratio_to_flash", "sdpa_flash"), ("ratio_to_exact", "distr exact G=1")):
            if of in times:
                row[key] = statistics.median(times[of]) / row["ms"]
        if op == "forward" and contender.strategy in ("lsh", "energy"):
            row["ms_grouping"] = statistics.median(times[grouping_of(contender)])
        if name in graph_times:
            row["ms_graph"] = graph_times[name]
        rows.append(row)
    return rows


def too_slow(shape, op, rates):
    """The contenders to leave out, by {name: ms for each flop} of a shorter length."""
    expected = {name: rate * shape.flops(op) for name, rate in rates.items()}
    bound = max(TOO_SLOW_MS, TOO_SLOW_RATIO * expected.get("sdpa_flash", 0))
    return sorted(name for name, ms in expected.items() if ms > bound)


def command_output(*command):
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def meta(options):
    driver = command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return {
        "version": ops.describe().version,
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cudnn": ".".join(str(torch.backends.cudnn.version() // unit % 100) for unit in (10000, 100, 1)),
        "commit": options.commit or command_output("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": result_file.command(),
        "disabled_kernels": os.environ.get("DISTR_DISABLE_KERNELS", os.environ.get("DISTR_LEAVE_OUT", "")),
        "built": f"CUDA kernels: {ops.describe().cuda_build}",
        "skipped": {},
    }


def sweep(options):
    """Yields (shape, op), lengths innermost."""
    heads, dims, lengths = (HEADS[:1], DIMS[1:], LENGTHS[::2]) if options.quick else (HEADS, DIMS, LENGTHS)
    for op, (batch, count), dim, causal, n in itertools.product(options.ops, heads, dims, (False, True), lengths):
        shape = Shape(batch, count, dim, n, causal, options.dtype)
        if options.filter in str(shape) and (op != "forward" or n >= options.forward_from):
            yield shape, op


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="result file")
    parser.add_argument("--commit", help="for the result file; else git is asked")
    parser.add_argument("--quick", action="store_true", help="B1 H10, d 64 and 128, every other length")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--ops", default="forward,forward_backward", help="forward, forward_backward, or both")
    parser.add_argument("--filter", default="", help='only shapes whose label holds it, "d64 N4096" for instance')
    parser.add_argument("--forward-from", type=int, default=0, help="no forward alone of shorter lengths")
    parser.add_argument("--seconds", type=float, default=0.4, help="to spend on the rounds of one shape and operation")
    parser.add_argument("--graph-up-to", type=int, default=4096, help="lengths also timed out of a graph; 0: none")
    parser.add_argument("--limit", type=float, default=225, help="seconds after which no new shape is begun")
    options = parser.parse_args()
    options.ops = options.ops.split(",")
    if not set(options.ops) <= {"forward", "forward_backward"}:
        parser.error(f"--ops is {','.join(options.ops)}; allowed: forward, forward_backward, or both")
    return options


def main():
    options = parse_arguments()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"meta": meta(options), "rows": []}
    left_out, rates, before, failures = result["meta"]["skipped"], {}, None, []
    begin = time.perf_counter()
    for shape, op in sweep(options):
        series = shape.batch, shape.heads, shape.head_dim, shape.causal, op
        rates, before = (rates if series == before else {}), series
        skipped = too_slow(shape, op, rates) if op == "forward_backward" else []
        if time.perf_counter() - begin > options.limit:
            left_out[f"{shape} {op}"] = ["all"]
            continue
        rows = measure(shape, op, options, skipped)
        result["rows"].extend(rows)
        if skipped:
            left_out[f"{shape} {op}"] = skipped
        measured = {name_of(row): row for row in rows if row["op"] == op}
        rates |= {name: row["ms"] / shape.flops(op) for name, row in measured.items()}
        if op == "forward":
            exact, flash = (measured[name]["rel_error_out"] for name in ("distr exact G=1", "sdpa_flash"))
            if exact > 2 * flash:
                failures.append(f"{shape}: exact attention errs by {exact}, FlashAttention-2 by {flash}")
        times = ", ".join(f"{name} {row['ms']:.3f}" for name, row in measured.items())
        print(f"{time.perf_counter() - begin:4.0f} s  {shape} {op}, ms: {times}", flush=True)
        result_file.write(options.out, result)
    unmeasured = list(left_out.values()).count(["all"])
    if unmeasured:
        failures.append(f"the {options.limit:.0f} s of --limit were up: {unmeasured} shapes are left")
    result_file.write(options.out, result)
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
