#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The progress of a build (python/build_progress.py) on a terminal, its output in a pipe as under pip."""

import os
import pty
import subprocess
import sys
import unittest
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[2] / "python"
SAID = """-- CUDA kernels for 90-real (native; DISTR_CUDA_ARCHITECTURES chooses)
[1/3] Building CXX object CMakeFiles/distr_objects.dir/src/plan.cpp.o
[2/3] Building CUDA object CMakeFiles/distr_hopper.dir/src/cuda/sm90/variants.cu.o
[3/3] Linking CXX shared module python/libdistrattention_ops.so
"""
BUILD = f"""
import subprocess, sys, time
import build_progress
with build_progress.shown():
    subprocess.run(["printf", "%s", {SAID!r}], check=True)
    time.sleep(1.2)
    if sys.argv[1] == "fail":
        raise ValueError("the build failed")
print("afterwards")
"""


def installer(result, detached):
    """Runs BUILD with its output in a pipe, whose text it prints between marks."""
    done = subprocess.run([sys.executable, "-c", BUILD, result], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(PYTHON)}, start_new_session=detached)
    print(f"<<{done.returncode}|{done.stdout}>>", flush=True)


def on_terminal(result, detached=False):
    """(what the terminal shows beside the installer's text, the exit status of the build, what the build said)."""
    child, terminal = pty.fork()
    if child == 0:
        installer(result, detached)
        os._exit(0)
    text = b""
    while True:
        try:
            block = os.read(terminal, 1 << 16)
        except OSError:  # the terminal of a process that has ended
            break
        text += block
    os.waitpid(child, 0)
    os.close(terminal)
    shown, rest = text.decode().replace("\r\n", "\n").split("<<")
    status, said = rest.rstrip().removesuffix(">>").split("|", maxsplit=1)
    return shown, int(status), said


class Progress(unittest.TestCase):
    def test_the_terminal_shows_what_was_compiled(self):
        shown, status, said = on_terminal("succeed")
        self.assertEqual(status, 0)
        self.assertIn("  CUDA kernels for 90-real (native; DISTR_CUDA_ARCHITECTURES chooses) \n", shown)
        self.assertRegex(shown, r"\r\x1b\[K  [1-9] s \[2/3\] src/cuda/sm90/variants.cu ")
        self.assertRegex(shown, r"built in \d s: $")
        self.assertEqual(said, SAID + "afterwards\n")

    def test_a_failure_is_no_success(self):
        shown, status, said = on_terminal("fail")
        self.assertEqual(status, 1)
        self.assertRegex(shown, r"failed after \d s: $")
        self.assertEqual(said, SAID)

    def test_without_a_terminal_nothing_is_shown(self):
        self.assertEqual(on_terminal("succeed", detached=True), ("", 0, SAID + "afterwards\n"))


if __name__ == "__main__":
    unittest.main()
