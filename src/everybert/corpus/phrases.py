"""Finds collocations in a run of tokens: longest first, each token in one collocation at most.

Collocations are looked up by a 64-bit hash of their tokens, for all places of a pack at once.
"""

from collections.abc import Sequence

import numpy as np

from everybert.corpus.random import bits, make_key

FACTOR = np.uint64(0xD6E8FEB86659FD93)  # odd, so that multiplying loses no information


class Phrases:
    """An index of collocations given as tuples of token ids."""

    def __init__(self, phrases: Sequence[tuple[int, ...]], vocab_size: int):
        self.token_hash_V = bits(make_key(0), np.arange(vocab_size))
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for phrase in phrases:
            if len(phrase) > 1:
                by_length.setdefault(len(phrase), []).append(phrase)
        self.hashes: dict[int, np.ndarray] = {}
        self.shift = np.uint64(64 - max(10, len(phrases).bit_length() + 4))
        self.seen = np.zeros(1 << (64 - int(self.shift)), bool)  # first pairs and whole phrases, by leading bits
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
        """All (−length, place) of collocations of whole words, overlapping ones too.

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
        """`first` with the words of each collocation joined to one unit."""
        taken = bytearray(len(token))
        inner: list[int] = []
        for negative, place in sorted(self.find(token, first, last)):
            if taken.find(1, place, place - negative) < 0:
                taken[place : place - negative] = b"\x01" * -negative
                inner += range(place + 1, place - negative)
        first = first.copy()
        first[inner] = False
        return first
