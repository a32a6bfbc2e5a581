from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_corpus import MemoryCorpus, random_corpus
from scipy import stats

from everybert.corpus import examples as module
from everybert.corpus.examples import (
    KINDS,
    UNLABELLED,
    Block,
    ExampleConfig,
    RandomSegments,
    epoch_documents,
    pair_examples,
    sentence_examples,
)
from everybert.corpus.masking import make_key
from everybert.errors import EverybertError

corpora = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=2, max_size=8).map(MemoryCorpus)


def all_examples(corpus, config, seed=0, epoch=0, separators=1):
    """The examples of a whole epoch as one block."""
    documents, copies = epoch_documents(corpus, config.alpha, seed, epoch)
    block = Block.of(corpus, documents, copies, by_language=config.kind == "full")
    if not config.paired:
        return sentence_examples(block, config)
    segments = RandomSegments(corpus) if config.kind == "pairs" else None
    return pair_examples(block, config, separators, seed, epoch, segments)


def parts(examples, e):
    a, b = examples.part_offsets_E1[e : e + 2]
    return [(int(s), int(s + n)) for s, n in zip(examples.part_start_P[a:b], examples.part_length_P[a:b])]


def document_of(corpus, token):
    starts = corpus.sentence_offsets[corpus.document_sentences]
    return int(np.searchsorted(starts, token, side="right")) - 1


@settings(max_examples=150, deadline=None)
@given(corpora, st.sampled_from(KINDS), st.integers(8, 64), st.integers(0, 9), st.sampled_from([50, 1 << 14]))
def test_every_token_has_one_place_and_examples_fit(corpus, kind, length, seed, lane):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LANE", lane)
        examples = all_examples(corpus, ExampleConfig(kind, length), seed)
    assert len(np.unique(examples.id_E)) == len(examples)
    assert (examples.part_length_P > 0).all()
    seen = np.zeros(corpus.token_count, int)
    for e, label in enumerate(examples.label_E):
        mine = parts(examples, e)
        size = sum(b - a for a, b in mine)
        assert examples.length_E[e] == size + 1 + len(mine) <= length
        for a, b in mine[:1] if kind == "pairs" and label == 1 else mine:
            seen[a:b] += 1
        if kind != "full":
            assert label == UNLABELLED or len(mine) == 2
            assert all(document_of(corpus, a) == document_of(corpus, b - 1) for a, b in mine)
    assert (seen == 1).all()


@settings(max_examples=60, deadline=None)
@given(corpora, st.integers(12, 64), st.integers(0, 9))
def test_pairs_are_next_or_from_another_document(corpus, length, seed):
    examples = all_examples(corpus, ExampleConfig("pairs", length), seed)
    starts = set(corpus.sentence_offsets.tolist())
    for e in np.flatnonzero(examples.label_E != UNLABELLED):
        (a, a_end), (b, _) = parts(examples, e)
        assert b in starts and a_end in starts  # the second begins with a sentence, whichever its label
        if examples.label_E[e] == 0:
            assert b == a_end and document_of(corpus, a) == document_of(corpus, b)
        else:
            assert document_of(corpus, a) != document_of(corpus, b)


@settings(max_examples=60, deadline=None)
@given(corpora, st.integers(12, 64), st.integers(0, 9))
def test_order_is_two_runs_of_whole_sentences_in_or_out_of_order(corpus, length, seed):
    examples = all_examples(corpus, ExampleConfig("order", length), seed)
    starts = set(corpus.sentence_offsets.tolist())
    for e in np.flatnonzero(examples.label_E != UNLABELLED):
        (a, a_end), (b, b_end) = parts(examples, e)
        assert {a, a_end, b, b_end} <= starts
        assert (b == a_end) if examples.label_E[e] == 0 else (a == b_end)


@settings(max_examples=60, deadline=None)
@given(corpora, st.sampled_from(["full", "document"]), st.integers(8, 64))
def test_sentences_are_packed_greedily(corpus, kind, length):
    examples = all_examples(corpus, ExampleConfig(kind, length))
    starts = corpus.sentence_offsets
    last_document = examples.document_E[-1]
    for e in range(len(examples)):
        mine = parts(examples, e)
        if kind == "document":
            assert len(mine) == 1
        for (_, a_end), (b, _) in pairwise(mine):  # a new part is the next document from its beginning
            assert a_end == starts[corpus.document_sentences[document_of(corpus, a_end - 1) + 1]]
            assert b == starts[corpus.document_sentences[document_of(corpus, b)]]
        end = mine[-1][1]
        document = document_of(corpus, end - 1)
        document_end = starts[corpus.document_sentences[document + 1]]
        if end < document_end:  # stopped in the document: the rest of its sentence would not have fitted
            following = starts[np.searchsorted(starts, end, side="right")]
            assert examples.length_E[e] + following - end > length
        elif kind == "full" and document != last_document and e + 1 < len(examples):
            begin = parts(examples, e + 1)[0][0]
            following = starts[np.searchsorted(starts, begin, side="right")]
            assert examples.length_E[e] + 1 + min(following - begin, length - 2) > length


def test_labels_are_fair_and_told_by_neither_first_segment_nor_lengths():
    corpus = random_corpus(1_500_000)
    for kind in ("pairs", "order"):
        examples = all_examples(corpus, ExampleConfig(kind, 128))
        labelled = examples.take(np.flatnonzero(examples.label_E != UNLABELLED))
        n, ones = len(labelled), int(labelled.label_E.sum())
        assert n > 10_000
        assert stats.binomtest(ones, n).pvalue > 1e-3
        first = labelled.part_length_P[labelled.part_offsets_E1[:-1]]
        second = labelled.part_length_P[labelled.part_offsets_E1[:-1] + 1]
        assert stats.ks_2samp(first[labelled.label_E == 0], first[labelled.label_E == 1]).pvalue > 1e-3
        gap = second[labelled.label_E == 0].mean() - second[labelled.label_E == 1].mean()
        assert abs(gap) < 0.06 * second.mean()


def test_lengths_are_drawn_as_in_the_paper():
    corpus = MemoryCorpus([[1] * 16_000] * 60)  # sentences of one token meet their targets exactly
    examples = all_examples(corpus, ExampleConfig("pairs", 128))
    length = examples.length_E[examples.label_E != UNLABELLED]
    full = (length == 128).sum()
    assert stats.binomtest(int(full), len(length), 0.9 + 0.1 / 124).pvalue > 1e-3
    counts = np.bincount(length[length < 128], minlength=128)
    assert counts[:5].sum() == 0
    assert stats.chisquare(counts[5:125].reshape(12, 10).sum(1)).pvalue > 1e-3
    never = all_examples(corpus, ExampleConfig("pairs", 128, short_probability=0.0))
    assert (never.length_E == 128).mean() > 0.98


def test_random_sentences_are_even_over_those_of_other_documents():
    corpus = MemoryCorpus([[5] * 30, [5] * 10, [5] * 20, [5] * 40])
    counts = np.zeros(4)
    for epoch in range(300):
        examples = all_examples(corpus, ExampleConfig("pairs", 20), epoch=epoch)
        for e in np.flatnonzero((examples.label_E == 1) & (examples.document_E == 1)):
            counts[document_of(corpus, parts(examples, e)[1][0])] += 1
    assert counts[1] == 0
    # A place within 14 tokens of its document's end may be drawn again, so nearly in proportion.
    share = counts / counts.sum()
    assert np.abs(share - np.array([30, 0, 20, 40]) / 90).max() < 0.05


def test_random_sentences_need_another_document():
    with pytest.raises(EverybertError, match="one document"):
        all_examples(MemoryCorpus([[5] * 200]), ExampleConfig("pairs", 32))


def test_a_lonely_sentence_is_an_example_without_label():
    examples = all_examples(MemoryCorpus([[9], [7], [8, 6]]), ExampleConfig("pairs", 64))
    lonely = examples.document_E < 2
    assert lonely.sum() == 2 and (examples.label_E[lonely] == UNLABELLED).all()
    assert (examples.parts_E[lonely] == 1).all() and (examples.label_E[~lonely][:1] != UNLABELLED).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_overlong_sentence_goes_on_in_the_next_example(kind):
    examples = all_examples(MemoryCorpus([[500], [20, 20]]), ExampleConfig(kind, 32))
    pieces = sorted(p for e in np.flatnonzero(examples.document_E == 0) for p in parts(examples, e) if p[0] < 500)
    assert len(pieces) == (18 if kind in ("pairs", "order") else 17)  # rooms of 29 and of 30 tokens
    assert pieces[0][0] == 0 and pieces[-1][1] == 500
    assert all(a[1] == b[0] for a, b in pairwise(pieces))


def test_epochs_and_seeds_differ_and_repeat():
    corpus = random_corpus(30_000)
    for kind in KINDS:
        a, b, c, d = (
            all_examples(corpus, ExampleConfig(kind, 64), seed, epoch)
            for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
        )
        assert np.array_equal(a.part_start_P, b.part_start_P) and np.array_equal(a.label_E, b.label_E)
        for other in (c, d):
            assert not np.array_equal(a.part_start_P, other.part_start_P)
    pairs = [all_examples(corpus, ExampleConfig("pairs", 64), 0, epoch) for epoch in (0, 1)]
    assert len(np.intersect1d(pairs[0].part_start_P, pairs[1].part_start_P)) < 0.8 * len(pairs[0].part_start_P)


def multilingual():
    rng = np.random.default_rng(0)
    sizes = [600, 150, 30]
    documents = [rng.integers(5, 30, 20).tolist() for n in sizes for _ in range(n)]
    return MemoryCorpus(documents, np.repeat([0, 1, 2], sizes), ("en", "fr", "cy"))


def test_languages_are_smoothed():
    corpus, alpha = multilingual(), 0.3
    size = np.diff(corpus.sentence_offsets[corpus.document_sentences])
    share = np.bincount(corpus.document_language, size) / size.sum()
    wanted = share**alpha / (share**alpha).sum()
    seen, times = np.zeros(3), np.zeros(corpus.documents, int)
    for epoch in range(5):
        documents, copies = epoch_documents(corpus, alpha, 0, epoch)
        assert len(np.unique(documents * 1000 + copies)) == len(documents)
        tokens = np.bincount(corpus.document_language[documents], size[documents])
        assert abs(tokens.sum() / size.sum() - 1) < 0.05
        seen += tokens
        times += np.bincount(documents, minlength=corpus.documents)
    assert np.abs(seen / seen.sum() - wanted).max() < 0.01
    for language in range(3):  # nobody waits: counts over epochs differ by one at most
        assert np.ptp(times[corpus.document_language == language]) <= 1
    documents, copies = epoch_documents(corpus, 1.0, 0, 0)
    assert sorted(documents) == list(range(corpus.documents)) and not copies.any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_has_one_language(kind):
    corpus = multilingual()
    examples = all_examples(corpus, ExampleConfig(kind, 128, alpha=0.5))
    assert len(np.unique(examples.id_E)) == len(examples)
    languages = corpus.document_language
    for e in range(len(examples)):
        assert len({languages[document_of(corpus, a)] for a, _ in parts(examples, e)}) == 1


def test_the_worked_example_of_the_planner():
    """Ten tokens, room for 8: see `_next_chunks`."""
    corpus = MemoryCorpus([[3, 4, 3], [9]])
    block = Block.of(corpus, np.array([0]), np.array([0]))
    splits = set()
    for seed in range(20):
        config = ExampleConfig("pairs", 11, short_probability=0.0)
        chunks = module._walk(block, config, 8, make_key(seed))
        assert chunks.begin_E[0] == 0 and chunks.end_E[0] == 8
        splits.add(int(chunks.split_E[0]))
        replaced = chunks.label_E[0] == 1
        assert chunks.begin_E[1] == (chunks.split_E[0] if replaced else 8) and chunks.end_E[1] == 10
        chunks = module._walk(block, replace(config, kind="order"), 8, make_key(seed))
        assert list(zip(chunks.begin_E, chunks.split_E, chunks.end_E)) == [(0, 3, 7), (7, 10, 10)]
        assert chunks.label_E[0] in (0, 1) and chunks.label_E[1] == UNLABELLED
    assert splits == {3, 7}


def test_empty_documents_and_sentences_do_no_harm():
    corpus = MemoryCorpus([[], [5, 0, 6], [0], [4, 4, 4], []])
    for kind in KINDS:
        examples = all_examples(corpus, ExampleConfig(kind, 16))
        assert (examples.part_length_P > 0).all()


@pytest.mark.parametrize("wrong", [{"kind": "nsp"}, {"length": 4}, {"short_probability": 2.0}, {"alpha": 1.5}])
def test_wrong_settings_are_named(wrong):
    with pytest.raises(EverybertError):
        ExampleConfig(**wrong)
