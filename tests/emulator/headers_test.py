#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The emulated headers declare the functions of those they stand for: what passes the emulator compiles with nvcc."""

import re
import unittest
from pathlib import Path

EMULATOR = Path(__file__).parent
CUDA = EMULATOR.parents[1] / "src" / "cuda"
FUNCTION = re.compile(r"^(template <[^>]*>\s)?(\w[^(){};#\n]*[ *&])(\w+)\(((?:[^()]|\([^()]*\))*)\)", re.M)


def functions(path):
    """Each function of namespace distr::cuda::ptx as "template <...> type name(types of the parameters)"."""
    text = re.sub(r"//.*|\b(__device__|__forceinline__|inline) ", "", path.read_text())
    text = text.split("namespace distr::cuda::ptx {")[1]
    found = set()
    for template, result, name, parameters in FUNCTION.findall(text):
        types = [re.sub(r" \w+$|(?<=\(&)\w+(?=\))", "", part) for part in re.split(r",\s*", parameters)]
        found.add(f"{template.strip()} {result.strip()} {name}({', '.join(types)})".strip())
    return found


class Headers(unittest.TestCase):
    def test_declare_the_same_functions(self):
        for name in "ptx.cuh", "sm90/ptx.cuh":
            real, emulated = functions(CUDA / name), functions(EMULATOR / "include" / "cuda" / name)
            self.assertTrue(real, name)
            self.assertEqual(sorted(real), sorted(emulated), name)


if __name__ == "__main__":
    unittest.main()
