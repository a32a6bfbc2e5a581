from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everybert.inference import engine
from everybert.inference.engine import Inputs, cover, encode, plan, shared_out, side_by_side
from everybert.inference.model import Model


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
