"""Collocations for PMI-Masking (Levine et al. 2021): mined from a corpus, and found again in packs.

The score of an n-gram is the paper's PMI_n: the minimum, over all ways to cut the n-gram into two or more parts, of
log p(w1 … wn) − Σ log p(part). So "New York" scores high and "the New York" does not, because of the cut after "the".

Words are runs of tokens and are identified by 64-bit hashes. N-grams are counted for one n after the other, and only
where both (n−1)-grams in them are frequent, so tables stay small. Above `table` rows the rarest are dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from everybert.corpus.masking import bits, make_key
from everybert.corpus.shards import Corpus
from everybert.text.tokenizer import Tokenizer

BLOCK = 1 << 20  # tokens processed together
FACTOR = np.uint64(0xD6E8FEB86659FD93)  # odd, so that multiplying loses no information


@dataclass(frozen=True)
class PmiOptions:
    """Which collocations to keep."""

    words: int = 5  # longest n-gram
    min_count: int = 10
    min_pmi: float = 4.0  # in nats: about fifty times as frequent as by chance
    size: int = 800_000  # at most; the best are kept
    table: int = 1 << 24  # most n-grams counted at once, 40 bytes each


@dataclass(frozen=True)
class Collocations:
    """Tuples of token ids, sorted by length and then by score, both descending."""

    ngrams: list[tuple[int, ...]]
    scores: np.ndarray


@dataclass(frozen=True)
class Words:
    """The words of some whole sentences. keys[m - 1] are the hashes of the m-grams that start at each word."""

    keys: list[np.ndarray]
    starts: np.ndarray  # token offsets in the corpus
    stops: np.ndarray
    sentences: np.ndarray
    spoken: np.ndarray  # whether it is a word rather than punctuation


@dataclass(frozen=True)
class Table:
    """N-grams in ascending order of hash: count, one occurrence (start, stop), log p of its best cut."""

    keys: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    cuts: np.ndarray

    def rows(self, keys: np.ndarray) -> np.ndarray:
        """The row of each key, or -1."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        rows = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[rows] == keys, rows, -1)

    def where(self, keep: np.ndarray) -> "Table":
        """Some of the rows."""
        return Table(*(getattr(self, field.name)[keep] for field in fields(self)))


DEFAULTS = PmiOptions()


def mine(
    corpus: Corpus,
    tokenizer: Tokenizer,
    options: PmiOptions = DEFAULTS,
    show: Callable[[int], None] = lambda done: None,
) -> Collocations:
    """The collocations of a corpus. `show` is called with the progress: of the corpus's tokens times `words`."""
    continues, marks = tokenizer.continues_word(), _marks(tokenizer)
    tables: list[Table] = []  # tables[m - 1] holds the frequent m-grams
    total = 0
    for n in range(1, options.words + 1):
        counter = Counter(options.table)
        for words in _blocks(corpus, continues, marks, n):
            total += len(words.starts) if n == 1 else 0
            counter.add(_count(words, n, tables, max(total, 1)))
            show((n - 1) * corpus.token_count + int(words.stops[-1]))
        table = counter.result()
        tables.append(table.where(table.counts >= options.min_count))
    return _best(corpus, tables[1:], total, options)


def _marks(tokenizer: Tokenizer) -> np.ndarray:
    """(V,) bool: the token is not part of a word but punctuation or a special token."""
    pieces = [tokenizer.decode([i], skip_special=False).strip() for i in range(tokenizer.size)]
    # U+FFFD is part of a character: byte-level vocabularies cut characters.
    marks = np.array([piece != "" and not any(c.isalnum() or c == "\ufffd" for c in piece) for piece in pieces])
    marks[list(tokenizer.special_ids)] = True
    return marks


def _blocks(corpus: Corpus, continues: np.ndarray, marks: np.ndarray, n: int) -> Iterator[Words]:
    """The corpus in runs of whole sentences, with the hashes of up to n-grams."""
    offsets = corpus.sentence_offsets
    sentence = 0
    while sentence < corpus.sentences:
        until = int(np.searchsorted(offsets, offsets[sentence] + BLOCK, side="right")) - 1
        until = min(max(until, sentence + 1), corpus.sentences)
        ids = corpus.tokens(int(offsets[sentence]), int(offsets[until]))
        yield _words(ids, offsets[sentence : until + 1], continues, marks, n)
        sentence = until


def _words(ids: np.ndarray, offsets: np.ndarray, continues: np.ndarray, marks: np.ndarray, n: int) -> Words:
    """Find the words: a word starts with a sentence, a token that does not continue a word, or punctuation."""
    base = int(offsets[0])
    mark = marks[ids]
    begins = ~continues[ids] | mark
    begins[1:] |= mark[:-1]
    begins[offsets[:-1] - base] = True
    starts = np.flatnonzero(begins)
    stops = np.append(starts[1:], len(ids))
    inside = np.arange(len(ids)) - np.repeat(starts, stops - starts)
    pieces = bits(ids.astype(np.uint64) + (inside.astype(np.uint64) << np.uint64(32)), 0)
    word = bits(np.add.reduceat(pieces, starts), 0)
    keys = [word]
    for m in range(1, n):
        keys.append(bits(keys[-1][:-1] * np.uint64(3) + word[m:], 0) if len(word) > m else word[:0])
    sentences = np.searchsorted(offsets, starts + base, side="right")
    return Words(keys, starts + base, stops + base, sentences, ~mark[starts])


def _count(words: Words, n: int, tables: list[Table], total: int) -> Table:
    """The n-grams of a block of which all parts are frequent."""
    at = np.flatnonzero(words.spoken)
    for m in range(1, n):  # keep the starts of frequent m-grams that another one follows
        at = at[at < len(words.keys[m - 1])]
        at = at[tables[m - 1].rows(words.keys[m - 1][at]) >= 0]
        at = at[np.isin(at + 1, at, assume_unique=True)]
        at = at[words.sentences[at] == words.sentences[at + 1]] if m == 1 else at
    keys, index, counts = np.unique(words.keys[n - 1][at], return_index=True, return_counts=True)
    first = at[index]
    cuts = _cuts(words, first, n, tables, total)
    return Table(keys, counts.astype(np.int64), words.starts[first], words.stops[first + n - 1], cuts)


def _cuts(words: Words, first: np.ndarray, n: int, tables: list[Table], total: int) -> np.ndarray:
    """The maximum of Σ log p(part) over all ways to cut the n-grams at `first` into two or more parts."""
    best = [np.zeros(len(first))]
    for end in range(1, n + 1):
        ways = []
        for size in range(1, min(end, n - 1) + 1):
            table, keys = tables[size - 1], words.keys[size - 1][first + end - size]
            rows = table.rows(keys)
            # A part is missing only if it was dropped for being rare: then its count is 1.
            counts = np.where(rows >= 0, table.counts[rows], 1) if len(table.counts) else np.ones(len(keys))
            ways.append(best[end - size] + np.log(counts / total))
        best.append(np.max(ways, axis=0) if ways else np.zeros(len(first)))
    return best[n]


class Counter:
    """Adds up tables. New tables are collected, and merged when they are as large as the merged one."""

    def __init__(self, limit: int):
        self.limit = limit
        self.merged: Table | None = None
        self.waiting: list[Table] = []

    def add(self, table: Table) -> None:
        """Add the counts of one block."""
        self.waiting.append(table)
        size = sum(len(table.keys) for table in self.waiting)
        if size > max(BLOCK, 0 if self.merged is None else len(self.merged.keys)):
            self.result()

    def result(self) -> Table:
        """All counts so far."""
        tables = ([] if self.merged is None else [self.merged]) + self.waiting
        joined = Table(*(np.concatenate([getattr(t, field.name) for t in tables]) for field in fields(Table)))
        order = np.argsort(joined.keys, kind="stable")  # stable: the first occurrence stays first
        keys = joined.keys[order]
        new = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
        counts = np.add.reduceat(joined.counts[order], new) if len(new) else joined.counts
        table = joined.where(order[new])
        table = Table(table.keys, counts, table.starts, table.stops, table.cuts)
        least = 1
        while len(table.keys) > self.limit:
            least += 1
            table = table.where(table.counts >= least)
        self.merged, self.waiting = table, []
        return table


def _best(corpus: Corpus, tables: list[Table], total: int, options: PmiOptions) -> Collocations:
    """Score every frequent n-gram, PMI_n = log p(n-gram) − its best cut, and keep the best."""
    starts = np.concatenate([table.starts for table in tables])
    stops = np.concatenate([table.stops for table in tables])
    scores = np.concatenate([np.log(table.counts / max(total, 1)) - table.cuts for table in tables])
    best = np.argsort(-scores, kind="stable")[: options.size]
    best = best[scores[best] >= options.min_pmi]
    ngrams = [tuple(corpus.tokens(int(starts[i]), int(stops[i])).tolist()) for i in best]
    order = sorted(range(len(best)), key=lambda i: -len(ngrams[i]))  # stable: best first among equals
    return Collocations([ngrams[i] for i in order], scores[best[order]].astype(np.float32))


class Phrases:
    """Finds collocations in a run of tokens, by a hash of their tokens at all positions at once."""

    def __init__(self, phrases: Sequence[tuple[int, ...]], vocab_size: int):
        self.token_hash_V = bits(make_key(0), np.arange(vocab_size))
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for phrase in phrases:
            if len(phrase) > 1:
                by_length.setdefault(len(phrase), []).append(phrase)
        self.hashes: dict[int, np.ndarray] = {}
        self.shift = np.uint64(64 - max(10, len(phrases).bit_length() + 4))
        # Leading bits of the hashes of first pairs and of whole phrases.
        self.seen = np.zeros(1 << (64 - int(self.shift)), bool)
        for length in sorted(by_length):
            token_NL = np.array(by_length[length])
            hash_N = self.token_hash_V[token_NL[:, 0]]
            for k in range(1, length):
                hash_N = self._extend(hash_N, token_NL[:, k])
                if k == 1:
                    self.seen[hash_N >> self.shift] = True
            self.seen[hash_N >> self.shift] = True
            self.hashes[length] = np.unique(hash_N)

    def _extend(self, hash_N: np.ndarray, token_N: np.ndarray) -> np.ndarray:
        return (hash_N ^ (hash_N >> np.uint64(29))) * FACTOR + self.token_hash_V[token_N]

    def find(self, token: np.ndarray, first: np.ndarray, last: np.ndarray) -> list[tuple[int, int]]:
        """All (−length, position) of collocations of whole words, including overlapping ones.

        `first` marks the tokens that begin a word, `last` those that end a run of text.
        """
        found: list[tuple[int, int]] = []
        run_end = np.append(np.flatnonzero(last) + 1, len(token))
        place = np.flatnonzero(first)
        stop = run_end[np.searchsorted(run_end, place, side="right")] if len(place) else place
        word_end = np.append(first[1:] | last[:-1], True)
        hashed = self.token_hash_V[token[place]]
        for length in range(2, max(self.hashes, default=1) + 1):
            inside = place + length <= stop
            place, stop, hashed = place[inside], stop[inside], hashed[inside]
            hashed = self._extend(hashed, token[place + length - 1])
            likely = np.flatnonzero(self.seen[hashed >> self.shift])
            if length == 2:
                place, stop, hashed = place[likely], stop[likely], hashed[likely]
                likely = np.arange(len(place))
            table = self.hashes.get(length)
            if table is not None:
                near = np.minimum(np.searchsorted(table, hashed[likely]), len(table) - 1)
                hit = place[likely[table[near] == hashed[likely]]]
                found += [(-length, p) for p in hit[word_end[hit + length - 1]].tolist()]
        return found

    def join(self, token: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """`first` with the words of each collocation joined to one unit: longest first, without overlaps."""
        taken = bytearray(len(token))
        inner: list[int] = []
        for negative, place in sorted(self.find(token, first, last)):
            if taken.find(1, place, place - negative) < 0:
                taken[place : place - negative] = b"\x01" * -negative
                inner += range(place + 1, place - negative)
        first = first.copy()
        first[inner] = False
        return first
