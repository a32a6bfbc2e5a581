"""Long texts in overlapping windows, each token owned by exactly one: nothing is cut off."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from everybert.errors import EverybertError


class Window(NamedTuple):
    """Tokens [start, stop) are read together; of them [own_start, own_stop) take their result from this window."""

    start: int
    stop: int
    own_start: int
    own_stop: int


def windows(n: int, size: int, overlap: int) -> list[Window]:
    """Cover 0..n with windows of at most `size` that share `overlap` tokens or more; no tokens, one empty window.

    All windows of a text are equally long (the last one begins earlier rather than run short), so the window in
    which a token has the most context on its shorter side is the one whose middle is nearest; ties go left.
    """
    if size < 1 or not 0 <= overlap < size:
        raise EverybertError(f"windows of {size} tokens cannot overlap by {overlap}: 0 <= overlap < size is needed")
    if n <= size:
        return [Window(0, n, 0, n)]
    starts = [*range(0, n - size, size - overlap), n - size]
    edges = [0, *((a + b + size + 1) // 2 for a, b in pairwise(starts)), n]
    return [Window(s, s + size, a, b) for s, (a, b) in zip(starts, pairwise(edges), strict=True)]
