"""The queue and its threads, with a model that only echoes: what shares a call, in what order, and what fails."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from server import until

from everybert.serving.batcher import Batcher, Job, alone
from everybert.serving.limits import HttpError, Limits, RequestContext
from everybert.serving.metrics import Metrics
from everybert.serving.models import LoadedModel, Served
from everybert.store.adapters import Bundle


def submit(batcher: Batcher, job: Job) -> asyncio.Future[bytes]:
    """Put a job into the queue: its response. A token has five letters here."""
    job.sizes = [2 + len(x) // 5 if isinstance(x, str) else sum(2 + len(part) // 5 for part in x) for x in job.inputs]
    job.response = asyncio.get_running_loop().create_future()
    batcher.submit(job)
    return job.response


class Echo:
    """In place of a model: gives each text back with the adapter in use, and remembers its calls."""

    def __init__(self, seconds=0.0):
        self.calls, self.seconds, self.opened = [], seconds, threading.Event()
        self.opened.set()
        self.adapter, self.inside = None, 0
        self.bundle = Bundle(defaults={"classify": "one", "classify pair": "two"})

    def use(self, adapter):
        assert not self.inside, "switched while a batch was computed"
        self.adapter = adapter

    def run(self, texts):
        self.inside += 1
        assert self.opened.wait(60), "nobody opened the door"
        time.sleep(self.seconds)
        self.calls.append((self.adapter, list(texts)))
        self.inside -= 1
        if "bad" in texts:
            raise ValueError("a bad text")
        return [f"{self.adapter}:{text}" for text in texts]


class World:
    """A batcher over an echo."""

    def __init__(self, budget=20, threads=1, seconds=0.0):
        self.echo = Echo(seconds)
        self.loaded = LoadedModel("echo", self.echo, budget)
        self.batcher = Batcher(Metrics())
        self.batcher.start(threads)

    def context(self, context=None, adapter=None):
        """A request of this model."""
        context = context or RequestContext(Limits())
        context.served = Served("echo", self.loaded, adapter, None, frozenset({"echo"}), 0, "", True, None)
        return context

    def submit(self, texts, adapter=None, options=(), context=None, task="echo"):
        context = self.context(context, adapter)
        job = Job(context, task, texts, lambda model, inputs: model.run(inputs), lambda results: results, options)
        return submit(self.batcher, job)

    async def busy(self):
        """Keep the one thread in a call until the door opens: what is submitted now waits in the queue."""
        self.echo.opened.clear()
        first = self.submit(["a"])
        await asyncio.to_thread(until, lambda: self.echo.inside == 1)
        return first

    def close(self):
        self.echo.opened.set()
        self.batcher.close()
        assert not self.batcher.queue and self.loaded.running == 0


def story(**settings):
    """A test that is told in a world of its own."""

    def decorate(tell):
        def test():
            async def play():
                world = World(**settings)
                try:
                    await asyncio.wait_for(tell(world), 60)
                finally:
                    await asyncio.to_thread(world.close)

            asyncio.run(play())

        test.__doc__ = tell.__doc__
        return test

    return decorate


def echoed(texts, adapter=None):
    return [f"{adapter}:{text}" for text in texts]


@story()
async def test_waiting_jobs_share_calls_up_to_the_budget(world):
    await world.busy()
    texts = [[f"text{i}", "two"] for i in range(9)]  # five tokens each
    jobs = [world.submit(some) for some in texts]
    world.echo.opened.set()
    assert [json.loads(await job) for job in jobs] == [echoed(some) for some in texts]
    assert [len(call) for _, call in world.echo.calls] == [1, 8, 8, 2]


@story(threads=3)
async def test_a_long_job_is_computed_in_pieces_and_keeps_its_order(world):
    texts = [f"text{i}" for i in range(50)]
    assert json.loads(await world.submit(texts)) == echoed(texts)
    assert max(len(call) for _, call in world.echo.calls) == 6


@story()
async def test_pieces_of_jobs_and_clients_take_turns(world):
    """A long job, and a client with many, do not keep another waiting; each keeps its own order."""
    many, other = (RequestContext(Limits(), client=name) for name in ("many", "other"))
    await world.busy()
    long = world.submit([f"long{i}" for i in range(50)], context=many, options=None)
    short = [world.submit([f"short{i}"], context=many, options=None) for i in range(9)]
    alone = world.submit(["alone"], context=other, options=None)
    world.echo.opened.set()
    await asyncio.gather(long, alone, *short)
    order = [call[0] for _, call in world.echo.calls]
    assert order.index("alone") <= 2 and order.index("short0") <= 4
    shorts = [text for text in order if text.startswith("short")]
    assert shorts == sorted(shorts) and order[-1].startswith(("long", "short"))
    assert order[1:10].count("alone") == 1 and any(text.startswith("long") for text in order[2:6])


@story(threads=2)
async def test_what_takes_long_leaves_a_thread_to_the_others(world):
    opened = threading.Event()

    def slow(model, texts):
        assert opened.wait(60)
        return texts

    def job(texts, **how):
        return Job(world.context(), "echo", texts, slow, lambda results: results, None, **how)

    slow_ones = [submit(world.batcher, job(["x" * 500]))]  # more than a batch
    slow_ones += [submit(world.batcher, job(["a"], long=True)) for _ in range(5)]
    assert json.loads(await world.submit(["short"])) == echoed(["short"])
    opened.set()
    await asyncio.gather(*slow_ones)
    assert world.batcher._long == 0


@story()
async def test_a_text_longer_than_the_budget_is_computed_alone(world):
    await world.busy()
    jobs = [world.submit(["x" * 500]), world.submit(["y"])]
    world.echo.opened.set()
    await asyncio.gather(*jobs)
    assert [len(call) for _, call in world.echo.calls] == [1, 1, 1]


@story()
async def test_one_bad_job_does_not_spoil_its_neighbours_and_its_other_pieces_are_dropped(world):
    await world.busy()
    good = [world.submit([f"text{i}"]) for i in range(3)]
    bad = world.submit(["bad"] * 40)
    world.echo.opened.set()
    assert [json.loads(await job) for job in good] == [echoed([f"text{i}"]) for i in range(3)]
    with pytest.raises(ValueError, match="a bad text"):
        await bad
    assert sum(len(call) for _, call in world.echo.calls) < 40
    assert world.batcher.alive


@story()
async def test_what_cannot_become_json_fails_alone(world):
    with pytest.raises(Exception, match="serialize"):
        await submit(world.batcher, alone(world.context(), "tokens", ("a",), lambda model: object()))


@story()
async def test_other_options_and_single_calls_are_not_shared(world):
    await world.busy()
    jobs = [world.submit(["text"], options=options) for options in ((1,), (2,), None, None, (1,))]
    world.echo.opened.set()
    await asyncio.gather(*jobs)
    assert [len(call) for _, call in world.echo.calls] == [1, 2, 1, 1, 1]


@story(threads=4, seconds=0.001)
async def test_adapters_never_share_a_call_and_none_starves(world):
    """Four threads, three adapters: the adapter is switched only when nothing is computed."""
    adapters = [(None, "one", "two")[i % 3] for i in range(150)]
    jobs = [world.submit([f"text{i}"], adapter) for i, adapter in enumerate(adapters)]
    found = [json.loads(await job) for job in jobs]
    assert found == [echoed([f"text{i}"], adapter) for i, adapter in enumerate(adapters)]


@story()
async def test_each_input_has_the_default_adapter_of_its_kind(world):
    given = ["text", ("a", "pair"), "text"]
    found = json.loads(await world.submit(given, task="classify"))
    assert found == ["one:text", "two:('a', 'pair')", "one:text"]


@story()
async def test_nobody_computes_for_clients_that_left_or_whose_time_is_over(world):
    gone, late = RequestContext(Limits()), RequestContext(Limits())
    first = await world.busy()
    jobs = [world.submit(["text"], context=context) for context in (gone, late)]
    gone.gone = True
    late.late()
    world.echo.opened.set()
    await first
    await world.submit(["next"])
    for job in jobs:
        with pytest.raises(HttpError, match="no answer within"):
            await job
    assert [call for _, call in world.echo.calls] == [["a"], ["next"]]


@story()
async def test_a_call_stops_between_passes_once_nobody_waits_for_it(world):
    context, passes = world.context(), []

    def run(model, inputs):
        for number in range(5):
            world.batcher.check()  # as the encoder does before each pass
            passes.append(number)
            context.gone = number == 1  # the client leaves
        return inputs

    with pytest.raises(HttpError, match="no answer"):
        await submit(world.batcher, Job(context, "echo", ["a"], run, lambda results: results))
    assert passes == [0, 1]
    assert json.loads(await world.submit(["next"])) == echoed(["next"])


@story()
async def test_closing_computes_what_waits_and_takes_no_more(world):
    await world.busy()
    jobs = [world.submit([f"text{i}"], options=None) for i in range(8)]
    closing = asyncio.create_task(asyncio.to_thread(world.batcher.close))
    await asyncio.to_thread(until, lambda: world.batcher._closing)
    with pytest.raises(HttpError, match="shutting down"):
        world.submit(["more"])
    world.echo.opened.set()
    assert [json.loads(await job) for job in jobs] == [echoed([f"text{i}"]) for i in range(8)]
    await closing
    assert not world.batcher.alive
