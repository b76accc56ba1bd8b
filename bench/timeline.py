# SPDX-License-Identifier: Apache-2.0
"""Draws when each chunk of a streamed forward was copied in, computed and copied out, from the rows that
`distr bench --stream --json-out FILE` writes.

Usage: python3 bench/timeline.py FILE.json PICTURE.png [ROW]    (ROW: which row of the file, from 0; the last)
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STAGES = {"copy_in": "copied in", "compute": "computed", "copy_out": "copied out"}
COLOURS = ("tab:blue", "tab:orange")  # of chunks in turn


def draw(row):
    """The figure of a row: three lanes for each device."""
    spans = row["timeline"]
    lanes = [(device, stage) for device in sorted({span["device"] for span in spans}) for stage in STAGES]
    figure, axes = plt.subplots(figsize=(10, 0.6 + 0.5 * len(lanes)), layout="constrained")
    for span in spans:
        where = lanes.index((span["device"], span["stage"]))
        width = span["end_ms"] - span["begin_ms"]
        axes.barh(where, width, left=span["begin_ms"], height=0.8, color=COLOURS[span["chunk"] % 2])
    several = len(lanes) > len(STAGES)
    names = [STAGES[stage] + (f", device {device}" if several else "") for device, stage in lanes]
    axes.set_yticks(range(len(lanes)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    heads = f"H {row['heads']}, N {row['seq_q']}, d {row['head_dim']}, {row['dtype']}, {row['strategy']}"
    axes.set_title(f"{heads}, {row['chunks']} chunks: {row['ms']:.0f} ms, copies alone {row['ms_copies']:.0f} ms, "
                   f"computation alone {row['ms_compute']:.0f} ms", fontsize="medium")  # fmt: skip
    return figure


def main():
    """Reads the file and writes the picture."""
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    rows = json.loads(Path(sys.argv[1]).read_text())["rows"]
    draw(rows[int(sys.argv[3]) if len(sys.argv) == 4 else -1]).savefig(sys.argv[2], dpi=150)


if __name__ == "__main__":
    main()
