"""Sequences of ids to hidden states, for a request that runs a model in a thread of its own.

Where the model calls its encoder, a `SharedEncoder` lets the sequences wait for the scheduler, which runs what several
requests wait for as one ragged batch. So every task is served by the code that Python and the command line use.

Legend: T tokens in the batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from everybert.model import engine, graphs
from everybert.model.ragged import Ragged
from everybert.serving.limits import CALL
from everybert.serving.scheduler import Scheduler, Ticket, Trunk


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
        return bool(self.inside) or self.batch.token_TE is not None

    def run(self, tickets: Sequence[Sequences]) -> list[Tensor]:
        """Their hidden states."""
        return _forward(tickets)


@torch.inference_mode()
def _forward(tickets: Sequence[Sequences]) -> list[Tensor]:
    """The hidden states of each ticket, computed as one batch."""
    first = tickets[0]
    if len(tickets) == 1:
        given_TE = first.batch.token_TE
        if given_TE is not None and given_TE.requires_grad:  # recorded; the request's own thread runs it backwards
            with torch.inference_mode(False), torch.enable_grad():
                return [first.trunk.encoder(first.batch, **first.inside)]
        if first.inside:
            return [first.trunk.encoder(first.batch, **first.inside)]
        return [engine.forward(first.trunk.encoder, first.batch)]
    batch, order = merge([ticket.batch for ticket in tickets])
    pieces = batch.split(engine.forward(first.trunk.encoder, batch))
    back: list[Any] = [None] * len(pieces)
    for piece, at in zip(pieces, order):
        back[at] = piece
    ends = list(accumulate((len(t.batch) for t in tickets), initial=0))
    return [torch.cat(back[a:b]) for a, b in pairwise(ends)]


def merge(batches: Sequence[Ragged]) -> tuple[Ragged, list[int]]:
    """Several batches as one, equal lengths together; and for each of its sequences, where it stood end to end."""
    if len({batch.device for batch in batches}) > 1:  # most come from the host, and go to the device as one
        device = next(batch.device for batch in batches if batch.device.type != "cpu")
        batches = [batch.to(device) for batch in batches]
    lengths = [n for batch in batches for n in batch.lengths]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])

    def lay(parts: list[Tensor]) -> Tensor:
        pieces = graphs.joined(parts).split(lengths)
        return graphs.joined([pieces[i] for i in order])

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
