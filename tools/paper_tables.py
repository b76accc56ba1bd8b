# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/paper.md: the paper's numbers (arXiv 2507.17245), and beside them those of the result files of
experiments/. What has no result file yet says so, with the command that makes it."""

import json
import pathlib
import statistics

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "bench/results"
NOT_YET = "not measured yet"

NAMES = {  # by the methods' names in results
    "standard": "Standard", "flash2": "FlashAttention-2", "flash-cpu": "torch's flash for CPUs", "cudnn": "cuDNN",
    "exact": "exact, ours", "hydra": "Hydra", "hyper": "Hyper", "hyper-short": "Hyper, least length 128",
    "hyper-authors": "Hyper, the authors' sizes", "flatten": "FLatten", "flatten-authors": "FLatten, the authors' code",
    "primal": "Primal", "lsh-sample": "`lsh` (`sample`), the paper's", "lsh-mean": "`lsh` (`mean`)",
    "energy": "`energy`", "lsh-sample-near": "`lsh` (`sample`), near keys", "energy-near": "`energy`, near keys",
}  # fmt: skip

# method: (ImageNet, CIFAR-100, CIFAR-10, iNaturalist 2018, 2019) top-1 in regime r1, the same in r2
TABLE5 = {
    "standard": ((80.04, 66.70, 86.89, 38.83, 51.12), (80.04, 67.56, 89.07, 35.94, 52.04)),
    "flash2": ((80.04, 66.70, 86.89, 38.83, 51.12), (80.04, 67.56, 89.07, 35.94, 52.04)),
    "hydra": ((69.20, 47.60, 76.25, 33.36, 52.10), (73.36, 36.51, 70.60, 4.95, 51.25)),
    "hyper-authors": ((67.93, 58.73, 81.42, 38.84, 50.56), (71.17, 55.66, 82.02, 34.52, 49.03)),
    "flatten": ((75.64, 49.52, 76.85, 32.96, 47.98), (62.42, 45.60, 74.89, 24.80, 42.27)),
    "primal": ((57.23, 54.29, 81.34, 29.61, 45.41), (61.84, 50.72, 80.37, 23.29, 43.20)),
    "lsh-sample": ((77.38, 65.62, 86.78, 38.07, 51.35), (79.29, 66.83, 88.73, 35.11, 50.50)),
}
TABLE5_TOP5 = {  # the same, top-5
    "standard": ((95.38, 91.06, 99.54, 63.03, 81.28), (95.38, 91.90, 99.64, 60.85, 80.46)),
    "flash2": ((95.38, 91.06, 99.54, 63.03, 81.28), (95.38, 91.90, 99.64, 60.85, 80.46)),
    "hydra": ((89.15, 79.00, 98.73, 58.27, 83.92), (91.39, 68.14, 97.60, 14.02, 80.42)),
    "hyper-authors": ((87.93, 86.19, 99.14, 63.19, 80.00), (90.43, 84.64, 99.30, 58.33, 79.27)),
    "flatten": ((93.13, 79.71, 98.45, 55.29, 76.99), (84.28, 76.29, 98.35, 46.00, 72.07)),
    "primal": ((81.29, 83.53, 99.17, 53.05, 75.71), (84.61, 81.69, 99.14, 45.77, 73.39)),
    "lsh-sample": ((93.50, 90.35, 99.52, 62.26, 80.50), (94.52, 91.48, 99.59, 59.83, 80.03)),
}
TABLE5_SECONDS = {  # of ImageNet's test set; the paper's estimator: "Simi", "Flash"
    "standard": "50", "flash2": "46", "hydra": "48", "hyper-authors": "47", "flatten": "48", "primal": "47",
    "lsh-sample": "47; 42",
}  # fmt: skip
TABLE6 = {  # seconds at n = 256, 512, 1024, 2048
    "standard": (0.18, 0.19, 0.20, 0.20), "flash2": (0.17, 0.17, 0.18, 0.20), "hydra": (0.18, 0.18, 0.19, 0.20),
    "hyper": (0.18, 0.18, 0.19, 0.20), "flatten": (0.30, 0.31, 0.32, 0.35), "primal": (0.27, 0.33, 0.41, 0.60),
    "lsh-sample": (0.17, 0.17, 0.18, 0.19),
}  # fmt: skip
TABLE7 = {  # accuracy at n = 256, 512
    "standard": (33.29, 32.50), "flash2": (33.29, 32.50), "hydra": (29.46, 22.75), "hyper-short": (33.29, 32.50),
    "flatten": (31.25, 31.27), "primal": (24.11, 31.25), "lsh-sample": (31.37, 31.50),
}  # fmt: skip
TABLE8 = {  # accuracy, seconds of the test set, for ViT-B 224, ViT-B 384, BERT
    "standard": ((81.1, 49), (84, 180), (62.75, 67)), "flash2": ((81.1, 46), (84, 146), (62.75, 64)),
    "hydra": ((0.1, 48), (0.1, 80), (22.5, 65)), "lsh-sample": ((75.1, 41), (77.12, 125), (62.67, 60)),
}  # fmt: skip
TABLE1 = {(128, 1024): 0.86, (128, 2048): 3.19, (128, 4096): 12.27, (128, 8192): 49.46,
          (64, 1024): 0.76, (64, 2048): 2.66, (64, 4096): 10.25, (64, 8192): 40.06}  # fmt: skip
SECTION_4_7 = {2048: (0.14, 74.8), 4096: (0.14, 37.8), 20480: (0.15, 4.1), 40960: (0.15, 1.3)}  # ms, % of the total
TABLE9 = {"flash2": (1299, 1768, 1471), "lsh-sample": (846, 1361, 1359)}  # ms on 1, 2 and 4 GPUs


def load(part):
    """(path from bench/results, meta, rows) of a part of experiments/run, measured on a GPU or, failing that, a CPU."""
    for folder in ("h200", "h100", "cpu"):
        path = RESULTS / folder / f"paper/{part}.json"
        if path.exists():
            result = json.loads(path.read_text())
            return path.relative_to(RESULTS), result["meta"], result["rows"]
    return None, {}, []


def markdown(head, lines, *parts):
    """The table, and where each of its parts comes from."""
    text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [head, ["---"] * len(head), *lines])
    sources = []
    for part in parts:
        name, meta, _ = load(part)
        if name is None:
            sources.append(f"(`{part}`: {NOT_YET}: `experiments/run --out FOLDER {part}`)")
        else:
            machine = meta["gpu"] or meta["cpu"].partition(",")[0]
            sources.append(f"(`{part}`: {machine}, {meta['dtype']}, torch {meta['torch']}, commit {meta['commit']};\n"
                           f"[bench/results/{name}](bench/results/{name}))")  # fmt: skip
    return text + "\n\n" + "\n".join(sources)


def cell(rows, name, form, **wanted):
    """The mean of what the rows with these values have under the name, and its spread over seeds; or that there is
    none, or why. A CPU's torch has no FlashAttention-2, but an algorithm like it, which is named."""
    if wanted.get("method") == "flash2" and any(row["method"] == "flash-cpu" for row in rows):
        return cell(rows, name, form, **{**wanted, "method": "flash-cpu"}) + " (flash-cpu)"
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if not found:
        return NOT_YET
    values = [row[name] for row in found if name in row]
    if not values:
        return next((row["error"] for row in found if "error" in row), "not timed")
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{spread}"


def methods_of(paper, *rows):
    """The paper's methods, and then those that results have besides."""
    others = (row["method"] for of in rows for row in of)
    return list(dict.fromkeys([*paper, *(name for name in others if name in NAMES and name != "flash-cpu")]))


def table1():
    _, _, rows = load("table1")
    lines = []
    for n in (1024, 2048, 4096, 8192):
        for d, dv in ((128, 128), (64, 64), (64, 128)):
            paper = f"{TABLE1[d, n]:.2f}" if d == dv else "none"
            of = {"seq": n, "head_dim": d, "head_dim_v": dv}
            cells = [cell(rows, "ms", ".3f", method=method, **of) for method in ("flash2", "cudnn", "exact")]
            lines.append([n, f"{d}, {dv}", paper, *cells])
    return markdown(["N", "d, dv", "paper, FA2, ms", "FA2, ms", "cuDNN, ms", "exact, ours, ms"], lines, "table1")


def fig1():
    _, _, rows = load("fig1")
    lengths = (256, 1024, 4096, 16384)
    lines = [[NAMES[method], *(percent(rows, "share", method=method, seq=n) for n in lengths)]
             for method in methods_of(("standard", "flash2", "exact", "lsh-sample", "energy"), rows)]  # fmt: skip
    return markdown(["share of attention", *(f"N = {n}" for n in lengths)], lines, "fig1")


def percent(rows, name, **wanted):
    found = cell([{**row, name: 100 * row[name]} if name in row else row for row in rows], name, ".0f", **wanted)
    return f"{found} %" if found[:1].isdigit() else found


TABLE5_PARTS = {"Fashion-MNIST": ("table5_fashion", "table5_fashion_seeds"), "digits": ("table5_digits",),
                "openclipart": ("table5_openclipart", "table5_openclipart_seeds")}  # fmt: skip


def table5(paper=TABLE5, measure="top1"):
    rows = {data: [row for part in of for row in load(part)[2]] for data, of in TABLE5_PARTS.items()}
    lines = []
    for method in methods_of(paper, *rows.values()):
        for at, regime in enumerate(("r1", "r2")):
            of_paper = [f"{x:.2f}" for x in paper[method][at]] if method in paper else ["none"] * 5
            ours = [cell(of, measure, ".1f", method=method, regime=regime) for of in rows.values()]
            lines.append([NAMES[method], regime, *of_paper, *ours])
    head = ["method", "regime", "ImageNet", "CIFAR-100", "CIFAR-10", "iNat 2018", "iNat 2019", *TABLE5_PARTS]
    return markdown(head, lines, *(part for of in TABLE5_PARTS.values() for part in of))


def table5_top5():
    return table5(TABLE5_TOP5, "top5")


def table5_times():
    """Of one seed and regime, as others have the same times, on other GPUs even."""
    rows = {data: load(part)[2] for data, (part, *_) in TABLE5_PARTS.items()}
    of = {"regime": "r1", "seed": 0}
    lines = [[NAMES[method], TABLE5_SECONDS.get(method, "none"),
              *(cell(rows[data], "seconds", ".3f", method=method, **of) for data in rows)]
             for method in methods_of(TABLE5, *rows.values())]  # fmt: skip
    head = ["method", "paper, ImageNet, s", *(f"{data}, s" for data in rows)]
    return markdown(head, lines, *(part for part, *_ in TABLE5_PARTS.values()))


def table6():
    _, _, rows = load("table6")
    lines = []
    lengths = (256, 512, 1024, 2048, 8192, 32768)
    for method in methods_of(TABLE6, rows):
        paper = "; ".join(f"{x:.2f}" for x in TABLE6.get(method, ())) or "none"
        ours = [cell(rows, "ms", ".1f", method=method, seq=n) for n in lengths]
        lines.append([NAMES[method], paper, *ours, cell(rows, "ms_cold", ".0f", method=method, seq=256)])
    head = ["method", "paper, n = 256; 512; 1024; 2048, s", *(f"n = {n}, ms" for n in lengths),
            "first call, n = 256, ms"]  # fmt: skip
    return markdown(head, lines, "table6")


def table6_smollm2():
    _, _, rows = load("table6_smollm2")
    lengths = (256, 512, 1024, 2048, 4096, 8192)
    lines = [[NAMES[method], *(cell(rows, "ms", ".1f", method=method, seq=n) for n in lengths)]
             for method in methods_of(TABLE6, rows)]  # fmt: skip
    return markdown(["SmolLM2-135M", *(f"n = {n}, ms" for n in lengths)], lines, "table6_smollm2")


def table7():
    parts = ("table7", "table7_near", "table7_untuned")
    tuned, near, untuned = (load(part)[2] for part in parts)
    tuned = tuned + near
    lines = []
    for method in methods_of(TABLE7, tuned, untuned):
        paper = [f"{x:.2f}" for x in TABLE7[method]] if method in TABLE7 else ["none"] * 2
        line = [NAMES[method], *paper]
        for n in (256, 512):
            of = {"method": method, "length": n}
            for measure, form, before in (("accuracy", ".1f", ".1f"), ("perplexity", ".1f", ".4g")):
                line += [cell(tuned, measure, form, **of, epochs=5), cell(untuned, measure, before, **of, epochs=0)]
        lines.append(line)
    measures = ("accuracy", "before", "perplexity", "before")
    head = ["method", "paper, 256", "paper, 512", *(f"{what}, {n}" for n in (256, 512) for what in measures)]
    return markdown(head, lines, *parts)


def table8():
    columns = {"table8_197": "top1", "table8_577": "top1", "table8_antibody": "accuracy",
               "table8_speech": "word_errors"}  # fmt: skip
    found = {part: load(part)[2] for part in columns}
    lines = []
    for method in methods_of(TABLE8, *found.values()):
        paper = [f"{x}, {s} s" for x, s in TABLE8[method]] if method in TABLE8 else ["none"] * 3
        ours = []
        for part, name in columns.items():
            value, time = (cell(found[part], of, ".2f", method=method) for of in (name, "seconds"))
            ours.append(f"{value}, {time} s" if time[:1].isdigit() else value)
        lines.append([NAMES[method], *paper, *ours])
    head = ["method", "ViT-B 224", "ViT-B 384", "BERT", "ViT-Ti, 197 tokens", "ViT-Ti, 577 tokens", "AntiBERTy",
            "Whisper tiny.en, word errors"]  # fmt: skip
    return markdown(head, lines, *columns)


def table9():
    _, _, rows = load("table9")
    name = "h200_x4/stream.json"
    streams = json.loads((RESULTS / name).read_text())

    def streamed(method, devices, origin):
        strategy, _, estimator = method.partition("-")
        return next((f"{row['ms']:.0f}" for row in streams["rows"] if row["strategy"] == strategy
                     and (row["estimator"] or "") == estimator and len(row["devices"]) == devices
                     and row["from"] == origin), "none")  # fmt: skip

    timed = [{**row, "ms_stream": 1000 * row["seconds"]} if "seconds" in row else row for row in rows
             if "seconds" in row or "error" in row]  # fmt: skip
    places = [(gpus, origin) for origin in ("host", 0) for gpus in (1, 2, 4)]
    lines = [[NAMES[method], "; ".join(map(str, TABLE9.get(method, ["none"]))), cell(rows, "ms", ".0f", method=method),
              cell(timed, "ms_stream", ".0f", method=method), cell(timed, "gb_per_s", ".0f", method=method),
              *(streamed(method, gpus, origin) for gpus, origin in places)]
             for method in methods_of(TABLE9, rows)]  # fmt: skip
    lines.append(["copies alone", "none", "none", cell(timed, "ms_copies", ".0f", method="exact"), *["none"] * 7])
    head = ["method", "paper, 1; 2; 4 GPUs, ms", "compute alone", "one loop for all, from host memory, 1 GPU", "GB/s",
            "`distr`, from host memory, 1 GPU", "2", "4", "from a GPU's memory, 1", "2", "4"]  # fmt: skip
    source = f"(`distr`: {streams['meta']['gpu']}, commit {streams['meta']['commit']};"
    return "\n".join([markdown(head, lines, "table9"), source, f"[bench/results/{name}](../bench/results/{name}))"])


def fig9():
    _, _, rows = load("fig9")
    lines = []
    methods = [("flash2", 1), ("cudnn", 1), ("exact", 1), *((name, g) for name in ("lsh-sample", "lsh-mean", "energy")
                                                            for g in (2, 4))]  # fmt: skip
    for d in (32, 64, 128):
        for method, size in methods:
            name = NAMES[method] + (f", G = {size}" if size > 1 else "")
            times = [cell(rows, "ms", ".3f", method=method, group_size=size, head_dim=d, seq=n)
                     for n in (2048, 8192, 20480, 40960)]  # fmt: skip
            lines.append([d, name, *times])
    return markdown(["d", "method", *(f"N = {n}, ms" for n in (2048, 8192, 20480, 40960))], lines, "fig9")


def grouping_alone():
    _, _, rows = load("grouping")
    alone = json.loads((RESULTS / "h200/grouping.json").read_text())
    kernel = [{**row, "ms_alone": row["ms"]} for row in alone["rows"] if row["strategy"] == "lsh" and row["heads"] == 1]
    lines = []
    for n, (ms, share) in SECTION_4_7.items():
        of = {"method": "lsh-sample", "seq": n}
        line = [n, f"{ms} ms", f"{share} %", cell(kernel, "ms_alone", ".4f", seq_q=n, head_dim=128)]
        for heads in (1, 10):
            line += [cell(rows, "grouping_ms", ".4f", heads=heads, **of), percent(rows, "share", heads=heads, **of)]
        lines.append(line)
    head = ["N", "paper", "share of the total", "the kernel alone, H = 1, ms", "called, H = 1, ms", "share",
            "called, H = 10, ms", "share"]  # fmt: skip
    source = (f"(the kernel alone: {alone['meta']['gpu']}, commit {alone['meta']['commit']};\n"
              "[bench/results/h200/grouping.json](bench/results/h200/grouping.json))")  # fmt: skip
    return markdown(head, lines, "grouping") + "\n" + source


TABLES = {"paper_table1": table1, "paper_fig1": fig1, "paper_table5": table5, "paper_table5_top5": table5_top5,
          "paper_table5_times": table5_times, "paper_table6": table6, "paper_table6_smollm2": table6_smollm2,
          "paper_table7": table7, "paper_table8": table8, "paper_table9": table9, "paper_fig9": fig9,
          "paper_grouping": grouping_alone}  # fmt: skip
