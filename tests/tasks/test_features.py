"""Sequences and batches: nothing is lost in windows, fillers change nothing, training combines as prediction does."""

import numpy as np
import pytest
import tiny_bert as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.tasks import Classify
from everybert.tasks import features as ft
from everybert.text.windows import WindowConfig

HEAD = ("ForSequenceClassification", 0, ["a", "b", "c"])


def test_cut_says_how_much(bert):
    network, tokenizer = bert[0].network, bert[1]
    texts = ["good " * 10, ("good " * 50, "bad " * 60)]
    made = ft.text_features(tokenizer, network.config, texts, WindowConfig(32, 8, "cut"))
    assert made.cut == [0, 110 - 29]
    assert made.lengths_S.tolist() == [12, 32]
    whole = ft.text_features(tokenizer, network.config, texts, WindowConfig(32, 8))
    assert whole.cut == [0, 0] and len(whole.lengths_S) > 2


def texts(seed, count=9):
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(tiny.WORDS, draw.integers(1, 150))) for _ in range(count)]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), fill=st.sampled_from([None, 16, 64]))
def test_training_combines_windows_as_prediction_does(bert, seed, fill):
    network, tokenizer = bert[0].network, bert[1]
    task = Classify(window=WindowConfig(40, 8), labels=("a", "b", "c"))
    made = task.encode(tokenizer, network.config, texts(seed))
    made = made.with_targets(label_E=np.arange(len(made)))
    ragged = ft.make_batch(made, np.array([5, 0, 3, 8]), fill=fill)
    with torch.no_grad():
        trained = ragged.targets.combine(task.logits(network, ragged))
    predicted = made.combine(task.run(network, made, 100))
    np.testing.assert_allclose(trained.numpy(), predicted[ragged.targets.label_E.numpy()], atol=2e-5)
    if fill:
        assert len(ragged.tokens_T) % fill == 0


def test_prediction_is_the_same_in_any_batch(bert):
    network, tokenizer = bert[0].network, bert[1]
    task = Classify(window=WindowConfig(64, 16), labels=("a", "b", "c"))
    made = task.encode(tokenizer, network.config, texts(3, 20))
    one, many = (made.combine(task.run(network, made, budget)) for budget in (1, 4096))
    np.testing.assert_allclose(one, many, atol=1e-5)


def test_a_training_batch_takes_a_few_windows_of_a_very_long_text(bert):
    network, tokenizer = bert[0].network, bert[1]
    made = ft.text_features(tokenizer, network.config, ["good " * 3000, "bad"], WindowConfig(64, 16))
    ragged = ft.make_batch(made, np.array([0, 1]))
    assert ragged.targets.counts == (1, ft.MOST_WINDOWS)
    shares = torch.zeros(2).index_add(0, ragged.targets.example_B, ragged.targets.weight_B)
    assert shares.tolist() == pytest.approx([1, 1])


def test_labels_follow_their_examples_sequences_and_tokens(bert):
    network, tokenizer = bert[0].network, bert[1]
    made = ft.text_features(tokenizer, network.config, texts(5), WindowConfig(40, 8))
    sequences = len(made.lengths_S)
    tokens = [ids.astype(np.int64) for ids in made.ids]
    made = made.with_targets(label_E=np.arange(len(made)), start_B=np.arange(sequences), tag_T=tokens)
    ragged = ft.make_batch(made, np.array([4, 1, 7]), fill=64)
    real = ragged.targets.tag_T != -100
    assert (ragged.targets.tag_T[real] == ragged.tokens_T[real]).all()
    assert ragged.targets.start_B[-1] == -1
    owners = made.example_S[ragged.targets.start_B[:-1].numpy()]
    assert list(dict.fromkeys(owners)) == ragged.targets.label_E.tolist()
