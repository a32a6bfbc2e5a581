from __future__ import annotations

import contextvars
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everybert.errors import EverybertError
from everybert.inference import embedding, engine
from everybert.inference.engine import Inputs, ahead, cover, encode, in_order, plan, shared_out, side_by_side
from everybert.inference.model import Model
from everybert.model.ragged import Ragged


@given(st.lists(st.integers(1, 600), max_size=80), st.integers(1, 2000))
def test_a_plan_holds_every_sequence_once_and_fills_its_batches(lengths, budget):
    groups = plan(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    order = [lengths[i] for group in groups for i in group]
    assert order == sorted(lengths, reverse=True)
    for k, group in enumerate(groups):
        total = sum(lengths[i] for i in group)
        assert total - lengths[group[-1]] < budget  # no sequence was added to a full batch
        assert k == len(groups) - 1 or total >= budget


@given(st.lists(st.integers(1, 600), max_size=80), st.integers(600, 2000))
def test_batches_in_order_never_overflow_and_are_as_few_as_order_allows(lengths, capacity):
    groups = in_order(lengths, capacity)
    assert [i for group in groups for i in group] == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in group) for group in groups]
    assert all(total <= capacity for total in totals)
    for total, following in zip(totals, groups[1:]):
        assert total + lengths[following[0]] > capacity


@given(st.integers(1, 100_000), st.integers(1, 32))
def test_every_core_gets_as_many_batches(tokens, cores):
    budget = shared_out(tokens, cores)
    assert engine.BUDGET_CPU // 4 <= budget <= engine.BUDGET_CPU
    if budget > engine.BUDGET_CPU // 4:
        assert -(-tokens // budget) % cores == 0 or tokens % budget == 0 or -(-tokens // budget) < cores


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
                assert piece.ids[piece.index(token)] == ids[token]
    for token in range(len(ids)):
        assert sum(piece.owns(token) for piece in pieces) == 1


def test_cores_work_side_by_side_and_the_thread_count_comes_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        both = threading.Barrier(2, timeout=30)  # breaks unless two run at once
        counts = []

        def work(which):
            both.wait()
            counts.append(torch.get_num_threads())

        side_by_side(work, [[0], [1], [2], [3]], 2)
        assert counts == [1, 1, 1, 1]
        assert torch.get_num_threads() == 2
        started = []
        thread = threading.Thread(target=lambda: started.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert started == [2]
    finally:
        torch.set_num_threads(before)


def test_an_error_in_one_batch_reaches_the_caller():
    before = torch.get_num_threads()

    def work(which):
        if which == [1]:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        side_by_side(work, [[i] for i in range(20)], before)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("threads", [1, 2])
def test_results_do_not_depend_on_how_batches_are_run(bert: Model, threads):
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(5, 40, (int(n),), generator=generator).tolist() for n in torch.arange(1, 33).repeat(9)]
    alone = {}
    for i in (0, 40, 100, 287):
        encode(bert.network, Inputs([sequences[i]]), lambda which, batch, x, i=i: alone.update({i: x}))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = bert.hidden(sequences)
    finally:
        torch.set_num_threads(before)
    assert [len(x) for x in together] == [len(s) for s in sequences]
    for i, x in alone.items():
        torch.testing.assert_close(together[i], x, atol=1e-5, rtol=0)


# ── tokenization ahead of compute ────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers()), st.integers(1, 4))
def test_work_done_ahead_comes_in_order(items, most):
    assert list(ahead(lambda x: x * 2, items, most)) == [x * 2 for x in items]


def test_one_item_needs_no_thread_and_many_have_one_of_their_own():
    me = threading.get_ident()
    assert list(ahead(lambda x: threading.get_ident(), [1])) == [me]
    others = set(ahead(lambda x: threading.get_ident(), range(5)))
    assert len(others) == 1 and me not in others


def test_the_thread_is_ahead_but_not_far():
    """While an item is used the next are made, and no more than were asked for."""
    made, next_made = [], threading.Event()

    def work(i):
        made.append(i)
        if i == 1:
            next_made.set()
        return i

    results = ahead(work, range(100), most=2)
    assert next(results) == 0
    assert next_made.wait(30)  # without the caller's asking
    assert next(results) == 1
    assert len(made) <= 5
    results.close()
    assert len(made) <= 5


def test_an_error_ahead_reaches_the_caller_and_nothing_hangs():
    def work(i):
        if i == 3:
            raise ValueError("the fourth")
        return i

    results = ahead(work, range(50))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="the fourth"):
        next(results)
    assert not [t for t in threading.enumerate() if t.name.startswith("everybert-ahead")]


def test_the_thread_has_the_callers_context():
    mark = contextvars.ContextVar("mark", default=0)
    mark.set(7)
    assert list(ahead(lambda x: mark.get(), range(4))) == [7] * 4


@pytest.mark.parametrize("long", ["window", "cut"])
def test_many_runs_give_the_vectors_of_one(bert: Model, monkeypatch, long):
    """Texts of 1 to 90 tokens (the window is 32): tokenized in one go, in runs, and in runs without a thread."""
    texts = [" ".join(["dog", "cat", "plays"][: 1 + i % 3] * (1 + i % 30)) for i in range(120)]
    whole = bert.embedded(texts, long=long)
    monkeypatch.setattr(embedding, "CHARACTERS", {True: 200, False: 200})
    parts = bert.embedded(texts, long=long)
    monkeypatch.setattr(embedding, "ahead", lambda work, items: map(work, items))
    plain = bert.embedded(texts, long=long)
    assert (parts.vectors == plain.vectors).all()
    assert parts.tokens == whole.tokens and parts.cut == whole.cut
    torch.testing.assert_close(torch.from_numpy(parts.vectors), torch.from_numpy(whole.vectors), atol=1e-5, rtol=0)


@pytest.mark.parametrize("long", ["window", "cut"])
def test_an_accelerators_runs_fill_their_batches(bert: Model, monkeypatch, long):
    """Rehearsed on the CPU: a run's last, half-full batch waits for the next run; texts keep their order."""
    texts = [" ".join(["dog", "cat", "plays"][: 1 + i % 3] * (1 + i % 30)) for i in range(120)]
    whole = bert.embedded(texts, long=long)
    sizes = []
    check = bert.network.encoder.check

    def noted(batch: Ragged):
        sizes.append(len(batch.tokens_T))
        check(batch)

    monkeypatch.setattr(bert.network.encoder, "check", noted)
    monkeypatch.setattr(embedding, "on_cpu", lambda network: False)
    monkeypatch.setattr(embedding, "CHARACTERS", {True: 500, False: 500})
    for module in (embedding, engine):
        monkeypatch.setattr(module, "BUDGET_GPU", 256)
    monkeypatch.setattr(engine, "plan", lambda lengths, budget: in_order(lengths, 256))
    found = bert.embedded(texts, long=long)
    torch.testing.assert_close(torch.from_numpy(found.vectors), torch.from_numpy(whole.vectors), atol=1e-5, rtol=0)
    assert found.tokens == whole.tokens
    assert max(sizes) <= 256 and sum(size >= 256 - 96 for size in sizes) >= len(sizes) - 1


def test_what_is_no_text_is_named(bert: Model):
    with pytest.raises(EverybertError, match="not a string"):
        bert.embed(["a", 3])
