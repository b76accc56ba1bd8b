# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/choosing.md on near keys and skipped tiles, and the one of docs/transformers.md on prompts."""

import math
import statistics

from table_parts import ROOT, load, markdown, source


def loss(row: dict) -> str:
    """Relative to exact attention."""
    return f'{100 * (row["relative_to_exact"] - 1):+.2f} %'


def smollm2() -> str:
    """What near keys, skipping and finishing cost SmolLM2, by their perplexity relative to exact attention."""
    name = "h200/smollm2.json"
    meta, rows = (load(name)[part] for part in ("meta", "rows"))
    near, wanted = " window=512 sinks=128", ["energy G=2", "energy G=4", "lsh mean G=2", "lsh sample G=2"]
    wanted += [f"energy G=2 window={window} sinks=128" for window in (0, 128, 256, 512, 1024)]
    wanted += [setting + near for setting in ("lsh mean G=2", "energy G=3", "energy G=4")]
    wanted += [f"energy G=2 l=8192 own{near}{skip}" for skip in ("", " skip=0.0025")]
    wanted += [f"{setting}{near} skip={skip}{finish}" for skip in ("0.01", "0.0025", "0.001")
               for setting, finish in (("exact", ""), ("energy G=2", ""), ("energy G=4", " finish"))]
    lines = []
    for setting in wanted:
        both = [next(row for row in rows if (row["setting"], row["length"]) == (setting, n)) for n in (2048, 8192)]
        kept = f'{both[1]["kept_share"]:.0%}' if both[1]["skip"] else ""
        lines.append([f"`{setting}`", *(f'{100 * (row["relative_to_exact"] - 1):+.2f} %' for row in both), kept])
    return markdown(["setting", "loss at N = 2048", "loss at N = 8192", "far halves kept"], lines) + "\n\n" + source(
        name, meta, f'CUDA {meta["cuda"]}', f'torch {meta["torch"]}')


def smollm2_alone() -> str:
    """SmolLM2's loss where each row decides by itself what it skips, beside 64 rows together."""
    name = "h200/smollm2.json"
    meta, rows = (load(name)[part] for part in ("meta", "rows"))
    found = {(row["setting"], row["length"], row["rows_together"]): row for row in rows}
    lines = [[f"`{setting}`", str(n), loss(found[setting, n, 64]), loss(row)]
             for (setting, n, together), row in found.items() if together == 1]
    return markdown(["setting", "N", "64 rows together", "rows one by one"], lines) + "\n\n" + source(
        name, meta, f'CUDA {meta["cuda"]}', f'torch {meta["torch"]}')


def prefill() -> str:
    """How long SmolLM2 takes to read prompts by torch's attention and ours, and what that does to its perplexity."""
    near = " window=512 sinks=128"
    wanted = ["exact", f"exact{near} skip=0.0025", f"energy G=2{near}", f"energy G=2{near} skip=0.0025"]
    lines, sources = [], []
    for name in ("cpu/prefill.json", "h200/prefill.json", "h200/prefill_b1.json"):
        meta, rows = (load(name)[part] for part in ("meta", "rows"))
        on = meta["gpu"] or f'{meta["threads"]} cores of an {meta["cpu"]}'
        sources.append(source(name, meta, f'torch {meta["torch"]}'))
        of_prompts = {}
        for row in rows:
            of_prompts.setdefault((row["batch"], row["length"]), {})[row["impl"]] = row
        for (batch, length), of_impl in of_prompts.items():
            changes = [math.expm1(of_impl[impl]["loss"] - of_impl["exact"]["loss"]) for impl in wanted]
            cells = [f'{of_impl[impl]["time_of_sdpa"]:.2f}' + (f" ({change:+.2%})" if impl != "exact" else "")
                     for impl, change in zip(wanted, changes)]
            lines.append([on, str(batch), str(length), f'{of_impl["sdpa"]["seconds"]:.3g} s', *cells])
    head = ["on", "B", "N", "torch's", "`exact`", "`exact`, skip", "`energy` G = 2 with near keys", "and skip"]
    return markdown(head, lines) + "\n\n" + "\n".join(sources)


def times_near(*names: str) -> str:
    """Times relative to exact attention, on captured and on planted inputs, by bench/near.py."""
    near = " window=512 sinks=128"
    wanted = [f"exact{near} skip=0.0025", "energy G=2", f"energy G=2{near}", f"energy G=2{near} skip=0.0025",
              f"energy G=4{near} skip=0.0025 finish", f"energy G=2 l=16384 own{near}",
              f"energy G=2 l=16384 own{near} skip=0.0025"]
    lines, sources = [], []
    for name in names:
        meta, rows = (load(name)[part] for part in ("meta", "rows"))
        sources.append(source(name, meta, f'torch {meta["torch"]}'))
        cases = {}
        for row in rows:
            inputs = "SmolLM2" if row["input"].startswith("captured") else "planted"
            case = inputs, row["batch"], row["heads"], row["seq"], row["head_dim"], row["causal"]
            cases.setdefault(case, {}).setdefault(row["setting"], []).append(row)
        for (inputs, batch, heads, seq, dim, causal), of_settings in cases.items():
            kept = statistics.fmean(row["kept_share"] for row in of_settings[wanted[0]])
            times = [statistics.fmean(row["time_of_exact"] for row in of_settings[setting]) for setting in wanted]
            case = [inputs, f"{batch}, {heads}", str(dim), str(seq), "yes" if causal else "no"]
            lines.append([*case, f"{kept:.0%}", *(f"{time:.2f}" for time in times)])
    head = ["inputs", "B, H", "d", "N", "causal", "kept by `exact`", "`exact`, skip", "`energy` G = 2",
            "with near keys", "and skip", "G = 4, skip, finish", "one grouping, near keys", "and skip"]
    return markdown(head, lines) + "\n\n" + "\n".join(sources)


def near_cpu() -> str:
    return times_near("cpu/near.json")


def near_gpu() -> str:
    return times_near("h200/near.json", "h200/near_b4_h16.json")


def near_portable() -> str:
    return times_near("h200/near_portable.json")


def near_exact() -> str:
    """Exact attention with `skip` by length, relative to the same without and to cuDNN."""
    lines, sources = [], []
    for name in ("h200/near_exact_bfloat16.json", "h200/near_exact_float16.json"):
        meta, rows = (load(name)[part] for part in ("meta", "rows"))
        sources.append(source(name, meta, f'torch {meta["torch"]}'))
        cases = {}
        for row in rows:
            case = row["dtype"], row["seq"], row["causal"]
            cases.setdefault(case, {}).setdefault(row["head_dim"], {})[row["setting"]] = row
        for (dtype, seq, causal), of_dims in cases.items():
            cells = []
            for dim in (64, 128):
                exact, skip, cudnn = of_dims[dim].values()
                cells += [f'{skip["time_of_exact"]:.2f}', f'{skip["ms"] / cudnn["ms"]:.2f}']
            lines.append([dtype, str(seq), "yes" if causal else "no", f'{skip["kept_share"]:.0%}', *cells])
    head = ["dtype", "N", "causal", "kept", "d = 64: of exact", "of cuDNN", "d = 128: of exact", "of cuDNN"]
    return markdown(head, lines) + "\n\n" + "\n".join(sources)


def near_small_models() -> str:
    """What near keys cost small models, causal and both ways."""
    names = (f"{folder}/small_model_near.json" for folder in ("h200", "cpu"))
    name = next((name for name in names if (ROOT / "bench/results" / name).exists()), None)
    if name is None:
        return "Not measured yet: `bench/gpu/run OUT DISTR_GPU quality_near` does it."
    result = load(name)
    found = {(causal, row["head_dim"], row["setting"]): row
             for part, causal in (("rows", True), ("both_ways", False)) for row in result[part]}
    models = [(model["causal"], model["head_dim"]) for model in result["models"]]
    settings = [row["setting"] for row in result["rows"] if row["head_dim"] == models[0][1]]
    lines = []
    for setting in settings:
        of_models = [found[(*model, setting)] for model in models]
        bits = [f'{row["bits_per_byte"]:.2f}' for row in of_models]
        lines.append([f"`{setting}`", *(bits if setting == "exact" else map(loss, of_models))])
    head = ["setting", *(f'd = {dim}, {"causal" if causal else "both ways"}' for causal, dim in models)]
    return markdown(head, lines) + "\n\n" + source(name, result["meta"], f'torch {result["meta"]["torch"]}')


def near_backward() -> str:
    """Forward and backward with near keys by blocks, relative to exact attention."""
    name = "h200/experiments/near_backward.json"
    meta, rows = (load(name)[part] for part in ("meta", "rows"))
    lines = []
    for row in rows:
        if row["strategy"] != "exact" and row["block"] < row["seq"]:  # given() has one grouping
            window = str(row["window"]) if row["window"] >= 0 else "none"
            lines.append([str(row["head_dim"]), "yes" if row["causal"] else "no",
                          f'`{row["strategy"]}` G = {row["group_size"]}', window,
                          f'{row["time_of_exact_with_forward"]:.2f}'])
    head = ["d", "causal", "setting", "window", "forward + backward"]
    return markdown(head, lines) + "\n\n" + source(name, meta, f'CUDA {meta["cuda"]}')


def given() -> str:
    """Forward and backward with one order a head, relative to exact attention and to cuDNN."""
    name = "h200/given.json"
    meta, rows = (load(name)[part] for part in ("meta", "rows"))
    times = {}
    for row in rows:
        if row["strategy"] == "given":
            key = (row["group_size"], row["window"] or "none", row["sinks"])
            shape = (row["batch"], row["heads"], row["head_dim"], row["causal"])
            times.setdefault(key, {})[shape] = f'{row["of_exact"]:.2f}, {row["of_cudnn"]:.2f}'
    shapes = sorted({shape for of in times.values() for shape in of}, key=lambda shape: (-shape[2], shape))
    lines = [[str(part) for part in key] + [of[shape] for shape in shapes] for key, of in times.items()]
    names = (f'B {b} H {h}, d {d}{", causal" if causal else ""}' for b, h, d, causal in shapes)
    head = ["G", "window", "sinks", *names]
    return markdown(head, lines) + "\n\n" + source(name, meta, f'torch {meta["torch"]}')
