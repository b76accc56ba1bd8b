#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures how much of the error of `energy` comes from choosing among the columns that there are.

softmax(Q K^T) is the same for (Q M) (K M^-T)^T with any invertible M, and when one row is subtracted from all keys. So
r = d / G columns may be kept in any basis. This compares three bases for each head of data/minilm.safetensors:
`energy`, the columns as they are, by the library (blocks of 128 rows, and one block for all); `keys`, the r leading
principal components of the centred keys; `best`, the r leading singular vectors of Q K^T, which no other basis beats in
the squared error of the scores.

Writes {"meta", "summary", "rows"} (bench/results/cpu/experiments/projection.json): a row for each layer, method and
G, with the relative errors of O, |O - O_exact| / |O_exact|, by head; in the summary their median, least and largest.
"""

import argparse
import datetime
import os
import platform
import statistics
from pathlib import Path

import torch
from safetensors.torch import load_file

from distrattention import scaled_dot_product_attention

import result_file

DATA = Path(__file__).resolve().parent.parent / "data/minilm.safetensors"


def keys_basis(q, k, r):
    """(q_hat, k_hat) [B, H, N, r]: the columns of Q and K in the principal components of K."""
    basis = torch.linalg.svd(k, full_matrices=False).Vh[..., :r, :].mT  # [B, H, d, r]
    return q @ basis, k @ basis


def best_basis(q, k, r):
    """(q_hat, k_hat) [B, H, N, r] with q_hat k_hat^T the matrix of rank r that is next to Q K^T."""
    (q_columns, q_rest), (k_columns, k_rest) = torch.linalg.qr(q), torch.linalg.qr(k)
    u, s, v = torch.linalg.svd(q_rest @ k_rest.mT)
    return q_columns @ (u[..., :r] * s[..., None, :r]), k_columns @ v.mT[..., :r]


def outputs(q, k, v, group_size):
    """{method: O} of float64 tensors [B, H, N, d]."""
    n, d = q.shape[-2:]
    found = {}
    for block in (128, n):
        found[f"energy l={block}"] = scaled_dot_product_attention(
            q, k, v, strategy="energy", group_size=group_size, block_size=block
        )
    centred = k - k.mean(-2, keepdim=True)
    for name, basis in (("keys", keys_basis), ("best", best_basis)):
        q_hat, k_hat = basis(q, centred, d // group_size)
        found[name] = torch.softmax(q_hat @ k_hat.mT / d**0.5, -1) @ v
    return found


def measure(q, k, v):
    exact = scaled_dot_product_attention(q, k, v, strategy="exact")
    rows = []
    for group_size in (2, 4):
        for method, out in outputs(q, k, v, group_size).items():
            errors = (out - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))  # [layers, heads]
            for layer, of_heads in enumerate(errors.tolist()):
                rows.append({"layer": layer, "method": method, "group_size": group_size, "errors": of_heads})
    return rows


def summary(rows):
    found = {}
    for row in rows:
        found.setdefault(f"{row['method']} G={row['group_size']}", []).extend(row["errors"])
    return {
        name: {"median": statistics.median(errors), "min": min(errors), "max": max(errors)}
        for name, errors in found.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json-out", type=Path, required=True, help="result file")
    options = parser.parse_args()
    tensors = load_file(DATA)
    rows = measure(*(tensors[name].double() for name in "qkv"))
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    meta = {"torch": torch.__version__, "cpu": platform.machine(), "commit": os.environ.get("DISTR_COMMIT")}
    result = {"meta": {**meta, "date": date}, "summary": summary(rows), "rows": rows}
    result_file.write(options.json_out, result)
    for name, numbers in result["summary"].items():
        print(f"{name:16}", ", ".join(f"{key} {value:.3f}" for key, value in numbers.items()))


if __name__ == "__main__":
    main()
