# SPDX-License-Identifier: Apache-2.0
"""The problems of Table 7: how they are made, learned and scored."""

import importlib
import sys
import types

import pytest
import torch
from test_experiments import command

from shared import data, evaluate, models  # found since test_experiments names their folder


def test_problems_have_four_words_to_choose_from(tmp_path, monkeypatch):
    """Those that the question holds, where it holds the answer."""
    entries = {
        "needle_haystack": ("Ann likes tea. Jean-Luc bears rain. Bo'ba has it. Cy runs. Who runs? Reply.", "Cy"),
        "color_cube_rotation": ("- a red top side\n- an indigo left side\n- a blue back side\n- a gray side\n", "gray"),
        "family_relationships": ("Who is Ann to Bo?", "aunt"),
    }
    relations = ["aunt", "uncle", "niece", "son", "aunt", "aunt", "aunt", "aunt"]

    def create_dataset(task, size, seed, **options):
        question, answer = entries[task]
        answers = [relations[n % len(relations)] if task == "family_relationships" else answer for n in range(size)]
        return [{"question": question, "answer": answer} for answer in answers]

    monkeypatch.setitem(sys.modules, "reasoning_gym", types.SimpleNamespace(create_dataset=create_dataset))
    command("fetch").make_items(tmp_path, 40, 30)
    found = data.read_items(tmp_path)
    assert len(found["train"]) == 40 and len(found["test"]) == 30
    for item in found["train"] + found["test"]:
        assert len(set(item["choices"])) == 4 and item["open"]
        if item["task"] == "needle_haystack":
            assert set(item["choices"]) < {"Ann", "Jean-Luc", "Bo'ba", "Cy", "Who"}
        if item["task"] != "family_relationships":
            assert item["choices"][item["answer"]] == entries[item["task"]][1]


@pytest.mark.parametrize("length", [500, 30])
def test_answers_are_chosen_by_the_probability_of_all_their_tokens(length):
    model, tokenize = models.llama("tiny", torch.float32, "cpu")
    items = [{"question": "Who?", "choices": ["Ann", "Beth", "C", "Dora"], "answer": 2, "open": is_open}
             for is_open in (True, False)]  # fmt: skip
    losses, hits = [], []
    for item in items:
        prompt, answers = evaluate.item_text(item)
        scores = []
        for answer in map(tokenize, answers):
            context = (tokenize(prompt) + answer[:-1])[-length:]
            logits = model(torch.tensor([context])).logits[0, -len(answer) :].log_softmax(1)
            scores.append(sum(row[token] for row, token in zip(logits, answer)))
        losses.append(torch.nn.functional.cross_entropy(torch.stack(scores), torch.tensor(2)).item())
        hits.append(max(range(4), key=scores.__getitem__) == 2)
    options = types.SimpleNamespace(device="cpu")
    found = evaluate.answer_items(model, tokenize, items, [length, 40], options)[length]
    assert found["choice_loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)
    assert found["accuracy"] == 50 * sum(hits) and found["items"] == 2


def test_the_answer_alone_is_learned_where_choices_are_not_shown():
    table7 = importlib.import_module("table7")
    item = {"question": "Who?", "choices": ["Ann", "Beth"], "answer": 1}
    tokens, count = table7.learned(item | {"open": True}, list)
    assert "".join(tokens) == "Who?\nAnswer: Beth" and "".join(tokens[-count:]) == " Beth"
    tokens, count = table7.learned(item, list)
    assert "".join(tokens).endswith("B. Beth\nAnswer: B") and count == len(tokens) - 1
    assert table7.learned({"question": "1+1?", "text": "2"}, list, longest=3) == (["?", "\n", "2"], 2)
