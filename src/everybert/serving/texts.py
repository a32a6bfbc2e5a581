"""Texts to vectors without a thread for each request: those that wait for a model together are embedded in one call.

A thread that runs models takes the texts of all requests that have gathered, and does for them what `Model.embedded`
does for one caller: tokenize, run the encoder, pool. So between the event loop and that thread there is one
hand-over a request, each way; every further thread would take Python's lock from those that compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from everybert.inference.embedding import Embedded
from everybert.inference.model import Model
from everybert.serving.limits import CALL, Call
from everybert.serving.scheduler import Ticket, Trunk

LETTERS = 5
"""Of a token, about: a request's tokens are guessed until it is tokenized."""


@dataclass(frozen=True)
class Direct:
    """A model whose encoder is the trunk itself, for the threads that run it."""

    trunk: Trunk
    adapter: str | None
    model: Model

    def takes(self, texts: Sequence[str]) -> bool:
        """Whether these texts make a batch or two; more would keep the thread from others for too long."""
        return guess(texts) <= 2 * self.trunk.budget


def guess(texts: Sequence[str]) -> int:
    """About how many tokens."""
    return sum(2 + len(text) // LETTERS for text in texts)


@dataclass(eq=False)
class Texts(Ticket):
    """Texts of a request that wait to be embedded."""

    call: Call
    model: Model
    texts: list[str]
    how: dict[str, Any]
    """Arguments of Model.embedded."""
    form: Callable[[Embedded], bytes]
    """Makes the answer."""

    @property
    def tokens(self) -> int:
        """Of its texts; a guess before they are read."""
        return self.call.tokens or guess(self.texts)

    def fits(self, other: Ticket) -> bool:
        """Whether the two can share a batch."""
        return isinstance(other, Texts) and super().fits(other) and self.how == other.how

    def run(self, tickets: Sequence[Texts]) -> list[bytes]:
        """Their answers."""
        for ticket in tickets:
            ticket.call.tokens = 0  # it may have been counted in a batch that failed
        shared = _Shared([ticket.call for ticket in tickets], [len(ticket.texts) for ticket in tickets])
        token = CALL.set(shared)  # type: ignore[arg-type]
        try:
            found = self.model.embedded([text for ticket in tickets for text in ticket.texts], **self.how)
        finally:
            CALL.reset(token)
        return [
            ticket.form(Embedded(found.vectors[own], found.tokens[own], found.cut[own]))
            for ticket, own in zip(tickets, shared.parts)
        ]


class _Shared:
    """The account of several requests whose texts are read at once: each keeps its own limits."""

    def __init__(self, calls: Sequence[Call], counts: Sequence[int]) -> None:
        self.calls = calls
        self.parts = [slice(a, b) for a, b in pairwise(accumulate(counts, initial=0))]

    def read(self, lengths: Sequence[int]) -> None:
        """Count all the texts, in their order."""
        for call, own in zip(self.calls, self.parts):
            call.read(lengths[own])
