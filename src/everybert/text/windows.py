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
    shift: int
    """Token i of this sequence is token i + shift of the whole text's."""
    at: int
    end: int
    """Of the whole text, the tokens [at, end) that it owns: their results are taken from here."""

    @property
    def own(self) -> slice:
        """The owned tokens of this sequence."""
        return slice(self.at - self.shift, self.end - self.shift)

    @property
    def count(self) -> int:
        """How many tokens it owns."""
        return self.end - self.at

    def owns(self, token: int) -> bool:
        """Whether the result of a token of the whole text is taken from this window."""
        return self.at <= token < self.end


def cover(ids: Sequence[int], lead: int, tail: int, size: int) -> list[Piece]:
    """A text's sequence as sequences of at most `size` tokens, each token owned by exactly one.

    `lead` and `tail` count the special tokens before and after the text; every window has them.
    """
    n = len(ids)
    if n <= size:
        return [Piece(ids, 0, 0, n)]
    body, room = ids[lead : n - tail], size - lead - tail
    spans = windows(len(body), room, min(OVERLAP, room // 4))
    pieces = []
    for w in spans:
        at = 0 if w is spans[0] else lead + w.own_start
        end = n if w is spans[-1] else lead + w.own_stop
        pieces.append(Piece([*ids[:lead], *body[w.start : w.stop], *ids[n - tail :]], w.start, at, end))
    return pieces
