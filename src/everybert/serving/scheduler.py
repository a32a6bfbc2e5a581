"""A few threads run the models; the requests of many threads share their batches.

What waits is a ticket: sequences that a request's thread needs hidden states of (sequences.py), or texts to embed,
which are asked for most and go without such a thread (texts.py). A thread of the scheduler takes what has gathered, up
to a budget of tokens, as one ragged batch. On the CPU each core has a thread and a batch of its own, as in the engine;
on an accelerator there is one thread. A short batch on an idle CPU is computed by the event loop.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from everybert.model.encoder import Encoder
from everybert.serving.limits import Call, Refusal
from everybert.serving.metrics import Metrics

FEW = 64
"""Tokens of a batch below which the CPU takes about as long for one as for all: the time of reading the weights."""
BRIEF = 0.05
"""Seconds for which the event loop may compute: nobody else is heard meanwhile."""
PASSES = 2
"""Passes of the event loop before it computes, so that requests which came at the same moment go together."""


@dataclass(eq=False)
class Trunk:
    """An encoder that the scheduler runs, and how to switch it between adapters."""

    name: str
    encoder: Encoder
    use: Callable[[str | None], None]
    budget: int
    running: int = 0
    """Batches that are being computed now, all under the same adapter."""
    small: int = 0
    """Of them, those of few tokens."""
    adapter: str | None = None
    """The adapter in use."""
    seconds: float = 0.0
    """What a batch of few tokens takes, lately."""

    def free_for(self, adapter: str | None) -> bool:
        """Whether a batch under that adapter may run now."""
        return self.running == 0 or self.adapter == adapter

    def begin(self, adapter: str | None) -> None:
        """Take the trunk for a batch under an adapter."""
        self.running += 1
        if self.adapter != adapter:
            self.use(adapter)
            self.adapter = adapter

    def took(self, seconds: float) -> None:
        """A small batch took so long. Faster is believed at once, slower by and by: machines stop for a moment."""
        self.seconds = min(seconds, 0.8 * self.seconds + 0.2 * seconds) if self.seconds else seconds


@dataclass(eq=False)
class Ticket(ABC):
    """Work of one request that waits for an encoder."""

    trunk: Trunk
    adapter: str | None
    call: Call | None
    future: Future[Any] = field(default_factory=Future, init=False)
    arrived: float = field(default_factory=time.monotonic, init=False)
    held: bool = field(default=False, init=False)
    """A thread of the scheduler has chosen it, and waits for others to go with it."""
    few: bool = field(default=False, init=False)
    """It leads a batch of few tokens."""
    alone: ClassVar[bool] = False
    """Whether nothing may share its batch."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens of its sequences."""

    @abstractmethod
    def run(self, tickets: Sequence[Any]) -> list[Any]:
        """What each of these tickets, which all fit with this one, waits for: computed as one batch."""

    def fits(self, other: Ticket) -> bool:
        """Whether the two can share a batch."""
        one_kind = type(self) is type(other) and self.trunk is other.trunk and self.adapter == other.adapter
        return one_kind and not self.alone and not other.alone


class Scheduler:
    """The queue before the models, and the threads that serve it."""

    def __init__(self, metrics: Metrics, wait: float = 0.0) -> None:
        self.metrics = metrics
        self.wait = wait
        self._coming: set[Call] = set()  # requests that a thread prepares: each may soon have a ticket
        self._queue: deque[Ticket] = deque()
        self._wake = threading.Condition()  # its lock is re-entrant
        self._closing = False
        self._running = 0  # batches
        self._taken = 0  # their tickets
        self._inline = 0  # tokens that the event loop may compute by itself
        self._due = False  # it will look what there is
        self._speed = 0.0  # tokens a second of a thread, lately
        self._threads: list[threading.Thread] = []

    def start(self, threads: int, inline: int = 0) -> None:
        """Begin to serve, with so many threads; the event loop itself computes batches of at most `inline` tokens."""
        self._inline = inline
        self._threads = [
            threading.Thread(target=self._work, name=f"everybert-scheduler-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Serve what waits, then stop."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    @property
    def alive(self) -> bool:
        """Whether the threads run."""
        return bool(self._threads) and all(thread.is_alive() for thread in self._threads)

    @property
    def waiting(self) -> int:
        """Tokens in the queue."""
        return sum(ticket.tokens for ticket in tuple(self._queue))

    def retry_after(self) -> int:
        """Seconds, rounded up, in which what waits now will be done."""
        speed = self._speed * max(len(self._threads), 1)
        return min(60, max(1, math.ceil(self.waiting / speed))) if speed else 1

    @contextmanager
    def expecting(self, call: Call) -> Iterator[None]:
        """While a request is worked on: a batch may wait a moment for its first ticket."""
        with self._wake:
            self._coming.add(call)
        try:
            yield
        finally:
            self._here(call)

    def _here(self, call: Call | None) -> None:
        """There is no need to wait for this request any more."""
        with self._wake:
            if call in self._coming:
                self._coming.remove(call)
                self._wake.notify_all()

    def put(self, ticket: Ticket, wake: bool = True) -> None:
        """Let a ticket wait for its turn; `wake` the threads for it."""
        if ticket.call is not None:
            ticket.call.check()
        with self._wake:
            if self._closing:
                raise Refusal(503, "the server is shutting down; try another", {"Retry-After": "5"})
            self._queue.append(ticket)
            self._here(ticket.call)
            if wake:
                self._wake.notify_all()

    def offer(self, ticket: Ticket) -> None:
        """As put, on the event loop, which computes by itself what is brief when nothing else runs.

        So no thread must be woken, none competes for Python's lock, and a short text has all cores. Requests that come
        meanwhile wait in their sockets, and are the next batch.
        """
        inline = self._inline > 0
        self.put(ticket, wake=not inline)
        if inline and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._turn, PASSES)

    def _turn(self, passes: int) -> None:
        """The event loop's turn, after some more passes."""
        if passes:
            asyncio.get_running_loop().call_soon(self._turn, passes - 1)
            return
        self._due = False
        with self._wake:
            first = self._first()
            if first is None or not self._is_brief(first):
                self._wake.notify_all()  # it is for the threads
                return
            first.trunk.begin(first.adapter)
            tickets = self._chosen(first)
        self._run(tickets)

    def _is_brief(self, first: Ticket) -> bool:
        """Whether all that waits is soon computed."""
        few = sum(ticket.tokens for ticket in self._queue) <= self._inline
        return few and self._running == 0 and first.trunk.seconds < BRIEF

    def run(self, ticket: Ticket) -> Any:
        """Wait for what a ticket gives; called in a request's thread."""
        self.put(ticket)
        left = None if ticket.call is None else ticket.call.deadline - time.monotonic()
        try:
            return ticket.future.result(None if left is None or left == math.inf else max(left, 0.0))
        except FutureTimeout:
            if ticket.call is not None:
                ticket.call.check()
            raise

    # ── the scheduler's own threads ──────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread: the other cores have threads of their own
        while tickets := self._take():
            self._run(tickets)

    def _take(self) -> list[Ticket]:
        """The oldest ticket that can run, and those that fit with it, up to the budget; nothing when all is over."""
        with self._wake:
            while (first := self._first()) is None:
                if self._closing and not self._queue:
                    return []
                self._wake.wait()
            first.trunk.begin(first.adapter)
            self._gather(first)
            return self._chosen(first)

    def _chosen(self, first: Ticket) -> list[Ticket]:
        """That ticket and those that fit with it, up to the budget, out of the queue; its trunk has begun."""
        taken, room = [first], first.trunk.budget - first.tokens
        self._queue.remove(first)
        for ticket in tuple(self._queue):
            if ticket.tokens <= room and not ticket.held and ticket.fits(first):
                taken.append(ticket)
                room -= ticket.tokens
        for ticket in taken[1:]:
            self._queue.remove(ticket)
        first.few = sum(ticket.tokens for ticket in taken) < FEW
        first.trunk.small += first.few
        self._running += 1
        self._taken += len(taken)
        self.metrics.waiting.set(self.waiting)
        return taken

    def _run(self, tickets: list[Ticket]) -> None:
        """Serve them, and leave their trunk to others."""
        try:
            self._serve(tickets)
        finally:
            with self._wake:
                self._running -= 1
                self._taken -= len(tickets)
                tickets[0].trunk.running -= 1
                tickets[0].trunk.small -= tickets[0].few
                if self._queue or self._closing:
                    self._wake.notify_all()

    def _first(self) -> Ticket | None:
        """The oldest ticket whose trunk is free for it; none overtakes an older one of its own trunk."""
        self._drop_unwanted()
        blocked: set[Trunk] = set()
        for ticket in self._queue:
            if ticket.held or ticket.trunk in blocked:
                continue
            if ticket.trunk.free_for(ticket.adapter) and not self._gathers(ticket):
                return ticket
            blocked.add(ticket.trunk)
        return None

    def _gathers(self, ticket: Ticket) -> bool:
        """Whether it is too little for a second batch beside a small one: what comes meanwhile will go with it."""
        return ticket.trunk.small > 0 and sum(t.tokens for t in self._queue if t is ticket or t.fits(ticket)) < FEW

    def _drop_unwanted(self) -> None:
        for ticket in tuple(self._queue):
            try:
                if ticket.call is not None and not ticket.held:
                    ticket.call.check()
            except Refusal as refusal:
                self._queue.remove(ticket)
                ticket.future.set_exception(refusal)

    def _gather(self, first: Ticket) -> None:
        """Give requests on their way a moment to come along, while the batch has room."""
        first.held = True
        until = first.arrived + self.wait
        while self._coming and not self._closing and not first.alone:
            if sum(t.tokens for t in self._queue if t.fits(first)) >= first.trunk.budget:
                return
            left = until - time.monotonic()
            if left <= 0 or not self._wake.wait(left):
                return

    def _serve(self, tickets: list[Ticket]) -> None:
        start = time.monotonic()
        try:
            results = tickets[0].run(tickets)
        except Exception as error:
            if len(tickets) > 1:  # one request must not spoil its neighbours'
                for ticket in tickets:
                    self._serve([ticket])
            else:
                tickets[0].future.set_exception(error)
            return
        tokens, seconds = sum(t.tokens for t in tickets), time.monotonic() - start
        speed = tokens / max(seconds, 1e-6)
        self._speed = 0.9 * self._speed + 0.1 * speed if self._speed else speed
        if tokens <= self._inline:
            tickets[0].trunk.took(seconds)
        self.metrics.tokens.labels(tickets[0].trunk.name).inc(tokens)
        self.metrics.batch_tokens.observe(tokens)
        self.metrics.batch_seconds.observe(seconds)
        for ticket, result in zip(tickets, results):
            ticket.future.set_result(result)
