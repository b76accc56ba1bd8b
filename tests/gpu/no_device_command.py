#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command on a machine that CUDA cannot use, for the reason that DISTR_EXPECTED_REASON gives.

Usage: no_device_command.py DISTR INPUT.safetensors
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

COMMAND, INPUT = sys.argv[1:3]
REASON = os.environ["DISTR_EXPECTED_REASON"]


def run(*words):
    """(exit status, stdout, stderr)."""
    done = subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


class NoDevice(unittest.TestCase):
    def test_cuda_is_refused_with_the_reason_and_writes_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "o.safetensors")
            for words in (
                ("attend", "--input", INPUT, "--out", str(out)),
                ("compare", "--input", INPUT, "--json-out", str(out)),
                ("bench", "--seq", "64", "--json-out", str(out)),
            ):
                expected = f"distr {words[0]}: --device: cuda cannot be used: {REASON}; allowed: auto, cpu\n"
                self.assertEqual(run(*words, "--device", "cuda"), (2, "", expected))
                self.assertEqual(list(Path(folder).iterdir()), [])
            expected = f"distr attend: --device: cuda cannot be used: {REASON}; allowed: auto, cpu\n"
            self.assertEqual(run("attend", "--input", INPUT, "--out", str(out), "--devices", "0"), (2, "", expected))

    def test_tune_needs_a_device(self):
        self.assertEqual(run("tune"), (2, "", f"distr tune: a CUDA device is needed: {REASON}\n"))

    def test_info_says_why(self):
        status, stdout, stderr = run("info", "--json", "--device", "cuda")
        self.assertEqual((status, stderr), (0, ""))
        report = json.loads(stdout)
        self.assertEqual((report["devices"]["cuda"], report["cuda_unusable"]), ([], REASON))
        self.assertEqual(set(report["would_run"].values()), {None})
        plain = next(kernel for kernel in report["kernels"] if kernel["name"] == "plain/forward")
        self.assertEqual(plain["reason"], REASON)
        self.assertIn(f"CUDA devices     none; {REASON}\n", run("info")[1])

    def test_auto_is_the_cpu(self):
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder, "o.safetensors"))
            status, stdout, _ = run("attend", "--input", INPUT, "--out", out, "--device", "auto", "--json")
            self.assertEqual((status, json.loads(stdout)["device"]), (0, "cpu"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
