# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/distributed.md; readme_tables.py writes them."""

from table_parts import label, load, markdown, source


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


def streams() -> str:
    """Table 9's sizes, chunk by chunk, from host memory and from a GPU's."""
    name = "h200_x4/stream.json"
    result = load(name)
    lines = []

    def model(row):
        """The first chunk of a GPU has nothing beside its copies, and the last nothing beside its kernels."""
        longer, shorter = max(row["ms_copies"], row["ms_compute"]), min(row["ms_copies"], row["ms_compute"])
        return longer + shorter / (row["chunks"] / len(row["devices"]))

    for row in result["rows"]:
        (alone,) = [other["ms"] for other in result["rows"] if label(other) == label(row) and
                    len(other["devices"]) == 1 and other["from"] == row["from"]]
        gpus = len(row["devices"])
        lines.append([str(gpus), "host memory" if row["from"] == "host" else f"GPU {row['from']}'s", label(row),
                      *(f"{row[key]:.1f}" for key in ("ms_copies", "ms_compute", "ms")),
                      f'{row["ratio_to_larger"]:.2f}', f"{model(row):.1f}",
                      f'{alone / row["ms"]:.2f}' if gpus > 1 else ""])
    head = ["GPUs", "from", "strategy", "copies alone, ms", "computation alone, ms", "all, ms",
            "all : larger of them", "model, ms", "as quick as one GPU"]
    return markdown(head, lines) + "\n\n" + source(name, result["meta"])


def rings(name) -> str:
    """A ring on several GPUs beside one, and beside torch's."""
    result = load(name)
    lines = []
    for row in result["rows"]:
        if row["op"] == "link":
            continue
        ranks = row["ranks"]
        op = row["op"].replace("_", " + ")
        times = {key: f"{value:.1f}" for key, value in row.items() if key.startswith("ms")}
        lines.append([str(row["seq"] // ranks), row["call"], op, f'{row["ms_one"] / ranks:.1f}',
                      *(times.get(key, "") for key in ("ms_compute", "ms_moving", "ms", "ms_model")),
                      f'{100 * row["share_of_ideal"]:.0f} %',
                      f'{100 * row["share_of_busy_ideal"]:.0f} %' if "share_of_busy_ideal" in row else "",
                      *(times.get(key, "") for key in ("ms_torch_flash", "ms_torch_cudnn"))])
    head = ["rows on a GPU", "call", "pass", "ideal, ms", "kernels alone", "traffic alone", "the call", "model",
            "of the ideal", "of all at work",
            "torch's ring, flash", "torch's ring, cuDNN"]
    return markdown(head, lines) + "\n\n" + source(name, result["meta"], f'{result["meta"]["ranks"]} processes')
