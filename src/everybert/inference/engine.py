"""Sequences through the encoder: batches filled to a budget of tokens, equal lengths together, long texts in windows.

Legend: T tokens in the batch, B sequences, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.windows import windows

BUDGET_CPU = 2048
"""Tokens of a batch on the CPU: a layer's activations stay in the cache."""
BUDGET_GPU = 32768
"""Tokens of a batch on an accelerator: enough to fill it."""
OVERLAP = 128
"""Tokens that neighbouring windows of a long text share, at most a quarter of the window."""


@dataclass(frozen=True)
class Inputs:
    """Sequences for the encoder."""

    ids: Sequence[Sequence[int]]
    segments: Sequence[Sequence[int]] | None = None
    global_tokens: Sequence[Sequence[int]] | None = None
    """Per sequence, the indices that are global (Longformer)."""

    def batch(self, which: Sequence[int], device: torch.device) -> Ragged:
        """Some of the sequences as one ragged batch."""

        def pick(x: Sequence[Sequence[int]] | None) -> list[Sequence[int]] | None:
            return None if x is None else [x[i] for i in which]

        return Ragged.of(pick(self.ids) or [], pick(self.segments), pick(self.global_tokens), device)


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Which sequences make each batch: at most `budget` tokens, or one sequence; the longest first."""
    groups: list[list[int]] = []
    total = budget
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        total += lengths[i]
        if total > budget:
            groups.append([])
            total = lengths[i]
        groups[-1].append(i)
    return groups


@torch.inference_mode()
def encode(
    network: Network, inputs: Inputs, layer: int | None = None, budget: int | None = None
) -> Iterator[tuple[list[int], Ragged, Tensor]]:
    """Batch after batch: which sequences it holds, the batch, and its hidden states (T, H) of a layer or the last."""
    device = network.encoder.embeddings.token.weight.device
    budget = budget or (BUDGET_CPU if device.type == "cpu" else BUDGET_GPU)
    for which in plan([len(ids) for ids in inputs.ids], budget):
        batch = inputs.batch(which, device)
        network.encoder.check(batch)
        if layer is None:
            yield which, batch, network.encoder(batch)
        else:
            states: list[Tensor] = []
            network.encoder(batch, states)
            yield which, batch, states[layer]


# ── texts longer than the window ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Piece:
    """A window of a text as a sequence of its own, the text's special tokens around it."""

    ids: Sequence[int]
    start: int
    stop: int
    """Of this sequence, the tokens it owns: their results are taken from here."""
    at: int
    """Where the first owned token stands in the whole text's sequence."""

    @property
    def own(self) -> slice:
        """The owned tokens of this sequence."""
        return slice(self.start, self.stop)

    def index(self, token: int) -> int:
        """Where a token of the whole text's sequence stands in this one."""
        return token - self.at + self.start

    def owns(self, token: int) -> bool:
        """Whether a token of the whole text's sequence takes its result from this one."""
        return self.at <= token < self.at + self.stop - self.start


def cover(ids: Sequence[int], lead: int, tail: int, size: int) -> list[Piece]:
    """A text's sequence as sequences of at most `size` tokens, each token owned by exactly one.

    `lead` and `tail` count the special tokens before and after the text; every window has them.
    """
    n = len(ids)
    if n <= size:
        return [Piece(ids, 0, n, 0)]
    body, room = ids[lead : n - tail], size - lead - tail
    spans = windows(len(body), room, min(OVERLAP, room // 4))
    pieces = []
    for span in spans:
        start, stop = lead + span.own_start - span.start, lead + span.own_stop - span.start
        at = lead + span.own_start
        if span is spans[0]:
            start, at = 0, 0
        if span is spans[-1]:
            stop = size
        pieces.append(Piece([*ids[:lead], *body[span.start : span.stop], *ids[n - tail :]], start, stop, at))
    return pieces
