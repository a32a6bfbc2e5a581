"""Collocations for PMI-Masking (Levine et al. 2021): mined from a corpus, and found again in packs.

The score of an n-gram is the paper's PMI_n: the minimum, over all ways to cut the n-gram into two or more parts, of
log p(w1 … wn) − Σ log p(part). So "New York" scores high and "the New York" does not, because of the cut after "the".

Words are runs of tokens. N-grams are counted for one n after the other, and only where both (n−1)-grams in them are
frequent: the numbers of these two identify the n-gram.

Legend: V vocabulary, N frequent n-grams of one length.
"""

from collections.abc import Callable, Iterable

import numpy as np

from everybert.corpus.masking import bits
from everybert.corpus.shards import Corpus, offsets
from everybert.text.tokenizer import Tokenizer

SAMPLE = 1 << 25  # tokens that are read at most, in sentences spread over the corpus; they take about 2 GB
WORDS = 5  # longest n-gram
MIN_COUNT = 10
MIN_PMI = 4.0  # in nats: about fifty times as frequent as by chance
SIZE = 800_000  # collocations at most; the best are kept


def mine(
    corpus: Corpus, tokenizer: Tokenizer, show: Callable[[int], None] = lambda done: None
) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """The collocations of a corpus and their scores, sorted by length and then by score, both descending.

    `show` is called with the n that is done, up to WORDS.
    """
    chosen = np.arange(0, corpus.sentences, -(-corpus.token_count // SAMPLE))
    starts, stops = corpus.sentence_offsets[chosen], corpus.sentence_offsets[chosen + 1]
    ids, edges, mark_V = corpus.gather(starts, stops), offsets(stops - starts), _marks(tokenizer)
    # A word begins with a sentence, with a token that does not continue a word, and at and after punctuation.
    mark = mark_V[ids]
    begins = ~tokenizer.continues_word()[ids] | mark
    begins[1:] |= mark[:-1]
    begins[edges[:-1][np.diff(edges) > 0]] = True
    begin = np.flatnonzero(begins)
    end = np.append(begin[1:], len(ids))
    sentence = np.searchsorted(edges, begin, side="right")
    inside = (np.arange(len(ids)) - np.repeat(begin, end - begin)).astype(np.uint64)
    pieces = bits(ids.astype(np.uint64) + (inside << np.uint64(32)), 0)
    _, word, count = np.unique(np.add.reduceat(pieces, begin), return_inverse=True, return_counts=True)
    rows = [np.where(~mark[begin] & (count[word] >= MIN_COUNT), word, -1)]  # per n: the n-gram at each word, or −1
    log_p = [np.log(count / len(begin))]
    place_N, score_N, size_N = ([np.empty(0, kind)] for kind in (np.int64, np.float64, np.int64))
    for n in range(2, WORDS + 1):
        row = rows[-1]
        at = np.flatnonzero((row[:-1] >= 0) & (row[1:] >= 0) & (sentence[:-1] == sentence[1:]))
        pair = row[at] * (row.max() + 1) + row[at + 1]
        _, first, gram, count = np.unique(pair, return_index=True, return_inverse=True, return_counts=True)
        frequent = count >= MIN_COUNT
        row = np.full(len(begin), -1)
        row[at] = np.where(frequent, np.cumsum(frequent) - 1, -1)[gram]
        rows.append(row)
        log_p.append(np.log(count[frequent] / len(begin)))
        place_N.append(at[first[frequent]])
        score_N.append(log_p[-1] - _cuts(place_N[-1], n, rows, log_p))
        size_N.append(np.full(len(place_N[-1]), n))
        show(n)
    place, scores, size = (np.concatenate(x) for x in (place_N, score_N, size_N))
    best = np.argsort(-scores, kind="stable")[:SIZE]
    best = best[scores[best] >= MIN_PMI]
    ngrams = [tuple(ids[begin[i] : end[i + n - 1]].tolist()) for i, n in zip(place[best], size[best])]
    order = sorted(range(len(best)), key=lambda i: -len(ngrams[i]))  # stable: best first among equals
    return [ngrams[i] for i in order], scores[best[order]].astype(np.float32)


def _cuts(place_N: np.ndarray, n: int, rows: list[np.ndarray], log_p: list[np.ndarray]) -> np.ndarray:
    """The maximum of Σ log p(part) over all ways to cut the n-grams at these words into two or more parts."""
    best = [np.zeros(len(place_N))]
    for end in range(1, n + 1):
        sizes = range(1, min(end, n - 1) + 1)
        best.append(np.max([best[end - m] + log_p[m - 1][rows[m - 1][place_N + end - m]] for m in sizes], axis=0))
    return best[n]


def _marks(tokenizer: Tokenizer) -> np.ndarray:
    """(V,) bool: the token is not part of a word but punctuation or a special token."""
    pieces = [tokenizer.decode([i], skip_special=False).strip() for i in range(tokenizer.size)]
    # U+FFFD is part of a character: byte-level vocabularies cut characters.
    marks = np.array([piece != "" and not any(c.isalnum() or c == "\ufffd" for c in piece) for piece in pieces])
    marks[list(tokenizer.special_ids)] = True
    return marks


class Phrases:
    """Finds collocations in a run of tokens."""

    def __init__(self, phrases: Iterable[tuple[int, ...]]):
        self.phrases = {phrase for phrase in phrases if len(phrase) > 1}
        self.lengths: dict[tuple[int, ...], set[int]] = {}
        """The first two tokens of collocations, with the lengths of those that begin so."""
        for phrase in self.phrases:
            self.lengths.setdefault(phrase[:2], set()).add(len(phrase))

    def join(self, token: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """`first` with the words of each collocation joined to one unit: longest first, without overlaps.

        `first` marks the tokens that begin a word, `last` those that end a run of text.
        """
        matches: list[tuple[int, int]] = []  # (−length, position), overlapping ones included
        ids, place = token.tolist(), np.flatnonzero(first)
        run_end = np.append(np.flatnonzero(last) + 1, len(token))
        stops = run_end[np.searchsorted(run_end, place, side="right")].tolist()
        word_end = np.append(first[1:] | last[:-1], True)
        for start, stop in zip(place.tolist(), stops):
            for length in self.lengths.get(tuple(ids[start : start + 2]), ()):
                end = start + length
                if end <= stop and word_end[end - 1] and tuple(ids[start:end]) in self.phrases:
                    matches.append((-length, start))
        taken = bytearray(len(token))
        first = first.copy()
        for negative, start in sorted(matches):
            if taken.find(1, start, start - negative) < 0:
                taken[start : start - negative] = b"\x01" * -negative
                first[start + 1 : start - negative] = False
        return first
