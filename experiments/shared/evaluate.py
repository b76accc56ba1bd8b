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
    """(the prompt, the four answers) of an item of four choices."""
    lines = [item["question"], *(f"{letter}. {choice}" for letter, choice in zip("ABCD", item["choices"]))]
    return "\n".join(lines) + "\nAnswer:", [f" {letter}" for letter in "ABCD"]


def padded(rows, device):
    """(tokens [B, N], where each row ends [B]) of lists of numbers, filled up behind with 0. A causal model needs no
    mask for that."""
    ends = torch.tensor([len(row) for row in rows], device=device)
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return tokens.to(device), ends


@torch.no_grad()
def answer_items(model, tokenize, items, length, options, batch=16):
    """Chooses the likeliest letter after each prompt, whose beginning is cut off beyond `length` tokens:
    {"accuracy": in %, "letter_loss": the mean of -ln P(right letter), of P over the four, "items"}."""
    letters = [tokenize(letter)[-1] for letter in item_text({"question": "", "choices": []})[1]]
    losses, hits = [], []
    for at in range(0, len(items), batch):
        part = items[at : at + batch]
        tokens, ends = padded([tokenize(item_text(item)[0])[-length:] for item in part], options.device)
        wanted = torch.tensor([item["answer"] for item in part], device=options.device)
        with precision(options):
            hidden = model.model(tokens, use_cache=False).last_hidden_state
            last = hidden[torch.arange(len(part), device=ends.device), ends - 1]
            logits = model.lm_head(last)[:, letters].float()
        losses.append(F.cross_entropy(logits, wanted, reduction="none"))
        hits.append(logits.argmax(1) == wanted)
    accuracy = 100 * torch.cat(hits).float().mean().item()
    return {"accuracy": accuracy, "letter_loss": torch.cat(losses).mean().item(), "items": len(items)}


@torch.no_grad()
def perplexity(model, tokens, length, options):
    """exp of the mean cross entropy over pieces of `length` tokens of a text [N]."""
    losses = []
    for piece in tokens[: len(tokens) // length * length].view(-1, length):
        with precision(options):
            logits = model(piece[None], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits[:-1].float(), piece[1:]))
    return torch.stack(losses).mean().exp().item()
