"""Windows cover a text, and each token takes its result from the window that sees most around it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

from everybert.text.windows import Window, WindowConfig, cover, cover_pair, longest_first, windows

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
    covered = cover(ids, lead, tail, size)
    owned = [token for window in covered for token in window.ids[window.own]]
    assert owned == ids
    for window in covered:
        assert len(window.ids) <= size
        assert window.ids[:lead] == ids[:lead]
        assert list(window.ids[len(window.ids) - tail :]) == ids[len(ids) - tail :]
        for token in range(len(ids)):
            if window.owns(token):
                assert window.ids[token - window.shift] == ids[token]
    for token in range(len(ids)):
        assert sum(window.owns(token) for window in covered) == 1


@given(a=st.integers(0, 80), b=st.integers(0, 80), room=st.integers(2, 60))
def test_longest_first_is_the_tokenizers_crates(a, b, room):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel({"x": 0}, unk_token="x"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(room, strategy="longest_first")
    kept = backend.encode("x " * a, "x " * b)
    sides = kept.sequence_ids
    assert longest_first(a, b, room) == (sides.count(0), sides.count(1))


@given(a=st.integers(0, 300), b=st.one_of(st.none(), st.integers(0, 300)), size=st.integers(16, 64))
def test_windows_cover_a_text_and_every_pair_of_tokens_once(a, b, size):
    reading = WindowConfig(size, size // 4)
    first, second = list(range(a)), None if b is None else list(range(1000, 1000 + b))
    parts, cut = cover_pair(first, second, 3, reading)
    assert cut == 0
    assert all(len(x) + len(y or ()) <= size - 3 for x, y, _ in parts)
    assert {i for x, _, _ in parts for i in x} == set(first)
    assert {i for _, y, _ in parts for i in y or ()} == set(second or ())
    assert all(weight > 0 for *_, weight in parts)
    if len(parts) > 1:
        assert sum(weight for *_, weight in parts) == max(a, 1) * max(b or 0, 1)


def test_a_window_that_is_too_small_is_refused():
    refuses("8 or more", WindowConfig.for_model, 512, 4)
    refuses("window or cut", WindowConfig.for_model, 512, long="drop")
