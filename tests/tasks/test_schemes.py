"""Entities are seqeval's and conlleval's; decoding is the best path a brute-force search finds."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics import classification_report
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import IOB2, IOBES

from everybert.errors import EverybertError
from everybert.tasks import schemes
from everybert.tasks.schemes import Entity

pytestmark = pytest.mark.filterwarnings("ignore")

BIO = ["O", "B-A", "I-A", "B-B", "I-B"]
BIOES = [*BIO, "E-A", "S-A", "E-B", "S-B"]


def corpora(labels):
    sentence = st.integers(1, 8).flatmap(
        lambda n: st.tuples(*[st.lists(st.sampled_from(labels), min_size=n, max_size=n)] * 2)
    )
    return st.lists(sentence, min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([BIO, BIOES]).flatmap(lambda labels: st.lists(st.sampled_from(labels), max_size=10)))
def test_lenient_entities_are_seqevals(tags):
    assert [(e.label, e.start, e.stop - 1) for e in schemes.entities(tags)] == get_entities(tags)


def report(pairs, **how):
    gold, guess = [list(side) for side in zip(*pairs)]
    theirs = classification_report(gold, guess, output_dict=True, zero_division=0, **how)
    return gold, guess, theirs


@pytest.mark.parametrize("labels, scheme, theirs", [(BIO, "BIO", IOB2), (BIOES, "BIOES", IOBES)])
@pytest.mark.parametrize("strict", [False, True])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_scores_equal_seqeval(labels, scheme, theirs, strict, data):
    pairs = data.draw(corpora(labels))
    gold, guess, expected = report(pairs, **({"mode": "strict", "scheme": theirs} if strict else {}))
    ours = schemes.entity_scores(gold, guess, scheme if strict else None)
    if "micro avg" in expected:
        micro = expected["micro avg"]
        assert ours["precision"] == pytest.approx(micro["precision"])
        assert ours["recall"] == pytest.approx(micro["recall"])
        assert ours["f1"] == pytest.approx(micro["f1-score"])
    for label in "AB":
        if label in expected:
            assert ours[f"f1/{label}"] == pytest.approx(expected[label]["f1-score"])


def test_conlleval_by_hand():
    # conlleval's own rule: I-LOC after O begins an entity; I-PER after B-LOC too.
    tags = ["I-LOC", "O", "B-LOC", "I-PER", "I-PER", "B-PER"]
    assert schemes.entities(tags) == [
        Entity("LOC", 0, 1),
        Entity("LOC", 2, 3),
        Entity("PER", 3, 5),
        Entity("PER", 5, 6),
    ]
    scores = schemes.entity_scores([tags], [["I-LOC", "O", "O", "I-PER", "I-PER", "I-PER"]])
    assert (scores["precision"], scores["recall"]) == (0.5, 0.25)
    assert scores["accuracy"] == pytest.approx(4 / 6)


def test_find_scheme():
    assert schemes.find_scheme([["I-A", "I-A", "B-A", "O"]]) == "IOB1"
    assert schemes.find_scheme([["B-A", "I-A", "O", "B-A"]]) == "BIO"
    assert schemes.find_scheme([["B-A", "E-A", "O", "S-A"]]) == "BIOES"
    assert schemes.find_scheme([["U-A", "O"]]) == "BIOES"
    assert schemes.find_scheme([["NOUN", "X", "O"]]) == "plain"
    assert schemes.find_scheme([["O", "O"]]) == "plain"


def test_iob1_becomes_bio():
    assert schemes.convert(["I-A", "I-A", "B-A", "I-B", "O"], "BIO") == ["B-A", "I-A", "B-A", "B-B", "O"]
    assert schemes.convert(["B-A", "I-A", "L-A", "U-B"], "BIOES") == ["B-A", "I-A", "E-A", "S-B"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(BIOES), max_size=12), st.sampled_from(["BIO", "BIOES"]))
def test_conversion_keeps_the_entities_and_is_well_formed(tags, scheme):
    once = schemes.convert(tags, scheme)
    assert schemes.entities(once) == schemes.entities(tags)
    assert schemes.strict_entities(once, scheme) == schemes.entities(tags)
    assert schemes.convert(once, scheme) == once


def test_overlapping_entities_are_refused():
    with pytest.raises(EverybertError, match="overlaps"):
        schemes.write_tags([Entity("A", 0, 2), Entity("B", 1, 3)], 4)


@pytest.mark.parametrize("labels", [BIO, BIOES])
@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_viterbi_is_the_best_allowed_path(labels, n, seed):
    scores = np.random.default_rng(seed).normal(size=(n, len(labels)))
    scheme = "BIOES" if labels is BIOES else "BIO"

    def allowed(path):
        tags = [labels[i] for i in path]
        return schemes.convert(tags, scheme) == tags

    best = max(
        (p for p in itertools.product(range(len(labels)), repeat=n) if allowed(p)),
        key=lambda p: sum(scores[i, c] for i, c in enumerate(p)),
    )
    assert tuple(schemes.viterbi(scores, labels)) == best


def test_viterbi_of_nothing_and_of_the_impossible():
    assert len(schemes.viterbi(np.zeros((0, 3)), ["O", "B-A", "I-A"])) == 0
    assert list(schemes.viterbi(np.zeros((1, 1)), ["I-A"])) == [0]
