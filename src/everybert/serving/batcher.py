"""One queue before the models, and plain threads that compute what is in it.

A request is a `Job`: inputs, and a function that computes a result for each of them. The queue holds it in parts of
at most a batch. A thread takes the oldest part and all others that ask for the same (model, adapter, task, options),
up to a budget of tokens, calls the model once for all of them, and splits the results. On the CPU each core has a
thread and a batch of its own; an accelerator has one thread.

The parts of different jobs and clients take turns: a long job, or a client with many, delays others by a few batches.
What takes much longer than a batch never occupies all threads.

A network computes with one adapter at a time: a part is taken only if its model is idle or runs with the same adapter.
"""

import asyncio
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic_core import to_json

from everybert.inference.model import Model
from everybert.serving.limits import HttpError, RequestContext
from everybert.serving.metrics import Metrics
from everybert.serving.models import LoadedModel

TRIM = 10.0
"""Seconds between two returns of memory: batches of ever new sizes leave gaps, which would grow to gigabytes."""
ITEMS = 64
"""Items of a response for which one call makes JSON."""


@dataclass(eq=False)
class Job:
    """What a request asks of a model, and the results so far."""

    context: RequestContext
    task: str
    """Decides the adapter where the request names none."""
    inputs: Sequence[Any]
    """Texts, or tuples of texts."""
    run: Callable[[Model, list[Any]], Sequence[Any]]
    """Computes one result per input."""
    finish: Callable[[list[Any]], Any]
    """Makes the response, which becomes JSON, from all results."""
    options: Hashable = ()
    """Jobs with the same task and options share a call of `run`; None shares with no other."""
    numbers: Callable[[], int] = lambda: 0
    """The size of the response, once the tokens are counted."""
    long: bool = False
    """Whether each input may take as long as many batches."""
    sizes: Sequence[int] = ()
    """The tokens of each input."""
    response: asyncio.Future[bytes] = field(init=False)
    """Made on the event loop."""

    def __post_init__(self) -> None:
        self.results: list[Any] = [None] * len(self.inputs)
        self.left = len(self.inputs)

    def parts(self) -> "list[JobPart]":
        """The inputs in parts, each with one adapter and at most a batch."""
        loaded, shared = self.context.served.loaded, object() if self.options is None else self.options
        parts: list[JobPart] = []
        latest: dict[str | None, JobPart] = {}
        for i, (example, tokens) in enumerate(zip(self.inputs, self.sizes, strict=True)):
            adapter = self.context.served.adapter_for(self.task, isinstance(example, tuple) and len(example) == 2)
            part = latest.get(adapter)
            if part is None or part.tokens + tokens > loaded.budget:
                part = latest[adapter] = JobPart(self, loaded, adapter, (loaded, adapter, self.task, shared))
                parts.append(part)
            part.indices.append(i)
            part.tokens += tokens
        return parts


@dataclass(eq=False)
class JobPart:
    """A part of a job, small enough for one batch."""

    job: Job
    loaded: LoadedModel
    adapter: str | None
    key: Hashable
    """One call computes parts with equal keys."""
    indices: list[int] = field(default_factory=list)
    """Its inputs, as indices into those of the job."""
    tokens: int = 0
    turn: int = 0
    """Its place in the queue."""

    @property
    def long(self) -> bool:
        """Whether it may take much longer than a batch, which cannot be interrupted for others."""
        return self.job.long or self.tokens > self.loaded.budget


def alone(
    context: RequestContext,
    task: str,
    texts: Sequence[str | None],
    compute: Callable[[Model], Any],
    numbers: Callable[[], int] = lambda: 0,
) -> Job:
    """A job that is one call, shared with no other job. `texts` are what it reads; None is left out."""
    inputs = tuple(text for text in texts if text is not None)
    return Job(context, task, [inputs], lambda model, _: [compute(model)], lambda rows: rows[0], None, numbers=numbers)


def json_bytes(value: Any) -> bytes:
    """A response as JSON, made by many short calls: a long one holds the interpreter, and the event loop waits."""
    if isinstance(value, dict):
        return b"{" + b",".join(to_json(key) + b":" + json_bytes(item) for key, item in value.items()) + b"}"
    if not isinstance(value, list) or not value or isinstance(value[0], str | float):
        return to_json(value, inf_nan_mode="null")
    if isinstance(value[0], list):
        return b"[" + b",".join(map(json_bytes, value)) + b"]"
    some = (to_json(value[i : i + ITEMS], inf_nan_mode="null")[1:-1] for i in range(0, len(value), ITEMS))
    return b"[" + b",".join(some) + b"]"


def give_back_memory() -> None:
    """Return freed memory to the system; of the C libraries, glibc alone keeps much of it."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None:
        trim(0)


class Batcher:
    """The queue, and the threads that serve it."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.queue: list[JobPart] = []  # by turn
        self._turn = 0  # of the part taken last
        self._long = 0  # long parts that are computed now
        self._wake = threading.Condition()
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._running = threading.local()
        self._trimmed = time.monotonic()
        metrics.waiting.set_function(lambda: sum(part.tokens for part in self.queue))

    def start(self, threads: int) -> None:
        """Start the threads."""
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def close(self, seconds: float = 2.0) -> None:
        """Finish the queued jobs that are still wanted, then stop; after `seconds`, running jobs are abandoned."""
        deadline = time.monotonic() + seconds
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    @property
    def alive(self) -> bool:
        """Whether all threads run."""
        return bool(self._threads) and all(thread.is_alive() for thread in self._threads)

    def submit(self, job: Job) -> None:
        """Put a job into the queue; its future gives the response as JSON."""
        parts, client = job.parts(), job.context.client
        with self._wake:
            if self._closing:
                raise HttpError(503, "the server is shutting down; try another", {"Retry-After": "5"})
            waiting = {part.job for part in self.queue if part.job.context.client == client}
            for i, part in enumerate(parts):
                part.turn = self._turn + 1 + len(waiting) + i
            self.queue = sorted([*self.queue, *parts], key=lambda part: part.turn)
            self._wake.notify(len(parts))

    def check(self) -> None:
        """Called before each pass through an encoder: stop if nobody waits for what this thread computes."""
        jobs: list[Job] = getattr(self._running, "jobs", [])
        if jobs and all(job.context.gone for job in jobs):
            raise jobs[0].context.late()

    # ── the threads ──────────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread: the other cores have their own
        while parts := self._take():
            start = time.monotonic()
            try:
                done = self._compute(parts)
            finally:
                with self._wake:
                    parts[0].loaded.running -= 1
                    self._long -= parts[0].long
                    if self.queue or self._closing:  # some may have waited for this model
                        self._wake.notify_all()
            self.metrics.batch_tokens.observe(sum(part.tokens for part in parts))
            self.metrics.batch_seconds.observe(time.monotonic() - start)
            settle(done)
            if parts[0].long or time.monotonic() - self._trimmed > TRIM:
                self._trimmed = time.monotonic()
                give_back_memory()

    def _take(self) -> list[JobPart]:
        """The first part that can run, and those that share its call, up to the budget; empty at the end."""
        with self._wake:
            while (first := self._first()) is None:
                if self._closing and not self.queue:
                    return []
                self._wake.wait()
            budget = first.loaded.budget
            share = sum(part.tokens for part in self.queue) // len(self._threads)  # all threads get some of it
            taken, room = [first], min(budget, max(share, budget // 4)) - first.tokens
            for part in self.queue:
                if part is not first and part.tokens <= room and part.key == first.key:
                    taken.append(part)
                    room -= part.tokens
            self._remove(taken)
            first.loaded.start(first.adapter)
            self._turn = first.turn
            self._long += first.long
            return taken

    def _first(self) -> JobPart | None:
        """The first part that can run: its model is idle, or uses its adapter. Only long parts may be overtaken."""
        if unwanted := [part for part in self.queue if part.job.context.gone]:
            self._remove(unwanted)
            settle([(part.job, part.job.context.late()) for part in unwanted])
        blocked: set[LoadedModel] = set()
        full = self._long >= max(1, len(self._threads) - 1)
        for part in self.queue:
            loaded = part.loaded
            if full and part.long:
                continue
            if loaded not in blocked and (loaded.running == 0 or loaded.model.adapter == part.adapter):
                return part
            blocked.add(loaded)
        return None

    def _remove(self, parts: Sequence[JobPart]) -> None:
        gone = set(parts)
        self.queue = [part for part in self.queue if part not in gone]

    def _compute(self, parts: list[JobPart]) -> list[tuple[Job, bytes | Exception]]:
        """Compute parts by one call. Returns the jobs that are now done, with their responses."""
        job = parts[0].job
        self._running.jobs = [part.job for part in parts]
        try:
            results = iter(job.run(job.context.served.model, [p.job.inputs[i] for p in parts for i in p.indices]))
        except Exception as error:
            if len(parts) == 1:
                job.context.gone = True  # its other parts need no computing
                return [(job, error)]
            return [done for part in parts for done in self._compute([part])]  # one must not spoil the others
        done: list[tuple[Job, bytes | Exception]] = []
        for part in parts:
            for i in part.indices:
                part.job.results[i] = next(results)
            with self._wake:
                part.job.left -= len(part.indices)
                last = part.job.left == 0
            if last:
                try:
                    done.append((part.job, json_bytes(part.job.finish(part.job.results))))
                except Exception as error:
                    done.append((part.job, error))
        return done


def settle(done: Sequence[tuple[Job, bytes | Exception]]) -> None:
    """Hand responses and errors to the event loop, for those who still wait."""

    def hand_over() -> None:
        for job, response in done:
            if not job.response.done():
                give = job.response.set_exception if isinstance(response, Exception) else job.response.set_result
                give(response)  # type: ignore[arg-type]

    if done:
        done[0][0].response.get_loop().call_soon_threadsafe(hand_over)
