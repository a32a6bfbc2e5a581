"""Layer probes (contrib/probe_layers.py) on what is known beforehand."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_model
from probe_layers import fit, probe_layers

from everybert.errors import EverybertError
from everybert.inference.model import load


@pytest.fixture
def words(tmp_path):
    tiny_model.save(tmp_path / "words", {"mlm": None}, seed=1)
    return load(tmp_path / "words", device="cpu")


def test_a_linear_probe_finds_what_is_there():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 8))
    y = (x @ rng.standard_normal((8, 3))).argmax(1)
    assert fit(x[:300], y[:300], x[300:], y[300:]) > 0.93
    noise = rng.integers(0, 3, 400)
    assert fit(x[:300], noise[:300], x[300:], noise[300:]) < 0.5


def test_layers_know_words_where_they_enter(words):
    """A label that is the word itself is read off the embeddings; one that stands elsewhere is not."""
    rng = np.random.default_rng(0)
    vocabulary = ["cat", "dog", "food", "song"]
    sentences = [list(rng.choice(vocabulary, 6)) for _ in range(120)]
    own = [list(s) for s in sentences]
    parts = [(sentences[:90], own[:90]), (sentences[90:], own[90:])]
    found = probe_layers(words.network, words.tokenizer, *parts)
    assert found.scores[0] == 1.0 and len(found.scores) == 3 and found.train == 540 and found.dev == 180
    assert found.majority < 0.5 and found.labels == sorted(vocabulary)
    hidden = [list(rng.permutation([*rng.choice(["cat", "dog"], 4), theme])) for theme in ["food", "song"] * 60]
    themes = [[theme] * 5 for theme in ["food", "song"] * 60]
    context = probe_layers(words.network, words.tokenizer, (hidden[:90], themes[:90]), (hidden[90:], themes[90:]))
    assert context.scores[0] < 0.7 < 0.9 < context.scores[1], "attention brings in what stands elsewhere"


def test_texts_are_probed_by_their_mean(words):
    texts = ["good food", "bad food"] * 40
    found = probe_layers(words.network, words.tokenizer, (texts, ["p", "n"] * 40), (texts, ["p", "n"] * 40), most=50)
    assert found.scores == [1.0, 1.0, 1.0] and found.train == 50
    with pytest.raises(EverybertError, match="fewer than two labels"):
        probe_layers(words.network, words.tokenizer, (texts, ["p"] * 80), (texts, ["p"] * 80))
