"""Windows cover a text, and each token takes its result from the window that sees most around it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

from everybert.text.windows import Window, cover, windows

_shapes = st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1)))


def test_by_hand():
    assert windows(10, 6, 2) == [Window(0, 6, 0, 5), Window(4, 10, 5, 10)]
    assert windows(11, 6, 2) == [Window(0, 6, 0, 5), Window(4, 10, 5, 8), Window(5, 11, 8, 11)]
    assert windows(6, 6, 5) == [Window(0, 6, 0, 6)]
    assert windows(0, 6, 2) == [Window(0, 0, 0, 0)]


@given(n=st.integers(0, 300), shape=_shapes)
def test_laws(n, shape):
    size, overlap = shape
    found = windows(n, size, overlap)
    assert all(0 < w.stop - w.start <= size or n == 0 for w in found)
    assert all(w.start <= w.own_start <= w.own_stop <= w.stop for w in found)
    owners = [i for w in found for i in range(w.own_start, w.own_stop)]
    assert owners == list(range(n)), "each index is owned once, in order"
    assert {i for w in found for i in range(w.start, w.stop)} == set(range(n))
    for before, after in pairwise(found):
        assert before.stop - after.start >= overlap
        assert after.start > before.start


@given(n=st.integers(1, 120), shape=_shapes)
def test_the_owner_has_the_most_context(n, shape):
    found = windows(n, *shape)

    def context(w, i):
        return min(i - w.start, w.stop - 1 - i)

    for owner in found:
        for i in range(owner.own_start, owner.own_stop):
            assert context(owner, i) == max(context(w, i) for w in found if w.start <= i < w.stop)


@pytest.mark.parametrize(("size", "overlap"), [(0, 0), (4, 4), (4, 5), (4, -1), (-2, 0)])
def test_impossible_windows_are_refused(size, overlap):
    refuses("overlap", windows, 10, size, overlap)


@given(st.integers(0, 700), st.integers(0, 2), st.integers(0, 2), st.integers(8, 200))
def test_windows_own_every_token_once_in_order(n, lead, tail, size):
    ids = list(range(1000, 1000 + lead + n + tail))
    pieces = cover(ids, lead, tail, size)
    owned = [token for piece in pieces for token in piece.ids[piece.own]]
    assert owned == ids
    for piece in pieces:
        assert len(piece.ids) <= size
        assert piece.ids[:lead] == ids[:lead]
        assert list(piece.ids[len(piece.ids) - tail :]) == ids[len(ids) - tail :]
        for token in range(len(ids)):
            if piece.owns(token):
                assert piece.ids[token - piece.shift] == ids[token]
    for token in range(len(ids)):
        assert sum(piece.owns(token) for piece in pieces) == 1
