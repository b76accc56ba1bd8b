#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Table 7: a Llama fine-tuned with each method on problems of four choices: accuracy, and perplexity on text beside it.

The regime of the paper's code: 5 epochs, batches of 5, at most 512 tokens, Adam with a rate of 5e-6 after 1000 steps of
warm-up. Rows with epochs = 0 are before fine-tuning. --data: train.jsonl and test.jsonl (experiments/fetch items: the
answer alone is learned, and chosen by the probability of its tokens), or MathInstruct.json and MMLU's test/*.csv
(shared/data.py). Chance is 25 %. hyper-short has a least length of 128."""

import copy

import torch
import torch.nn.functional as F

from baselines import ksvd_loss
from shared import models
from shared.data import read_items, toy_items
from shared.evaluate import answer_items, continued, item_text, padded, perplexity
from shared.results import DTYPES, Results, arguments, chosen, label, parsed, shard
from shared.swap import swap
from shared.training import train

METHODS = ("standard", "flash2", "exact", "hydra", "hyper-short", "flatten", "primal", "lsh-sample", "lsh-mean",
           "energy", "lsh-sample-near", "energy-near")  # fmt: skip
ETA = 0.1  # of the KSVD loss, as Primal's authors have it for language


def learned(item, tokenize, longest=512):
    """(the tokens that a model reads of an item in training, how many of the last ones it is to learn)."""
    if "text" in item:
        tokens = tokenize(f"{item['question']}\n{item['text']}")[-longest:]
        return tokens, len(tokens) - 1
    prompt, answers = item_text(item)
    answer = continued(tokenize, answers[item["answer"]])
    tokens = (tokenize(prompt) + answer)[-longest:]
    return tokens, len(answer) if item.get("open") else len(tokens) - 1


def main():
    parser = arguments(__doc__, methods=METHODS, model="smollm2", data="items")
    parser.add_argument("--lengths", default="256,512", help="n, the tokens of a prompt [%(default)s]")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", default="0,5", help="0: as the model comes [%(default)s]")
    parser.add_argument("--items", type=int, help="train on the first so many items [all]")
    parser.add_argument("--test-items", type=int, help="test on the first so many items [all]")
    parser.add_argument("--text", type=int, default=16384, help="tokens for the perplexity, of all texts [%(default)s]")
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument("--rate", type=float, default=5e-6)
    parser.add_argument("--warm-up", type=int, default=1000, help="steps [%(default)s]")
    parser.add_argument("--shard", type=shard, default=(0, 1), help="I/N: every N-th model [all]")
    parser.set_defaults(near="0,128")
    options = parsed(parser)
    items = toy_items() if options.quick else read_items(options.data)
    train_items, test_items = items["train"][: options.items], items["test"][: options.test_items]
    lengths = [48] if options.quick else [int(n) for n in options.lengths.split(",")]
    whole, tokenize = models.llama("tiny" if options.quick else options.model, torch.float32, options.device)
    if options.quick:
        options.rate, options.warm_up, options.batch = 3e-3, 1, 8
    rows = [learned(item, tokenize) for item in train_items]
    texts = models.bench_models().texts().values()
    pieces = (256 if options.quick else options.text) // len(texts) // max(lengths)
    each = max(1, pieces) * max(lengths)
    text = torch.tensor([token for text in texts for token in tokenize(text)[:each]], device=options.device)
    results = Results(options, ("method", "epochs", "seed", "length"), train_items=len(rows), rate=options.rate,
                      batch=options.batch, near=options.near, group_size=options.group_size)  # fmt: skip

    def loss_of(model, part):
        tokens, ends = padded([rows[number][0] for number in part], options.device)
        places = [(row, place) for row, (number, end) in enumerate(zip(part, ends))
                  for place in range(end - rows[number][1], end)]  # fmt: skip
        row, place = torch.tensor(places).to(options.device, non_blocking=True).T  # a mask would wait for the GPU
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[row, place - 1])  # of no other tokens: they would take most of the memory
        return F.cross_entropy(logits.float(), tokens[row, place]) + ETA * ksvd_loss(model)

    for seed in map(int, options.seeds.split(",")):

        def batches(epoch, seed=seed):
            """Of items of similar length, so that little is filled up."""
            random = torch.Generator().manual_seed(1000 * seed + epoch)
            many = torch.randperm(len(rows), generator=random).split(16 * options.batch)
            by_length = [torch.tensor(sorted(some.tolist(), key=lambda n: len(rows[n][0]))) for some in many]
            parts = [part for some in by_length for part in some.split(options.batch)]
            order = torch.randperm(len(parts), generator=random).tolist()
            return len(parts), (parts[number].tolist() for number in order)

        def rate(epoch):
            return options.rate * min(1, epoch * len(rows) / options.batch / options.warm_up)

        for method in options.methods:
            for epochs in [int(n) for n in options.epochs.split(",")]:
                row = {"method": label(method, options.device), "epochs": epochs, "seed": seed}
                wanted = [n for n in lengths if results.wants(**row, length=n)]
                if not wanted or epochs == 0 and seed > 0 and method in ("standard", "flash2", "exact"):
                    continue
                if not results.takes_turn():
                    continue
                torch.manual_seed(seed)
                model = copy.deepcopy(whole)
                swap(model, chosen(options, method, seed=seed))
                losses = train(model, epochs, batches, loss_of, rate, device=options.device,
                               dtype=DTYPES[options.dtype], log=lambda text: None,
                               optimizer=torch.optim.Adam(model.parameters(), options.rate))  # fmt: skip
                for n, found in answer_items(model, tokenize, test_items, wanted, options).items():
                    found["perplexity"] = perplexity(model, text, n, options)
                    results.add(row | {"length": n} | found | {"losses": [round(loss, 4) for loss in losses]})


if __name__ == "__main__":
    main()
