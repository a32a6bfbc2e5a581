"""Pseudo-log-likelihoods: equal to masking one token at a time by hand; the word variant masks what it should."""

import numpy as np
import pytest
import tiny_model

import everybert
from everybert.errors import EverybertError
from everybert.evaluation import likelihood
from everybert.evaluation.likelihood import likelihoods
from everybert.inference import model as inference

TEXTS = ["the cats was liked .", "john smith lives in paris", "a", "xyzzyq the dog", "the film was good and " * 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return everybert.load(tiny_model.save(tmp_path_factory.mktemp("m") / "m", {"mlm": None}, max_positions=24))


def test_token_variant_is_the_models_own_score(model):
    assert likelihoods(model, TEXTS) == pytest.approx([model.score(text).total for text in TEXTS], abs=1e-4)


def test_chunks_change_nothing(model, monkeypatch):
    whole = likelihoods(model, TEXTS)
    monkeypatch.setattr(likelihood, "CHUNK", 2)
    done = []
    assert likelihoods(model, TEXTS, progress=done.append) == pytest.approx(whole, abs=1e-4)
    assert done == [2, 4, 5]


def test_word_variant_masks_the_rest_of_the_word_to_the_right(model, monkeypatch):
    encoding = model.tokenizer.encode("the xyq dog")  # x ##y ##q: three pieces of one word
    assert encoding.words == [None, 0, 1, 1, 1, 2, None]
    calls = []
    monkeypatch.setattr(inference, "token_log_probs", lambda network, *rest: calls.append(rest) or [np.zeros(5)])
    likelihoods(model, ["the xyq dog"], "word")
    (((ids,), (positions,), mask, (ends,)),) = calls
    assert list(ids) == encoding.ids and mask == model.tokenizer.mask_id
    assert list(zip(positions, ends)) == [(1, 2), (2, 5), (3, 5), (4, 5), (5, 6)]


def test_variants_agree_where_every_word_is_one_piece(model):
    text = ["john smith lives in paris", "the film was good"]
    assert likelihoods(model, text, "word") == pytest.approx(likelihoods(model, text, "token"), abs=1e-5)
    split = ["the xyzzyq dog"]
    assert abs(likelihoods(model, split, "word") - likelihoods(model, split, "token"))[0] > 1e-3


def test_empty_texts_and_unknown_variants(model):
    assert likelihoods(model, [""]).tolist() == [0.0]
    assert len(likelihoods(model, [])) == 0
    with pytest.raises(EverybertError, match="token or word"):
        likelihoods(model, ["a"], "sentence")
    assert np.isfinite(likelihoods(model, ["\N{SNOWMAN} \N{SNOWMAN}"])).all()
