# SPDX-License-Identifier: Apache-2.0
"""Python programs as processes of their own that need not import torch and the package again, which takes longer than
most of them run: each is a fork of a process that did."""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The one server of forks of a process that runs tests.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch.distributed.tensor", "distrattention.distributed"])


def run_python(*arguments, folder=".", environment=None, timeout=600):
    """What `python *arguments` does in `folder`, as subprocess.run() tells it: a script or -c or -m, and its words.

    `environment` is added to this process'. Raises subprocess.TimeoutExpired.
    """
    return run_ranks(1, *arguments, folder=folder, environment=environment, timeout=timeout)


def run_ranks(ranks, *arguments, folder=".", environment=None, timeout=600):
    """The same by so many processes, which have the variables that torchrun sets; the largest of their exit codes."""
    arguments = [str(argument) for argument in arguments]
    environment = {**os.environ, **(environment or {})}
    if ranks > 1:
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory() as texts:
        out, err = Path(texts, "out"), Path(texts, "err")
        processes = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            process = SERVER.Process(target=_run, args=(arguments, str(folder), environment | own, str(out), str(err)))
            process.start()
            processes.append(process)
        end = time.monotonic() + timeout
        for process in processes:
            process.join(max(0, end - time.monotonic()))
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        texts = [path.read_text() if path.exists() else "" for path in (out, err)]
    if late:
        raise subprocess.TimeoutExpired(arguments, timeout, *texts)
    codes = [process.exitcode for process in processes]
    return subprocess.CompletedProcess(arguments, next((code for code in codes if code != 0), 0), *texts)


def _run(arguments, folder, environment, out, err):
    """A program, as Python starts it."""
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # which torch read when it was imported
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    foreign = ("", os.getcwd(), str(Path(__file__).parent))  # where pytest finds the tests
    os.chdir(folder)
    sys.path[:] = [path for path in sys.path if path not in foreign]
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(arguments[0]).absolute().parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
