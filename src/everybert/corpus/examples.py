"""Training examples from runs of the corpus: BERT's pairs, ALBERT's order, RoBERTa's sentences.

Examples are planned for a block of documents at a time, as arrays of token ranges. No token is read here. Every
random choice depends only on the seed, the epoch and the position where the example begins.

Legend: D documents in the block, S sentences, U sentences or pieces of long ones, E examples, P parts of examples.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np

from everybert.corpus.masking import below, bits, make_key, permutation, uniform
from everybert.corpus.shards import Corpus, offsets, ranges
from everybert.errors import EverybertError

ExampleKind = Literal["pairs", "order", "full", "document"]
KINDS: tuple[ExampleKind, ...] = get_args(ExampleKind)
UNLABELLED = -100
LANE = 1 << 14  # documents with more tokens than this are planned as several, to keep planning fast


@dataclass(frozen=True)
class ExampleConfig:
    """How training examples are made."""

    kind: ExampleKind = "pairs"
    """pairs: BERT's next or random sentence; order: ALBERT's swapped halves; full and document: RoBERTa's
    full sentences, across documents or within one."""
    length: int = 128
    """Most tokens in an example, including special tokens."""
    short_probability: float = 0.1
    """Share of pairs (and order) examples with a shorter target length, uniform in 2 … the longest."""
    alpha: float = 1.0
    """Languages are sampled in proportion to their tokens to this power (XLM-R: 0.3); 1 keeps their shares."""

    def __post_init__(self):
        if self.kind not in KINDS:
            raise EverybertError(f"examples = {self.kind!r} is unknown: choose one of {', '.join(KINDS)}")
        if self.length < 8:
            raise EverybertError(f"an example length of {self.length} is too short: give at least 8 tokens")
        if not 0 <= self.short_probability <= 1:
            raise EverybertError(f"short_probability = {self.short_probability} must lie between 0 and 1")
        if not 0 <= self.alpha <= 1:
            raise EverybertError(f"alpha = {self.alpha} must lie between 0 (even) and 1 (as the corpus is)")

    @property
    def paired(self) -> bool:
        """Whether examples have a second segment and a label."""
        return self.kind in ("pairs", "order")


def epoch_documents(corpus: Corpus, alpha: float, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(document, copy) numbers of an epoch in random order.

    Language l is sampled with p_l ∝ n_l^α (Conneau et al. 2020), where n_l is its number of tokens, so its documents
    appear f_l = p_l / share_l times per epoch. Epoch e has ⌊u + (e+1) f⌋ − ⌊u + e f⌋ copies of a document, with a
    fixed u per document: every document is used, rare ones every 1 / f epochs.
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
    """Some documents, concatenated. A local token is a position in this concatenation."""

    document_D: np.ndarray
    copy_D: np.ndarray
    base_D1: np.ndarray
    """Local token at which each document begins, and the end."""
    shift_D: np.ndarray
    """Add it to a local token of the document to get the token offset in the corpus."""
    end_S: np.ndarray
    """Local token at which each sentence ends."""
    language_D: np.ndarray

    @classmethod
    def of(cls, corpus: Corpus, documents: np.ndarray, copies: np.ndarray, by_language: bool = False) -> "Block":
        """Concatenate the given copies of documents; with `by_language`, one language after another."""
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
        end = end[np.diff(end, prepend=0) > 0]  # leaves out empty sentences
        language = np.zeros(len(documents), np.int64)
        if corpus.document_language is not None:
            language = corpus.document_language[documents].astype(np.int64)
        return cls(documents, copies, base, shift, end, language)

    def mirror(self, mirrored_D: np.ndarray) -> "Block":
        """The same block with the sentences of the chosen documents in reverse order."""
        d_S = np.searchsorted(self.base_D1, self.end_S) - 1
        start_S = np.concatenate([self.base_D1[:1], self.end_S[:-1]])
        turned_S = self.base_D1[d_S] + self.base_D1[d_S + 1] - start_S
        return replace(self, end_S=np.sort(np.where(mirrored_D[d_S], turned_S, self.end_S)))

    def example_id(self, cursor: np.ndarray, d: np.ndarray) -> np.ndarray:
        """int64 id of the examples that begin at a local token of the block's document d."""
        return (self.copy_D[d] << 48) + cursor + self.shift_D[d]


class RandomSegments:
    """Draws random second segments for BERT's pairs, from the same language and from another document.

    The draw is uniform over sentences, not over documents: random sentences are then as long, and as deep in their
    documents, as true ones. Another language would give the label away.
    """

    def __init__(self, corpus: Corpus):
        sentences = np.diff(corpus.document_sentences)
        language = corpus.document_language
        self.language = np.zeros(len(sentences), np.uint8) if language is None else language
        self.order = np.argsort(self.language, kind="stable")
        self.cumulative = offsets(sentences[self.order])
        self.rank = np.argsort(self.order, kind="stable")
        edge = self.cumulative[offsets(np.bincount(self.language))]
        self.first, self.total = edge[:-1], np.diff(edge)
        self.corpus = corpus
        lonely = np.bincount(self.language[sentences > 0]) == 1
        if lonely.any():
            where = "corpus" if language is None else f"language {corpus.languages[np.argmax(lonely)]!r}"
            raise EverybertError(f"pairs need sentences of other documents, and the {where} has one document: add some")

    def draw(self, key_E: np.ndarray, document_E: np.ndarray, length_E: np.ndarray, fill_E: np.ndarray):
        """Global token offsets (start, stop) of random whole sentences of about `length_E` tokens.

        At least that many where `fill_E` is set. If the document ends too soon, up to three others are drawn.
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
        """Global token offset of one random sentence per example, and of the end of its document."""
        language, rank = self.language[document_E], self.rank[document_E]
        own_start, own_end = self.cumulative[rank], self.cumulative[rank + 1]
        skipped = own_end - own_start  # the sentences of the example's own document
        place = self.first[language] + below(key_E, index, self.total[language] - skipped)
        place += np.where(place >= own_start, skipped, 0)
        slot = np.searchsorted(self.cumulative, place, side="right") - 1
        document = self.order[slot]
        sentence = self.corpus.document_sentences[document] + place - self.cumulative[slot]
        last = self.corpus.document_sentences[document + 1]
        return self.corpus.sentence_offsets[sentence], self.corpus.sentence_offsets[last]


@dataclass(frozen=True)
class ExampleRanges:
    """E examples; example e is the parts `part_offsets_E1[e]:part_offsets_E1[e + 1]`."""

    id_E: np.ndarray
    """int64, unique within an epoch: the document's copy in the high 16 bits, then a token of the corpus."""
    label_E: np.ndarray
    """int64: 0 next or in order, 1 random or swapped, −100 where the example is one segment."""
    document_E: np.ndarray
    """int64: the document in which it begins."""
    part_offsets_E1: np.ndarray
    part_start_P: np.ndarray
    """int64 global token offset."""
    part_length_P: np.ndarray
    separators: int = 1
    """Separator tokens between two parts. One more ends the example, and a class token begins it."""

    def __len__(self) -> int:
        return len(self.id_E)

    @cached_property
    def parts_E(self) -> np.ndarray:
        """Number of parts of each example."""
        return np.diff(self.part_offsets_E1)

    @cached_property
    def length_E(self) -> np.ndarray:
        """Tokens of each example, including special tokens."""
        text = np.add.reduceat(self.part_length_P, self.part_offsets_E1[:-1]) if len(self) else 0
        return text + 2 + (self.parts_E - 1) * self.separators

    def take(self, chosen: np.ndarray) -> "ExampleRanges":
        """The chosen examples, in the order given."""
        count = self.parts_E[chosen]
        parts = ranges(self.part_offsets_E1[:-1][chosen], count)
        return replace(
            self,
            id_E=self.id_E[chosen],
            label_E=self.label_E[chosen],
            document_E=self.document_E[chosen],
            part_offsets_E1=offsets(count),
            part_start_P=self.part_start_P[parts],
            part_length_P=self.part_length_P[parts],
        )


class Chunks(NamedTuple):
    """Runs of consecutive sentences that are split in two, one per example: local tokens begin … split … end."""

    begin_E: np.ndarray
    split_E: np.ndarray
    end_E: np.ndarray
    d_E: np.ndarray
    label_E: np.ndarray
    key_E: np.ndarray


def all_examples(
    block: Block, config: ExampleConfig, separators: int, seed: int, epoch: int, random_segments: RandomSegments | None
) -> ExampleRanges:
    """The examples of a block, of the kind that is configured."""
    if config.paired:
        return pair_examples(block, config, separators, seed, epoch, random_segments)
    return sentence_examples(block, config)


def pair_examples(
    block: Block, config: ExampleConfig, separators: int, seed: int, epoch: int, random_segments: RandomSegments | None
) -> ExampleRanges:
    """Two-segment examples of a block: BERT's if `random_segments` is given, else ALBERT's.

    Only the text should reveal the label. A random second segment is as long as the true one that it replaces.
    A chunk of whole sentences begins with a sentence that did not fit into the chunk before, usually a long one.
    So ALBERT's chunks are cut from the front in half of the documents and from the back in the others.
    """
    room = config.length - 2 - separators
    mirrored_D = np.zeros(len(block.document_D), bool)
    if random_segments is None:
        mirrored_D = bits(make_key(seed, 4, epoch, block.copy_D), block.document_D) % np.uint64(2) == 1
        block = block.mirror(mirrored_D)
    begin, split, end, d, label, key = _walk(block, config, room, make_key(seed, 3, epoch))
    id_E = block.example_id(begin, d)
    both_ends = block.base_D1[d] + block.base_D1[d + 1]  # minus a token: its mirror image in the document
    mirrored = both_ends - end, both_ends - split, both_ends - begin
    begin, split, end = np.where(mirrored_D[d], mirrored, (begin, split, end))
    split = np.where(label == UNLABELLED, end, split)
    shift = block.shift_D[d]
    first, first_length = begin + shift, split - begin
    second, second_length = split + shift, end - split
    ones = np.flatnonzero(label == 1)
    if random_segments is not None:
        fills = end[ones] - begin[ones] == room
        start, stop = random_segments.draw(key[ones], block.document_D[d[ones]], second_length[ones], fills)
        second[ones], second_length[ones] = start, np.minimum(stop - start, room - first_length[ones])
    else:
        first[ones], second[ones] = second[ones], first[ones]
        first_length[ones], second_length[ones] = second_length[ones], first_length[ones]
    length = np.stack([first_length, second_length], 1).ravel()
    return ExampleRanges(
        id_E=id_E,
        label_E=label,
        document_E=block.document_D[d],
        part_offsets_E1=offsets(1 + (second_length > 0)),
        part_start_P=np.stack([first, second], 1).ravel()[length > 0],
        part_length_P=length[length > 0],
        separators=separators,
    )


def _walk(block: Block, config: ExampleConfig, room: int, key: np.ndarray) -> Chunks:
    """Cut every document of the block into chunks, all documents (or lanes of long ones) in parallel."""
    lanes_D = -(-np.diff(block.base_D1) // LANE)
    mark = np.repeat(block.base_D1[:-1], lanes_D) + ranges(np.zeros_like(lanes_D), lanes_D) * LANE
    inner_mark = mark[~np.isin(mark, block.base_D1)]
    lane_end = block.end_S[np.searchsorted(block.end_S, inner_mark)]  # of the sentence at the mark
    edges = np.unique(np.concatenate([block.base_D1, lane_end]))
    cursor, stop = edges[:-1], edges[1:]
    d = np.searchsorted(block.base_D1, cursor, side="right") - 1
    rounds = [_next_chunks(block, config, room, key, cursor[:0], stop[:0], d[:0])]  # an empty one, for the dtypes
    while len(cursor):
        chunks = _next_chunks(block, config, room, key, cursor, stop, d)
        rounds.append(chunks)
        replaced = (chunks.label_E == 1) & (config.kind == "pairs")  # their true second segment is used again
        cursor = np.where(replaced, chunks.split_E, chunks.end_E)
        unfinished = cursor < stop
        cursor, stop, d = cursor[unfinished], stop[unfinished], d[unfinished]
    return Chunks(*(np.concatenate(column) for column in zip(*rounds)))


def _next_chunks(
    block: Block, config: ExampleConfig, room: int, key: np.ndarray, cursor: np.ndarray, stop: np.ndarray, d: np.ndarray
) -> Chunks:
    """One chunk per cursor: sentences up to a target length, split at a random sentence boundary.

    The target is `room` or, with `short_probability`, uniform in 2 … room (Devlin et al. 2019, appendix A.2).
    A chunk has at least two sentences if the document has. Nothing is dropped: BERT's pairs are filled to the last
    token, and the rest of the sentence begins the next example, as do the sentences that a random second segment
    replaced. ALBERT's chunks are whole sentences, because a cut at one end would reveal which half came first; only
    a sentence longer than `room` is cut, and continues in the next chunk. A chunk without a boundary inside (one
    sentence is left, or one long sentence fills it) is an example of one segment without a label.

    Example: a document of ten tokens, whose sentences end at 3, 7 and 10, with room for 8. BERT's first chunk is 0 … 8.
    It has boundaries at 3 and 7. If 3 is drawn, its segments are 0 … 3 and 3 … 8, and the next chunk is 8 … 10; if the
    second segment is replaced, the next chunk is 3 … 10. ALBERT's first chunk is 0 … 7, as the third sentence does not
    fit; its one boundary is 3. The next chunk, 7 … 10, has none, so it is one segment without a label.
    """
    key_E = make_key(key, block.example_id(cursor, d))
    short = uniform(key_E, 0) < config.short_probability
    target = np.where(short, 2 + below(key_E, 1, room - 1), room)
    limit = cursor + room
    end_S = block.end_S
    first = np.searchsorted(end_S, cursor, side="right")  # the sentence at the cursor
    last = np.maximum(np.searchsorted(end_S, cursor + target), first + 1)  # the sentence that meets the target
    end = np.minimum(end_S[np.minimum(last, len(end_S) - 1)], stop)
    if config.kind == "pairs":
        end = np.minimum(end, limit)
        splits = np.ones(len(cursor), bool)
    else:
        last_whole = np.searchsorted(end_S, limit, side="right") - 1
        end = np.where(end <= limit, end, np.where(last_whole >= first, end_S[last_whole], limit))
        splits = (cursor == block.base_D1[d]) | (end_S[first - 1] == cursor)  # not after a cut in a long sentence
    boundaries = np.where(splits, np.searchsorted(end_S, end) - first, 0)
    drawn = first + below(key_E, 2, np.maximum(boundaries, 1))
    split = np.where(boundaries > 0, end_S[drawn], end)
    label = np.where(boundaries > 0, (uniform(key_E, 3) < 0.5).astype(np.int64), UNLABELLED)
    return Chunks(cursor, split, end, d, label, key_E)


def sentence_examples(block: Block, config: ExampleConfig) -> ExampleRanges:
    """RoBERTa's examples: as many consecutive sentences as fit (Liu et al. 2019, section 4.2).

    "full" continues into the next document (of the same language) after a separator; "document" does not. A sentence
    longer than the room is cut into pieces that continue in the next example.
    """
    room = config.length - 2
    start_S = np.concatenate([[0], block.end_S[:-1]])
    pieces = -(-(block.end_S - start_S) // room)
    begin_U = np.repeat(start_S, pieces) + ranges(np.zeros_like(pieces), pieces) * room
    end_U = np.minimum(begin_U + room, np.repeat(block.end_S, pieces))
    d_U = np.searchsorted(block.base_D1, begin_U, side="right") - 1
    group_U = block.language_D[d_U] if config.kind == "full" else d_U
    group_end = np.append(np.flatnonzero(np.diff(group_U)) + 1, len(group_U))
    # Each further document costs one separator, so document numbers are added to the lengths.
    next_U = np.searchsorted(end_U + d_U, begin_U + d_U + room, side="right")
    next_U = np.minimum(next_U, group_end[np.searchsorted(group_end, np.arange(len(group_U)), side="right")])
    follow, starts, u = next_U.tolist(), [], 0
    while u < len(follow):
        starts.append(u)
        u = follow[u]
    first_E = np.array(starts, dtype=np.int64)
    begin_E, end_E = begin_U[first_E], end_U[next_U[first_E] - 1]
    d_E, last_d_E = d_U[first_E], d_U[next_U[first_E] - 1]
    parts_E = last_d_E - d_E + 1
    d_P = ranges(d_E, parts_E)
    begin_P = np.maximum(np.repeat(begin_E, parts_E), block.base_D1[d_P])
    end_P = np.minimum(np.repeat(end_E, parts_E), block.base_D1[d_P + 1])
    return ExampleRanges(
        id_E=block.example_id(begin_E, d_E),
        label_E=np.full(len(first_E), UNLABELLED),
        document_E=block.document_D[d_E],
        part_offsets_E1=offsets(parts_E),
        part_start_P=begin_P + block.shift_D[d_P],
        part_length_P=end_P - begin_P,
    )
