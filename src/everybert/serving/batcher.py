"""One queue before the models, and plain threads that compute what is in it.

A request is a `Job`: inputs, and a function that computes a result for each of them. The queue holds it in pieces of
at most a batch. A thread takes the oldest piece and all others that ask for the same (model, adapter, task, options),
up to a budget of tokens, calls the model once for all of them, and splits the results. On the CPU each core has a
thread and a batch of its own; an accelerator has one thread.

A network computes with one adapter at a time: a piece is taken only if its model is idle or runs with the same adapter.
"""

from __future__ import annotations

import asyncio
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
from everybert.serving.models import LoadedModel

LETTERS = 5
"""Characters per token, about."""


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
    count: bool = True
    """Whether the tokens are counted, and the limits checked, before the job goes into the queue."""
    specials: bool = False
    """Whether the count includes special tokens."""
    response: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self.results: list[Any] = [None] * len(self.inputs)
        self.left = len(self.inputs)
        self.failed = False

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for the response."""
        return self.context.wanted and not self.failed

    def pieces(self) -> Iterator[Piece]:
        """The inputs in parts, each with one adapter and at most a batch."""
        by_adapter: dict[str | None, list[int]] = {}
        for i, given in enumerate(self.inputs):
            pair = isinstance(given, tuple) and len(given) == 2
            by_adapter.setdefault(self.context.served.adapter_for(self.task, pair), []).append(i)
        loaded, shared = self.context.served.loaded, object() if self.options is None else self.options
        for adapter, indices in by_adapter.items():
            piece = Piece(self, loaded, adapter, (loaded, adapter, self.task, shared))
            for i in indices:
                tokens = guess_tokens(self.inputs[i])
                if piece.which and piece.tokens + tokens > loaded.budget:
                    yield piece
                    piece = Piece(self, loaded, adapter, piece.key)
                piece.which.append(i)
                piece.tokens += tokens
            yield piece


@dataclass(eq=False)
class Piece:
    """A part of a job, small enough for one batch."""

    job: Job
    loaded: LoadedModel
    adapter: str | None
    key: Hashable
    """One call computes pieces with equal keys."""
    which: list[int] = field(default_factory=list)
    """Indices of its inputs."""
    tokens: int = 0
    """Estimated."""


def once(context: RequestContext, task: str, texts: tuple[str, ...], compute: Callable[[Model], Any]) -> Job:
    """A job that is one call for some texts, shared with no other request."""

    def run(model: Model, _: list[Any]) -> Sequence[Any]:
        return [compute(model)]

    return Job(context, task, [texts], run, lambda results: results[0], None, specials=True)


def guess_tokens(given: str | Sequence[str]) -> int:
    """About how many tokens a text, or a tuple of texts, has."""
    return 2 + len(given) // LETTERS if isinstance(given, str) else sum(map(guess_tokens, given))


class Batcher:
    """The queue, and the threads that serve it."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.queue: deque[Piece] = deque()
        self._waiting = 0  # tokens in the queue, estimated
        self._wake = threading.Condition()
        self._closing = False
        self._threads: list[threading.Thread] = []

    def start(self, threads: int) -> None:
        """Start the threads."""
        names = [f"everybert-batcher-{i}" for i in range(threads)]
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        for thread in self._threads:
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

    def submit(self, job: Job) -> asyncio.Future[bytes]:
        """Put a job into the queue; the future gives its response as JSON."""
        pieces = list(job.pieces())
        with self._wake:
            if self._closing:
                raise HttpError(503, "the server is shutting down; try another", {"Retry-After": "5"})
            self.queue.extend(pieces)
            self._count(sum(piece.tokens for piece in pieces))
            self._wake.notify(len(pieces))
        return job.response

    def _count(self, tokens: int) -> None:
        self._waiting += tokens
        self.metrics.waiting.set(self._waiting)

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
                    if self.queue or self._closing:  # some may have waited for this model
                        self._wake.notify_all()
            self.metrics.batch_tokens.observe(sum(piece.tokens for piece in pieces))
            self.metrics.batch_seconds.observe(time.monotonic() - start)
            settle(done)

    def _take(self) -> list[Piece]:
        """The oldest piece that can run, and those that share its call, up to the budget; empty at the end."""
        with self._wake:
            while (first := self._first()) is None:
                if self._closing and not self.queue:
                    return []
                self._wake.wait()
            budget = first.loaded.budget
            share = self._waiting // len(self._threads)  # a short queue is divided among the threads
            taken, room = [first], min(budget, max(share, budget // 4)) - first.tokens
            for piece in self.queue:
                if piece is not first and piece.tokens <= room and piece.key == first.key:
                    taken.append(piece)
                    room -= piece.tokens
            self._remove(taken)
            first.loaded.start(first.adapter)
            return taken

    def _first(self) -> Piece | None:
        """The oldest piece whose model is free for it; none overtakes an older piece of the same model."""
        if unwanted := [piece for piece in self.queue if not piece.job.wanted]:
            self._remove(unwanted)
            settle([(piece.job, piece.job.context.late()) for piece in unwanted])
        blocked: set[LoadedModel] = set()
        for piece in self.queue:
            if piece.loaded not in blocked and piece.loaded.can_run(piece.adapter):
                return piece
            blocked.add(piece.loaded)
        return None

    def _remove(self, pieces: Sequence[Piece]) -> None:
        gone = set(pieces)
        self.queue = deque(piece for piece in self.queue if piece not in gone)
        self._count(-sum(piece.tokens for piece in pieces))

    def _compute(self, pieces: list[Piece]) -> list[tuple[Job, bytes | Exception]]:
        """Compute pieces by one call; the jobs that are done now, with their responses."""
        job = pieces[0].job
        try:
            results = job.run(job.context.served.model, [piece.job.inputs[i] for piece in pieces for i in piece.which])
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
                try:
                    done.append((piece.job, to_json(piece.job.finish(piece.job.results), inf_nan_mode="null")))
                except Exception as error:
                    done.append((piece.job, error))
        return done


def settle(done: Sequence[tuple[Job, bytes | Exception]]) -> None:
    """Hand responses and errors to the event loop, for those who still wait."""

    def hand_over() -> None:
        for job, response in done:
            if job.response.done():
                continue
            if isinstance(response, Exception):
                job.response.set_exception(response)
            else:
                job.response.set_result(response)

    if done:
        done[0][0].response.get_loop().call_soon_threadsafe(hand_over)
