"""One thread runs the models; the requests of many threads share its batches.

A request's thread calls the model as anyone would. Where the model calls its encoder, a `SharedEncoder` puts the
sequences in a queue and waits; the scheduler's thread takes what has gathered, up to a budget of tokens, as one
ragged batch. So every task is served by the code that Python and the command line use.

Legend: T tokens in the batch, H hidden.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from everybert.model.encoder import Encoder
from everybert.model.ragged import Ragged
from everybert.serving.limits import CALL, Call, Refusal
from everybert.serving.metrics import Metrics


@dataclass(frozen=True)
class Trunk:
    """An encoder that the scheduler runs, and how to switch it between adapters."""

    name: str
    encoder: Encoder
    use: Callable[[str | None], None]
    budget: int


@dataclass(eq=False)
class Ticket:
    """Sequences of one request that wait for the encoder."""

    trunk: Trunk
    adapter: str | None
    batch: Ragged
    call: Call | None
    inside: dict[str, Any] = field(default_factory=dict)
    """`states` and `watch` of those who look inside: their batch is theirs alone."""
    future: Future[Tensor] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> int:
        """Tokens of its sequences."""
        return len(self.batch.tokens_T)

    def fits(self, other: Ticket) -> bool:
        """Whether the two can share a batch."""
        return self.trunk is other.trunk and self.adapter == other.adapter and not self.inside and not other.inside


class Scheduler:
    """The queue before the models, and the thread that serves it."""

    def __init__(self, metrics: Metrics, wait: float = 0.0) -> None:
        self.metrics = metrics
        self.wait = wait
        self.calls = 0
        """Requests in the hands of a thread: they have a ticket in the queue, or may soon have one."""
        self._queue: deque[Ticket] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._speed = 0.0  # tokens a second, lately
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="everybert-scheduler", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Serve what waits, then stop."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Tokens in the queue."""
        return sum(ticket.tokens for ticket in tuple(self._queue))

    def retry_after(self) -> int:
        """Seconds, rounded up, in which what waits now will be done."""
        return min(60, max(1, math.ceil(self.waiting / self._speed))) if self._speed else 1

    def run(self, ticket: Ticket) -> Tensor:
        """Wait for a ticket's hidden states (T, H); called in a request's thread."""
        if ticket.call is not None:
            ticket.call.check()
        with self._wake:
            if self._closing:
                raise Refusal(503, "the server is shutting down; try another", {"Retry-After": "5"})
            self._queue.append(ticket)
            self._wake.notify()
        left = None if ticket.call is None else ticket.call.deadline - time.monotonic()
        try:
            return ticket.future.result(None if left is None or left == math.inf else max(left, 0.0))
        except FutureTimeout:
            if ticket.call is not None:
                ticket.call.check()
            raise

    # ── the scheduler's own thread ───────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # of this thread: the requests' threads have one each
        while tickets := self._take():
            self._serve(tickets)

    def _take(self) -> list[Ticket]:
        """The oldest ticket and those that fit with it, up to the budget; nothing when all is over."""
        with self._wake:
            while True:
                self._drop_unwanted()
                if self._queue:
                    break
                if self._closing:
                    return []
                self._wake.wait()
            self._gather()
            first = self._queue.popleft()
            taken, room = [first], first.trunk.budget - first.tokens
            for ticket in tuple(self._queue):
                if ticket.tokens <= room and ticket.fits(first):
                    taken.append(ticket)
                    room -= ticket.tokens
            for ticket in taken[1:]:
                self._queue.remove(ticket)
        self.metrics.waiting.set(self.waiting)
        return taken

    def _drop_unwanted(self) -> None:
        for ticket in tuple(self._queue):
            try:
                if ticket.call is not None:
                    ticket.call.check()
            except Refusal as refusal:
                self._queue.remove(ticket)
                ticket.future.set_exception(refusal)

    def _gather(self) -> None:
        """Give requests on their way a moment to come along, while the batch has room."""
        first = self._queue[0]
        until = first.arrived + self.wait
        while self.calls > len(self._queue) and not self._closing and not first.inside:
            if sum(t.tokens for t in self._queue if t.fits(first)) >= first.trunk.budget:
                return
            left = until - time.monotonic()
            if left <= 0 or not self._wake.wait(left):
                return

    def _serve(self, tickets: list[Ticket]) -> None:
        start = time.monotonic()
        try:
            results = _forward(tickets)
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
        for ticket, x_TH in zip(tickets, results):
            ticket.future.set_result(x_TH)


@torch.inference_mode()
def _forward(tickets: Sequence[Ticket]) -> list[Tensor]:
    """The hidden states of each ticket, computed as one batch."""
    first = tickets[0]
    first.trunk.use(first.adapter)
    if len(tickets) == 1:
        return [first.trunk.encoder(first.batch, **first.inside)]
    batch, order = merge([ticket.batch for ticket in tickets])
    pieces = batch.split(first.trunk.encoder(batch))
    back: list[Any] = [None] * len(pieces)
    for piece, at in zip(pieces, order):
        back[at] = piece
    ends = list(accumulate((len(t.batch) for t in tickets), initial=0))
    return [torch.cat(back[a:b]) for a, b in pairwise(ends)]


def merge(batches: Sequence[Ragged]) -> tuple[Ragged, list[int]]:
    """Several batches as one, equal lengths together; and for each of its sequences, where it stood end to end."""
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
        return self._scheduler.run(Ticket(self._real[0], self._adapter, batch, CALL.get(), inside))
