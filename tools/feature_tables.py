# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/benchmarks-gpu.md on windows, capped scores, packed sequences and decoding, which readme_tables.py
writes."""

from table_parts import load, markdown, source


def features() -> str:
    """Times of windows and capped scores, and their share of the time without, beside flex_attention."""
    name = "h100/features.json"
    result = load(name)
    lines = []
    for ours, flex in zip(result["rows"][::2], result["rows"][1::2]):
        what = f'window of {ours["window"]}' if ours["window"] else "softcap" if ours["softcap"] else "neither"
        times = (f'{row["ms"]:.2f} ({row["of_plain"]:.2f})' for row in (ours, flex))
        lines.append([ours["op"].replace("_", " + "), str(ours["head_dim"]), what, *times])
    head = ["pass", "d", "causal, with", "ms (of neither)", "flex_attention, ms (of neither)"]
    return markdown(head, lines) + "\n\n" + source(name, result["meta"], f'torch {result["meta"]["torch"]}')


def varlen() -> str:
    """Times of packed sequences, and the share of them in the time of the same rows otherwise."""
    name = "h200/varlen.json"
    result = load(name)
    found = {}
    for row in result["rows"]:
        key = row["op"].replace("_", " + "), str(row["head_dim"]), row["pack"]
        found.setdefault(key, {})[row["impl"]] = row
    lines = []
    for key, of in found.items():
        ours = of["distr"]
        others = (f'{of[impl]["ms"]:.3f} ({ours["ms"] / of[impl]["ms"]:.2f})' if impl in of else "none"
                  for impl in ("torch varlen_attn", "distr portable", "distr dense"))  # fmt: skip
        pack = f'{ours["sequences"]} {key[2]}'
        lines.append([*key[:2], pack, f'{ours["ms"]:.3f}', *others])
    head = ["pass", "d", "sequences", "ours, ms", "torch varlen_attn, ms (ours of it)",
            "ours without Hopper's kernels", "ours as a dense batch"]  # fmt: skip
    return markdown(head, lines) + "\n\n" + source(name, result["meta"], f'torch {result["meta"]["torch"]}')


def decode() -> str:
    """A decoding step by the filled rows of the cache, as a share of a copy's bandwidth."""
    name = "h100/decode.json"
    result = load(name)
    found = {}
    for row in result["rows"]:
        key = row["batch"], f'{row["heads"]}, {row["kv_heads"]}', row["head_dim"], row["seq_k"]
        found.setdefault(key, {})[row["impl"]] = row
    lines = [[*map(str, key), f'{1000 * of["distr"]["ms"]:.0f}', f'{1000 * of["sdpa"]["ms"]:.0f}',
              *(f'{100 * of[impl]["ratio_to_copy"]:.0f} %' for impl in ("distr", "sdpa"))] for key, of in found.items()]
    head = ["B", "heads of Q, of K", "d", "keys", "ours, µs", "SDPA, µs", "ours, of a copy", "SDPA, of a copy"]
    return markdown(head, lines) + "\n\n" + source(name, result["meta"], f'torch {result["meta"]["torch"]}')
