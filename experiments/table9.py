#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 9, one GPU: H = 480, N = 20480, d = 128, in chunks of 20 heads that come from host memory and go back to it.

seconds is the wall time of a stream, copies included, and gb_per_s its Q, K, V and O by that; ms_copies is its copies
alone, and ms the compute alone, of chunks that lie on the GPU. All methods go through one loop (shared/stream.py), from
pinned memory, with copies beside the compute. Each result is compared with the same calls without a stream."""

import torch

from baselines import Shape
from shared.results import DTYPES, Results, arguments, chosen, label, parsed
from shared.stream import Streamed
from shared.swap import function_of
from shared.timing import times

CHUNK = 20  # heads


def check(function, stream, inputs, out, chunk):
    """Ends the script where a stream does not give what the function gives for inputs on the device: the first chunk,
    one amid and the last."""
    out.fill_(torch.nan)
    stream(function)
    stream.of.synchronize()
    chunks = list(zip(*(x.split(chunk, 1) for x in (*inputs, out))))
    for *qkv, found in (chunks[0], chunks[len(chunks) // 2], chunks[-1]):
        wanted = function(*qkv)
        rtol = 1e-5 if out.dtype == torch.float32 else 0.02
        torch.testing.assert_close(found.to(wanted.device), wanted, rtol=rtol, atol=rtol * wanted.std().item())


def main():
    parser = arguments(__doc__, methods=("standard", "flash2", "cudnn", "exact", "lsh-sample", "lsh-mean", "energy"))
    options = parsed(parser)
    heads, n, chunk = (10, 150, 2) if options.quick else (480, 20480, CHUNK)
    device, dtype = options.device, DTYPES[options.dtype]
    results = Results(options, ("method", "group_size"), heads=heads, seq=n, head_dim=128)
    size, pinned = (1, heads, n, 128), device.startswith("cuda")
    inputs = [torch.rand(size, device=device, dtype=dtype) for _ in range(3)]
    hosts = [torch.empty(size, dtype=dtype, pin_memory=pinned).copy_(x) for x in inputs]
    out = torch.empty(size, dtype=dtype, pin_memory=pinned)
    stream = Streamed(hosts, out, chunk, device)
    ready = torch.empty_like(inputs[0][:, :chunk])
    rows, functions, calls = {}, {}, {"copies": lambda: stream(lambda q, k, v: ready)}
    for name in options.methods:
        row = {"method": label(name, device), "group_size": options.group_size, "gpus": 1, "from": "host"}
        if not results.wants(**row):
            continue
        function = function_of(chosen(options, name), Shape(chunk, chunk, 128), device, dtype)

        def by_chunks(of=function):
            for q, k, v in zip(*(x.split(chunk, 1) for x in inputs)):
                of(q, k, v)

        rows[name], functions[name] = row, function
        calls |= {(name, "alone"): by_chunks, (name, "streamed"): lambda of=function: stream(of)}
    with torch.no_grad():
        found = times(calls, device, *(2,) if options.quick else (8, 1), seconds=1)
        for x, host in zip(inputs, hosts):  # by the paper's data, U(0, 1), all heads have nearly the same result
            host.copy_(x.normal_())
        for name, row in rows.items():
            alone, streamed = found[name, "alone"], found[name, "streamed"]
            failed = {"error": of["error"] for of in (alone, streamed) if "error" in of}
            if not failed:
                check(functions[name], stream, inputs, out, chunk)
                row |= alone | {f"seconds{part}": streamed[f"ms{part}"] / 1000 for part in ("", "_min", "_max")}
                row |= {"gb_per_s": 4 * out.nbytes / 1e9 / row["seconds"], "ms_copies": found["copies"]["ms"]}
            results.add(row | failed)


if __name__ == "__main__":
    main()
