"""The queue and its threads, with an encoder that is no model: what shares a batch, in what order, and what fails."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server import until

from everybert.model.ragged import Ragged
from everybert.serving.limits import Call, Limits, Refusal
from everybert.serving.metrics import Metrics
from everybert.serving.scheduler import BRIEF, Scheduler, Trunk
from everybert.serving.sequences import Sequences, SharedEncoder, merge


class Echo(torch.nn.Module):
    """Gives each token's id, its place in its sequence and the sequence's length; remembers batches."""

    config = None

    def __init__(self, seconds=0.0):
        super().__init__()
        self.batches, self.seconds, self.gate = [], seconds, threading.Event()
        self.gate.set()
        self.active = None

    def use(self, adapter):
        assert not getattr(self, "inside", 0), "switched while a batch ran"
        self.active = adapter

    def forward(self, batch, states=None, watch=None):
        assert self.gate.wait(60), "nobody opened the gate"
        self.inside = getattr(self, "inside", 0) + 1
        time.sleep(self.seconds)
        self.batches.append((self.active, batch.lengths))
        self.inside -= 1
        if 666 in batch.tokens_T:
            raise RuntimeError("a bad token")
        lengths_T = torch.tensor(batch.lengths)[batch.sequence_T]
        segments = batch.segments_T if batch.segments_T is not None else torch.zeros_like(batch.tokens_T)
        x_TH = torch.stack((batch.tokens_T, batch.positions_T, lengths_T, segments), dim=1).float()
        if states is not None:
            states.append(x_TH)
        return x_TH


def start(echo, budget=64, wait=0.0, threads=1, inline=0):
    scheduler = Scheduler(Metrics(), wait)
    scheduler.start(threads, inline)
    trunk = Trunk("echo", echo, echo.use, budget)
    return scheduler, trunk


def busy(pool, scheduler, trunk):
    """Keep the one thread in a batch of one token until the gate opens: what is sent now waits in the queue."""
    job = pool.submit(scheduler.run, Sequences(trunk, None, None, ragged(1)))
    until(lambda: trunk.running == 1 and scheduler.waiting == 0)
    return job


def ragged(*lengths, first=0, segments=None):
    return Ragged.of([[first + i] * n for i, n in enumerate(lengths)], segments)


def check(x_TH, batch):
    assert x_TH[:, 0].tolist() == batch.tokens_T.tolist()
    assert x_TH[:, 1].tolist() == batch.positions_T.tolist()
    assert x_TH[:, 2].tolist() == torch.tensor(batch.lengths)[batch.sequence_T].tolist()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6), st.data())
def test_merged_batches_come_apart_again(shapes, data):
    """Whatever requests share a batch, each gets its own sequences back, in order."""
    batches = []
    for i, lengths in enumerate(shapes):
        segments = [[1] * n for n in lengths] if data.draw(st.booleans()) else None
        batches.append(ragged(*lengths, first=100 * i, segments=segments))
    whole, order = merge(batches)
    assert sorted(order) == list(range(len(order)))
    assert list(whole.lengths) == sorted(whole.lengths, reverse=True)
    flat = [ids for batch in batches for ids in batch.split(batch.tokens_T)]
    for piece, at in zip(whole.split(whole.tokens_T), order):
        assert torch.equal(piece, flat[at])
    if whole.segments_T is not None:
        marks = [int(b.segments_T is not None) for b in batches for _ in b.lengths]
        for piece, at in zip(whole.split(whole.segments_T), order):
            assert piece.tolist() == [marks[at]] * len(piece)


def test_waiting_requests_share_a_batch_up_to_the_budget():
    echo = Echo()
    echo.gate.clear()
    scheduler, trunk = start(echo, budget=20)
    batches = [ragged(4, 3, first=100 * i) for i in range(9)]
    with ThreadPoolExecutor(10) as pool:
        busy(pool, scheduler, trunk)
        jobs = [pool.submit(scheduler.run, Sequences(trunk, None, None, batch)) for batch in batches]
        until(lambda: scheduler.waiting == 9 * 7)
        echo.gate.set()
        for job, batch in zip(jobs, batches):
            check(job.result(60), batch)
    scheduler.close()
    assert [sum(lengths) for _, lengths in echo.batches] == [1, 14, 14, 14, 14, 7]


def test_small_batches_gather_rather_than_run_side_by_side():
    """Beside a batch of few tokens the second thread waits until there is enough for another."""
    echo = Echo()
    echo.gate.clear()
    scheduler, trunk = start(echo, budget=1024, threads=2)
    small = [ragged(7, first=100 * i) for i in range(3)]
    with ThreadPoolExecutor(6) as pool:
        busy(pool, scheduler, trunk)
        jobs = [pool.submit(scheduler.run, Sequences(trunk, None, None, batch)) for batch in small]
        until(lambda: scheduler.waiting == 21)
        time.sleep(0.05)
        assert trunk.running == trunk.small == 1
        jobs.append(pool.submit(scheduler.run, Sequences(trunk, None, None, ragged(60, first=900))))
        until(lambda: trunk.running == 2 and scheduler.waiting == 0)
        assert trunk.small == 1
        echo.gate.set()
        for job, batch in zip(jobs, [*small, ragged(60, first=900)]):
            check(job.result(60), batch)
    scheduler.close()
    assert sorted(sum(lengths) for _, lengths in echo.batches) == [1, 81]
    assert trunk.running == trunk.small == 0


def test_a_text_longer_than_the_budget_runs_alone():
    echo = Echo()
    scheduler, trunk = start(echo, budget=8)
    check(scheduler.run(Sequences(trunk, None, None, batch := ragged(500))), batch)
    scheduler.close()


def test_one_bad_request_does_not_spoil_its_neighbours():
    echo = Echo()
    echo.gate.clear()
    scheduler, trunk = start(echo)
    with ThreadPoolExecutor(6) as pool:
        busy(pool, scheduler, trunk)
        good = [pool.submit(scheduler.run, Sequences(trunk, None, None, ragged(3, first=i))) for i in range(4)]
        bad = pool.submit(scheduler.run, Sequences(trunk, None, None, Ragged.of([[666]])))
        until(lambda: scheduler.waiting == 4 * 3 + 1)
        echo.gate.set()
        for i, job in enumerate(good):
            assert job.result(60)[:, 0].tolist() == [i] * 3
        with pytest.raises(RuntimeError, match="bad token"):
            bad.result(60)
    assert scheduler.alive
    scheduler.close()


def test_adapters_never_share_a_batch_and_none_starves():
    """Four threads, three adapters: a trunk is switched only when nothing runs on it."""
    echo = Echo(0.001)
    scheduler, trunk = start(echo, threads=4)
    encoders = [SharedEncoder(trunk, adapter, scheduler) for adapter in (None, "one", "two")]
    with ThreadPoolExecutor(12) as pool:
        batches = [ragged(1 + i % 5, first=1000 * (i % 3)) for i in range(150)]
        jobs = [pool.submit(encoders[i % 3], batch) for i, batch in enumerate(batches)]
        for job, batch in zip(jobs, batches):
            check(job.result(60), batch)
    scheduler.close()
    assert {adapter for adapter, _ in echo.batches} == {None, "one", "two"}


def test_those_who_look_inside_have_their_batch_alone():
    echo = Echo()
    echo.gate.clear()
    scheduler, trunk = start(echo)
    states = []
    with ThreadPoolExecutor(4) as pool:
        busy(pool, scheduler, trunk)
        jobs = [pool.submit(scheduler.run, Sequences(trunk, None, None, ragged(2, first=i))) for i in range(2)]
        jobs.append(pool.submit(SharedEncoder(trunk, None, scheduler), ragged(5), states))
        until(lambda: scheduler.waiting == 9)
        echo.gate.set()
        [job.result(60) for job in jobs]
    scheduler.close()
    assert len(states) == 1 and (None, (5,)) in echo.batches


def test_nobody_works_for_those_who_left():
    echo = Echo()
    echo.gate.clear()
    scheduler, trunk = start(echo)
    call, late = Call(Limits()), Call(Limits(), deadline=time.monotonic() + 0.05)
    with ThreadPoolExecutor(4) as pool:
        first = busy(pool, scheduler, trunk)
        jobs = [pool.submit(scheduler.run, Sequences(trunk, None, c, ragged(7))) for c in (call, late)]
        time.sleep(0.1)
        call.gone = True
        echo.gate.set()
        first.result(60)
        for job in jobs:
            with pytest.raises(Refusal, match="no answer within"):
                job.result(60)
    scheduler.close()
    assert echo.batches == [(None, (1,))]


def test_a_batch_waits_a_moment_for_requests_on_their_way():
    echo = Echo()
    scheduler, trunk = start(echo, wait=40.0)
    start_time = time.monotonic()
    one, two = Call(Limits()), Call(Limits())
    with ThreadPoolExecutor(2) as pool, scheduler.expecting(one), scheduler.expecting(two):
        first = pool.submit(scheduler.run, Sequences(trunk, None, one, ragged(3)))
        time.sleep(0.1)
        second = pool.submit(scheduler.run, Sequences(trunk, None, two, ragged(4)))
        first.result(60), second.result(60)
        assert echo.batches == [(None, (4, 3))] and time.monotonic() - start_time < 30
        alone = time.monotonic()  # both have had their turn, and may work on: nobody waits for them
        scheduler.run(Sequences(trunk, None, Call(Limits()), ragged(3)))
        assert time.monotonic() - alone < 30
    scheduler.close()


def offered(scheduler, tickets):
    """Offer them on an event loop, all in one pass; the threads that computed their batches."""
    where = []
    forward = tickets[0].trunk.encoder.forward
    tickets[0].trunk.encoder.forward = lambda *a, **k: (where.append(threading.current_thread()), forward(*a, **k))[1]

    async def go():
        for ticket in tickets:
            scheduler.offer(ticket)
        await asyncio.gather(*(asyncio.wrap_future(ticket.future) for ticket in tickets))

    asyncio.run(go())
    for ticket in tickets:
        check(ticket.future.result(60), ticket.batch)
    return where


def test_what_is_brief_is_computed_by_the_event_loop():
    """What came at the same moment is one batch, in the loop's own thread."""
    echo = Echo()
    scheduler, trunk = start(echo, inline=20)
    tickets = [Sequences(trunk, None, None, ragged(n, first=100 * n)) for n in (4, 3, 2)]
    assert offered(scheduler, tickets) == [threading.current_thread()]
    assert echo.batches == [(None, (4, 3, 2))]
    assert trunk.running == trunk.small == scheduler._running == 0 and trunk.seconds < BRIEF
    scheduler.close()


@pytest.mark.parametrize("why", ["never", "many tokens", "a slow model", "a busy machine"])
def test_what_is_not_brief_is_left_to_the_threads(why):
    echo, other = Echo(), Echo()
    scheduler, trunk = start(echo, inline=0 if why == "never" else 20, threads=2)
    if why == "a slow model":
        trunk.seconds = 2 * BRIEF
    tickets = [Sequences(trunk, None, None, ragged(21 if why == "many tokens" else 4))]
    with ThreadPoolExecutor(1) as pool:
        if why == "a busy machine":  # with a batch of another model
            other.gate.clear()
            busy(pool, scheduler, Trunk("other", other, other.use, 64))
        (thread,) = offered(scheduler, tickets)
        other.gate.set()
    assert thread in scheduler._threads
    scheduler.close()


def test_a_model_is_as_slow_as_its_small_batches_are_lately():
    """A moment's stop of the machine does not make it slow; being slow does, and one fast batch ends that."""
    scheduler, trunk = start(Echo(), inline=20)
    scheduler.run(Sequences(trunk, None, None, ragged(2)))
    assert trunk.seconds > 0, "small batches are timed, whoever runs them"
    scheduler.close()
    trunk.seconds = 0.01
    trunk.took(0.15)
    assert trunk.seconds < BRIEF
    for _ in range(8):
        trunk.took(0.15)
    assert trunk.seconds > BRIEF
    trunk.took(0.02)
    assert trunk.seconds == 0.02


def test_closing_serves_what_waits_and_takes_no_more():
    echo = Echo()
    echo.gate.clear()
    scheduler, trunk = start(echo, budget=2)
    with ThreadPoolExecutor(10) as pool:
        busy(pool, scheduler, trunk)
        jobs = [pool.submit(scheduler.run, Sequences(trunk, None, None, ragged(2, first=i))) for i in range(8)]
        until(lambda: scheduler.waiting == 16)
        closing = pool.submit(scheduler.close)
        until(lambda: scheduler._closing)
        echo.gate.set()
        closing.result(60)
        assert [int(job.result(60)[0, 0]) for job in jobs] == list(range(8))
    with pytest.raises(Refusal, match="shutting down"):
        scheduler.run(Sequences(trunk, None, None, ragged(1)))


@pytest.mark.parametrize("_", range(20))
def test_closing_ends_every_thread_though_one_still_gathers(_):
    """A thread that looks while another holds the last ticket must be told when that is done."""
    scheduler, trunk = start(Echo(), wait=30.0, threads=2)
    with ThreadPoolExecutor(2) as pool, scheduler.expecting(Call(Limits())):
        job = pool.submit(scheduler.run, Sequences(trunk, None, None, ragged(3)))
        until(lambda: trunk.running == 1)
        pool.submit(scheduler.close).result(20)
        job.result(20)
    assert not scheduler.alive
