"""Packs: training batches as a pure function of (corpus, recipe, seed, position).

A pack is a run of whole examples of at most `capacity` tokens. Packs are numbered within a block of documents,
and blocks within an epoch, so any pack is made without making those before it: a resumed run continues at its
position, and workers and ranks take every n-th pack of the same sequence.

Legend: T tokens in the pack, B sequences, P parts of sequences, M masked positions, E examples, N packs.
"""

from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np

from everybert.corpus.examples import Block, ExampleConfig, ExampleRanges, RandomSegments, all_examples, epoch_documents
from everybert.corpus.masking import Masked, Masker, MaskingConfig, PackText, below, make_key, next_tokens, permutation
from everybert.corpus.pmi import Phrases
from everybert.corpus.shards import Corpus, ExampleLayout, offsets, ranges
from everybert.errors import EverybertError

BLOCK_TOKENS = 1 << 22  # planned in a fraction of a second, and large enough to shuffle examples well
BLOCK_PACKS = 64  # at least, because the last pack of a block is not full
LOOKAHEAD = 64  # examples that may fill the gap at the end of a pack
DRAWS = 1 << 24  # draws at masked positions are below this: exact in fp32


class Position(NamedTuple):
    """Where a pack is, or a run resumes: there `pack` may exceed the number of packs in the block."""

    epoch: int = 0
    block: int = 0
    pack: int = 0


class Plan(NamedTuple):
    """The examples of a block in the order of its packs. Pack n is examples `offsets_N1[n]:offsets_N1[n + 1]`."""

    examples: ExampleRanges
    offsets_N1: np.ndarray


def fill_packs(length_E: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(order_E, offsets_N1): examples in packs, in order; a gap is filled by the best fit among the next few."""
    order, length = np.arange(len(length_E)), np.array(length_E)
    starts = [0]
    most = capacity // int(length.min()) + 1 if len(length) else 0
    while (start := starts[-1]) < len(order):
        used = np.cumsum(length[start : start + most])
        stop = start + int(np.searchsorted(used, capacity, side="right"))
        gap = capacity - int(used[stop - start - 1])
        while len(ahead := length[stop : stop + LOOKAHEAD]):
            fit = stop + int(np.argmax(np.where(ahead <= gap, ahead, 0)))
            if length[fit] > gap:
                break
            gap -= int(length[fit])
            order[[stop, fit]], length[[stop, fit]] = order[[fit, stop]], length[[fit, stop]]
            stop += 1
        starts.append(stop)
    return order, np.array(starts)


class PackStream:
    """The endless sequence of packs of a recipe.

    `make` makes one pack and `packs` iterates over them. A pack is a dict of int64 arrays: tokens (T),
    segments (T, only in families that have them), lengths (B), mask_index, mask_label and draw (M; a random number
    below DRAWS), pair_label (B; 0 next or in order, 1 random or swapped, −100 none), example (B) ids, language (B,
    only of a multilingual corpus), and its position. The span strategy adds span_left and span_right (M; the positions
    next to the span) and span_place (M; 1 for the span's first token).
    """

    def __init__(
        self,
        corpus: Corpus,
        layout: ExampleLayout,
        examples: ExampleConfig | None = None,
        masking: MaskingConfig | None = None,
        seed: int = 0,
        capacity: int = 16_384,
        causal: bool | str = False,
        phrases: Phrases | None = None,
    ):
        self.corpus, self.layout, self.seed, self.capacity, self.causal = corpus, layout, seed, capacity, causal
        self.examples = examples or ExampleConfig()
        self.masking = masking or MaskingConfig()
        if capacity < self.examples.length:
            raise EverybertError(f"a pack of {capacity} tokens cannot hold {self.examples.length}: raise its capacity")
        if self.examples.paired and corpus.sentences <= corpus.documents:
            raise EverybertError(
                f"examples = {self.examples.kind!r} needs documents of two sentences or more: put a document's "
                "sentences into one document, or choose examples = 'full'"
            )
        self.random_segments = RandomSegments(corpus) if self.examples.kind == "pairs" else None
        unigram = corpus.unigram() if self.masking.replacement == "unigram" else None
        if phrases is None and self.masking.strategy == "pmi" and (mined := corpus.collocations()) is not None:
            phrases = Phrases(mined)
        self.masker = Masker(self.masking, layout, unigram, phrases)
        block_tokens = max(BLOCK_TOKENS, BLOCK_PACKS * capacity)
        self.blocks = max(1, min(corpus.token_count // block_tokens, corpus.documents))
        self._epoch: tuple[int, tuple[np.ndarray, np.ndarray]] | None = None
        self._plan: tuple[tuple[int, int], Plan] | None = None

    def content_epoch(self, epoch: int) -> int:
        """The epoch whose examples and masks this one has: its own, or those of a static duplicate."""
        return epoch % self.masking.static_duplicates if self.masking.static_duplicates else epoch

    def plan(self, epoch: int, block: int) -> Plan:
        """The examples of a block of an epoch, in packs. The last plan is cached."""
        if self._plan is None or self._plan[0] != (epoch, block):
            self._plan = (epoch, block), self._make_plan(epoch, block)
        return self._plan[1]

    def _make_plan(self, epoch: int, number: int) -> Plan:
        content = self.content_epoch(epoch)
        if self._epoch is None or self._epoch[0] != content:
            self._epoch = content, epoch_documents(self.corpus, self.examples.alpha, self.seed, content)
        documents, copies = self._epoch[1]
        cut = slice(number * len(documents) // self.blocks, (number + 1) * len(documents) // self.blocks)
        block = Block.of(self.corpus, documents[cut], copies[cut], by_language=self.examples.kind == "full")
        separators = self.layout.pair_separators
        examples = all_examples(block, self.examples, separators, self.seed, content, self.random_segments)
        order = permutation(make_key(self.seed, 5, epoch, number), len(examples))
        packed, offsets_N1 = fill_packs(examples.length_E[order], self.capacity)
        return Plan(examples.take(order[packed]), offsets_N1)

    def positions(self, start: Position | None = None, epochs: int | None = None) -> Iterator[Position]:
        """All positions from `start` on, endless or for the given number of epochs."""
        epoch, block, pack = start or Position()
        stop = None if epochs is None else epoch + epochs
        while epoch != stop:
            count = len(self.plan(epoch, block).offsets_N1) - 1
            yield from (Position(epoch, block, p) for p in range(pack, count))
            pack = max(0, pack - count)
            block += 1
            if block == self.blocks:
                epoch, block = epoch + 1, 0

    def packs(
        self,
        start: Position | None = None,
        first: int = 0,
        stride: int = 1,
        rates: Iterable[float | None] = repeat(None),
        epochs: int | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Packs first, first + stride, … counted from `start`; `rates` has the masking rate of every pack from there.

        Worker w of W on rank r of R takes first = r + w R and stride = R W.
        """
        for position, rate in islice(zip(self.positions(start, epochs), rates), first, None, stride):
            yield self.make(position, rate)

    def examples_at(self, position: Position) -> ExampleRanges:
        """The examples of the pack at a position."""
        plan = self.plan(position.epoch, position.block)
        if not 0 <= position.pack < len(plan.offsets_N1) - 1:
            raise IndexError(f"{position} is beyond its block, which has {len(plan.offsets_N1) - 1} packs")
        return plan.examples.take(np.arange(*plan.offsets_N1[position.pack : position.pack + 2]))

    def mask(
        self, examples: ExampleRanges, epoch: int, rate: float | None = None
    ) -> tuple[PackText, np.ndarray, np.ndarray, Masked]:
        """(text, segments, keys, masked): examples with the masks of an epoch, or with a causal model's targets."""
        text, segments = self.assemble(examples)
        key_B = make_key(self.seed, 6, self.content_epoch(epoch), examples.id_E)
        masked = next_tokens(text, self.causal == "reverse") if self.causal else self.masker(text, key_B, rate)
        return text, segments, key_B, masked

    def make(self, position: Position, rate: float | None = None) -> dict[str, Any]:
        """The pack at a position, masked at the given rate or the configured one."""
        examples = self.examples_at(position)
        text, segments, key_B, masked = self.mask(examples, position.epoch, rate)
        sequence_M = np.searchsorted(text.sequence_offsets_B1, masked.index_M, side="right") - 1
        within_M = masked.index_M - text.sequence_offsets_B1[sequence_M]
        pack = {
            "tokens": masked.tokens_T,
            "lengths": examples.length_E,
            "mask_index": masked.index_M,
            "mask_label": masked.label_M,
            "draw": below(make_key(key_B, 5)[sequence_M], within_M, DRAWS),
            "pair_label": examples.label_E,
            "example": examples.id_E,
            "position": position,
        }
        if self.layout.segments:
            pack["segments"] = segments
        if self.corpus.document_language is not None:
            pack["language"] = self.corpus.document_language[examples.document_E].astype(np.int64)
        if self.masking.strategy == "span":
            pack["span_left"], pack["span_right"] = masked.unit_start_M - 1, masked.unit_stop_M
            pack["span_place"] = masked.index_M - masked.unit_start_M + 1
        return pack

    def assemble(self, examples: ExampleRanges) -> tuple[PackText, np.ndarray]:
        """(tokens, segments): the class token, the parts, and separators between and after them."""
        length_P, parts_E = examples.part_length_P, examples.parts_E
        number_P = ranges(np.zeros_like(parts_E), parts_E)
        last_P = np.zeros(len(length_P), bool)
        last_P[examples.part_offsets_E1[1:] - 1] = True
        size_P = (number_P == 0) + length_P + np.where(last_P, 1, examples.separators)
        start_P = offsets(size_P)[:-1] + (number_P == 0)
        sequence_offsets = offsets(examples.length_E)
        tokens = np.full(int(sequence_offsets[-1]), self.layout.sep_id)
        tokens[sequence_offsets[:-1]] = self.layout.cls_id
        source = examples.part_start_P
        tokens[ranges(start_P, length_P)] = self.corpus.gather(source, source + length_P)
        segments = np.repeat(number_P if self.examples.paired else np.zeros_like(number_P), size_P)
        sequence_P = np.repeat(np.arange(len(examples)), parts_E)
        return PackText(tokens, sequence_offsets, start_P, length_P, sequence_P), segments
