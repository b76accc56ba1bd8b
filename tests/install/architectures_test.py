#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the CUDA kernels are compiled for (cmake/cuda_architectures.cmake), on machines with GPUs of all kinds."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALL = "80-real;90-real;90-virtual"
KNOWN = "75;80;86;90;100;120"
SCRIPT = """
cmake_minimum_required(VERSION 3.25)
include({root}/cmake/cuda_architectures.cmake)
distr_cuda_architectures("{asked}" "{known}" architectures error)
distr_cuda_code("${{architectures}}" machine_code ptx)
message("${{architectures}} | ${{machine_code}} | ${{ptx}} | ${{error}}")
"""


def answer(asked, gpus=None):
    """[architectures, machine code, PTX, error] as CMake prints them; gpus: what nvidia-smi says; None: it fails."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.cmake")
        script.write_text(SCRIPT.format(root=ROOT, asked=asked, known=KNOWN))
        smi = Path(folder, "nvidia-smi")
        smi.write_text("#!/bin/sh\nexit 9\n" if gpus is None else f"#!/bin/sh\nprintf '{gpus}'\n")
        smi.chmod(0o755)
        done = subprocess.run(["cmake", "-P", script], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})
        if done.returncode != 0:
            raise ValueError(" ".join(done.stderr.split()))
        return [part.strip() for part in done.stderr.split("|")]


class Architectures(unittest.TestCase):
    def test_native_is_the_gpus_that_are_there(self):
        self.assertEqual(answer("native", "9.0\\n"), ["90-real", "90", "", ""])
        self.assertEqual(answer("native", "8.6\\n9.0\\n8.6\\n"), ["86-real;90-real", "86;90", "", ""])
        self.assertEqual(answer("native", "7.5\\n8.0\\n"), ["80-real", "80", "", ""])

    def test_native_without_a_gpu_is_all(self):
        self.assertEqual(answer("native"), [ALL, "80;90", "90", ""])
        self.assertEqual(answer("native", "No devices were found\\n"), [ALL, "80;90", "90", ""])

    def test_a_gpu_that_nvcc_does_not_know_gets_ptx(self):
        self.assertEqual(answer("native", "13.0\\n"), ["90-virtual", "", "90", ""])

    def test_only_gpus_that_are_too_old(self):
        architectures, _, _, error = answer("native", "7.5\\n6.1\\n")
        self.assertEqual(architectures, "")
        self.assertEqual(error, "the GPUs here have compute capability 7.5, 6.1; allowed: 8.0 and later")

    def test_what_is_named_is_taken(self):
        self.assertEqual(answer("all", "9.0\\n")[0], ALL)
        self.assertEqual(answer("80;90-real", "7.5\\n"), ["80;90-real", "80;90", "80", ""])
        self.assertEqual(answer("80,90")[0], "80;90")

    def test_what_is_wrong_is_named(self):
        for asked, wrong in (("75", "75"), ("80;sm_90", "sm_90"), ("90;native", "native"), ("90a", "90a")):
            with self.assertRaisesRegex(ValueError, f"hold '{wrong}'; allowed: native, all, or a list of 80 and later"):
                answer(asked)


if __name__ == "__main__":
    unittest.main()
