from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_corpus import SPECIALS, layout
from scipy import stats

from everybert.corpus import masking
from everybert.corpus.masking import (
    STRATEGIES,
    Masker,
    MaskingConfig,
    PackText,
    Units,
    below,
    bits,
    make_key,
    permutation,
    uniform,
)
from everybert.corpus.pmi import Phrases
from everybert.errors import EverybertError

LAYOUT = layout()
PHRASES = [(10, 11), (10, 11, 12), (20, 21, 22, 23)]


def sequences(lengths, seed=0, stray=0.0):
    """[CLS] text [SEP] text [SEP] … for each list of text lengths; `stray` is the share of specials in the text."""
    rng = np.random.default_rng(seed)
    tokens, starts, sizes, owners, ends = [], [], [], [], [0]
    for b, parts in enumerate(lengths):
        tokens.append(2)
        for n in parts:
            starts.append(len(tokens))
            sizes.append(n)
            owners.append(b)
            text = rng.integers(SPECIALS, LAYOUT.vocab_size, n)
            tokens += np.where(rng.random(n) < stray, 1, text).tolist() + [3]
        ends.append(len(tokens))
    return PackText(*(np.array(x, dtype=np.int64) for x in (tokens, ends, starts, sizes, owners)))


def masker(strategy="token", where=LAYOUT, **kwargs):
    counts = np.arange(where.vocab_size)
    return Masker(MaskingConfig(strategy=strategy, **kwargs), where, counts, Phrases(PHRASES))


def runs(index):
    """(start, stop) of each run of consecutive places."""
    cuts = np.flatnonzero(np.diff(index) > 1) + 1
    return [(int(r[0]), int(r[-1]) + 1) for r in np.split(index, cuts) if len(r)]


MILLION = sequences([[62, 63]] * 8000)  # 10⁶ tokens of text
KEYS = make_key(1, np.arange(8000))

texts = st.builds(
    sequences,
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=6),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.2]),
)


@settings(max_examples=120, deadline=None)
@given(texts, st.sampled_from(STRATEGIES), st.floats(0.01, 0.7), st.integers(0, 99))
def test_laws_of_every_strategy(text, strategy, rate, seed):
    key_B = make_key(seed, np.arange(len(text.sequence_offsets_B1) - 1))
    masked = masker(strategy)(text, key_B, rate)
    index, tokens = masked.index_M, text.tokens_T
    assert (np.diff(index) > 0).all()
    assert not LAYOUT.special_V[tokens[index]].any()
    assert np.array_equal(masked.label_M, tokens[index])
    untouched = np.setdiff1d(np.arange(len(tokens)), index)
    assert np.array_equal(masked.tokens_T[untouched], tokens[untouched])
    changed = masked.tokens_T[index]
    assert (~LAYOUT.special_V[changed] | (changed == LAYOUT.mask_id)).all()
    more = masker(strategy)(text, key_B, min(0.7, rate * 1.5))
    assert np.isin(index, more.index_M).all()


@settings(max_examples=60, deadline=None)
@given(texts, st.sampled_from(STRATEGIES), st.integers(0, 99))
def test_a_mask_does_not_depend_on_the_pack(text, strategy, seed):
    key_B = make_key(seed, np.arange(len(text.sequence_offsets_B1) - 1))
    together = masker(strategy, rate=0.4)(text, key_B)
    for b, (start, stop) in enumerate(pairwise(text.sequence_offsets_B1)):
        mine = text.part_sequence_P == b
        alone = PackText(
            text.tokens_T[start:stop],
            np.array([0, stop - start]),
            text.part_start_P[mine] - start,
            text.part_length_P[mine],
            np.zeros(mine.sum(), np.int64),
        )
        masked = masker(strategy, rate=0.4)(alone, key_B[b : b + 1])
        assert np.array_equal(masked.tokens_T, together.tokens_T[start:stop])
        inside = (together.index_M >= start) & (together.index_M < stop)
        assert np.array_equal(masked.index_M + start, together.index_M[inside])


@settings(max_examples=60, deadline=None)
@given(texts, st.floats(0.05, 0.9), st.integers(0, 99))
def test_whole_words_are_masked_together(text, rate, seed):
    key_B = make_key(seed, np.arange(len(text.sequence_offsets_B1) - 1))
    hidden = np.zeros(len(text.tokens_T), bool)
    hidden[masker("word")(text, key_B, rate).index_M] = True
    firsts = set(text.part_start_P.tolist())
    for i in range(1, len(hidden)):
        joined = LAYOUT.continues_V[text.tokens_T[i]] and not LAYOUT.special_V[text.tokens_T[i - 1]]
        if joined and i not in firsts:
            assert hidden[i] == hidden[i - 1]


@settings(max_examples=60, deadline=None)
@given(texts, st.floats(0.05, 0.6), st.integers(1, 6), st.integers(0, 99))
def test_spans_are_short_whole_and_apart(text, rate, most, seed):
    key_B = make_key(seed, np.arange(len(text.sequence_offsets_B1) - 1))
    config = MaskingConfig(0.1, "span", span_max=most)
    masked = Masker(config, LAYOUT)(text, key_B, min(rate, 0.45))
    spans = runs(masked.index_M)
    assert sorted(set(zip(masked.unit_start_M.tolist(), masked.unit_stop_M.tolist()))) == spans
    begins_word = ~LAYOUT.continues_V[text.tokens_T]
    begins_word[1:] |= LAYOUT.special_V[text.tokens_T[:-1]]
    for start, stop in spans:
        assert begins_word[start] and 1 <= begins_word[start:stop].sum() <= most
        assert begins_word[stop] and stop - 1 not in text.sequence_offsets_B1
        changed = masked.tokens_T[start:stop]  # a span has one fate
        assert (changed == LAYOUT.mask_id).all() or not (changed == LAYOUT.mask_id).any()


def test_the_worked_example_of_the_tiler(monkeypatch):
    """A run of ten words, lengths 2, 3, 1 and 4: see `Masker.spans`."""
    spanning = masker("span")
    first, rest = np.append(0, spanning.first_cdf), np.append(0, spanning.span_cdf)
    draws = [first[2], *rest[[2, 0, 3, 0, 0, 0]]]  # at the lower edges of 2, 3, 1, 4, 1 …
    monkeypatch.setattr(masking, "uniform", lambda key, index: np.array(draws) + 1e-9)
    words = Units(np.arange(1, 11), np.ones(10, np.int64), np.zeros(10, np.int64))
    spans = spanning.spans(words, np.array([0, 12]), make_key(0, np.arange(1)))
    assert (spans.start_U - 1).tolist() == [0, 3, 7, 9] and spans.size_U.tolist() == [2, 3, 1, 1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_the_rate_is_met_on_a_million_tokens(strategy, rate):
    masked = masker(strategy, rate=rate)(MILLION, KEYS)
    assert abs(len(masked.index_M) / 1_000_000 - rate) < (2e-4 if strategy == "token" else 1e-3)
    per_sequence = np.histogram(masked.index_M, MILLION.sequence_offsets_B1)[0]
    longest = np.max(masked.unit_stop_M - masked.unit_start_M)
    assert np.abs(per_sequence - 125 * rate).max() <= longest


def test_single_tokens_are_counted_exactly():
    masked = masker(rate=0.15)(MILLION, KEYS)
    counts = np.histogram(masked.index_M, MILLION.sequence_offsets_B1)[0]
    assert set(counts.tolist()) == {18, 19}  # 125 × 0.15 = 18.75
    assert stats.binomtest(int((counts == 19).sum()), 8000, 0.75).pvalue > 1e-3
    everything = masker(rate=1.0)(MILLION, KEYS)
    assert len(everything.index_M) == 1_000_000


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_eighty_ten_ten(strategy):
    masked = masker(strategy)(MILLION, KEYS)
    tokens = masked.tokens_T[masked.index_M]
    _, unit = np.unique(masked.unit_start_M, return_index=True)
    chosen = unit if strategy == "span" else np.arange(len(tokens))  # spans share one fate
    n = len(chosen)
    hidden = int((tokens[chosen] == LAYOUT.mask_id).sum())
    kept = int((tokens[chosen] == masked.label_M[chosen]).sum())
    assert stats.binomtest(hidden, n, 0.8).pvalue > 1e-3
    by_chance = 0.1 / (LAYOUT.vocab_size - SPECIALS)
    assert stats.binomtest(kept, n, 0.1 + by_chance).pvalue > 1e-3
    assert abs(hidden / n - 0.8) < 0.01 and abs(kept / n - 0.1) < 0.01


def test_the_split_can_be_changed():
    masked = masker(mask_share=1.0, random_share=0.0)(MILLION, KEYS)
    assert (masked.tokens_T[masked.index_M] == LAYOUT.mask_id).all()
    masked = masker(mask_share=0.0, random_share=0.0)(MILLION, KEYS)
    assert np.array_equal(masked.tokens_T, MILLION.tokens_T)


@pytest.mark.parametrize("strategy", ["token", "word", "span"])
def test_every_place_is_equally_likely(strategy):
    plain = layout(continues=0.0)
    masked = masker(strategy, plain)(MILLION, KEYS)
    counts = np.bincount(masked.index_M % 128, minlength=128)
    assert counts[[0, 63, 127]].sum() == 0
    inner = np.delete(counts, [0, 63, 127])
    expected = 8000 * 0.15
    if strategy == "span":  # words of a span share their fate, so only the spread is bounded
        assert np.abs(inner / expected - 1).max() < 0.15
    else:
        assert stats.chisquare(inner).pvalue > 1e-3


def test_tokens_are_chosen_apart_from_one_another():
    hidden = np.zeros(len(MILLION.tokens_T), bool)
    hidden[masker()(MILLION, KEYS).index_M] = True
    left = hidden.reshape(8000, 128)[:, 1:62].ravel()
    right = hidden.reshape(8000, 128)[:, 2:63].ravel()
    both = 0.15 * (18.75 - 1 + 0.1875 / 18.75) / 124  # without replacement, 18 or 19 of 125
    assert abs((left & right).mean() - both) < 1e-3


def test_long_words_are_as_likely_as_short_ones():
    text = sequences([[120]] * 8000)
    where = layout(continues=0.5)
    hidden = np.zeros(len(text.tokens_T), bool)
    hidden[masker("word", where)(text, KEYS).index_M] = True
    first = ~where.continues_V[text.tokens_T]
    first[text.part_start_P] = True
    begin = np.flatnonzero(first)
    size = np.diff(np.append(begin, len(first)))
    for n in (1, 2, 3, 4):
        words = begin[(size == n) & ~where.special_V[text.tokens_T[begin]]]
        share, sigma = hidden[words].mean(), np.sqrt(0.15 * 0.85 / len(words))
        assert abs(share - 0.15) < 4 * sigma


def test_span_lengths_are_geometric():
    text = sequences([[250]] * 4000)
    plain = layout(continues=0.0)
    for rate in (0.15, 0.5):  # at any rate: nothing is rejected
        masked = masker("span", plain, rate=rate)(text, make_key(2, np.arange(4000)))
        start, stop = np.unique(np.stack([masked.unit_start_M, masked.unit_stop_M]), axis=1)
        place = start % 252
        inside = (place > 11) & (place < 240)  # those at the edges of a sequence are cut
        counts = np.bincount((stop - start)[inside], minlength=11)[1:]
        law = 0.2 * 0.8 ** np.arange(10)
        assert len(counts) == 10
        assert stats.chisquare(counts, law / law.sum() * counts.sum()).pvalue > 1e-3
    assert abs((stop - start)[inside].mean() - 3.8) < 0.05  # SpanBERT's mean


def test_random_replacements_follow_their_law():
    for replacement in ("uniform", "unigram"):
        masked = masker(mask_share=0.0, random_share=1.0, replacement=replacement, rate=0.4)(MILLION, KEYS)
        drawn = np.bincount(masked.tokens_T[masked.index_M], minlength=LAYOUT.vocab_size)
        assert drawn[:SPECIALS].sum() == 0
        law = np.arange(SPECIALS, LAYOUT.vocab_size) if replacement == "unigram" else np.ones(995)
        assert stats.chisquare(drawn[SPECIALS:], law / law.sum() * drawn.sum()).pvalue > 1e-3


def test_collocations_are_masked_together():
    text = sequences([[40]] * 500)
    plain = layout(continues=0.0)
    place = text.part_start_P + 7
    for k, token in enumerate((20, 21, 22, 23)):
        text.tokens_T[place + k] = token
    hidden = np.zeros(len(text.tokens_T), bool)
    hidden[masker("pmi", plain)(text, KEYS[:500]).index_M] = True
    together = np.stack([hidden[place + k] for k in range(4)])
    assert (together == together[0]).all() and 0 < together[0].sum() < 500


def test_masks_change_with_the_key():
    first, second = (masker()(MILLION, key).index_M for key in (KEYS, make_key(2, np.arange(8000))))
    overlap = len(np.intersect1d(first, second)) / len(first)
    assert abs(overlap - 0.15) < 0.01


def test_nothing_to_mask_is_no_trouble():
    text = sequences([[3]], stray=1.0)
    for strategy in STRATEGIES:
        masked = masker(strategy)(text, KEYS[:1])
        assert len(masked.index_M) == 0 and np.array_equal(masked.tokens_T, text.tokens_T)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0.0},
        {"rate": 1.2},
        {"rate": 0.9, "strategy": "span"},
        {"strategy": "words"},
        {"mask_share": 0.8, "random_share": 0.3},
        {"replacement": "zipf"},
        {"static_duplicates": 0},
        {"span_p": 0.0},
    ],
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(EverybertError):
        MaskingConfig(**wrong)


def test_missing_tables_are_named():
    with pytest.raises(EverybertError, match="--pmi"):
        Masker(MaskingConfig(strategy="pmi"), LAYOUT)
    with pytest.raises(EverybertError, match="counts"):
        Masker(MaskingConfig(replacement="unigram"), LAYOUT)


# ── the generator ───────────────────────────────────────────────────────────────────────────────────────────


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
