from __future__ import annotations

import contextvars
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everybert.errors import EverybertError
from everybert.model import engine
from everybert.model.config import EncoderConfig
from everybert.model.engine import (
    Inputs,
    ahead,
    cpu_budget,
    encode,
    ordered_batches,
    pick_device,
    run_head,
    side_by_side,
    sorted_batches,
    token_log_probs,
)
from everybert.model.heads import FeatureConfig, Network, add_feature_head, head_logits
from everybert.model.ragged import Ragged


@given(st.lists(st.integers(1, 600), max_size=80), st.integers(1, 2000))
def test_a_plan_holds_every_sequence_once_and_fills_its_batches(lengths, budget):
    groups = sorted_batches(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    order = [lengths[i] for group in groups for i in group]
    assert order == sorted(lengths, reverse=True)
    for k, group in enumerate(groups):
        total = sum(lengths[i] for i in group)
        assert total - lengths[group[-1]] < budget  # no sequence was added to a full batch
        assert k == len(groups) - 1 or total >= budget


@given(st.lists(st.integers(1, 600), max_size=80), st.integers(600, 2000))
def test_batches_in_order_never_overflow_and_are_as_few_as_order_allows(lengths, capacity):
    groups = ordered_batches(lengths, capacity)
    assert [i for group in groups for i in group] == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in group) for group in groups]
    assert all(total <= capacity for total in totals)
    for total, following in zip(totals, groups[1:]):
        assert total + lengths[following[0]] > capacity


@given(st.integers(1, 100_000), st.integers(1, 32))
def test_every_core_gets_as_many_batches(tokens, cores):
    budget = cpu_budget(tokens, cores)
    assert engine.BUDGET_CPU // 4 <= budget <= engine.BUDGET_CPU
    if budget > engine.BUDGET_CPU // 4:
        assert -(-tokens // budget) % cores == 0 or tokens % budget == 0 or -(-tokens // budget) < cores


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


def sequences(count: int = 288) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 60, (1 + i % 32,), generator=generator).tolist() for i in range(count)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def hidden(network: Network, inputs: Inputs, layer: int | None = None) -> list[torch.Tensor]:
    out = {}
    encode(network, inputs, lambda which, batch, x_TH: out.update(zip(which, batch.split(x_TH))), layer)
    return [out[i] for i in range(len(inputs.ids))]


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("layer", [None, 0, 2])
def test_results_do_not_depend_on_how_batches_are_run(tiny: Network, cores, layer):
    given = sequences()
    with threads(cores):
        together = hidden(tiny, Inputs(given), layer)
    for i in (0, 40, 100, 287):
        states: list[torch.Tensor] = []
        with torch.inference_mode():
            tiny.encoder(Ragged.of([given[i]]), states)
        torch.testing.assert_close(together[i], states[-1 if layer is None else layer], atol=1e-5, rtol=0)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("name", ["classify", "tag"])
@pytest.mark.parametrize("features", [None, "last", "sum", "concat"])
def test_a_head_gives_one_array_per_sequence(tiny: Network, cores, name, features):
    """(C,) for heads of whole sequences, (n, C) for heads of tokens; whatever the head and the batches."""
    labels = tiny.heads[name].output.out_features
    if features is not None:
        add_feature_head(tiny, name, labels, FeatureConfig(features)).eval()
    given = sequences()
    segments = [[i % 2 for i in range(len(ids))] for ids in given]
    tiny.train()  # as during fine-tuning: dropout is off for the predictions, and on again after
    with threads(cores):
        found = run_head(tiny, Inputs(given, segments), name)
    assert tiny.training and tiny.heads[name].training
    tiny.eval()
    assert len(found) == len(given)
    for i in (0, 40, 100, 287):
        with torch.inference_mode():
            wanted = head_logits(tiny, Ragged.of([given[i]], [segments[i]]), name)
        wanted = wanted[0] if name == "classify" else wanted
        assert found[i].dtype == np.float32
        np.testing.assert_allclose(found[i], wanted.numpy(), atol=1e-5, rtol=0)
    if features is not None:
        read = torch.from_numpy(run_head(tiny, Inputs(given[:1], segments[:1]), name, features=True)[0])
        with torch.inference_mode():
            np.testing.assert_allclose(found[0], tiny.heads[name](read).numpy(), atol=1e-5, rtol=0)


def test_a_missing_head_is_named(tiny: Network):
    with pytest.raises(EverybertError, match="no answer head"):
        run_head(tiny, Inputs([[5, 6]]), "answer")


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


# ── masked tokens ────────────────────────────────────────────────────────────────────────────────────────────

MASK = 4
SEQUENCES = [[2, 10, 4, 12, 3], [2, 20, 21, 22, 23, 24, 3], [2, 3]]  # the first holds a mask token of its own


@pytest.fixture(scope="module")
def predictor():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "heads": 2, "intermediate_size": 64, "layers": 2, "max_positions": 64}
    return Network(EncoderConfig(vocab_size=128, **shape), {"mlm": None}).eval()


@torch.no_grad()
def by_hand(predictor: Network, ids: list[int], place: int, end: int) -> float:
    hidden = [*ids[:place], *[MASK] * (end - place), *ids[end:]]
    logits = predictor.mlm_logits(predictor.encoder(Ragged.of([hidden])))
    return float(logits[place].log_softmax(-1)[ids[place]])


def test_each_position_is_masked_in_a_copy_of_its_own(predictor):
    positions = [range(1, len(ids) - 1) for ids in SEQUENCES]
    found = token_log_probs(predictor, SEQUENCES, positions, MASK)
    assert [len(values) for values in found] == [3, 5, 0]
    for ids, places, values in zip(SEQUENCES, positions, found):
        assert values == pytest.approx([by_hand(predictor, ids, p, p + 1) for p in places], abs=1e-5)


def test_nothing_to_score(predictor):
    assert token_log_probs(predictor, [], [], MASK) == []


# ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("asked", ["gpu", "cuda:99", "meta", "cuda:"])
def test_what_is_not_there_is_refused(asked):
    with pytest.raises(EverybertError, match=f"device '{asked}' cannot be used here .*: give cpu"):
        pick_device(asked)


def test_what_is_there_is_taken(monkeypatch):
    assert pick_device("cpu") == pick_device(torch.device("cpu")) == torch.device("cpu")
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: int(there))
        assert pick_device(None).type == ("cuda" if there else "cpu")
        assert pick_device(None, gpu=False).type == "cpu"
    assert pick_device("cuda").type == "cuda"
    with pytest.raises(EverybertError, match="torch sees 1 GPUs"):
        pick_device("cuda:1")


def test_padded_batches_of_one_long_text_and_many_short_ones_stay_small():
    """Attention with a bias pads to the longest, and holds a score per pair of places: both are bounded."""
    for lengths, places, scores in (([512] + [12] * 3000, 34_000, 2**24), ([8192] * 5 + [12] * 2000, 34_000, 2**26)):
        groups = sorted_batches(lengths, 33_792, padded=True)
        assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
        for group in groups:
            longest = max(lengths[i] for i in group)
            assert len(group) * longest <= places + longest and len(group) * longest**2 <= scores
        assert len(groups) < 12


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory in their own way")
def test_batches_use_the_memory_of_those_before_them():
    code = """if True:
        import resource, everybert
        model = everybert.load("everybert-small", device="cpu", dtype="int8")
        texts = ["the man went to the shop and bought a pair of shoes for his daughter " * 8] * 20
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            model.embed(texts)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 15_000, "pages mapped again: tens of thousands if memory goes back to the system"
