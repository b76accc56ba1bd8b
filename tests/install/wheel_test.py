#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Uses an installed wheel where no compiler can be found: attention and its gradients beside torch's, then `doctor`.

Usage: PATH=/nowhere VENV/bin/python wheel_test.py. Exits with 0 if the package is a wheel's and all agrees.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys

import distrattention
import torch


def check_environment():
    found = [name for name in ("c++", "g++", "cc", "gcc", "clang", "nvcc", "cmake", "ninja") if shutil.which(name)]
    if found:
        sys.exit(f"the environment is to have no compiler; it has {', '.join(found)}")
    facts = importlib.metadata.distribution("distrattention").read_text("WHEEL")
    tags = re.findall(r"^Tag: (.*)$", facts, re.MULTILINE)
    if not tags or not all(re.fullmatch(r"py3-none-manylinux_2_\d+_\w+", tag) for tag in tags):
        sys.exit(f"the wheel's tags are {tags}; wanted: py3-none-manylinux_2_...")
    print(f"{distrattention.__path__[0]}: {', '.join(tags)}", flush=True)


def check_attention():
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 4, 256, 64, requires_grad=True) for _ in range(3))
    ours = distrattention.scaled_dot_product_attention(q, k, v, is_causal=True)
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    weights = torch.randn_like(ours)
    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(torch.autograd.grad(ours, (q, k, v), weights),
                               torch.autograd.grad(torchs, (q, k, v), weights), rtol=1e-4, atol=1e-5)
    approximate = distrattention.scaled_dot_product_attention(q, k, v, strategy="energy", group_size=2)
    exact = distrattention.scaled_dot_product_attention(q, k, v)
    error = ((approximate - exact).norm() / exact.norm()).item()
    if not 0 < error < 1:
        sys.exit(f"the relative error of energy with G = 2 is {error}; wanted: between 0 and 1")
    print(f"exact attention agrees with torch's; the relative error of energy with G = 2 is {error:.2f}", flush=True)


if __name__ == "__main__":
    check_environment()
    check_attention()
    sys.exit(subprocess.run([sys.executable, "-m", "distrattention", "doctor"], check=False).returncode)
