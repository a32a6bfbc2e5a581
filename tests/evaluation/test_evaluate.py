"""evaluate: the scores of a folder are those of its predictions."""

import numpy as np
import pytest
import tiny_model

import everybert
from everybert.evaluation.evaluate import evaluate

ROWS = [("the film was good", "pos"), ("the food was bad", "neg"), ("a great song", "pos"), ("an awful day", "neg")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return everybert.load(tiny_model.save(tmp_path_factory.mktemp("m") / "m", {"classify": 2}, ["neg", "pos"]))


def test_accuracy_and_confusion_are_those_of_the_predictions(model):
    found = evaluate("classify", model, ROWS)
    guess = [p.label for p in model.classify([text for text, _ in ROWS])]
    assert found.scores["accuracy"] == pytest.approx(np.mean([g == gold for g, (_, gold) in zip(guess, ROWS)]))
    assert found.confusion.sum() == found.examples == 4
    assert found.confusion[1, 1] == sum(g == gold == "pos" for g, (_, gold) in zip(guess, ROWS))
    rows = found.each_label()
    assert [r["label"] for r in rows] == ["neg", "pos"] and [r["examples"] for r in rows] == [2, 2]


def test_tags_and_numbers(tmp_path):
    tagger = everybert.load(tiny_model.save(tmp_path / "t", {"tag": 3}, ["O", "B-X", "I-X"]))
    found = evaluate("tag", tagger, [(["john", "lives"], ["B-X", "O"]), (["the", "dog"], ["O", "O"])])
    assert {"precision", "recall", "f1", "accuracy"} <= set(found.scores) and found.metric == "f1"
    regressor = everybert.load(tiny_model.save(tmp_path / "r", {"classify": 1}, problem_type="regression"))
    found = evaluate("regress", regressor, [("the film", 1.0), ("the song", 2.5), ("a day", 0.5)])
    assert found.metric == "spearman" and found.confusion is None
