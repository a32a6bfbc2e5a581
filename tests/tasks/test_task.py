"""What holds for every task: its settings survive the folder, it refuses a score it does not have, and it has one
prediction per input, in order, whatever the size of the chunks."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from everybert.errors import EverybertError
from everybert.model.heads import Network
from everybert.tasks import TASKS

HEAD = ("Model",)
TEXTS = ["a good film", "an awful song .", "john likes a poor cat", "mary sees the great dog in paris"]
ROWS = {
    "classify": [(text, label) for text, label in zip(TEXTS, "abab")],
    "regress": [(text, number) for text, number in zip(TEXTS, (0.5, 1.5, 2.0, 3.0))],
    "tag": [(text.split(), ["O"] * (len(text.split()) - 1) + ["B-X"]) for text in TEXTS],
    "answer": [
        {"question": "who ?", "context": text, "answers": {"text": [text.split()[0]], "answer_start": [0]}}
        for text in TEXTS
    ],
    "choose": [{"prompt": text, "choices": ["good", "bad", "awful"], "label": i % 3} for i, text in enumerate(TEXTS)],
    "embed": list(pairwise(TEXTS)),
    "rank": [("who ?", text, i % 2) for i, text in enumerate(TEXTS)],
}


def fitted(name, config):
    examples = TASKS[name].read(ROWS[name])
    return TASKS[name].from_examples(examples, config), examples


def test_every_task_is_tried():
    assert set(ROWS) == set(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_settings_survive_the_folder(name, bert):
    task, _ = fitted(name, bert[0].config)
    assert type(task).from_state(json.loads(json.dumps(task.state())), bert[0].config) == task


@pytest.mark.parametrize("name", TASKS)
def test_an_unknown_score_is_refused_with_the_known_ones(name, bert):
    examples = TASKS[name].read(ROWS[name])
    with pytest.raises(EverybertError, match=rf"{name} is judged by one of {TASKS[name].metrics[0]}.*not 'luck'"):
        TASKS[name].from_examples(examples, bert[0].config, metric="luck")


@pytest.mark.parametrize("name", [name for name in TASKS if TASKS[name].head])
def test_one_prediction_per_input_whatever_the_chunk(name, bert, monkeypatch):
    loaded, tokenizer, _ = bert
    task, examples = fitted(name, loaded.config)
    torch.manual_seed(0)
    network = Network(loaded.config, {task.head: task.outputs}).eval()
    network.encoder.load_state_dict(loaded.network.encoder.state_dict())
    whole = list(task.predict(network, tokenizer, examples.inputs))
    features = task.features(tokenizer, loaded.config, examples)
    assert len(whole) == len(examples.inputs) and set(task.score(network, features, examples)) >= {task.metrics[0]}
    monkeypatch.setattr(type(task), "chunk", 3)
    for a, b in zip(whole, list(task.predict(network, tokenizer, examples.inputs)), strict=True):
        columns = [task.as_columns(prediction, scores=True) for prediction in (a, b)]
        assert columns[0].keys() == columns[1].keys()
        for one, other in zip(columns[0].values(), columns[1].values()):
            assert one == (pytest.approx(other, abs=2e-5) if isinstance(other, float | np.floating) else other)
