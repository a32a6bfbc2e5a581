"""A few threads run the models; the requests of many threads share their batches.

A request's thread calls the model as anyone would. Where the model calls its encoder, a `SharedEncoder` puts the
sequences in a queue and waits; a thread of the scheduler takes what has gathered, up to a budget of tokens, as one
ragged batch. So every task is served by the code that Python and the command line use. Embedding, which is asked for
most, goes without a request's thread (texts.py). On the CPU each core has a thread and a batch of its own, as in the
engine; on an accelerator there is one thread.

Legend: T tokens in the batch, H hidden.
"""

from __future__ import annotations

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
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from everybert.inference import replay
from everybert.model.encoder import Encoder
from everybert.model.ragged import Ragged
from everybert.serving.limits import CALL, Call, Refusal
from everybert.serving.metrics import Metrics

FEW = 64
"""Tokens of a batch below which the CPU takes about as long for one as for all: the time of reading the weights."""


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

    def free_for(self, adapter: str | None) -> bool:
        """Whether a batch under that adapter may run now."""
        return self.running == 0 or self.adapter == adapter

    def begin(self, adapter: str | None) -> None:
        """Take the trunk for a batch under an adapter."""
        self.running += 1
        if self.adapter != adapter:
            self.use(adapter)
            self.adapter = adapter


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


@dataclass(eq=False)
class Sequences(Ticket):
    """Sequences whose hidden states (T, H) a request's thread waits for."""

    batch: Ragged
    inside: dict[str, Any] = field(default_factory=dict)
    """`states` and `watch` of those who look inside: their batch is theirs alone."""

    @property
    def tokens(self) -> int:
        """Tokens of its sequences."""
        return len(self.batch.tokens_T)

    @property
    def alone(self) -> bool:  # type: ignore[override]
        """Whether it looks inside, or brings embeddings of its own: then nothing shares its batch."""
        return bool(self.inside) or "token_TE" in self.batch.extra

    def run(self, tickets: Sequence[Sequences]) -> list[Tensor]:
        """Their hidden states."""
        return _forward(tickets)


class Scheduler:
    """The queue before the models, and the thread that serves it."""

    def __init__(self, metrics: Metrics, wait: float = 0.0) -> None:
        self.metrics = metrics
        self.wait = wait
        self._coming: set[Call] = set()  # requests that a thread prepares: each may soon have a ticket
        self._queue: deque[Ticket] = deque()
        self._wake = threading.Condition()  # its lock is re-entrant
        self._closing = False
        self._speed = 0.0  # tokens a second of a thread, lately
        self._threads: list[threading.Thread] = []

    def start(self, threads: int) -> None:
        """Begin to serve."""
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

    def put(self, ticket: Ticket) -> None:
        """Let a ticket wait for its turn."""
        if ticket.call is not None:
            ticket.call.check()
        with self._wake:
            if self._closing:
                raise Refusal(503, "the server is shutting down; try another", {"Retry-After": "5"})
            self._queue.append(ticket)
            self._here(ticket.call)
            self._wake.notify_all()

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
            try:
                self._serve(tickets)
            finally:
                with self._wake:
                    tickets[0].trunk.running -= 1
                    tickets[0].trunk.small -= tickets[0].few
                    self._wake.notify_all()

    def _take(self) -> list[Ticket]:
        """The oldest ticket that can run, and those that fit with it, up to the budget; nothing when all is over."""
        with self._wake:
            while (first := self._first()) is None:
                if self._closing and not self._queue:
                    return []
                self._wake.wait()
            first.trunk.begin(first.adapter)
            self._gather(first)
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
        self.metrics.waiting.set(self.waiting)
        return taken

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
        self.metrics.tokens.labels(tickets[0].trunk.name).inc(tokens)
        self.metrics.batch_tokens.observe(tokens)
        self.metrics.batch_seconds.observe(seconds)
        for ticket, result in zip(tickets, results):
            ticket.future.set_result(result)


@torch.inference_mode()
def _forward(tickets: Sequence[Sequences]) -> list[Tensor]:
    """The hidden states of each ticket, computed as one batch."""
    first = tickets[0]
    if len(tickets) == 1:
        given_TE = first.batch.extra.get("token_TE")
        if given_TE is not None and given_TE.requires_grad:  # recorded; the request's own thread runs it backwards
            with torch.inference_mode(False), torch.enable_grad():
                return [first.trunk.encoder(first.batch, **first.inside)]
        if first.inside:
            return [first.trunk.encoder(first.batch, **first.inside)]
        return [replay.forward(first.trunk.encoder, first.batch)]
    batch, order = merge([ticket.batch for ticket in tickets])
    pieces = batch.split(replay.forward(first.trunk.encoder, batch))
    back: list[Any] = [None] * len(pieces)
    for piece, at in zip(pieces, order):
        back[at] = piece
    ends = list(accumulate((len(t.batch) for t in tickets), initial=0))
    return [torch.cat(back[a:b]) for a, b in pairwise(ends)]


def merge(batches: Sequence[Ragged]) -> tuple[Ragged, list[int]]:
    """Several batches as one, equal lengths together; and for each of its sequences, where it stood end to end."""
    if len({batch.device for batch in batches}) > 1:  # most come from the host, and go to the device as one
        device = next(batch.device for batch in batches if batch.device.type != "cpu")
        batches = [replay.moved(batch, device) for batch in batches]
    lengths = [n for batch in batches for n in batch.lengths]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])

    def lay(parts: list[Tensor]) -> Tensor:
        pieces = torch.cat(parts).split(lengths)
        return torch.cat([pieces[i] for i in order])

    def of(name: str) -> Tensor | None:
        found = [getattr(batch, name) for batch in batches]
        if all(x is None for x in found):
            return None
        kind = torch.bool if name == "globals_T" else torch.int64
        return lay([torch.zeros_like(b.tokens_T, dtype=kind) if x is None else x for b, x in zip(batches, found)])

    tokens_T = lay([batch.tokens_T for batch in batches])
    return Ragged.flat(tokens_T, [lengths[i] for i in order], of("segments_T"), of("globals_T")), order


class SharedEncoder(nn.Module):
    """Stands where a model's encoder does, in a view of the model that many threads may use at once."""

    def __init__(self, trunk: Trunk, adapter: str | None, scheduler: Scheduler) -> None:
        super().__init__()
        self.config = trunk.encoder.config
        self._real = (trunk,)  # in a tuple: not a part of this module, whose train() and eval() must not reach it
        self._adapter = adapter
        self._scheduler = scheduler

    @property
    def embeddings(self) -> nn.Module:
        """The token table is the decoder's too, and says where the weights are."""
        return self._real[0].encoder.embeddings

    def check(self, batch: Ragged) -> None:
        """As Encoder's."""
        self._real[0].encoder.check(batch)

    def forward(
        self, batch: Ragged, states: list[Tensor] | None = None, watch: Callable[[str, Tensor], None] | None = None
    ) -> Tensor:
        """As Encoder's: (T) ids → (T, H)."""
        inside: dict[str, Any] = {"states": states} if states is not None else {}
        inside |= {"watch": watch} if watch is not None else {}
        return self._scheduler.run(Sequences(self._real[0], self._adapter, CALL.get(), batch, inside))
