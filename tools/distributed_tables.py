# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/distributed.md; readme_tables.py writes them."""

from table_parts import load, markdown, source


def ring_model() -> str:
    """The share of the ideal that the model of the ring says, by rows on a GPU."""
    name = "model/ring.json"
    result = load(name)
    cells = {}
    for row in result["rows"]:
        hidden = row["hop_ms"] <= row["step_ms"]
        key = row["rows"], row["strategy"], row["link"], row["ranks"]
        cells.setdefault(key, []).append(f'{100 * row["share_of_ideal"]:.0f}{"" if hidden else "*"}')
    columns = [("exact", "NVLink", 8), ("exact", "400 Gb/s", 64), ("exact", "400 Gb/s", 1024),
               ("energy", "400 Gb/s", 64)]
    head = ["rows on a GPU", *(f"{strategy}, {ranks} GPUs, {link}" for strategy, link, ranks in columns)]
    lines = [[str(n), *("; ".join(cells[n, *column]) for column in columns)]
             for n in sorted({row["rows"] for row in result["rows"]})]
    return (markdown(head, lines) + f'\n\n(a model, from kernels measured on the {result["meta"]["gpu"]};\n'
            f"[bench/results/{name}](bench/results/{name}))")


def distributed() -> str:
    """What two processes of gloo take, beside the model."""
    name = "cpu/distributed.json"
    result = load(name)
    lines = [[row["call"], row["op"].replace("_", " + "),
              *(f"{row[key]:.0f}" for key in ("ms_compute", "ms_moving", "ms", "ms_model")),
              f'{row["ms"] / row["ms_model"]:.2f}'] for row in result["rows"] if "ms_model" in row]
    head = ["call", "pass", "kernels alone, ms", "traffic alone", "the call", "the model", "call : model"]
    return markdown(head, lines) + "\n\n" + source(name, result["meta"], f'{result["meta"]["ranks"]} processes')
