"""The documents of an epoch in their random order, a block of them at a time, and places elsewhere in the corpus.

Legend: D documents in the block, S sentences in the block, E examples.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from everybert.corpus.random import below, make_key, permutation, uniform
from everybert.corpus.ranges import offsets, ranges
from everybert.errors import EverybertError


class Documents(Protocol):
    """What this file needs of a corpus (`everybert.corpus.shards.Corpus` has it)."""

    document_sentences: np.ndarray
    sentence_offsets: np.ndarray
    document_language: np.ndarray | None
    languages: tuple[str, ...]


def epoch_documents(corpus: Documents, alpha: float, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(document, copy) numbers of an epoch in its random order.

    Language l is sampled with p_l ∝ n_l^α (Conneau et al. 2020) of the corpus's tokens, so its documents
    appear f_l = p_l / share_l times an epoch. Whole copies are counted over epochs (⌊u + (e+1) f⌋ − ⌊u + e f⌋
    with u fixed for each document): every document has its turn, rare ones every 1 / f epochs.
    """
    documents = np.arange(len(corpus.document_sentences) - 1)
    copies = np.zeros_like(documents)
    if alpha < 1 and corpus.document_language is not None:
        size = np.diff(corpus.sentence_offsets[corpus.document_sentences])
        tokens = np.bincount(corpus.document_language, size, minlength=len(corpus.languages))
        share = tokens / tokens.sum()
        smooth = np.where(tokens > 0, share**alpha, 0)
        times = (smooth / smooth.sum() / np.where(tokens > 0, share, 1))[corpus.document_language]
        u = uniform(make_key(seed, 1), documents)
        count = (np.floor(u + (epoch + 1) * times) - np.floor(u + epoch * times)).astype(np.int64)
        copies = ranges(np.zeros_like(count), count)
        documents = np.repeat(documents, count)
    order = permutation(make_key(seed, 2, epoch), len(documents))
    return documents[order], copies[order]


@dataclass(frozen=True)
class Block:
    """Some documents laid end to end in coordinates of their own (local tokens)."""

    document_D: np.ndarray
    copy_D: np.ndarray
    base_D1: np.ndarray
    """Local token where each document begins, and the end."""
    shift_D: np.ndarray
    """Add it to a document's local tokens to have the corpus's."""
    end_S: np.ndarray
    """Local token where each sentence ends."""
    language_D: np.ndarray

    @classmethod
    def of(cls, corpus: Documents, documents: np.ndarray, copies: np.ndarray, by_language: bool = False) -> "Block":
        """Lay out the given copies of documents, one language after another if asked to."""
        if by_language and corpus.document_language is not None:
            grouped = np.argsort(corpus.document_language[documents], kind="stable")
            documents, copies = documents[grouped], copies[grouped]
        first, last = corpus.document_sentences[documents], corpus.document_sentences[documents + 1]
        filled = corpus.sentence_offsets[last] > corpus.sentence_offsets[first]
        documents, copies, first, last = documents[filled], copies[filled], first[filled], last[filled]
        start = corpus.sentence_offsets[first]
        base = offsets(corpus.sentence_offsets[last] - start)
        shift = start - base[:-1]
        sentences = ranges(first, last - first)
        end = corpus.sentence_offsets[sentences + 1] - np.repeat(shift, last - first)
        end = end[np.diff(end, prepend=0) > 0]  # an empty sentence is none
        language = np.zeros(len(documents), np.int64)
        if corpus.document_language is not None:
            language = corpus.document_language[documents].astype(np.int64)
        return cls(documents, copies, base, shift, end, language)

    def mirror(self, mirrored_D: np.ndarray) -> "Block":
        """The same block with the sentences of the chosen documents in the opposite order."""
        d_S = np.searchsorted(self.base_D1, self.end_S) - 1
        start_S = np.concatenate([self.base_D1[:1], self.end_S[:-1]])
        turned_S = self.base_D1[d_S] + self.base_D1[d_S + 1] - start_S
        return replace(self, end_S=np.sort(np.where(mirrored_D[d_S], turned_S, self.end_S)))

    def example_id(self, cursor: np.ndarray, d: np.ndarray) -> np.ndarray:
        """int64 id of the examples that begin at a local token of the block's document d."""
        return (self.copy_D[d] << 48) + cursor + self.shift_D[d]


class Elsewhere:
    """Draws random second sentences: even over the sentences of the language, outside the first's document.

    Even over sentences, not documents, so that random sentences are as long and as deep in their documents
    as true ones; of the same language, or the label would be given away.
    """

    def __init__(self, corpus: Documents, other_document: bool):
        sentences = np.diff(corpus.document_sentences)
        language = corpus.document_language
        self.language = np.zeros(len(sentences), np.uint8) if language is None else language
        self.order = np.argsort(self.language, kind="stable")
        self.cumulative = offsets(sentences[self.order])
        self.rank = np.argsort(self.order, kind="stable")
        edge = self.cumulative[offsets(np.bincount(self.language))]
        self.first, self.total = edge[:-1], np.diff(edge)
        self.other_document, self.corpus = other_document, corpus
        lonely = np.bincount(self.language[sentences > 0]) == 1
        if other_document and lonely.any():
            where = "corpus" if language is None else f"language {corpus.languages[np.argmax(lonely)]!r}"
            raise EverybertError(
                f"the {where} is one document, so no random sentence can come from another: add documents, or "
                "set other_document = false"
            )

    def draw(self, key_E: np.ndarray, document_E: np.ndarray, length_E: np.ndarray, fill_E: np.ndarray):
        """Global token offsets (start, stop) of sentences from random places, `length_E` tokens or thereabouts.

        They are whole sentences, and no fewer tokens where `fill_E`. Where the document ends too soon another
        place is drawn, three times; the last is taken as it is.
        """
        start, end = self._place(key_E, 4, document_E)
        for index in (5, 6, 7):
            short = np.flatnonzero(end - start < length_E)
            start[short], end[short] = self._place(key_E[short], index, document_E[short])
        wanted = np.minimum(start + length_E, end)
        after = np.searchsorted(self.corpus.sentence_offsets, wanted)
        before, stop = self.corpus.sentence_offsets[after - 1], self.corpus.sentence_offsets[after]
        nearer = ~fill_E & (before > start) & (wanted - before < stop - wanted)
        return start, np.where(nearer, before, stop)

    def _place(self, key_E: np.ndarray, index: int, document_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Global token offsets of one random sentence for each example, and of the end of its document."""
        language, rank = self.language[document_E], self.rank[document_E]
        own_start = self.cumulative[rank]
        own = self.cumulative[rank + 1] - own_start if self.other_document else 0
        place = self.first[language] + below(key_E, index, self.total[language] - own)
        place += np.where(place >= own_start, own, 0)
        slot = np.searchsorted(self.cumulative, place, side="right") - 1
        document = self.order[slot]
        sentence = self.corpus.document_sentences[document] + place - self.cumulative[slot]
        last = self.corpus.document_sentences[document + 1]
        return self.corpus.sentence_offsets[sentence], self.corpus.sentence_offsets[last]
