"""Head probes against a plain reading of their definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from everybert.inside import probes as heads

# word, head, relation; the words of the last one are cut into pieces
TREES = [
    [
        ("the", 2, "det"),
        ("cat", 3, "nsubj"),
        ("sees", 0, "root"),
        ("a", 6, "det"),
        ("red", 6, "amod"),
        ("dog", 3, "obj"),
    ],
    [("mary", 2, "nsubj"), ("eats", 0, "root"), ("the", 4, "det"), ("food", 2, "obj")],
    [("doging", 2, "amod"), ("cats", 3, "nsubj"), ("sees", 0, "root"), ("filmer", 3, "obj"), (".", 3, "punct")],
]


def trees():
    return [[{"form": f, "head": str(h), "deprel": r} for f, h, r in tree] for tree in TREES]


def naive(model):
    """For each relation, direction, layer and head: how many words are right. Straight from the definition."""
    right: dict = {}
    for tree in trees():
        forms = [w["form"] for w in tree]
        found = model.attention(" ".join(forms))
        ends = np.cumsum([len(f) + 1 for f in forms])
        owner = [
            None if t is None else int(np.searchsorted(ends, a, side="right"))
            for (a, _), t in zip(found.offsets, found.texts)
        ]
        for layer, head in np.ndindex(found.weights.shape[:2]):
            weights = found.weights[layer, head]

            def best(word, weights=weights, owner=owner, forms=forms):
                total = {}
                for other in range(len(forms)):
                    if other != word:
                        rows = [i for i, o in enumerate(owner) if o == word]
                        columns = [j for j, o in enumerate(owner) if o == other]
                        total[other] = np.mean([weights[i, columns].sum() for i in rows])
                return max(total, key=total.get)

            for child, word in enumerate(tree):
                parent = int(word["head"]) - 1
                if parent < 0:
                    continue
                for key in ("all", word["deprel"]):
                    counts = right.setdefault(key, np.zeros((2, *found.weights.shape[:2])))
                    counts[0, layer, head] += best(child) == parent
                    counts[1, layer, head] += best(parent) == child
    return right


def test_accuracies_are_those_of_the_definition(words):
    found = heads.probe_heads(words.network, words.tokenizer, trees())
    expected = naive(words)
    assert found.sentences == 3 and found.words == 15 and found.skipped == 0
    assert set(found.relations) == set(expected)
    for name, relation in found.relations.items():
        assert np.allclose(relation.right * relation.count, expected[name])
    assert found.relations["all"].count == 12
    det = found.relations["det"]
    assert (det.count, det.offset, det.baseline) == (3, 1, pytest.approx(2 / 3))
    obj = found.relations["obj"]
    assert (obj.offset, obj.baseline) == (-3, pytest.approx(1 / 3)) or obj.baseline == pytest.approx(1 / 3)
    assert det.accuracy == det.right.max() == det.right[int(det.direction == "from its head"), det.layer, det.head]
    assert det.published == 94.3


def test_batches_do_not_change_the_outcome(words, monkeypatch):
    one = heads.probe_heads(words.network, words.tokenizer, trees())
    monkeypatch.setattr(heads, "CHUNK", 1)
    told = []
    other = heads.probe_heads(words.network, words.tokenizer, trees(), told.append)
    assert told == [1, 2, 3]
    assert all(np.allclose(one.relations[n].right, other.relations[n].right) for n in one.relations)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=6), st.integers(0, 99))
def test_strongest_is_the_best_other_word(pieces, seed):
    owner = np.array([-1, *np.repeat(np.arange(len(pieces)), pieces), -1])
    weights = np.random.default_rng(seed).random((2, len(owner), len(owner))).astype(np.float32)
    sentence = heads.Sentence(None, owner, np.ones(len(pieces), dtype=bool))
    found = heads.strongest(weights, sentence)
    for head in range(2):
        for word in range(len(pieces)):
            score = [
                weights[head][owner == word][:, owner == other].sum(1).mean() if other != word else -1
                for other in range(len(pieces))
            ]
            assert score[found[head, word]] == pytest.approx(max(score), rel=1e-4)


def test_long_sentences_are_counted_not_cut(words):
    long = [{"form": "cat", "head": "2", "deprel": "x"}] * 80
    found = heads.probe_heads(words.network, words.tokenizer, [*trees(), long])
    assert (found.sentences, found.skipped) == (3, 1)


def test_bad_trees_are_one_line(words):
    for head, why in (
        ("0", "no sentence has a word with a syntactic head"),
        ("_", "the word 'cat' has the head '_', which is no number"),
    ):
        refuses(
            why, heads.probe_heads, words.network, words.tokenizer, [[{"form": "cat", "head": head, "deprel": "x"}]]
        )
