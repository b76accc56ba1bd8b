# SPDX-License-Identifier: Apache-2.0
"""Arguments that all scripts take, and result files that a later run goes on with."""

import argparse
import datetime
import json
import math
import os
import sys
import time
from pathlib import Path

import timm
import torch
import transformers

from distrattention import ops

from shared import hub
from shared.swap import METHODS, method_of

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "build/experiments/data"  # where experiments/fetch puts data and weights; ignored by git
sys.path.insert(0, str(ROOT / "bench"))
import processor  # noqa: E402
import result_file  # noqa: E402

DATA_HELP = """files of the script's own kind; or, with the package datasets, a folder of save_to_disk() or of files
    that load_dataset() reads, a parquet file, or a name of the hub, OWNER/NAME:CONFIG or parts of it"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def arguments(doc, methods=(), model=None, data=None, dtype="bfloat16"):
    """The parser of a script; its own options can be added. methods, model, data: defaults, None for no such option."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0], epilog="\n\n".join(doc.split("\n\n")[1:]),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="result file; the rows that it has are kept")
    parser.add_argument("--quick", action="store_true", help="tiny random models and data, seconds on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="begin no row after so many seconds")
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help="of attention on a GPU [%(default)s]")
    if methods:
        parser.add_argument("--methods", default=",".join(methods), help=f"of {', '.join(METHODS)} [%(default)s]")
        parser.add_argument("--group-size", type=int, default=2, help="G of ours [%(default)s]")
        parser.add_argument("--block", type=int, help="l of ours [128]")
        parser.add_argument("--near", default="512,128", help="window and sinks of what is named -near [%(default)s]")
    if model:
        parser.add_argument("--model", default=model, help="[%(default)s]")
    if data:
        parser.add_argument("--data", type=Path, default=DATA / data, help=f"{DATA_HELP} [%(default)s]")
    return parser


def shard(text):
    """(I, N) of I/N, as --shard takes it: every N-th of the rows that are wanted, from the I-th on."""
    number, count = map(int, text.split("/"))
    if not 0 <= number < count:
        raise ValueError
    return number, count


def parsed(parser):
    options = parser.parse_args()
    if options.device == "cpu":
        options.dtype = "float32"
    options.methods = [name for name in getattr(options, "methods", "").split(",") if name]
    for name in options.methods:
        if name not in METHODS:
            parser.error(f"--methods has {name!r}; allowed: {', '.join(METHODS)}")
    if hasattr(options, "data") and not options.quick and not hub.is_name(options.data):
        require(options.data)
    return options


def shown(value):
    """A path as results name it: from the repository on, where it is within, else its last part. A name of the hub
    stays."""
    if not isinstance(value, Path):
        return value
    if hub.is_name(value):
        return str(value)
    return str(value.relative_to(ROOT)) if value.is_relative_to(ROOT) else value.name


def chosen(options, name, **fields):
    """The method of that name, with the options' group size, block and near keys."""
    fields = {"group_size": options.group_size, "block_size": options.block, **fields}
    return method_of(name, tuple(map(int, options.near.split(","))), **fields)


def require(path):
    """The path; ends the script in words where nothing is there."""
    if not Path(path).exists():
        raise SystemExit(f"{path} is not there; allowed: a path that is. experiments/fetch brings what it can")
    return Path(path)


class Results:
    """The rows of a result file, written anew with each row. `key` names the fields that tell rows apart; `facts`, and
    the machine, the versions and the commit, are the same for all rows."""

    def __init__(self, options, key, **facts):
        self.path, self.key, self.limit = options.out, key, options.time_limit
        self.begin, self.shard, self.turn = time.perf_counter(), getattr(options, "shard", (0, 1)), 0
        known = json.loads(self.path.read_text()) if self.path.exists() else {"rows": []}
        self.rows = known["rows"]
        cuda = options.device.startswith("cuda")
        self.meta = {
            "gpu": torch.cuda.get_device_name() if cuda else None,
            "cpu": None if cuda else processor.cpu_name(),
            "threads": None if cuda else torch.get_num_threads(),
            "cuda": torch.version.cuda if cuda else None,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "timm": timm.__version__,
            "built": f"CUDA kernels: {ops.describe().cuda_build}",
            "commit": os.environ.get("DISTR_COMMIT"),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "command": result_file.command(),
            "dtype": options.dtype,
            **{name: shown(getattr(options, name)) for name in ("model", "data") if hasattr(options, name)},
            **facts,
        }
        self._require_the_same(known)

    def _require_the_same(self, known):
        """Ends the script where rows that are there were measured otherwise, as the file says of all how it was."""
        apart = {"command", "date", "model", "data", *self.key}
        for name, value in json.loads(json.dumps(self.meta)).items():
            if self.rows and name not in apart and known["meta"].get(name) != value:
                found = f"{self.path} has rows with {name} {known['meta'].get(name)!r}"
                raise SystemExit(f"{found}; allowed: {value!r}, that of this run. Name another file by --out")

    def wants(self, **row):
        """Whether the row is to be measured: it is not there, and there is time."""
        if any(all(known.get(name) == row.get(name) for name in self.key) for known in self.rows):
            return False
        if self.is_over():
            self.log(f"no time for {row}: left to a further run")
            return False
        return True

    def takes_turn(self):
        """Whether the next of the rows that are wanted falls to this process, of those that --shard names."""
        self.turn += 1
        return (self.turn - 1) % self.shard[1] == self.shard[0]

    def is_over(self):
        """Whether --time-limit has passed."""
        return time.perf_counter() - self.begin > self.limit

    def add(self, row):
        self.rows.append(row)
        self.write()
        line = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()
                if not isinstance(value, list | dict)}  # fmt: skip
        self.log("  ".join(f"{name} {value}" for name, value in line.items()))

    def write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        result_file.write(self.path, {"meta": self.meta, "rows": self.rows})

    def log(self, text):
        print(f"{time.perf_counter() - self.begin:5.0f} s  {text}", flush=True)


def label(method, device):
    """A method's name in results: on a CPU, torch's flash algorithm is no FlashAttention-2."""
    return "flash-cpu" if method == "flash2" and not device.startswith("cuda") else method
