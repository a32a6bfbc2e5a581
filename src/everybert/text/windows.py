"""Long texts in overlapping windows, each token owned by exactly one: nothing is cut off.

`windows` divides a number of tokens. `cover` gives one text with its special tokens, for embeddings, masked tokens and
token vectors; `WindowConfig` and `cover_pair` give the texts and pairs of tasks, which may also be cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
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
class TextWindow:
    """A window of a text as a sequence with special tokens around it."""

    ids: Sequence[int]
    shift: int
    """Token i of this sequence is token i + shift of the whole text's."""
    own_start: int
    own_stop: int
    """Tokens [own_start, own_stop) of the whole text: their results are taken from this window."""

    @property
    def own(self) -> slice:
        """The owned tokens of this sequence."""
        return slice(self.own_start - self.shift, self.own_stop - self.shift)

    @property
    def count(self) -> int:
        """How many tokens it owns."""
        return self.own_stop - self.own_start

    def owns(self, token: int) -> bool:
        """Whether the result of a token of the whole text is taken from this window."""
        return self.own_start <= token < self.own_stop


def cover(ids: Sequence[int], lead: int, tail: int, size: int) -> list[TextWindow]:
    """A text's sequence as sequences of at most `size` tokens, each token owned by exactly one.

    `lead` and `tail` count the special tokens before and after the text; every window has them.
    """
    n = len(ids)
    if n <= size:
        return [TextWindow(ids, 0, 0, n)]
    body, room = ids[lead : n - tail], size - lead - tail
    spans = windows(len(body), room, min(OVERLAP, room // 4))
    covered = []
    for w in spans:
        own_start = 0 if w is spans[0] else lead + w.own_start
        own_stop = n if w is spans[-1] else lead + w.own_stop
        sequence = [*ids[:lead], *body[w.start : w.stop], *ids[n - tail :]]
        covered.append(TextWindow(sequence, w.start, own_start, own_stop))
    return covered


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class WindowConfig:
    """How texts longer than the model's window are read."""

    size: int
    """Tokens of a sequence, special tokens included."""
    overlap: int
    """Tokens that neighbouring windows share at least."""
    long: str = "window"
    """"window": cover the whole text; "cut": truncate it, the longer text of a pair first."""

    @classmethod
    def for_model(
        cls, longest: int, size: int | None = None, overlap: int | None = None, long: str = "window"
    ) -> "WindowConfig":
        """By default the `longest` sequence that the model reads, a quarter of it overlapping, at most OVERLAP."""
        size = min(index(size or longest), longest)
        if size < 8:
            raise EverybertError(f"a window of {size} tokens leaves no room for text; take 8 or more")
        if long not in ("window", "cut"):
            raise EverybertError(f"long texts are read by window or cut, not {long!r}")
        overlap = min(OVERLAP, size // 4) if overlap is None else index(overlap)
        if overlap < 0:
            raise EverybertError(f"windows cannot overlap by {overlap} tokens; take 0 or more")
        return cls(size, overlap, long)

    def cover(self, n: int, room: int) -> tuple[list[Window], int]:
        """Windows of at most `room` tokens over a text of n tokens, and how many tokens were cut."""
        room = max(room, 1)
        if self.long == "cut" and n > room:
            return [Window(0, room, 0, room)], n - room
        return windows(n, room, min(self.overlap, room // 2)), 0


def cover_pair(
    first: list[int], second: list[int] | None, special: int, window: WindowConfig
) -> tuple[list[tuple[list[int], list[int] | None, float]], int]:
    """The windows of a text or pair, each with its weight; and how many ids were cut off.

    A pair that is too long shares the room: the shorter text gets what it needs up to half, and each window of one
    is combined with each window of the other. The weight is the product of the numbers of tokens that they own.
    """
    length = len(second or ())
    first_room, second_room = longest_first(len(first), length, window.size - special)
    first_windows, first_cut = window.cover(len(first), first_room)
    second_windows, second_cut = window.cover(length, second_room)

    def owned(w: Window) -> int:
        return max(w.own_stop - w.own_start, 1)

    return [
        (first[a.start : a.stop], None if second is None else second[b.start : b.stop], float(owned(a) * owned(b)))
        for a in first_windows
        for b in second_windows
    ], first_cut + second_cut


def longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """How many tokens of each text stay if the longer is cut until both are equal, then both; as in `tokenizers`."""
    if a + b <= room:
        return a, b
    short = min(a, b, room // 2)
    return (room - short, short) if a > b else (short, room - short)
