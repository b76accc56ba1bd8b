# SPDX-License-Identifier: Apache-2.0
"""What the tables of readme_tables.py are made of."""

import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def load(name: str) -> dict:
    return json.loads((ROOT / "bench/results" / name).read_text())


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def label(row: dict) -> str:
    return row["strategy"] + (f' ({row["estimator"]})' if row["estimator"] else "")


def source(name: str, meta: dict, *facts: str) -> str:
    """What the figures above come from, in lines of at most 120 characters."""
    machine = [meta[key] for key in ("gpu", "cpu", "instruction_set") if meta.get(key)]
    threads = [f'{meta["threads"]} thread{"s" if meta["threads"] > 1 else ""}'] if meta.get("threads") else []
    where = ", ".join([*machine, *threads])
    return (f'({"; ".join([where, *facts, "commit " + meta["commit"]])};\n'
            f"[bench/results/{name}](bench/results/{name}))")
