"""Sequences through the encoder: batches filled to a budget of tokens, equal lengths together, long texts in windows.

Legend: T tokens in the batch, B sequences, H hidden.
"""

from __future__ import annotations

import contextvars
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

import torch
from torch import Tensor

from everybert.inference import replay
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.windows import windows

Given = TypeVar("Given")
Made = TypeVar("Made")
Read = Callable[[list[int], Ragged, Tensor], None]
"""Takes the numbers of a batch's sequences, the batch, and its hidden states (T, H)."""

BUDGET_CPU = 1024
"""Tokens of a batch on the CPU: products large enough to be fast, activations small enough to stay in memory pages
already touched."""
BUDGET_GPU = 4 * replay.WAVE
"""Tokens of a batch on an accelerator: enough to fill it, and whole waves of tiles."""
OVERLAP = 128
"""Tokens that neighbouring windows of a long text share, at most a quarter of the window."""


@dataclass(frozen=True)
class Inputs:
    """Sequences for the encoder."""

    ids: Sequence[Sequence[int]]
    segments: Sequence[Sequence[int]] | None = None
    global_tokens: Sequence[Sequence[int]] | None = None
    """Per sequence, the indices that are global (Longformer)."""

    def batch(self, which: Sequence[int]) -> Ragged:
        """Some of the sequences as one ragged batch, on the host."""

        def pick(x: Sequence[Sequence[int]] | None) -> list[Sequence[int]] | None:
            return None if x is None else [x[i] for i in which]

        return Ragged.of(pick(self.ids) or [], pick(self.segments), pick(self.global_tokens))


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Which sequences make each batch, the longest first; a batch is full once it has `budget` tokens."""
    groups: list[list[int]] = []
    total = budget
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if total >= budget:
            groups.append([])
            total = 0
        groups[-1].append(i)
        total += lengths[i]
    return groups


def in_order(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which sequences make each batch on an accelerator: as they come, never more than `capacity` tokens.

    There a batch of unequal lengths costs no more than one of equal ones, and batches of about one size share a graph.
    """
    groups: list[list[int]] = []
    total = capacity
    for i, n in enumerate(lengths):
        if not groups or total + n > capacity:
            groups.append([])
            total = 0
        groups[-1].append(i)
        total += n
    return groups


def shared_out(tokens: int, cores: int) -> int:
    """A CPU batch's budget: near BUDGET_CPU, and such that every core gets as many batches as the others."""
    rounds = max(1, math.ceil(tokens / (cores * BUDGET_CPU)))
    return max(BUDGET_CPU // 4, math.ceil(tokens / (cores * rounds)))


def encode(network: Network, inputs: Inputs, read: Read, layer: int | None = None, budget: int | None = None) -> None:
    """Run all sequences, batch after batch, and hand each batch's hidden states (T, H) to `read`.

    The states are the last layer's unless `layer` says otherwise. On the CPU several batches run side by side, one
    to a core: `read` is called from several threads, never twice for the same sequence. On an accelerator nothing
    here waits for it, so that the next batch is made while it computes.
    """
    device = replay.device_of(network.encoder)
    lengths = [len(ids) for ids in inputs.ids]
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    if device.type == "cpu":
        groups = plan(lengths, budget or shared_out(sum(lengths), cores))
    else:
        groups = in_order(lengths, budget or BUDGET_GPU)

    @torch.inference_mode()
    def work(which: list[int]) -> None:
        batch = inputs.batch(which)
        network.encoder.check(batch)
        if layer is None:
            x_TH = replay.forward(network.encoder, batch)
            read(which, replay.moved(batch, device), x_TH)
        else:
            states: list[Tensor] = []
            batch = replay.moved(batch, device)
            network.encoder(batch, states)
            read(which, batch, states[layer])

    if cores > 1 and len(groups) > 1 and cores <= 2 * len(groups):
        side_by_side(work, groups, cores)
    else:
        for which in groups:
            work(which)


def side_by_side(work: Callable[[list[int]], None], groups: Sequence[list[int]], cores: int) -> None:
    """Each core works on batches of its own, because threads that share every product wait for each other.

    On two busy cores this is several times faster than sharing, on two idle ones about a tenth.
    """
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for job in [pool.submit(work, which) for which in groups]:
            job.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)  # the number is each thread's own, but threads to come begin with the last set


def ahead(work: Callable[[Given], Made], items: Iterable[Given], most: int = 2) -> Iterator[Made]:
    """`work` of each item, in order; while one is used, a thread makes up to `most` more.

    An error reaches whoever asks for the item that caused it. A single item is worked on where it is asked for.
    """
    rest = iter(items)
    start = list(islice(rest, 2))
    if len(start) < 2:
        yield from map(work, start)
        return
    pool = ThreadPoolExecutor(1, "everybert-ahead")
    try:
        waiting: deque[Future[Made]] = deque()
        for item in chain(start, rest):
            # Each job has the caller's context: a server counts the tokens of a request by it.
            waiting.append(pool.submit(contextvars.copy_context().run, work, item))
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ── texts longer than the window ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Piece:
    """A window of a text as a sequence of its own, the text's special tokens around it."""

    ids: Sequence[int]
    start: int
    stop: int
    """Of this sequence, the tokens it owns: their results are taken from here."""
    at: int
    """Where the first owned token stands in the whole text's sequence."""

    @property
    def own(self) -> slice:
        """The owned tokens of this sequence."""
        return slice(self.start, self.stop)

    def index(self, token: int) -> int:
        """Where a token of the whole text's sequence stands in this one."""
        return token - self.at + self.start

    def owns(self, token: int) -> bool:
        """Whether a token of the whole text's sequence takes its result from this one."""
        return self.at <= token < self.at + self.stop - self.start


def cover(ids: Sequence[int], lead: int, tail: int, size: int) -> list[Piece]:
    """A text's sequence as sequences of at most `size` tokens, each token owned by exactly one.

    `lead` and `tail` count the special tokens before and after the text; every window has them.
    """
    n = len(ids)
    if n <= size:
        return [Piece(ids, 0, n, 0)]
    body, room = ids[lead : n - tail], size - lead - tail
    spans = windows(len(body), room, min(OVERLAP, room // 4))
    pieces = []
    for span in spans:
        start, stop = lead + span.own_start - span.start, lead + span.own_stop - span.start
        at = lead + span.own_start
        if span is spans[0]:
            start, at = 0, 0
        if span is spans[-1]:
            stop = size
        pieces.append(Piece([*ids[:lead], *body[span.start : span.stop], *ids[n - tail :]], start, stop, at))
    return pieces
