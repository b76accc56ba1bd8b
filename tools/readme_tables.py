#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README.md and docs/*.md from the result files in bench/results: no figure is typed by hand.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`, in one page or in several. With --check nothing is written;
exits with 1 if a table differs from its result file, or stands in no page.
"""

import pathlib
import re
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import paper_tables  # noqa: E402
from distributed_tables import distributed, ring_model, rings, streams  # noqa: E402
from feature_tables import decode, features, varlen  # noqa: E402
import near_tables  # noqa: E402
from table_parts import ROOT, label, load, markdown, source  # noqa: E402


def compare() -> str:
    """Error and relative time of each setting on the shipped Q, K and V."""
    name = "cpu/compare_minilm.json"
    result = load(name)
    rows = []
    for row in result["rows"]:
        if row["strategy"] == "exact":
            rows.append(["exact", "1", "1.00", "0", "0", "1"])
            continue
        rows.append([label(row), str(row["group_size"]), f'{row["ratio_to_exact"]:.2f}',
                     f'{row["rel_error_out"]:.2f}', f'{row["total_variation"]:.2f}', f'{row["row_cosine_min"]:.2f}'])
    head = ["strategy", "G", "speed relative to exact", "error of O", "total variation of P", "smallest row cosine"]
    return markdown(head, rows) + "\n\n" + source(name, result["meta"])


def performance() -> str:
    """Speed on the CPU at N = 4096, f32: relative to exact attention in the same run, and to the FMA peak."""
    name = "cpu/bench.json"
    result = load(name)
    rows = [row for row in result["rows"] if row["seq_q"] == 4096 and row["dtype"] == "f32" and not row["causal"]]
    lines = []
    for work in ("forward", "backward"):
        for dim in (64, 128):
            for row in rows:
                if row["op"] == work and row["head_dim"] == dim:
                    lines.append([work, str(dim), label(row), str(row["group_size"]), f'{row["ratio_to_exact"]:.2f}',
                                  f'{100 * row["share_of_fma_peak"]:.0f} %'])
    head = ["op", "d", "strategy", "G", "speed relative to exact", "products of exact attention, share of FMA peak"]
    return markdown(head, lines) + "\n\n" + source(name, result["meta"])


def grouping() -> str:
    """Time of hash or energies and sorting, as a share of grouping + forward."""
    name = "cpu/bench.json"
    result = load(name)

    def key(row: dict) -> tuple:
        return row["seq_q"], row["head_dim"], label(row), row["group_size"]

    forward = {key(row): row["ms"] for row in result["rows"] if row["op"] == "forward"}
    lines = [[*map(str, key(row)), f'{100 * row["ms"] / forward[key(row)]:.1f} %'] for row in result["rows"]
             if row["op"] == "grouping" and row["strategy"] != "exact"]
    return markdown(["N", "d", "strategy", "G", "share"], lines) + "\n\n" + source(name, result["meta"])


def memory() -> str:
    """Memory beyond inputs and outputs at N = 65536."""
    name = "cpu/memory.json"
    result = load(name)
    lines = [[str(row["seq_q"]), label(row), str(row["group_size"]), f'{row["peak_memory_bytes"] / 1e6:.1f} MB']
             for row in result["rows"]]
    return markdown(["N", "strategy", "G", "memory of the run"], lines) + "\n\n" + source(name, result["meta"])


def errors() -> str:
    """The paper's Tables 3 and 4 at d = 32: its statistic, and the element-wise error that users would feel."""
    name = "cpu/errors.json"
    result = load(name)
    rows = {(row["table"], row["block"], row["group_size"], row["estimator"]): row for row in result["rows"]
            if row["head_dim"] == 32}
    lines = []
    for (table, block, group, estimator), row in rows.items():
        if estimator == "sample":
            mean = rows[table, block, group, "mean"]
            lines.append([str(table), str(block), str(group), f'{row["paper"]["mean"]:.2f} %',
                          f'{row["signed"]["mean"]:.2f} %',
                          f'{row["elementwise"]["mean"]:.1f} %', f'{mean["elementwise"]["mean"]:.1f} %'])
    head = ["table", "l", "G", "paper", "signed mean, `sample`", "element by element, `sample`",
            "element by element, `mean`"]
    return markdown(head, lines) + "\n\n" + source(name, result["meta"])


def semantic_search() -> str:
    """How far the settings find what exact attention finds, in examples/semantic_search.py."""
    name = "cpu/semantic_search.json"
    result = load(name)
    meta = result["meta"]
    names = {"torch": "torch's own", "auto": "`auto`"}
    lines = [[names.get(row["setting"], row["setting"]), f'{100 * row["top_1"]:.0f} %',
              f'{100 * row["top_5_overlap"]:.0f} %', f'{row["cosine_mean"]:.3f}', f'{row["cosine_min"]:.3f}']
             for row in result["comparison"]]
    head = ["setting", "same best passage", "same five best", "mean cosine", "smallest cosine"]
    facts = [f'{result["passages"]} passages, {result["queries"]} queries', f'torch {meta["torch"]}',
             f'transformers {meta["transformers"]}']
    return markdown(head, lines) + "\n\n" + source(name, meta, *facts)


def quality() -> str:
    """What settings cost small language models at N = 8192 and l = 128."""
    name = "h200/small_model_report.json"
    result = load(name)
    rows = {(row["head_dim"], row["setting"], row["tuned"]): row for row in result["rows"] if row["length"] == 8192}

    def ratio(dim: int, setting: str, tuned: bool = False) -> str:
        row = rows.get((dim, setting, tuned))
        return f'{row["relative_to_exact"]:.2f}' if row else ""

    lines = []
    for dim in (64, 128):
        exact = rows[dim, "exact", False]["bits_per_byte"]
        lines.append([str(dim), "exact", "1", f"{exact:.2f}", "1", "1", "1"])
        for words in ("energy", "lsh mean", "lsh sample"):
            for size in (2, 4):
                own, previous = (f"{words} G={size} l=128 {order_from}" for order_from in ("own", "previous"))
                strategy = words.replace("lsh ", "lsh (") + ")" * words.startswith("lsh")
                lines.append([str(dim), strategy, str(size), f'{rows[dim, own, False]["bits_per_byte"]:.2f}',
                              ratio(dim, own), ratio(dim, previous), ratio(dim, previous, True)])
    head = ["d", "strategy", "G", "bits a byte", "relative to exact", "strictly causal", "trained further with it"]
    meta = result["meta"]
    return markdown(head, lines) + "\n\n" + source(name, meta, f'CUDA {meta["cuda"]}', f'torch {meta["torch"]}')


def torch_speed(name: str = "cpu/torch.json") -> str:
    """Speed on the CPU: exact attention relative to torch's, and G > 1 relative to exact attention."""
    result = load(name)
    grouped = [("energy", 2), ("energy", 4), ("lsh", 2), ("lsh", 4)]
    works = {"forward": "forward", "forward_backward": "forward + backward"}

    def ratios(key: str, least_n: int = 0, **wanted: object) -> list[float]:
        return [row[key] for row in result["rows"]
                if row["seq_q"] >= least_n and all(row[name] == value for name, value in wanted.items())]

    def cell(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f})"

    lines = []
    for dtype in ("f32", "bf16"):
        for op, work in works.items():
            for dim in sorted({row["head_dim"] for row in result["rows"]}):
                kind = {"dtype": dtype, "op": op, "head_dim": dim}
                gains = [ratios("ratio_to_exact", 2048, **kind, strategy=strategy, group_size=size)
                         for strategy, size in grouped]
                exact = ratios("ratio_to_sdpa", **kind, strategy="exact")
                lines.append([dtype, work, str(dim), cell(exact), *map(cell, gains)])
    head = ["dtype", "op", "d", "exact : torch", *(f"{strategy}, G = {size} : exact" for strategy, size in grouped)]
    return markdown(head, lines) + "\n\n" + source(name, result["meta"], f'torch {result["meta"]["torch"]}')


GPU_METHODS = {
    "FA2": ("sdpa_flash", None, None, False), "cuDNN": ("sdpa_cudnn", None, None, False),
    "exact": ("distr", "exact", 1, False), "lsh, G = 2": ("distr", "lsh", 2, False),
    "lsh, G = 4": ("distr", "lsh", 4, False), "energy, G = 2": ("distr", "energy", 2, False),
    "energy, G = 4": ("distr", "energy", 4, False), "one block, G = 2": ("distr", "energy", 2, True),
    "one block, G = 4": ("distr", "energy", 4, True)}


def gpu_rows(result: dict, **wanted) -> dict:
    """The rows that hold these values, by (impl, strategy, group size, one block)."""
    return {(row["impl"], row["strategy"], row["group_size"], row["block"] == row["seq_q"]): row
            for row in result["rows"] if all(row[key] == value for key, value in wanted.items())}


def gpu_speed() -> str:
    """Milliseconds on the GPU for B = 1, H = 10, bf16: torch's SDPA, pinned, and the package."""
    name = "h200/torch.json"
    result = load(name)
    lines = []
    for op, work in {"forward": "forward", "forward_backward": "forward + backward"}.items():
        for dim in (64, 128):
            for causal in (False, True):
                for n in (4096, 16384):
                    rows = gpu_rows(result, op=op, head_dim=dim, causal=causal, seq_q=n, batch=1)
                    lines.append([work, str(dim), str(n), "yes" if causal else "no",
                                  *(f'{rows[key]["ms"]:.3f}' if key in rows else "" for key in GPU_METHODS.values())])
    meta = result["meta"]
    facts = [f'CUDA {meta["cuda"]}', f'torch {meta["torch"]}', f'cuDNN {meta["cudnn"]}']
    return markdown(["op, ms", "d", "N", "causal", *GPU_METHODS], lines) + "\n\n" + source(name, meta, *facts)


# Of bench/torch_cpu.py, one for each kind of CPU measured.
CPU_FILES = ["cpu/torch.json", "cpu/torch_zen4.json", "cpu/torch_xeon.json"]


def span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def exact_speed() -> str:
    """How many times as quick as its peers exact attention is: on each CPU that was measured, and on Hopper."""
    operations = ("forward", "forward_backward")
    lines = []
    for name in CPU_FILES:
        result = load(name)
        rows = [row for row in result["rows"] if row["strategy"] == "exact"]
        rate = max(row["tflops_exact_flops"] for row in rows if (row["op"], row["dtype"]) == ("forward", "f32")) * 1000
        for dtype in ("f32", "bf16"):
            gains = [span([row["ratio_to_sdpa"] for row in rows if (row["op"], row["dtype"]) == (op, dtype)])
                     for op in operations]
            machine = f'{result["meta"]["cpu"].partition(",")[0]}, one core ({rate:.0f} GFLOP/s reached)'
            lines.append([f"torch, {dtype}", machine, *gains])
    result = load("h200/torch.json")
    for peer in ("cuDNN", "FA2"):
        gains = []
        for op in operations:
            settings = {(row["batch"], row["head_dim"], row["seq_q"], row["causal"]) for row in result["rows"]
                        if row["seq_q"] >= 8192 and row["head_dim"] in (64, 128)}
            found = [gpu_rows(result, op=op, batch=batch, head_dim=dim, seq_q=n, causal=causal)
                     for batch, dim, n, causal in sorted(settings)]
            gains.append(span([rows[GPU_METHODS[peer]]["ms"] / rows[GPU_METHODS["exact"]]["ms"] for rows in found]))
        name = {"FA2": "FlashAttention-2"}.get(peer, peer)
        lines.append([f"{name}, bf16", result["meta"]["gpu"], *gains])
    files = ",\n".join(f"[bench/results/{name}](bench/results/{name})" for name in (*CPU_FILES, "h200/torch.json"))
    return markdown(["relative to", "on", "forward", "forward + backward"], lines) + f"\n\n({files})"


SUSTAINED = 790  # TFLOP/s: about what large bf16 products sustain on an H200 or an H100 at their power limit


def hopper() -> str:
    """N = 16384, forward: ms, and the share that the products by themselves would need."""
    name = "h200/torch.json"
    result = load(name)
    lines = []
    for batch, heads in ((1, 10), (4, 16)):
        for dim in (64, 128):
            for causal in (False, True):
                rows = gpu_rows(result, op="forward", batch=batch, head_dim=dim, causal=causal, seq_q=16384)
                cells = [f'{rows[GPU_METHODS["cuDNN"]]["ms"]:.3f}']
                for method, size in (("exact", 1), ("one block, G = 2", 2), ("one block, G = 4", 4)):
                    row = rows[GPU_METHODS[method]]
                    share = row["tflops_exact_flops"] * (1 + 1 / size) / 2 / SUSTAINED
                    cells.append(f'{row["ms"]:.3f} ({100 * share:.0f} %)')
                lines.append([f"{batch} × {heads}", str(dim), "yes" if causal else "no", *cells])
    return markdown(["B × H", "d", "causal", "cuDNN, ms", "exact", "one block, G = 2", "one block, G = 4"],
                    lines) + "\n\n" + source(name, result["meta"])


GAINS = {  # what is measured: (result file, op, peer, N from, to, the time)
    "Hopper's, bf16, forward : cuDNN": ("h200/torch", "forward", "cuDNN", 8192, 32768, "ms"),
    "Hopper's, bf16, forward, called from Python : cuDNN": ("h200/torch", "forward", "cuDNN", 1024, 4096, "ms"),
    "Hopper's, bf16, forward in a CUDA graph : cuDNN": ("h200/torch", "forward", "cuDNN", 1024, 4096, "ms_graph"),
    "Hopper's, fp16, forward : cuDNN": ("h100/torch_f16", "forward", "cuDNN", 16384, 16384, "ms"),
    "Hopper's, bf16, forward + backward : cuDNN": ("h200/torch", "forward_backward", "cuDNN", 8192, 32768, "ms"),
    "Hopper's, bf16, forward + backward, short : cuDNN": ("h200/torch", "forward_backward", "cuDNN", 1024, 4096, "ms"),
    "Hopper's, bf16, forward + backward in a CUDA graph : cuDNN":
        ("h200/torch", "forward_backward", "cuDNN", 1024, 4096, "ms_graph"),
    "Hopper's, bf16, forward : FA2": ("h200/torch", "forward", "FA2", 8192, 32768, "ms"),
    "portable, bf16, forward : FA2": ("h200/torch_portable", "forward", "FA2", 4096, 32768, "ms"),
    "portable, bf16, forward + backward : FA2": ("h200/torch_portable", "forward_backward", "FA2", 8192, 32768, "ms"),
    "portable, bf16, forward + backward, short : FA2":
        ("h200/torch_portable", "forward_backward", "FA2", 1024, 4096, "ms")}


def gpu_and_commit(meta: dict) -> str:
    return f"{meta['gpu'].removesuffix(' 80GB HBM3')}, commit {meta['commit']}"


def gpu_gains() -> str:
    """How many times as quick as a peer on the GPU: the least and the most over batch sizes, lengths and causality."""
    ours = [method for method, key in GPU_METHODS.items() if key[0] == "distr"]
    lines, names = [], {}
    for work, (name, op, peer, first, last, time) in GAINS.items():
        result = names.setdefault(name, load(f"{name}.json"))
        settings = {(row["batch"], row["seq_q"], row["causal"]) for row in result["rows"]
                    if first <= row["seq_q"] <= last}
        for dim in (64, 128):
            found = [gpu_rows(result, op=op, head_dim=dim, batch=batch, seq_q=n, causal=causal)
                     for batch, n, causal in sorted(settings)]
            cells = []
            for method in ours:
                key = GPU_METHODS[method]
                gains = [rows[GPU_METHODS[peer]][time] / rows[key][time] for rows in found if key in rows]
                cells.append(f"{min(gains):.2f} to {max(gains):.2f}" if gains else "")
            lines.append([work, str(first) if first == last else f"{first} to {last}", str(dim), *cells])
    files = ",\n".join(f"[bench/results/{name}.json](bench/results/{name}.json) ({gpu_and_commit(result['meta'])})"
                       for name, result in names.items())
    return markdown(["kernels, op : peer", "N", "d", *ours], lines) + f"\n\n({files})"


def gpu_free_order() -> str:
    """The exact backward on the GPU with sums in any order, relative to sums in a fixed one."""
    name = "h200/kernels.json"
    result = load(name)
    ms = {(row["kernel"], row["head_dim"], row["seq_q"], row["causal"]): row["ms"] for row in result["rows"]
          if row["op"] == "backward" and row["strategy"] == "exact"}
    lines = []
    for kernel in ("sm90/backward", "sm80/backward"):
        for dim in (64, 128):
            gains = [time / ms[kernel + "_atomics", *key] for (of, *key), time in ms.items() if of == kernel
                     and key[0] == dim]
            lengths = sorted({key[2] for key in ms if key[:2] == (kernel, dim)})
            lines.append([f"`{kernel}`", str(dim), " and ".join(map(str, lengths)),
                          f"{min(gains):.2f} to {max(gains):.2f}"])
    return markdown(["kernel", "d", "N", "sums in any order : in a fixed one"], lines) + "\n\n" + source(
        name, result["meta"])


def build_time() -> str:
    """What `pip install .` costs."""
    name = "build.json"
    result = load(name)
    words = {"none": "none, a build for the CPU alone", "all": "`all`"}
    lines = [[words.get(row["architectures"], f'one, `{row["architectures"]}`'), f'{row["cpu_seconds"] / 60:.1f} min',
              f'{row["wheel_megabytes"]:.1f} MB'] for row in result["rows"]]
    meta = result["meta"]
    return (markdown(["CUDA architectures", "CPU time of the build", "the wheel"], lines) + "\n\n" +
            source(name, meta, f'nvcc {meta["nvcc"]}'))


TABLES = {"exact_speed": exact_speed, "compare": compare, "quality": quality, "smollm2": near_tables.smollm2,
          "smollm2_alone": near_tables.smollm2_alone, "near_cpu": near_tables.near_cpu,
          "near_gpu": near_tables.near_gpu, "near_portable": near_tables.near_portable,
          "near_exact": near_tables.near_exact,
          "near_backward": near_tables.near_backward,
          "given": near_tables.given, "prefill": near_tables.prefill,
          "near_small_models": near_tables.near_small_models,
          "performance": performance, "grouping": grouping, "memory": memory, "errors": errors,
          "semantic_search": semantic_search, "torch_speed": torch_speed,
          "torch_speed_zen4": lambda: torch_speed("cpu/torch_zen4.json"),
          "torch_speed_xeon": lambda: torch_speed("cpu/torch_xeon.json"), "gpu_speed": gpu_speed,
          "gpu_gains": gpu_gains, "hopper": hopper, "gpu_free_order": gpu_free_order, "build_time": build_time,
          "ring_model": ring_model, "distributed": distributed, "streams": streams,
          "rings": lambda: rings("h200_x2/distributed.json"),
          "rings_of_four": lambda: rings("h200_x4/distributed.json"),
          "features": features, "varlen": varlen, "decode": decode,
          **paper_tables.TABLES}


def pages() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def with_tables(text: str, to_root: str, made: dict[str, str]) -> tuple[str, set[str]]:
    """(the page with its tables as `made` has them, their names); `to_root` leads from the page to the repository."""
    found = set()

    def table(match: re.Match) -> str:
        name = match["name"]
        found.add(name)
        if name not in made:
            raise ValueError(f"{name} is no table; allowed: {', '.join(made)}")
        return f"<!-- {name} -->\n" + made[name].replace("](bench/", f"]({to_root}bench/") + f"\n<!-- /{name} -->"

    text = re.sub(r"<!-- (?P<name>\w+) -->\n.*?<!-- /(?P=name) -->", table, text, flags=re.DOTALL)
    return text, found


def main(check: bool) -> int:
    made = {name: table() for name, table in TABLES.items()}
    missing, differing = set(TABLES), []
    for page in pages():
        old = page.read_text()
        try:
            new, found = with_tables(old, "../" * (len(page.relative_to(ROOT).parts) - 1), made)
        except ValueError as error:
            sys.exit(f"{page.relative_to(ROOT)}: {error}")
        missing -= found
        if new != old:
            differing.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new)
    if missing:
        sys.exit(f"no page has the tables {', '.join(sorted(missing))}")
    if check and differing:
        print(f"{', '.join(differing)}: tables differ from bench/results; run tools/readme_tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
