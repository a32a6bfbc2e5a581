"""From packs to batches on the device: workers make packs, a pinned copy travels on a side stream, waits are counted.

Step s of a phase is made of the packs P_s … P_s + K_s − 1 of the phase's row; pack n belongs to rank n mod R and is
made by any worker. So the batches of a step are the same for every number of workers and ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from everybert.corpus.masking import make_key
from everybert.corpus.packs import PackStream, Position
from everybert.corpus.shards import Corpus, Layout
from everybert.model.ragged import Ragged
from everybert.training.recipe import Recipe
from everybert.training.schedule import moment
from everybert.training.step import collate

AHEAD = 3
"""Batches on their way to the device while one is used."""
SPANS = ("span_left", "span_right", "span_place")


class Place(NamedTuple):
    """Where the data stands: the phase, its next pack by number, and that pack's (epoch, block, pack)."""

    phase: int = 0
    number: int = 0
    epoch: int = 0
    block: int = 0
    pack: int = 0

    @property
    def position(self) -> Position:
        """As the row of packs counts."""
        return Position(self.epoch, self.block, self.pack)


@dataclass
class Item:
    """A pack as a batch on the host, with what the loop wants to know of it."""

    batch: Ragged
    number: int
    position: Position
    tokens: int
    counts: tuple[float, float]
    """Masked tokens and labelled pairs."""

    def pin_memory(self) -> Item:
        """In page-locked memory, from which copies to the device need not wait (torch's loader calls this)."""
        return replace(self, batch=_each(self.batch, Tensor.pin_memory))


@dataclass
class Step:
    """This rank's share of a step."""

    items: list[Item]
    place: Place
    """Where the data stands after the step."""
    wait: float = 0.0
    """Seconds the loop waited for it."""
    tokens: int = field(init=False)
    counts: Tensor = field(init=False)
    """(masked tokens, labelled pairs) of these items; to be summed over the ranks."""

    def __post_init__(self) -> None:
        self.tokens = sum(item.tokens for item in self.items)
        self.counts = torch.tensor([item.counts for item in self.items], dtype=torch.float64).reshape(-1, 2).sum(0)

    def batches(self, counts: Tensor) -> Iterator[tuple[int, Ragged]]:
        """(pack number, batch) of each item, with the step's (masked, pairs, tokens) over all ranks to divide by."""
        if not self.items:
            return
        device, counts = self.items[0].batch.device, counts.clamp(min=1.0).float()
        if device.type == "cuda":  # from page-locked memory: a plain copy would wait for all that the GPU has queued
            counts = counts.pin_memory()
        shared = dict(zip(("masked", "pairs", "tokens"), counts.to(device, non_blocking=True)))
        for item in self.items:
            yield item.number, replace(item.batch, extra=item.batch.extra | shared)


def stream(recipe: Recipe, corpus: Corpus, layout: Layout, phase: int) -> PackStream:
    """The row of packs of a phase; each phase draws its own examples."""
    return PackStream(
        corpus,
        layout,
        replace(recipe.examples, length=recipe.phases[phase].length),
        recipe.mask,
        seed=int(make_key(recipe.seed, phase)[0] >> np.uint64(1)),
        capacity=recipe.batch.pack,
    )


class Packs(IterableDataset):
    """A rank's packs of one phase from a place on, made by whichever worker's turn it is."""

    def __init__(self, stream: PackStream, rates: Rates, place: Place, rank: int, ranks: int, fill: bool) -> None:
        self.stream, self.rates, self.place = stream, rates, place
        self.rank, self.ranks, self.fill = rank, ranks, fill

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        first = (self.rank - self.place.number) % self.ranks + mine * self.ranks
        stride = self.ranks * workers
        for i, pack in enumerate(self.stream.packs(self.place.position, first, stride, self.rates)):
            yield to_item(pack, self.place.number + first + i * stride, self.stream, self.fill)


class Rates:
    """The mask rate of a pack by its number from a step on; asked in rising order."""

    def __init__(self, recipe: Recipe, step: int, total: int | None) -> None:
        self.recipe, self.step, self.total = recipe, step, total
        self.end = moment(recipe, step, total).packs

    def __call__(self, number: int) -> float:
        """The rate of pack `number`, counted from the first of that step."""
        while number >= self.end:
            self.step += 1
            self.end += moment(self.recipe, self.step, self.total).packs
        return moment(self.recipe, self.step, self.total).mask_rate


def to_item(pack: dict[str, Any], number: int, stream: PackStream, fill: bool) -> Item:
    """A pack's arrays as tensors; with `fill` its tail is padded, so that every pack has the same number of tokens."""
    pack = by_length(pack)
    counts = (float(len(pack["mask_index"])), float((pack["pair_label"] >= 0).sum()))
    batch = collate(
        pack,
        masked=1.0,
        pairs=1.0,
        max_length=stream.examples.length,
        pad_id=stream.layout.pad_id,
        capacity=stream.capacity if fill else None,
    )
    slots = len(batch.extra["mask_index"])
    for name in SPANS:
        if name in pack:
            batch.extra[name] = torch.from_numpy(np.pad(pack[name], (0, slots - len(pack[name]))))
    batch.extra["real"] = torch.tensor(len(pack["tokens"]))  # what follows is filling
    return Item(batch, number, pack["position"], len(pack["tokens"]), counts)


def blank(item: Item) -> Item:
    """The item with nothing to learn from it: its loss and gradients are zero."""
    extra = item.batch.extra
    none = {name: torch.full_like(extra[name], -100) for name in ("mask_label", "pair_label") if name in extra}
    none["real"] = torch.zeros_like(extra["real"])
    return replace(item, batch=replace(item.batch, extra=extra | none), tokens=0, counts=(0.0, 0.0))


def by_length(pack: dict[str, Any]) -> dict[str, Any]:
    """The pack with its sequences in order of length, so that attention finds those of equal length side by side."""
    lengths = np.asarray(pack["lengths"])
    order = np.argsort(lengths, kind="stable")
    starts, moved = np.cumsum(lengths) - lengths, np.cumsum(lengths[order]) - lengths[order]
    shift = np.repeat((starts[order] - moved), lengths[order])
    source = np.arange(len(shift)) + shift  # where each token of the new order was
    target = np.empty_like(source)
    target[source] = np.arange(len(source))
    out = dict(pack)
    out |= {name: pack[name][source] for name in ("tokens", "segments") if name in pack}
    out |= {name: pack[name][order] for name in ("lengths", "pair_label", "example", "language") if name in pack}
    out |= {name: target[pack[name]] for name in ("mask_index", "span_left", "span_right") if name in pack}
    return out


class Feed:
    """The steps of a run from a place on, for one rank; ends after the step before `total`."""

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        layout: Layout,
        device: torch.device,
        rank: int = 0,
        ranks: int = 1,
        fill: bool = False,
        workers: int = 0,
        even: bool = False,
    ) -> None:
        """`even`: every rank gets as many items as any other, blank ones where its packs are fewer."""
        self.even = even
        self.blanks: dict[int, Item] = {}
        self.recipe, self.corpus, self.layout, self.device = recipe, corpus, layout, device
        self.rank, self.ranks, self.fill, self.workers = rank, ranks, fill, workers

    def steps(self, step: int, total: int | None, place: Place) -> Iterator[Step]:
        """Steps from `step` on, as planned for a run of `total`."""
        packs: Iterator[Item] | None = None
        while total is None or step < total:
            now = moment(self.recipe, step, total)
            if now.phase != place.phase:
                place, packs = Place(now.phase), None
            if packs is None:
                packs = self._open(step, total, place)
            began = time.perf_counter()
            end = place.number + now.packs
            items = [next(packs) for n in range(place.number, end) if n % self.ranks == self.rank]
            gap = -(-now.packs // self.ranks) - len(items) if self.even else 0
            blanks = [self._blank(step, total, place)] * gap
            place = _after(place, items, end)
            yield Step(items + blanks, place, time.perf_counter() - began)
            step += 1

    def _blank(self, step: int, total: int | None, place: Place) -> Item:
        """What to compute where other ranks have one pack more: sharded ranks must move in step."""
        if place.phase not in self.blanks:
            row = stream(self.recipe, self.corpus, self.layout, place.phase)
            item = blank(next(iter(Packs(row, Rates(self.recipe, step, total), Place(place.phase), 0, 1, self.fill))))
            self.blanks[place.phase] = replace(item, batch=item.batch.to(self.device))
        return self.blanks[place.phase]

    def _open(self, step: int, total: int | None, place: Place) -> Iterator[Item]:
        row = stream(self.recipe, self.corpus, self.layout, place.phase)
        packs = Packs(row, Rates(self.recipe, step, total), place, self.rank, self.ranks, self.fill)
        loader = DataLoader(
            packs,
            batch_size=None,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if self.workers else None,
        )
        return ahead(iter(loader), self.device) if self.device.type == "cuda" else iter(loader)


def ahead(items: Iterator[Item], device: torch.device) -> Iterator[Item]:
    """Items on the device: while one is used, a thread fetches the next few and sends them on a stream of its own."""
    side = torch.cuda.Stream(device)

    def fetch() -> tuple[Item, torch.cuda.Event] | None:
        item = next(items, None)
        if item is None:
            return None
        with torch.cuda.stream(side):
            sent = replace(item, batch=item.batch.to(device))
            return sent, side.record_event()

    with ThreadPoolExecutor(max_workers=1) as thread:
        coming = deque(thread.submit(fetch) for _ in range(AHEAD))
        try:
            while (held := coming.popleft().result()) is not None:
                coming.append(thread.submit(fetch))
                ready, arrived = held
                now = torch.cuda.current_stream(device)
                now.wait_event(arrived)
                _each(ready.batch, lambda x, now=now: x.record_stream(now) or x)
                yield ready
        finally:
            thread.shutdown(cancel_futures=True)  # whoever stops early does not wait for batches it will not use


def _after(place: Place, items: list[Item], end: int) -> Place:
    """The place of pack number `end`, counted from the last pack this rank made, which knows its block."""
    if not items:
        return place._replace(number=end, pack=place.pack + end - place.number)
    last = items[-1]
    epoch, block, pack = last.position
    return Place(place.phase, end, epoch, block, pack + end - last.number)


def _each(batch: Ragged, change: Any) -> Ragged:
    """The batch with every tensor replaced by change(tensor)."""

    def turn(x: Any) -> Any:
        return change(x) if isinstance(x, Tensor) else x

    parts = {name: turn(getattr(batch, name)) for name in ("tokens_T", "offsets_B1", "positions_T")}
    parts |= {name: turn(getattr(batch, name)) for name in ("segments_T", "globals_T")}
    return replace(batch, **parts, extra={k: turn(v) for k, v in batch.extra.items()})
