"""Which runs of the corpus make which training examples: BERT's pairs, ALBERT's order, RoBERTa's sentences.

Examples are planned a block at a time, as arrays of token ranges; no token is read here. Every choice hangs on
(seed, epoch, the place where the example begins).

Legend: D documents in the block, S sentences, U sentences or pieces of long ones, E examples, P parts of examples.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from everybert.corpus.blocks import Block, Elsewhere
from everybert.corpus.random import below, bits, make_key, uniform
from everybert.corpus.ranges import offsets, ranges
from everybert.errors import EverybertError

Kind = Literal["pairs", "order", "full", "document"]
KINDS: tuple[Kind, ...] = ("pairs", "order", "full", "document")
UNLABELLED = -100
LANE = 1 << 14  # documents longer than this are planned as several, side by side, to keep planning fast


@dataclass(frozen=True)
class ExampleConfig:
    """What one training example is made of."""

    kind: Kind = "pairs"
    """pairs: BERT's next or random sentence; order: ALBERT's swapped halves; full and document: RoBERTa's
    full sentences, across documents or within one."""
    length: int = 128
    """Most tokens in an example, special tokens included."""
    short_probability: float = 0.1
    """Share of pairs (and order) examples that aim at a shorter length, drawn evenly from 2 … the longest."""
    other_document: bool = True
    """Random second sentences come from another document; false: from anywhere."""
    alpha: float = 1.0
    """Languages are sampled in proportion to their tokens to this power (XLM-R: 0.3); 1 leaves them be."""

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


@dataclass(frozen=True)
class Examples:
    """E examples; example e is the parts `part_offsets_E1[e]:part_offsets_E1[e + 1]`."""

    id_E: np.ndarray
    """int64, unique within an epoch: the document's copy in the high 16 bits, then a token of the corpus."""
    label_E: np.ndarray
    """int64: 0 next or in order, 1 random or swapped, −100 where the example is one segment."""
    document_E: np.ndarray
    """int64: the document it begins in."""
    part_offsets_E1: np.ndarray
    part_start_P: np.ndarray
    """int64 global token offset."""
    part_length_P: np.ndarray
    separators: int = 1
    """Separator tokens between two parts; one more ends the example, and one class token begins it."""

    def __len__(self) -> int:
        return len(self.id_E)

    @cached_property
    def parts_E(self) -> np.ndarray:
        """How many parts each example has."""
        return np.diff(self.part_offsets_E1)

    @cached_property
    def length_E(self) -> np.ndarray:
        """Tokens of each example, special tokens included."""
        text = np.add.reduceat(self.part_length_P, self.part_offsets_E1[:-1]) if len(self) else 0
        return text + 2 + (self.parts_E - 1) * self.separators

    def cut(self, start: int, stop: int) -> "Examples":
        """Examples start … stop − 1."""
        parts = slice(self.part_offsets_E1[start], self.part_offsets_E1[stop])
        return replace(
            self,
            id_E=self.id_E[start:stop],
            label_E=self.label_E[start:stop],
            document_E=self.document_E[start:stop],
            part_offsets_E1=self.part_offsets_E1[start : stop + 1] - parts.start,
            part_start_P=self.part_start_P[parts],
            part_length_P=self.part_length_P[parts],
        )

    def take(self, chosen: np.ndarray) -> "Examples":
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
    """Runs of consecutive sentences, split in two: local tokens begin … split … end."""

    begin: np.ndarray
    split: np.ndarray
    end: np.ndarray
    d: np.ndarray
    label: np.ndarray
    key: np.ndarray


def pair_examples(
    block: Block, config: ExampleConfig, separators: int, seed: int, epoch: int, elsewhere: Elsewhere | None
) -> Examples:
    """Two-segment examples of a block: BERT's, with random sentences from `elsewhere`, or else ALBERT's.

    Nothing but the text should tell the label. A random second segment is as long as the true one it replaces.
    Chunks of whole sentences begin with a sentence that did not fit the chunk before, a long one as a rule;
    so ALBERT's are cut from the front in half of the documents and from the back in the others.
    """
    room = config.length - 2 - separators
    mirrored_D = np.zeros(len(block.document_D), bool)
    if elsewhere is None:
        mirrored_D = bits(make_key(seed, 4, epoch, block.copy_D), block.document_D) % np.uint64(2) == 1
        block = block.mirror(mirrored_D)
    begin, split, end, d, label, key = _walk(block, config, room, make_key(seed, 3, epoch))
    id_E = block.example_id(begin, d)
    ends = block.base_D1[d] + block.base_D1[d + 1]
    begin, split, end = np.where(mirrored_D[d], (ends - end, ends - split, ends - begin), (begin, split, end))
    split = np.where(label == UNLABELLED, end, split)
    shift = block.shift_D[d]
    first, first_length = begin + shift, split - begin
    second, second_length = split + shift, end - split
    e = np.flatnonzero(label == 1)
    if elsewhere is not None:
        fills = end[e] - begin[e] == room
        start, stop = elsewhere.draw(key[e], block.document_D[d[e]], second_length[e], fills)
        second[e], second_length[e] = start, np.minimum(stop - start, room - first_length[e])
    else:
        first[e], second[e] = second[e], first[e]
        first_length[e], second_length[e] = second_length[e], first_length[e]
    length = np.stack([first_length, second_length], 1).ravel()
    return Examples(
        id_E=id_E,
        label_E=label,
        document_E=block.document_D[d],
        part_offsets_E1=offsets(1 + (second_length > 0)),
        part_start_P=np.stack([first, second], 1).ravel()[length > 0],
        part_length_P=length[length > 0],
        separators=separators,
    )


def _walk(block: Block, config: ExampleConfig, room: int, key: np.ndarray) -> Chunks:
    """Cut every document of the block into chunks, all documents (or lanes of long ones) in step."""
    pieces = -(-np.diff(block.base_D1) // LANE)
    marks = np.repeat(block.base_D1[:-1], pieces) + ranges(np.zeros_like(pieces), pieces) * LANE
    inner = block.end_S[np.searchsorted(block.end_S, marks[~np.isin(marks, block.base_D1)])]
    edges = np.unique(np.concatenate([block.base_D1, inner]))
    cursor, stop = edges[:-1], edges[1:]
    d = np.searchsorted(block.base_D1, cursor, side="right") - 1
    rows = [_next_chunks(block, config, room, key, cursor[:0], stop[:0], d[:0])]  # an empty row, for its types
    while len(cursor):
        chunks = _next_chunks(block, config, room, key, cursor, stop, d)
        rows.append(chunks)
        given_back = (chunks.label == 1) & (config.kind == "pairs")
        cursor = np.where(given_back, chunks.split, chunks.end)
        left = cursor < stop
        cursor, stop, d = cursor[left], stop[left], d[left]
    return Chunks(*(np.concatenate(column) for column in zip(*rows)))


def _next_chunks(block, config: ExampleConfig, room: int, key, cursor, stop, d) -> Chunks:
    """One chunk from each cursor: sentences up to a target length, split at a random sentence boundary.

    The target is the room there is or, with `short_probability`, even in 2 … room (Devlin et al. 2019,
    appendix A.2). A chunk has two sentences at least where the document has. What does not fit is never
    dropped: BERT's pairs are filled to the last token, and the rest of the sentence begins the next example,
    as do the sentences that a random second segment replaced. ALBERT's chunks are whole sentences (a cut at
    one end would tell which half came first); only a sentence longer than the room is cut, to go on in the
    next. A chunk without a boundary inside (one sentence is left, or one over-long sentence fills it) is an
    example of one segment without a label: a forced label would teach that last sentences precede nothing.
    """
    key_E = make_key(key, block.example_id(cursor, d))
    short = uniform(key_E, 0) < config.short_probability
    target = np.where(short, 2 + below(key_E, 1, room - 1), room)
    end_S = block.end_S
    first = np.searchsorted(end_S, cursor, side="right")
    reach = np.searchsorted(end_S, cursor + target)
    end = np.minimum(end_S[np.minimum(np.maximum(reach, first + 1), len(end_S) - 1)], stop)
    if config.kind == "pairs":
        end = np.minimum(end, cursor + room)
        boundaries = np.searchsorted(end_S, end) - first
    else:
        before = np.searchsorted(end_S, cursor + room, side="right") - 1
        fitting = np.where(before >= first, end_S[before], cursor + room)
        end = np.where(end > cursor + room, fitting, end)
        whole = (cursor == block.base_D1[d]) | (end_S[first - 1] == cursor)
        boundaries = np.where(whole, np.searchsorted(end_S, end) - first, 0)
    at = first + below(key_E, 2, np.maximum(boundaries, 1))
    split = np.where(boundaries > 0, end_S[at], end)
    label = np.where(boundaries > 0, (uniform(key_E, 3) < 0.5).astype(np.int64), UNLABELLED)
    return Chunks(cursor, split, end, d, label, key_E)


def sentence_examples(block: Block, config: ExampleConfig) -> Examples:
    """RoBERTa's examples: as many whole sentences in a row as fit (Liu et al. 2019, section 4.2).

    Full sentences go on into the next document (of the same language) after a separator; document sentences
    do not. A sentence longer than the room is cut into pieces that go on in the next example.
    """
    room = config.length - 2
    start_S = np.concatenate([[0], block.end_S[:-1]])
    pieces = -(-(block.end_S - start_S) // room)
    begin_U = np.repeat(start_S, pieces) + ranges(np.zeros_like(pieces), pieces) * room
    end_U = np.minimum(begin_U + room, np.repeat(block.end_S, pieces))
    d_U = np.searchsorted(block.base_D1, begin_U, side="right") - 1
    group_U = block.language_D[d_U] if config.kind == "full" else d_U
    change = np.append(np.flatnonzero(np.diff(group_U)) + 1, len(group_U))
    # Each document costs one separator more, so lengths are measured with document numbers added.
    next_U = np.searchsorted(end_U + d_U, begin_U + d_U + room, side="right")
    next_U = np.minimum(next_U, change[np.searchsorted(change, np.arange(len(group_U)), side="right")])
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
    return Examples(
        id_E=block.example_id(begin_E, d_E),
        label_E=np.full(len(first_E), UNLABELLED),
        document_E=block.document_D[d_E],
        part_offsets_E1=offsets(parts_E),
        part_start_P=begin_P + block.shift_D[d_P],
        part_length_P=end_P - begin_P,
    )
