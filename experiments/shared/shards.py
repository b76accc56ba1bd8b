# SPDX-License-Identifier: Apache-2.0
"""The rows of a script measured by several processes beside one another, where a row leaves most of a GPU idle, and on
all GPUs that there are."""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import result_file  # noqa: E402


def shard_files(out):
    return sorted(out.parent.glob(f"{out.stem}.shard*.json"))


def join(out):
    """Moves the rows of the shards' files into the file `out`, those of a run that was cut off, too."""
    parts = [json.loads(path.read_text()) for path in [out, *shard_files(out)] if path.exists()]
    if parts:
        rows = {json.dumps(row): row for part in parts for row in part["rows"]}
        result_file.write(out, {"meta": parts[0]["meta"], "rows": list(rows.values())})
    for path in shard_files(out):
        path.unlink()


def gpu_of(number):
    """The environment that shows a process its GPU, where there are several. Rows come in the order of the methods, so
    each round of GPUs begins with the next GPU: else one would have the slowest methods."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return {}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": names[(number + number // count) % count]}


def run_shards(script, words, out, jobs):
    """Runs the script with --shard I/jobs for each I, and joins what they measured. Ends in words where one fails."""
    join(out)
    threads = {} if "cpu" in words else {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // jobs))}
    processes = []
    for number in range(jobs):
        part = out.with_suffix(f".shard{number}.json")
        if out.exists():
            part.write_bytes(out.read_bytes())
        command = [sys.executable, script, *map(str, words), "--out", part, "--shard", f"{number}/{jobs}"]
        processes.append(subprocess.Popen(command, env=threads | os.environ | gpu_of(number)))
    failed = [number for number, process in enumerate(processes) if process.wait() != 0]
    join(out)
    if failed:
        raise SystemExit(f"{script}: the shards {failed} failed; what the others measured is in {out}")
