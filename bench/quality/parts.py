#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cuts a file into parts, for ways that take small files alone, and puts it together again.

    python3 bench/quality/parts.py split FILE FOLDER --megabytes 33   # FOLDER/FILE's name.part0, .part1, ...; .sha256
    python3 bench/quality/parts.py join FOLDER FILE                   # once all parts are there; checks the sum
"""

import argparse
import hashlib
import sys
from pathlib import Path


def split(source, folder, size):
    folder.mkdir(parents=True, exist_ok=True)
    content = source.read_bytes()
    for number, start in enumerate(range(0, len(content), size)):
        (folder / f"{source.name}.part{number}").write_bytes(content[start : start + size])
    sums = f"{hashlib.sha256(content).hexdigest()} {-(-len(content) // size)}\n"
    (folder / f"{source.name}.sha256").write_text(sums)


def join(folder, target):
    (sums,) = folder.glob("*.sha256")
    wanted, count = sums.read_text().split()
    parts = [folder / f"{sums.name.removesuffix('.sha256')}.part{number}" for number in range(int(count))]
    if missing := [part.name for part in parts if not part.exists()]:
        sys.exit(f"{', '.join(missing)} not yet there")
    content = b"".join(part.read_bytes() for part in parts)
    if hashlib.sha256(content).hexdigest() != wanted:
        sys.exit(f"the parts in {folder} are not those of the file whose sum is {wanted}")
    target.write_bytes(content)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("split", "join"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--megabytes", type=int, default=33, help="of a part, at most")
    options = parser.parse_args()
    if options.action == "split":
        split(options.source, options.target, options.megabytes * 1_000_000)
    else:
        join(options.source, options.target)


if __name__ == "__main__":
    main()
