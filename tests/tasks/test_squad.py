"""SQuAD's scores, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everybert.tasks import squad


@pytest.mark.parametrize(
    "text, normal",
    [
        ("The Eiffel Tower.", "eiffel tower"),
        ("an  apple,\ta day", "apple day"),
        ("theatre and anagram", "theatre and anagram"),  # articles are whole words
        ("U.S.A.", "usa"),
        ("a-b", "ab"),  # punctuation goes before articles do, so "a" is no word here
        ("the", ""),
        ("“Café”…", "“café”…"),  # only ASCII punctuation is removed
        ("Ａ Ⅷ", "ａ ⅷ"),
        ("25%", "25"),
    ],
)
def test_normalise(text, normal):
    assert squad.normalise(text) == normal


@pytest.mark.parametrize(
    "guess, golds, version_1, version_2",
    [
        ("the Paris", ["Paris"], (1, 1), (1, 1)),
        ("in Paris France", ["Paris", "Paris, France"], (0, 0.8), (0, 0.8)),
        ("Paris Paris", ["Paris"], (0, 2 / 3), (0, 2 / 3)),
        ("London", ["Paris"], (0, 0), (0, 0)),
        ("", ["Paris"], (0, 0), (0, 0)),
        ("", [], (0, 0), (1, 1)),
        ("Paris", [], (0, 0), (0, 0)),
        ("the", ["a"], (1, 0), (1, 1)),  # 1.1 finds no common word; 2.0 reads both as no answer
    ],
)
def test_scores_by_hand(guess, golds, version_1, version_2):
    assert squad.best_over(guess, golds) == pytest.approx(version_1)
    assert squad.best_over(guess, golds, no_answer=True) == pytest.approx(version_2)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(-5, 5), st.booleans(), st.booleans()), min_size=1, max_size=30))
def test_the_threshold_is_the_best_of_all(rows):
    scores, gaps, answerable, guessed = map(list, zip(*rows))
    gaps = [gap + i / 100 for i, gap in enumerate(gaps)]  # no ties: the sweep's order is then unique
    scores = [s * g for s, g in zip(scores, guessed)]  # an empty guess scores nothing where there is an answer

    def total(threshold):
        return sum(
            (s if a else 1.0 - g) if gap <= threshold else (0.0 if a else 1.0)
            for s, gap, a, g in zip(scores, gaps, answerable, guessed)
        ) / len(rows)

    found = squad.best_threshold(scores, gaps, answerable, guessed)
    best = max(total(t) for t in [min(gaps) - 1, *gaps])
    assert found.score == pytest.approx(best)
    assert total(found.value) == pytest.approx(best)


def test_the_official_sweep_by_hand():
    # Sorted by gap: −2 (answerable, 1.0), 0 (unanswerable, answered: −1), 3 (answerable, 0.5). Never answering: 1.
    found = squad.best_threshold([0.5, 1.0, 0.0], [3.0, -2.0, 0.0], [True, True, False], [True, True, True])
    assert (found.value, found.score) == (-2.0, pytest.approx(2 / 3))
