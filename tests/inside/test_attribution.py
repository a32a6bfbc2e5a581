"""Attributions add up, and say what they explain."""

import math

import numpy as np
import pytest
import tiny_model
from refusals import refuses

from everybert.inference.model import load
from everybert.inside.attribution import attribute

TEXT = "good food , bad song and awful film"
EXPLAINS = "attribution explains classify, regress, rank and answer"


@pytest.mark.parametrize("label", ["bad", "fine", "good"])
def test_integrated_gradients_sum_to_the_difference(labels, label):
    found = labels.attribution(TEXT, label=label)
    assert abs(found.value - found.baseline) > 1e-3, "otherwise the check below says nothing"
    assert found.scores.sum() == pytest.approx(found.value - found.baseline, abs=1e-3)
    assert abs(found.gap) < 1e-3
    p = labels.classify([TEXT])[0].scores[label]
    assert found.value == pytest.approx(math.log(p / (1 - p)), abs=1e-4)
    masked = " ".join(["[MASK]"] * 8)
    p = labels.classify([masked])[0].scores[label]
    assert found.baseline == pytest.approx(math.log(p / (1 - p)), abs=1e-4)


def test_a_pair_and_its_texts(labels):
    found = labels.attribution("good food", "bad song", label="good")
    assert [t for t, s in zip(found.tokens, found.texts) if s == 1] == ["bad", "song"]
    assert abs(found.gap) < 1e-3
    assert found.scores[0] == found.scores[-1] == 0, "special tokens are the same in the baseline"


def test_a_linear_function_is_attributed_exactly(labels):
    """If the target is doubled, so are the scores."""
    encoding = labels.tokenizer.encode(TEXT)
    once, *_ = attribute(labels.network, labels.tokenizer, encoding, "classify", lambda z: z[:, 0])
    twice, *_ = attribute(labels.network, labels.tokenizer, encoding, "classify", lambda z: 2 * z[:, 0])
    assert np.abs(2 * once - twice).max() < 1e-5


def test_answers_are_explained(qa):
    context = "john lives in paris and mary eats"
    found = qa.attribution("where does john lives ?", context)
    best = qa.answer("where does john lives ?", context)[0]
    assert best.text in found.target
    assert abs(found.gap) < 2e-3 and found.value < 0
    assert found.value > found.baseline - 50


def test_weights_keep_no_gradients(labels):
    labels.attribution(TEXT)
    assert all(p.grad is None for p in labels.network.parameters())


def test_mistakes_are_one_line(labels, qa, words):
    refuses("no label 'nice'; the model's labels are bad, fine, good", labels.attribution, TEXT, label="nice")
    refuses("pair=the context", qa.attribution, "where ?")
    refuses("no classify head", words.attribution, TEXT)
    refuses(f"{EXPLAINS}, not embed", labels.attribution, TEXT, task="embed")
    refuses("the model reads 64", labels.attribution, "good " * 100)


def test_a_model_is_explained_by_the_task_that_it_was_trained_for(tmp_path):
    """A tagger is no classifier without a head, and a reranker's output is explained as it is."""
    tiny_model.save(tmp_path / "tags", {"tag": 3}, ["O", "B-X", "I-X"])
    refuses(f"{EXPLAINS}, not tag", load(tmp_path / "tags", device="cpu").attribution, TEXT)
    extras = {"task": {"task": "rank", "window": {"size": 64, "overlap": 16, "long": "window"}}}
    tiny_model.save(tmp_path / "rank", {"classify": 1}, extras=extras)
    model = load(tmp_path / "rank", device="cpu")
    found = model.attribution("good food", "bad song")
    assert found.target == "the number predicted, as the head gives it"
    assert found.value == pytest.approx(next(model.predict("rank", [("good food", "bad song")])), abs=1e-5)
