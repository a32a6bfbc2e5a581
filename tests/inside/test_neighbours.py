"""One word in several texts."""

import numpy as np
import pytest
from refusals import refuses

from everybert.inside.neighbours import _is_form

TEXTS = ["the red cat sees mary", "a cat eats the red song and the dog"]


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_similarity_is_that_of_the_hidden_states(words):
    found = words.neighbours("red", TEXTS)
    assert found.levels == ["static", "embeddings", "layer 1", "layer 2"]
    assert [o.text for o in found.occurrences] == [0, 1]
    assert found.similarity.shape == (4, 2, 2)
    assert found.similarity[0, 0, 1] == pytest.approx(1.0, abs=1e-6), "static: one vector for both"
    for layer in range(3):
        vectors = [words.tokens(text, layer=layer) for text in TEXTS]
        at = [v.vectors[v.tokens.index("red")] for v in vectors]
        assert found.similarity[layer + 1, 0, 1] == pytest.approx(cosine(*at), abs=1e-5)


def test_nearest_words_are_read_alone_at_the_same_layer(words):
    found = words.neighbours("cat", TEXTS, top=3)
    for level, near in enumerate(found.nearest):
        for k, text in enumerate(TEXTS):
            scores = [n.cosine for n in near[k]]
            assert scores == sorted(scores, reverse=True) and len(scores) == 3
            assert all(n.word != "cat" for n in near[k])
            if level:
                own = words.tokens(text, layer=level - 1)
                other = words.tokens(near[k][0].word, layer=level - 1)
                expected = cosine(own.vectors[own.tokens.index("cat")], other.vectors[1])
                assert scores[0] == pytest.approx(expected, abs=1e-5)


def test_words_of_several_pieces_and_several_times(words):
    found = words.neighbours("Doging", ["the doging dog", "doging, doging"])
    assert [(o.text, o.start, o.end) for o in found.occurrences] == [(0, 4, 10), (1, 0, 6), (1, 8, 14)]
    assert found.occurrences[0].tokens == ["dog", "##ing"]
    vectors = words.tokens("the doging dog", layer=2)
    assert found.similarity.shape == (4, 3, 3) and vectors.tokens[2:4] == ["dog", "##ing"]


def test_forms_of_the_word_are_left_out():
    assert all(_is_form(form, "bank") for form in ("bank", "banks", "banking", "ban"))
    assert not any(_is_form(other, "bank") for other in ("banco", "river", "ba", "embankment"))


def test_mistakes_are_one_line(words):
    refuses("'cat' does not occur in text 2", words.neighbours, "cat", ["a cat", "cats and dogs"])
    refuses("give the word, then the texts", words.neighbours, " ", ["a cat"])
    refuses("text 1 has 103 tokens, the model reads 64", words.neighbours, "cat", ["cat " + "dog " * 100])
