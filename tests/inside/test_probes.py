"""Head probes against a plain reading of their definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from everybert.errors import EverybertError
from everybert.inside import probes as heads
from everybert.text.readers import read_conllu

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
    assert det.published == 0.943, "a share, as the accuracy beside it"


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


# ── coreference ──

# form, head, entity marks
DOCUMENT = [
    [("mary", 2, "(e1-person)"), ("sees", 0, ""), ("a", 5, "(e2-animal"), ("red", 5, ""), ("dog", 2, "e2)"),
     (".", 2, "")],
    [("the", 2, "(e2-animal"), ("dog", 3, "e2)"), ("eats", 0, ""), ("food", 3, "(e3)"), (".", 3, "")],
    [("she", 2, "(e1-person)"), ("sees", 0, ""), ("the", 4, "(e3[1/2]-food"), ("food", 2, "e3[1/2])"),
     (".", 2, "(e3[2/2])")],
]  # fmt: skip
ASKED = ((7, [0, 4], 4), (11, [0, 4, 7, 9], 0), (14, [0, 4, 7, 9, 11], 9))
"""dog, she and food: the place of each in the document, of the mentions before, and of the antecedent."""


def conllu(sentences, name="a") -> str:
    rows = [f"# newdoc id = {name}", "# text = _"]
    for words in sentences:
        for i, (form, head, marks) in enumerate(words, 1):
            misc = f"SpaceAfter=No|Entity={marks}|Bridge=_" if marks else "_"
            rows.append("\t".join([str(i), form, "_", "_", "_", "_", str(head), "dep", "_", misc]))
        rows.append("")
    return "\n".join(rows) + "\n"


def coreference(model, tmp_path, text):
    (tmp_path / "a.conllu").write_text(text)
    return heads.probe_coref(model.network, model.tokenizer, read_conllu(tmp_path / "a.conllu"))


def test_coreference_of_every_head_and_of_the_baselines(words, tmp_path):
    found = coreference(words, tmp_path, conllu(DOCUMENT) + conllu(DOCUMENT, "b"))
    assert found["mentions"] == 6, "no antecedent in another document"
    # dog → dog is the nearest and the same word; she → mary neither; food → food the same word
    assert found["nearest"] == pytest.approx(1 / 3) and found["head_match"] == pytest.approx(2 / 3)
    forms = [word[0] for sentence in DOCUMENT for word in sentence]
    attention = words.attention(" ".join(forms))
    assert attention.tokens[1:-1] == forms, "a token per word"
    weights = attention.weights[:, :, 1:-1, 1:-1]
    right = [weights[:, :, at, before].argmax(-1) == before.index(antecedent) for at, before, antecedent in ASKED]
    assert np.allclose(found["right"], np.mean(right, axis=0))
    assert found["right"][found["layer"]][found["head"]] == found["accuracy"] == np.max(found["right"])


def test_a_planted_head_finds_all_antecedents(words, tmp_path, monkeypatch):
    """One head attends to the word with the same form, else to the first: it finds dog, mary and food."""
    forms = [word[0] for sentence in DOCUMENT for word in sentence]

    def planted(network, encoding):
        weights = np.zeros((2, 2, len(forms) + 2, len(forms) + 2), np.float32)
        weights[1, 0, :, 1] = 0.1
        for i, form in enumerate(forms):
            weights[1, 0, i + 1, 1:-1] += [form == other for other in forms]
        return type("Attention", (), {"weights": weights})

    monkeypatch.setattr(heads, "read_attention", planted)
    found = coreference(words, tmp_path, conllu(DOCUMENT))
    assert (found["layer"], found["head"], found["accuracy"]) == (1, 0, 1.0)
    assert found["right"][0][0] == pytest.approx(1 / 3), "a head without a choice takes the first"


def test_texts_are_whole_sentences_that_fit(words, tmp_path):
    many = [sentence for _ in range(6) for sentence in DOCUMENT]  # of a document that is longer than the window
    assert coreference(words, tmp_path, conllu(many))["mentions"] > 18, "more antecedents: the mentions repeat"
    long = [[("cat", 0, "(e1)")] + [("the", 1, "")] * 80]
    found = coreference(words, tmp_path, conllu(DOCUMENT) + conllu(long, "b"))
    assert (found["mentions"], found["skipped"]) == (3, 1), "a sentence that is too long is counted, not read"


def test_a_file_without_coreference_is_refused(words, tmp_path):
    with pytest.raises(EverybertError, match="no mention has an antecedent; give CoNLL-U with coreference, Entity="):
        coreference(words, tmp_path, conllu([[("the", 2, ""), ("cat", 0, "")]]))
    with pytest.raises(EverybertError, match="2 columns, 10 expected"):
        coreference(words, tmp_path, "1 the\n\n")
