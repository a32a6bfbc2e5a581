"""Collocations for PMI-Masking (Levine et al. 2021): runs of words that belong together, mined from a corpus.

An n-gram's score is the paper's PMI_n: the least, over every way to cut the n-gram into two or more parts, of
log p(w1 … wn) - sum of log p(part). So "New York" scores high and "the New York" does not: cut after "the" it
is no surprise.

Words are runs of tokens, known by 64-bit hashes. Lengths are counted one after another, and an n-gram is counted
only where both (n-1)-grams in it are frequent, so tables stay small; above `table` rows the rarest are let go.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from everybert.corpus.shards import Corpus
from everybert.text.tokenizer import Tokenizer

BLOCK = 1 << 20  # tokens looked at together


@dataclass(frozen=True)
class PmiOptions:
    """Which collocations to keep."""

    words: int = 5  # longest n-gram
    min_count: int = 10
    min_pmi: float = 4.0  # in nats: some fifty times as often as chance
    size: int = 800_000  # at most, the best first
    table: int = 1 << 24  # n-grams counted at once, 40 bytes each


@dataclass(frozen=True)
class Collocations:
    """Token-id tuples, longest first and then best first, and their PMI."""

    ngrams: list[tuple[int, ...]]
    scores: np.ndarray


@dataclass(frozen=True)
class Words:
    """The words of some whole sentences, keys[m - 1] the hashes of the m-grams that start at each word."""

    keys: list[np.ndarray]
    starts: np.ndarray  # token offsets in the corpus
    stops: np.ndarray
    sentences: np.ndarray
    spoken: np.ndarray  # the word is one, not punctuation


@dataclass(frozen=True)
class Table:
    """N-grams in ascending order of hash: how often each occurs, one place where, log p of its best cut."""

    keys: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    cuts: np.ndarray

    def rows(self, keys: np.ndarray) -> np.ndarray:
        """The row of each key, -1 where it has none."""
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
    """The collocations of a corpus; `show` is told how many of its tokens, times `words`, are done."""
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
    """(V,) bool: the piece is no part of a word: punctuation, or a special token such as the unknown one."""
    pieces = [tokenizer.decode([i], skip_special=False).strip() for i in range(tokenizer.size)]
    # U+FFFD is part of a character, which a byte-level vocabulary may cut.
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
    """Find the words: one starts with a sentence, a piece that does not continue one, or punctuation."""
    base = int(offsets[0])
    mark = marks[ids]
    begins = ~continues[ids] | mark
    begins[1:] |= mark[:-1]
    begins[offsets[:-1] - base] = True
    starts = np.flatnonzero(begins)
    stops = np.append(starts[1:], len(ids))
    inside = np.arange(len(ids)) - np.repeat(starts, stops - starts)
    pieces = _mix(ids.astype(np.uint64) + (inside.astype(np.uint64) << np.uint64(32)))
    word = _mix(np.add.reduceat(pieces, starts))
    keys = [word]
    for m in range(1, n):
        keys.append(_mix(keys[-1][:-1] * np.uint64(3) + word[m:]) if len(word) > m else word[:0])
    sentences = np.searchsorted(offsets, starts + base, side="right")
    return Words(keys, starts + base, stops + base, sentences, ~mark[starts])


def _mix(x: np.ndarray) -> np.ndarray:
    """A good 64-bit hash of 64-bit numbers (the finish of splitmix64)."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _count(words: Words, n: int, tables: list[Table], total: int) -> Table:
    """The block's n-grams whose parts are all frequent."""
    at = np.flatnonzero(words.spoken)
    for m in range(1, n):  # keep the starts of frequent m-grams that have one right after them
        at = at[at < len(words.keys[m - 1])]
        at = at[tables[m - 1].rows(words.keys[m - 1][at]) >= 0]
        at = at[np.isin(at + 1, at, assume_unique=True)]
        at = at[words.sentences[at] == words.sentences[at + 1]] if m == 1 else at
    keys, index, counts = np.unique(words.keys[n - 1][at], return_index=True, return_counts=True)
    first = at[index]
    cuts = _cuts(words, first, n, tables, total)
    return Table(keys, counts.astype(np.int64), words.starts[first], words.stops[first + n - 1], cuts)


def _cuts(words: Words, first: np.ndarray, n: int, tables: list[Table], total: int) -> np.ndarray:
    """The greatest sum of log p(part) over all ways to cut the n-grams at `first` into two parts or more."""
    best = [np.zeros(len(first))]
    for end in range(1, n + 1):
        ways = []
        for size in range(1, min(end, n - 1) + 1):
            table, keys = tables[size - 1], words.keys[size - 1][first + end - size]
            rows = table.rows(keys)
            # A part can be missing only if it was let go for being rare: then it counts once.
            counts = np.where(rows >= 0, table.counts[rows], 1) if len(table.counts) else np.ones(len(keys))
            ways.append(best[end - size] + np.log(counts / total))
        best.append(np.max(ways, axis=0) if ways else np.zeros(len(first)))
    return best[n]


class Counter:
    """Adds up tables; they wait in a heap and are merged when it has grown as large as what is merged."""

    def __init__(self, limit: int):
        self.limit = limit
        self.merged: Table | None = None
        self.waiting: list[Table] = []

    def add(self, table: Table) -> None:
        """Take the counts of one more block."""
        self.waiting.append(table)
        size = sum(len(table.keys) for table in self.waiting)
        if size > max(BLOCK, 0 if self.merged is None else len(self.merged.keys)):
            self.result()

    def result(self) -> Table:
        """All counts so far."""
        tables = ([] if self.merged is None else [self.merged]) + self.waiting
        joined = Table(*(np.concatenate([getattr(t, field.name) for t in tables]) for field in fields(Table)))
        order = np.argsort(joined.keys, kind="stable")  # stable: the first place stays first
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
    """Score every frequent n-gram: PMI_n = log p(n-gram) - its best cut; keep the best."""
    starts = np.concatenate([table.starts for table in tables])
    stops = np.concatenate([table.stops for table in tables])
    scores = np.concatenate([np.log(table.counts / max(total, 1)) - table.cuts for table in tables])
    best = np.argsort(-scores, kind="stable")[: options.size]
    best = best[scores[best] >= options.min_pmi]
    ngrams = [tuple(corpus.tokens(int(starts[i]), int(stops[i])).tolist()) for i in best]
    order = sorted(range(len(best)), key=lambda i: -len(ngrams[i]))  # stable: best first among equals
    return Collocations([ngrams[i] for i in order], scores[best[order]].astype(np.float32))
