# SPDX-License-Identifier: Apache-2.0
"""Accuracies of models on test sets, and the time that a model takes for the whole set."""

import contextlib
import time

import torch
import torch.nn.functional as F

MASK = "[MASK]"


def precision(options):
    """The block in which a model of float32 weights runs in the options' dtype on a GPU."""
    if not options.device.startswith("cuda"):
        return contextlib.nullcontext()
    return torch.autocast("cuda", getattr(torch, options.dtype))


@torch.no_grad()
def classify(model, images, batch, options, items=None):
    """{"top1", "top5": in %, "items", "seconds": of the model alone, without what makes the images}, and the logits of
    the first batch."""
    hits, total, seconds, first = torch.zeros(2), 0, 0.0, None
    _, batches = images.batches("test", batch, items=items)
    for x, labels in batches:
        if first is None:  # the first call of a method is slow: it is not counted
            with precision(options):
                first = model(x).float()
        with precision(options):
            logits, lasted = timed(lambda x=x: model(x), options)
        best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        hits += torch.tensor([best[:, 0].sum().item(), best.any(1).sum().item()])
        total, seconds = total + len(labels), seconds + lasted
    top1, top5 = (100 * hits / total).tolist()
    return {"top1": top1, "top5": top5, "items": total, "seconds": seconds}, first


def timed(function, options):
    """(what it returns, seconds)."""
    if options.device.startswith("cuda"):
        torch.cuda.synchronize()
    begin = time.perf_counter()
    found = function()
    if options.device.startswith("cuda"):
        torch.cuda.synchronize()
    return found, time.perf_counter() - begin


def relative_error(x, exact):
    """||x - exact|| / ||exact||."""
    return ((x - exact).norm() / exact.norm()).item()


@torch.no_grad()
def guess_residues(model, tokenize, sequences, options):
    """Guesses every seventh residue, all masked at once, of sequences that are run by themselves, without padding:
    {"accuracy": in %, "items": residues, "seconds"}, and the logits of the first sequence."""
    hits, total, seconds, first = 0, 0, 0.0, None
    for sequence in sequences:
        places = torch.arange(3, len(sequence) + 1, 7)
        masked = list(sequence)
        for place in places.tolist():
            masked[place - 1] = MASK
        wanted, x = (torch.tensor([tokenize(of)], device=options.device) for of in (list(sequence), masked))
        if first is None:
            with precision(options):
                first = model(x).logits.float()
        with precision(options):
            out, lasted = timed(lambda x=x: model(x), options)
        hits += (out.logits[0, places].argmax(-1) == wanted[0, places]).sum().item()
        total, seconds = total + len(places), seconds + lasted
    return {"accuracy": 100 * hits / total, "items": total, "seconds": seconds}, first


NUMBERS = "zero one two three four five six seven eight nine ten".split()


def words_of(text):
    """Lower-case words without punctuation, numbers up to ten in letters."""
    plain = "".join(letter if letter.isalnum() else " " for letter in text.lower().replace("mr.", "mister"))
    return [NUMBERS[int(word)] if word.isdigit() and int(word) <= 10 else word for word in plain.split()]


def edits(said, heard):
    """The fewest words to replace, to leave out and to put in between two lists of words."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (word != other))
    return row[-1]


@torch.no_grad()
def transcribe(model, to_text, features, texts, prompt, options, most=80):
    """Greedy transcripts of mel features [1, 80, 3000] each: {"word_errors": in % of the words said, "items": words,
    "seconds": of the encoder alone}, and the encoder's output for the first."""
    wrong, total, seconds, first = 0, 0, 0.0, None
    for mel, text in zip(features, texts):
        if first is None:
            with precision(options):
                first = model.get_encoder()(mel).last_hidden_state.float()
        with precision(options):
            encoded, lasted = timed(lambda mel=mel: model.get_encoder()(mel), options)
            tokens = torch.tensor([prompt], device=options.device)
            cache = None
            while tokens.shape[1] < most:
                step = tokens if cache is None else tokens[:, -1:]
                out = model(encoder_outputs=encoded, decoder_input_ids=step, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                tokens = torch.cat((tokens, out.logits[:, -1:].argmax(-1)), 1)
                if tokens[0, -1] == model.config.eos_token_id:
                    break
        said = words_of(text)
        heard = words_of(to_text(tokens[0, len(prompt) :].tolist()))
        wrong, total, seconds = wrong + edits(said, heard), total + len(said), seconds + lasted
    return {"word_errors": 100 * wrong / total, "items": total, "seconds": seconds}, first


def item_text(item):
    """(the prompt, what the four answers begin with) of an item of four choices: letters of those that the prompt
    shows, or where the item is "open" the answers themselves, which it does not."""
    if item.get("open"):
        return f"{item['question']}\nAnswer:", [f" {choice}" for choice in item["choices"]]
    lines = [item["question"], *(f"{letter}. {choice}" for letter, choice in zip("ABCD", item["choices"]))]
    return "\n".join(lines) + "\nAnswer:", [f" {letter}" for letter in "ABCD"]


def continued(tokenize, text):
    """The tokens of a text that continues another one: without what begins every text."""
    return tokenize(text)[len(tokenize("")) :]


def padded(rows, device):
    """(tokens [B, N], where each row ends) of lists of numbers, filled up behind with 0, which a causal model needs no
    mask for."""
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return tokens.to(device, non_blocking=True), [len(row) for row in rows]


@torch.no_grad()
def answer_items(model, tokenize, items, lengths, options, batch=32):
    """Chooses the likeliest answer after each prompt, whose beginning is cut off where both have more than so many
    tokens: for each of the lengths {"accuracy": in %, "choice_loss": the mean of -ln P(right answer), of P over the
    four, "items"}. What the lengths have in common is read once."""
    contexts = {}  # of what is read: [(length, item, choice, the tokens of the answer)]
    for n, item in enumerate(items):
        prompt, answers = item_text(item)
        begin = tokenize(prompt)
        for choice, answer in enumerate(continued(tokenize, answer) for answer in answers):
            for length in lengths:
                read = tuple((begin + answer[:-1])[-length:])
                contexts.setdefault(read, []).append((length, n, choice, answer))
    scores, rows = {length: torch.zeros(len(items), 4) for length in lengths}, sorted(contexts, key=len)
    for at in range(0, len(rows), batch):
        part = rows[at : at + batch]
        tokens, ends = padded(part, options.device)
        most = [max(len(answer) for *_, answer in contexts[row]) for row in part]  # logits of no other tokens
        places = [(row, place) for row, end in enumerate(ends) for place in range(end - most[row], end)]
        with precision(options):
            hidden = model.model(tokens, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[tuple(torch.tensor(places).T)])
        logits = logits.float().log_softmax(-1).cpu().split(most)
        for of_row, row in zip(logits, part):
            for length, n, choice, answer in contexts[row]:
                wanted = torch.tensor(answer)[:, None]
                scores[length][n, choice] = of_row[-len(answer) :].gather(1, wanted).sum()
    wanted = torch.tensor([item["answer"] for item in items])
    return {length: {"accuracy": 100 * (of.argmax(1) == wanted).float().mean().item(),
                     "choice_loss": F.cross_entropy(of, wanted).item(), "items": len(items)}
            for length, of in scores.items()}  # fmt: skip


@torch.no_grad()
def perplexity(model, tokens, length, options, batch=16):
    """exp of the mean cross entropy over pieces of `length` tokens of a text [N]."""
    losses = []
    for pieces in tokens[: len(tokens) // length * length].view(-1, length).split(batch):
        with precision(options):
            logits = model(pieces, use_cache=False).logits
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), pieces[:, 1:].flatten(), reduction="none"))
    return torch.cat(losses).mean().exp().item()
