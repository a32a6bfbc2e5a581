"""One queue before the models, and plain threads that compute what is in it.

A request is a `Job`: inputs, and a function that computes a result for each of them. The queue holds it in pieces of
at most a batch. A thread takes the oldest piece and all others that ask for the same (model, adapter, task, options),
up to a budget of tokens, calls the model once for all of them, and splits the results. On the CPU each core has a
thread and a batch of its own; an accelerator has one thread.

A network computes with one adapter at a time: a piece is taken only if its model is idle or runs with the same adapter.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic_core import to_json

from everybert.inference.model import Model
from everybert.serving.limits import HttpError, RequestContext
from everybert.serving.metrics import Metrics
from everybert.serving.models import LoadedModel, Served

LETTERS = 5
"""Characters per token, about."""


@dataclass(frozen=True)
class Work:
    """What a request asks of a model."""

    task: str
    """Decides the adapter where the request names none."""
    inputs: Sequence[Any]
    """Texts, or tuples of texts."""
    run: Callable[[Model, list[Any]], Sequence[Any]]
    """Computes one result per input."""
    finish: Callable[[list[Any]], Any]
    """Makes the response, which becomes JSON, from all results."""
    options: Hashable = ()
    """Work with the same task and options shares a call of `run`; None never does."""
    count: bool = True
    """Whether the tokens are counted, and the limits checked, before it goes into the queue."""
    specials: bool = False
    """Whether the count includes special tokens."""


def once(task: str, texts: tuple[str, ...], compute: Callable[[Model], Any]) -> Work:
    """Work that is one call for some texts, shared with no other request."""
    return Work(task, [texts], lambda model, _: [compute(model)], lambda results: results[0], None, specials=True)


class Job:
    """The work for one request, and its results so far."""

    def __init__(self, served: Served, context: RequestContext, work: Work) -> None:
        self.served, self.context, self.work = served, context, work
        self.loop = asyncio.get_running_loop()
        self.response: asyncio.Future[bytes] = self.loop.create_future()
        self.results: list[Any] = [None] * len(work.inputs)
        self.left = len(work.inputs)
        self.failed = False

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for the response."""
        return self.context.wanted and not self.failed

    def pieces(self) -> Iterator[Piece]:
        """The inputs in parts, each with one adapter and at most a batch."""
        by_adapter: dict[str | None, list[int]] = {}
        for i, given in enumerate(self.work.inputs):
            pair = isinstance(given, tuple) and len(given) == 2
            by_adapter.setdefault(self.served.adapter_for(self.work.task, pair), []).append(i)
        for adapter, indices in by_adapter.items():
            piece = Piece(self, adapter)
            for i in indices:
                tokens = guess_tokens(self.work.inputs[i])
                if piece.which and piece.tokens + tokens > self.served.loaded.budget:
                    yield piece
                    piece = Piece(self, adapter)
                piece.which.append(i)
                piece.tokens += tokens
            yield piece


@dataclass(eq=False)
class Piece:
    """A part of a job, small enough for one batch."""

    job: Job
    adapter: str | None
    which: list[int] = field(default_factory=list)
    """Indices of its inputs."""
    tokens: int = 0
    """Estimated."""

    @property
    def loaded(self) -> LoadedModel:
        """Its model."""
        return self.job.served.loaded

    def shares_with(self, other: Piece) -> bool:
        """Whether one call can compute both."""
        one, two = self.job.work, other.job.work
        same = self.loaded is other.loaded and self.adapter == other.adapter and one.task == two.task
        return same and one.options == two.options is not None


def guess_tokens(given: str | Sequence[str]) -> int:
    """About how many tokens a text, or a tuple of texts, has."""
    return 2 + len(given) // LETTERS if isinstance(given, str) else sum(map(guess_tokens, given))


class Batcher:
    """The queue, and the threads that serve it."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.waiting = 0
        """Tokens in the queue, estimated."""
        self._queue: deque[Piece] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._speed = 0.0  # tokens per second of a thread, lately
        self._threads: list[threading.Thread] = []

    def start(self, threads: int) -> None:
        """Start the threads."""
        for i in range(threads):
            thread = threading.Thread(target=self._work, name=f"everybert-batcher-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Compute what is in the queue, then stop."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    @property
    def alive(self) -> bool:
        """Whether all threads run."""
        return bool(self._threads) and all(thread.is_alive() for thread in self._threads)

    def retry_after(self) -> int:
        """Seconds, rounded up, in which the queue will be empty."""
        speed = self._speed * max(len(self._threads), 1)
        return min(60, max(1, math.ceil(self.waiting / speed))) if speed else 1

    def submit(self, job: Job) -> asyncio.Future[bytes]:
        """Put a job into the queue; the future gives its response as JSON."""
        pieces = list(job.pieces())
        with self._wake:
            if self._closing:
                raise HttpError(503, "the server is shutting down; try another", {"Retry-After": "5"})
            self._queue.extend(pieces)
            self._count(sum(piece.tokens for piece in pieces))
            self._wake.notify(len(pieces))
        return job.response

    def _count(self, tokens: int) -> None:
        self.waiting += tokens
        self.metrics.waiting.set(self.waiting)

    # ── the threads ──────────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread: the other cores have their own
        while pieces := self._take():
            start = time.monotonic()
            try:
                done = self._compute(pieces)
            finally:
                with self._wake:
                    pieces[0].loaded.running -= 1
                    if self._queue or self._closing:  # some may have waited for this model
                        self._wake.notify_all()
            self._measure(pieces, time.monotonic() - start)
            if done:
                pieces[0].job.loop.call_soon_threadsafe(_settle, done)

    def _take(self) -> list[Piece]:
        """The oldest piece that can run, and those that share its call, up to the budget; empty at the end."""
        with self._wake:
            while (first := self._first()) is None:
                if self._closing and not self._queue:
                    return []
                self._wake.wait()
            taken, room = [first], self._room(first) - first.tokens
            for piece in self._queue:
                if piece is not first and piece.tokens <= room and piece.shares_with(first):
                    taken.append(piece)
                    room -= piece.tokens
            self._remove(taken)
            first.loaded.start(first.adapter)
            return taken

    def _first(self) -> Piece | None:
        """The oldest piece whose model is free for it; none overtakes an older piece of the same model."""
        if unwanted := [piece for piece in self._queue if not piece.job.wanted]:
            self._remove(unwanted)
            dropped = [(piece.job, piece.job.context.late()) for piece in unwanted]
            unwanted[0].job.loop.call_soon_threadsafe(_settle, dropped)
        blocked: set[LoadedModel] = set()
        for piece in self._queue:
            if piece.loaded not in blocked and piece.loaded.can_run(piece.adapter):
                return piece
            blocked.add(piece.loaded)
        return None

    def _room(self, first: Piece) -> int:
        """The budget of a batch: a short queue is shared between the threads."""
        share = self.waiting // len(self._threads)
        return min(first.loaded.budget, max(share, first.loaded.budget // 4))

    def _remove(self, pieces: Sequence[Piece]) -> None:
        gone = set(pieces)
        self._queue = deque(piece for piece in self._queue if piece not in gone)
        self._count(-sum(piece.tokens for piece in pieces))

    def _compute(self, pieces: list[Piece]) -> list[tuple[Job, bytes | Exception]]:
        """Compute pieces by one call; the jobs that are done now, with their responses."""
        job = pieces[0].job
        try:
            inputs = [piece.job.work.inputs[i] for piece in pieces for i in piece.which]
            results = job.work.run(job.served.model, inputs)
        except Exception as error:
            if len(pieces) == 1:
                job.failed = True
                return [(job, error)]
            return [done for piece in pieces for done in self._compute([piece])]  # one must not spoil the others
        done: list[tuple[Job, bytes | Exception]] = []
        remaining = iter(results)
        for piece in pieces:
            for i in piece.which:
                piece.job.results[i] = next(remaining)
            with self._wake:
                piece.job.left -= len(piece.which)
                last = piece.job.left == 0
            if last:
                done.append((piece.job, _response(piece.job)))
        return done

    def _measure(self, pieces: list[Piece], seconds: float) -> None:
        tokens = sum(piece.tokens for piece in pieces)
        speed = tokens / max(seconds, 1e-6)
        self._speed = 0.9 * self._speed + 0.1 * speed if self._speed else speed
        self.metrics.batch_tokens.observe(tokens)
        self.metrics.batch_seconds.observe(seconds)


def _response(job: Job) -> bytes | Exception:
    """The response of a job as JSON."""
    try:
        return to_json(job.work.finish(job.results), inf_nan_mode="null")
    except Exception as error:
        return error


def _settle(done: Sequence[tuple[Job, bytes | Exception]]) -> None:
    """On the event loop: hand responses to those who still wait."""
    for job, response in done:
        if job.response.done():
            continue
        if isinstance(response, Exception):
            job.response.set_exception(response)
        else:
            job.response.set_result(response)
