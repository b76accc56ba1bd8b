#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What Hopper's forward kernels wait for: pipes and stalls by ncu, one launch of each compiled shape.

Runs `distr_gpu time` (N 16384, B 1, H 10, bf16, not causal; d 64 and 128) under ncu, once for each strategy, as ncu
takes launches of the same grid and shared memory for one. A row for each kernel: cycles, the clock in Hz that ncu
fixes, per cent of its cycles that a pipe was busy, bytes through the L2, and warps' stalls in cycles an issued
instruction, of all warps, those that only copy included. At d = 64 most queries go to blocks of three consumers, and
what is left to blocks of two, but where `energy` picks keys.

Writes {"meta", "rows"} (bench/results/h200/experiments/ncu.json).
"""

import argparse
import csv
import datetime
import io
import pathlib
import re
import shlex
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import result_file  # noqa: E402

METRICS = {
    "cycles": "sm__cycles_elapsed.max",
    "hz": "sm__cycles_elapsed.avg.per_second",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "xu_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "l1_and_shared_percent": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "issue_percent": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "l2_bytes": "lts__t_bytes.sum",
}
STALLS = (
    "barrier branch_resolving dispatch_stall drain gmma long_scoreboard math_pipe_throttle mio_throttle no_instruction "
    "not_selected selected short_scoreboard wait"
).split()
METRICS |= {f"stall_{name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS}


# Config's parameters behind the element type: columns, values, consumers, where the scale is, loader, blocks, stages.
SHAPE = re.compile(r"Config<__nv_bfloat16, (\d+), (\d+), (\d+), (\d+), (\w+), (\d+), (\w+)>")


def is_shipped(kernel):
    """Whether it is no ablation, which has other stages."""
    found = SHAPE.search(kernel)
    return found is not None and found[7] == "Stages"


def profile(program, head_dim, strategy, limit):
    """The rows of one run of `distr_gpu time` under ncu."""
    timed = [program, "time", "--op", "forward", "--filter", f"H10 d{head_dim} N16384"]
    timed += ["--kernel", "sm90/forward", "--strategy", strategy]
    ncu = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS.values())]
    which = ["-k", "regex:^forward$", "--filter-mode", "per-launch-config", "-c", "1"]
    done = subprocess.run([*ncu, *which, *timed], capture_output=True, text=True, timeout=limit)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode != 0 or len(lines) < 3:  # names, units, and a launch
        raise SystemExit(f"ncu failed (exit {done.returncode}): {done.stdout[-2000:]}{done.stderr[-2000:]}")
    for launch in list(csv.DictReader(io.StringIO("\n".join(lines))))[1:]:  # the first holds the units
        row = {"kernel": launch["Kernel Name"], "head_dim": head_dim, "grid": launch["Grid Size"]}
        for name, metric in METRICS.items():
            row[name] = float(launch[metric].replace(",", ""))
        yield row


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", help="distr_gpu")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="result file")
    parser.add_argument("--commit", default="")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a run")
    return parser.parse_args()


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main():
    options = parse_arguments()
    query = ("--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0")
    gpu, driver = output_of("nvidia-smi", *query).split(", ")
    meta = {
        "gpu": gpu,
        "driver": driver,
        "ncu": output_of("ncu", "--version").splitlines()[-1],
        "torch": None,
        "commit": options.commit,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": shlex.join("distr_gpu" if part == options.program else part for part in sys.argv),
    }
    rows = []
    for head_dim in (128, 64):
        for strategy in ("exact", "lsh", "energy"):
            launches = profile(options.program, head_dim, strategy, options.limit)
            of_run = [row for row in launches if is_shipped(row["kernel"])]
            if not of_run:
                raise SystemExit(f"no kernel for {strategy} was found, d = {head_dim}: has Config other parameters?")
            for row in of_run:
                if row["kernel"] not in [known["kernel"] for known in rows]:
                    rows.append(row)
                    print(row)
    result_file.write(options.out, {"meta": meta, "rows": rows})


if __name__ == "__main__":
    main()
