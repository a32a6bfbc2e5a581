import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from everybert.corpus.random import below, bits, make_key, permutation, uniform


def splitmix64(state):
    """The published generator, one number at a time."""
    mask = (1 << 64) - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_is_the_published_splitmix64():
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert bits(1234567, np.arange(4)).tolist() == known


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_any_draw_is_made_without_those_before(key):
    stream = splitmix64(key)
    expected = [next(stream) for _ in range(5)]
    assert bits(key, np.arange(5)).tolist() == expected
    assert bits(key, 4).tolist() == expected[4:]
    assert bits(np.array([key] * 2, dtype=np.uint64), np.array([3, 1])).tolist() == [expected[3], expected[1]]


def test_keys_differ_by_value_order_and_number_of_words():
    words = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (-1,), (2**63,), (2**64 + 5,)]
    assert len({int(make_key(*w)[0]) for w in words}) == len(words)
    many = make_key(7, np.arange(100_000), 3)
    assert len(np.unique(many)) == 100_000
    assert make_key(7, 5, 3)[0] == many[5]


def test_uniform_is_even_within_and_between_keys():
    for draws in (uniform(make_key(3), np.arange(200_000)), uniform(make_key(3, np.arange(200_000)), 0)):
        assert draws.min() >= 0 and draws.max() < 1
        assert stats.kstest(draws, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.01


def test_nearby_keys_and_indices_are_unrelated():
    draws = uniform(make_key(1, np.arange(300))[:, None], np.arange(300))
    assert abs(np.corrcoef(draws)[np.triu_indices(300, 1)]).max() < 0.35  # 5.9 σ of 1/√300


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 10_000))
def test_below_stays_below(key, limit):
    draws = below(make_key(key), np.arange(50), limit)
    assert draws.min() >= 0 and draws.max() < limit


def test_below_is_even():
    counts = np.bincount(below(make_key(5), np.arange(120_000), 12), minlength=12)
    assert stats.chisquare(counts).pvalue > 1e-3


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 200))
def test_permutation_has_everything_once(key, n):
    assert sorted(permutation(make_key(key), n).tolist()) == list(range(n))


def test_permutations_are_equally_likely():
    seen = [tuple(permutation(make_key(k), 4).tolist()) for k in range(12_000)]
    _, counts = np.unique(seen, axis=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3
