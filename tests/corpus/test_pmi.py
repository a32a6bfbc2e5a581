import random
from itertools import combinations, pairwise
from math import log

import numpy as np
import pytest
from corpus_texts import tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.corpus import pmi
from everybert.corpus.build import build_corpus
from everybert.corpus.pmi import Phrases, mine
from everybert.corpus.shards import Corpus


def build(tmp_path, text, kind="wordpiece"):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "in.txt").write_text(text, "utf-8")
    tok = tokenizer(kind)
    build_corpus(tmp_path / "in.txt", tok, tmp_path / "c", workers=1, heldout=0, fresh=True)
    return Corpus.open(tmp_path / "c"), tok


def limits(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setattr(pmi, name, value)


def by_definition(sentences):
    """PMI_n straight from its definition, over sentences of words."""
    total = sum(len(sentence) for sentence in sentences)
    counts = {}
    for sentence in sentences:
        for n in range(1, pmi.WORDS + 1):
            for i in range(len(sentence) - n + 1):
                ngram = tuple(sentence[i : i + n])
                if all(any(c.isalnum() for c in word) for word in ngram):
                    counts[ngram] = counts.get(ngram, 0) + 1

    def score(ngram):
        places = range(1, len(ngram))
        cuts = [c for k in places for c in combinations(places, k)]
        return min(
            log(counts[ngram] / total)
            - sum(log(counts[ngram[a:b]] / total) for a, b in pairwise((0, *cut, len(ngram))))
            for cut in cuts
        )

    scores = {g: score(g) for g, count in counts.items() if len(g) > 1 and count >= pmi.MIN_COUNT}
    return {ngram: value for ngram, value in scores.items() if value >= pmi.MIN_PMI}


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_scores_follow_the_definition(tmp_path_factory, seed):
    rng = random.Random(seed)
    sentences = [
        rng.choices(["river", "hill", "New", "York", "old", ",", "stone"], k=rng.randint(1, 9)) for _ in range(60)
    ]
    corpus, tok = build(tmp_path_factory.mktemp("p"), "\n".join(" ".join(s) for s in sentences))
    with pytest.MonkeyPatch.context() as patch:
        limits(patch, WORDS=4, MIN_COUNT=3, MIN_PMI=0.2)
        ngrams, scores = mine(corpus, tok)
        defined = by_definition([[w.lower() for w in s] for s in sentences])
    expected = {tuple(tok.encode(" ".join(ngram), specials=False).ids): value for ngram, value in defined.items()}
    assert dict(zip(ngrams, scores)) == pytest.approx(expected, rel=1e-5)
    assert [len(ngram) for ngram in ngrams] == sorted(map(len, ngrams), reverse=True)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_planted_collocations_are_found_and_chance_is_not(tmp_path, kind, monkeypatch):
    rng = random.Random(1)
    words = ["river", "hill", "town", "old", "green", "quiet", "stone", "bridge", "morning", "light", "near", "under"]
    lines = []
    for _ in range(600):
        line = rng.choices(words, k=8)
        line.insert(rng.randint(1, 8), rng.choice(["New York,", "naïve café"]) if rng.random() < 0.2 else "over")
        lines.append(" ".join(line))
    corpus, tok = build(tmp_path, "\n".join(lines), kind)
    limits(monkeypatch, MIN_PMI=2.0)
    found = {tok.decode(ngram).strip().lower() for ngram in mine(corpus, tok)[0]}
    plain = {"naïve café", "naive cafe"}  # BERT's uncased vocabulary strips accents
    assert "new york" in found
    assert found & plain
    assert found <= plain | {"new york"}


def test_the_best_are_kept_and_a_large_corpus_is_sampled(tmp_path, monkeypatch):
    rng = random.Random(2)
    lines = [
        " ".join(rng.choices(["river", "hill", "town", "old", "green", "quiet", "stone"], k=6)) for _ in range(300)
    ]
    corpus, tok = build(tmp_path, "\n".join([*lines, *["New York sings"] * 60]))
    limits(monkeypatch, WORDS=3, MIN_COUNT=5, MIN_PMI=1.5)
    assert tok.decode(mine(corpus, tok)[0][0]) == "new york sings"
    limits(monkeypatch, SAMPLE=corpus.token_count // 3)
    assert tok.decode(mine(corpus, tok)[0][0]) == "new york sings"
    limits(monkeypatch, MIN_PMI=-9, SIZE=4)
    assert len(mine(corpus, tok)[0]) == 4


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
    joined = Phrases(found).join(token, first, last)
    assert joined.tolist() == plain_join(set(found), token.tolist(), first.tolist(), last.tolist())
    assert np.array_equal(first, before)


def test_finds_one_phrase_among_many():
    rng = np.random.default_rng(0)
    many = {tuple(p) for p in rng.integers(0, 30_000, (20_000, 3)).tolist()} | {(1, 2), (1, 2, 3, 4, 5)}
    token = np.array([9, 1, 2, 3, 4, 5, 9, 1, 2, 9])
    first, last = np.ones(10, bool), np.zeros(10, bool)
    joined = Phrases(many).join(token, first, last)
    assert np.flatnonzero(joined).tolist() == [0, 1, 6, 7, 9]
