#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what `pip install .` costs: the CPU seconds of `pip wheel .`, all of its compilers included.

A row for each of --architectures: what DISTR_CUDA_ARCHITECTURES is set to, or `none`, a build without CUDA. Run it
where torch is installed, whose headers are needed. CPU seconds are user and system time, without a compiler cache: they
hardly depend on what else the machine does, and N cores take an N-th of them, as nearly all of it is in parallel.

Writes {"meta", "rows"} (bench/results/build.json).
"""

import argparse
import datetime
import os
import pathlib
import re
import resource
import shlex
import subprocess
import sys
import tempfile

import result_file
from processor import cpu_name

ROOT = pathlib.Path(__file__).resolve().parent.parent


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def build(architectures):
    """A row of the result."""
    options = ["--config-settings=cmake.define.DISTR_CUDA=" + ("OFF" if architectures == "none" else "ON")]
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_COMPILER_LAUNCHER")}
    environment |= {"CCACHE_DISABLE": "1", "DISTR_CUDA_ARCHITECTURES": architectures.replace("none", "all")}
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *options, "-w", folder, ROOT],
                       check=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        megabytes = next(pathlib.Path(folder).glob("*.whl")).stat().st_size / 1e6
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"architectures": architectures, "cpu_seconds": round(seconds), "wheel_megabytes": round(megabytes, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--architectures", default="none,90", help="separated by commas (default: %(default)s)")
    parser.add_argument("--json-out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    compiler = re.search(r"release ([\d.]+)", output_of("nvcc", "--version"))[1]
    meta = {"commit": os.environ.get("DISTR_COMMIT"),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "command": shlex.join(["bench/build_time.py", *sys.argv[1:]]),
            "cpu": cpu_name(), "compiler": output_of("c++", "--version").splitlines()[0], "nvcc": compiler}
    rows = []
    for architectures in arguments.architectures.split(","):
        rows.append(build(architectures))
        print(rows[-1], flush=True)
    result_file.write(arguments.json_out, {"meta": meta, "rows": rows})


if __name__ == "__main__":
    main()
