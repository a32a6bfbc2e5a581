import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.corpus.phrases import Phrases

phrases = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4).map(tuple), min_size=1, max_size=8)


def plain_join(found, token, first, last):
    """Longest first, then from the left, over whole words inside one run; written the slow way."""
    joined, taken = list(first), [False] * len(token)
    for length in sorted({len(p) for p in found}, reverse=True):
        for i in range(len(token) - length + 1):
            window = range(i, i + length)
            ends_word = i + length == len(token) or last[i + length - 1] or first[i + length]
            if (
                tuple(token[i : i + length]) in found
                and first[i]
                and ends_word
                and not any(last[j] for j in window[:-1])
                and not any(taken[j] for j in window)
            ):
                for j in window:
                    taken[j] = True
                for j in window[1:]:
                    joined[j] = False
    return joined


@settings(max_examples=200, deadline=None)
@given(phrases, st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_joins_the_longest_first(found, cells):
    token, begins, last = (np.array(x) for x in zip(*cells))
    last[-1] = True
    first = begins | np.append(True, last[:-1])  # a run of text begins with a word
    before = first.copy()
    joined = Phrases(found, 10).join(token, first, last)
    assert joined.tolist() == plain_join(set(found), token.tolist(), first.tolist(), last.tolist())
    assert np.array_equal(first, before)


def test_finds_one_phrase_among_many():
    rng = np.random.default_rng(0)
    many = {tuple(p) for p in rng.integers(0, 30_000, (20_000, 3)).tolist()} | {(1, 2), (1, 2, 3, 4, 5)}
    token = np.array([9, 1, 2, 3, 4, 5, 9, 1, 2, 9])
    first, last = np.ones(10, bool), np.zeros(10, bool)
    assert sorted(Phrases(list(many), 30_000).find(token, first, last)) == [(-5, 1), (-2, 1), (-2, 7)]
    joined = Phrases(list(many), 30_000).join(token, first, last)
    assert np.flatnonzero(joined).tolist() == [0, 1, 6, 7, 9]
