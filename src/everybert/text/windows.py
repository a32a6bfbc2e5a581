"""Long texts in overlapping windows, each token owned by exactly one: nothing is cut off."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from everybert.errors import EverybertError

OVERLAP = 128
"""Tokens that neighbouring windows of a long text share, at most a quarter of the window."""


class Window(NamedTuple):
    """The tokens [start, stop) of a text; the results of [own_start, own_stop) are taken from this window."""

    start: int
    stop: int
    own_start: int
    own_stop: int


def windows(n: int, size: int, overlap: int) -> list[Window]:
    """Cover n tokens with windows of at most `size` tokens that overlap by at least `overlap`.

    All windows of a text have the same length: the last one starts earlier rather than being shorter. A token belongs
    to the window with the nearest middle, in which it has the most context on its shorter side; ties go left.
    """
    if size < 1 or not 0 <= overlap < size:
        raise EverybertError(f"windows of {size} tokens cannot overlap by {overlap}: 0 <= overlap < size is needed")
    if n <= size:
        return [Window(0, n, 0, n)]
    starts = [*range(0, n - size, size - overlap), n - size]
    edges = [0, *((a + b + size + 1) // 2 for a, b in pairwise(starts)), n]
    return [Window(s, s + size, a, b) for s, (a, b) in zip(starts, pairwise(edges), strict=True)]


@dataclass(frozen=True)
class Piece:
    """A window of a text as a sequence with special tokens around it."""

    ids: Sequence[int]
    start: int
    stop: int
    """Of this sequence, the tokens it owns: their results are taken from here."""
    at: int
    """Position of the first owned token in the sequence of the whole text."""

    @property
    def own(self) -> slice:
        """The owned tokens of this sequence."""
        return slice(self.start, self.stop)

    @property
    def count(self) -> int:
        """How many tokens it owns."""
        return self.stop - self.start

    def index(self, token: int) -> int:
        """The position in this sequence of a token of the whole text."""
        return token - self.at + self.start

    def owns(self, token: int) -> bool:
        """Whether the result of a token of the whole text is taken from this window."""
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
