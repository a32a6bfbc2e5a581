"""From packs to batches on the device.

Step s of a phase is made of the packs P_s … P_s + K_s − 1 of the phase's stream; pack n belongs to rank n mod R and
is made by any worker. So the batches of a step are the same for every number of workers and ranks.

Legend: B sequences, M masked positions.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from everybert.corpus.masking import make_key
from everybert.corpus.packs import PackStream, Position
from everybert.corpus.shards import Corpus, ExampleLayout
from everybert.errors import EverybertError
from everybert.model.engine import ahead
from everybert.model.losses import IGNORE, PretrainTargets
from everybert.model.ragged import Ragged, pinned
from everybert.text.tokenizer import Tokenizer
from everybert.training.distributed import World
from everybert.training.recipe import Recipe
from everybert.training.schedule import moment

AHEAD = 3
"""Batches on their way to the device while one is used."""


class Place(NamedTuple):
    """A position in the data: the phase, the number of its next pack, and that pack's (epoch, block, pack)."""

    phase: int = 0
    number: int = 0
    epoch: int = 0
    block: int = 0
    pack: int = 0


@dataclass
class Item:
    """A pack as a batch, with what the loop needs to know about it."""

    batch: Ragged
    place: Place
    """The pack's own position."""
    counts: tuple[float, float, float]
    """Masked tokens, labelled pairs, and tokens of text (without those that fill the batch up)."""


@dataclass
class Step:
    """The packs of a step that belong to this rank."""

    items: list[Item]
    place: Place
    """The position in the data after the step."""
    wait: float = 0.0
    """Seconds that the loop waited for it."""

    @property
    def counts(self) -> Tensor:
        """(masked tokens, labelled pairs, tokens) of these items; to be summed over the ranks."""
        return torch.tensor([item.counts for item in self.items], dtype=torch.float64).reshape(-1, 3).sum(0)

    def batches(self, counts: Tensor) -> Iterator[tuple[int, Ragged]]:
        """(pack number, batch) of each item, with the counts of the whole step for the loss to divide by."""
        if not self.items:
            return
        device, counts = self.items[0].batch.device, counts.clamp(min=1.0).float()
        counts = pinned(counts, device).to(device, non_blocking=True)  # a plain copy would wait for the GPU's queue
        for item in self.items:
            targets = item.batch.targets
            yield item.place.number, replace(item.batch, targets=None if targets is None else targets.of_step(counts))


def collate(pack: dict[str, Any], *, max_length: int, pad_id: int = 0, capacity: int | None = None) -> Ragged:
    """A pack's arrays as a batch.

    With a `capacity` the batch is filled with sequences of padding that no loss reads, so that compiled code always
    sees the same number of tokens; masked positions are rounded up to 64 likewise.
    """

    def padded(name: str, size: int = 0, value: int = 0) -> Any:
        if pack.get(name) is None:
            return None
        array = np.asarray(pack[name], dtype=np.int64)
        return torch.from_numpy(np.pad(array, (0, max(0, size - len(array))), constant_values=value))

    lengths, size = [int(n) for n in pack["lengths"]], len(pack["tokens"])
    total = size if capacity is None else capacity
    batch = Ragged.flat(padded("tokens"), lengths, padded("segments"), max_length=max_length)
    batch = batch.padded(total - size, max_length, pad_id)
    slots = 0
    if capacity is not None:
        # Never few: the compiler treats small matrices differently, so a block's last, short pack would recompile.
        # A causal model predicts nearly all tokens, and gets a slot for each.
        predicted = len(pack["mask_index"])
        needed = total if predicted > total // 2 else max(predicted, total // 8)
        slots = -(-needed // 64) * 64
    targets = PretrainTargets(
        mask_index_M=padded("mask_index", slots),
        mask_label_M=padded("mask_label", slots, IGNORE),
        draw_M=padded("draw", slots),
        pair_label_B=padded("pair_label", len(batch), IGNORE),
        span_left_M=padded("span_left", slots),
        span_right_M=padded("span_right", slots),
        span_place_M=padded("span_place", slots),
        real=torch.tensor(size),
    )
    return replace(batch, targets=targets)


def sorted_by_length(pack: dict[str, Any]) -> dict[str, Any]:
    """The pack with its sequences sorted by length, so that attention finds those of equal length side by side."""
    lengths = np.asarray(pack["lengths"])
    order = np.argsort(lengths, kind="stable")
    source = np.argsort(np.repeat(lengths, lengths), kind="stable")  # where each token of the new order was
    target = np.argsort(source)
    moved: dict[str, Any] = {name: pack[name][source] for name in ("tokens", "segments") if name in pack}
    moved |= {name: pack[name][order] for name in ("lengths", "pair_label")}
    moved |= {name: target[pack[name]] for name in ("mask_index", "span_left", "span_right") if name in pack}
    return pack | moved


def to_item(pack: dict[str, Any], stream: PackStream, fill: bool, phase: int = 0, number: int = 0) -> Item:
    """A pack as an item; with `fill` every batch has the same number of tokens."""
    pack = sorted_by_length(pack)
    counts = (len(pack["mask_index"]), int((pack["pair_label"] >= 0).sum()), len(pack["tokens"]))
    if not stream.examples.paired:
        del pack["pair_label"]  # so that the head for pairs gets no gradient and stays unchanged
    capacity = stream.capacity if fill else None
    batch = collate(pack, max_length=stream.examples.length, pad_id=stream.layout.pad_id, capacity=capacity)
    return Item(batch, Place(phase, number, *pack["position"]), counts)


class Packs(IterableDataset):
    """The packs of one phase for one rank, from a place on; each worker makes every n-th of them."""

    def __init__(self, context: "RunContext", step: int, total: int | None, place: Place) -> None:
        self.recipe, self.world, self.fill = context.recipe, context.world, context.compiled
        self.stream, self.place, self.step, self.total = context.stream(place.phase), place, step, total

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        index, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        ranks = self.world.size
        first, stride = (self.world.rank - self.place.number) % ranks + index * ranks, ranks * workers
        moments = (moment(self.recipe, step, self.total) for step in count(self.step))
        rates = chain.from_iterable(repeat(now.mask_rate, now.packs) for now in moments)
        packs = self.stream.packs(Position(*self.place[2:]), first, stride, rates)
        for number, pack in zip(count(self.place.number + first, stride), packs):
            yield to_item(pack, self.stream, self.fill, self.place.phase, number)


@dataclass(frozen=True)
class RunContext:
    """The inputs of a run, and the steps that they make for one rank."""

    recipe: Recipe
    out: Path
    corpus: Corpus
    tokenizer: Tokenizer
    layout: ExampleLayout
    device: torch.device
    world: World
    teacher: str | None = None
    causal: bool | str = False
    """The network's `causal`, once there is one."""

    @property
    def dtype(self) -> torch.dtype:
        """The compute precision."""
        setting, cuda = self.recipe.run.dtype, self.device.type == "cuda"
        return torch.bfloat16 if setting == "bfloat16" or (setting == "auto" and cuda) else torch.float32

    @property
    def compiled(self) -> bool:
        """Whether to use torch.compile; then every batch has the same number of tokens."""
        setting, half = self.recipe.run.compile, self.dtype != torch.float32
        return setting if setting is not None else half and self.device.type == "cuda"

    def stream(self, phase: int) -> PackStream:
        """The packs of a phase; each phase draws its own examples."""
        recipe = self.recipe
        return PackStream(
            self.corpus,
            self.layout,
            recipe.examples_of(phase),
            recipe.mask,
            seed=int(make_key(recipe.seed, phase)[0] >> np.uint64(1)),
            capacity=recipe.batch.pack,
            causal=self.causal,
        )

    def steps(self, step: int, total: int | None, place: Place) -> Iterator[Step]:
        """The steps from number `step` to the end of a run of `total`."""
        packs: Iterator[Item] | None = None
        while total is None or step < total:
            now = moment(self.recipe, step, total)
            if now.phase != place.phase:
                place, packs = Place(now.phase), None
            if packs is None:
                packs = self._open(step, total, place)
            began = time.perf_counter()
            end = place.number + now.packs
            try:
                items = [next(packs) for n in range(place.number, end) if n % self.world.size == self.world.rank]
            except EverybertError as error:  # a worker's has its traceback before it
                raise EverybertError(str(error).rstrip().rpartition("EverybertError: ")[2]) from None
            last = items[-1].place if items else place
            place = last._replace(number=end, pack=last.pack + end - last.number)
            yield Step(items, place, time.perf_counter() - began)
            step += 1

    def _open(self, step: int, total: int | None, place: Place) -> Iterator[Item]:
        setting, cuda = self.recipe.run.workers, self.device.type == "cuda"
        workers = setting if setting is not None else 4 if cuda else 0
        loader: Any = DataLoader(
            Packs(self, step, total, place),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
        )
        items = iter(loader)
        return to_device(items, self.device) if cuda else items


def to_device(items: Iterator[Item], device: torch.device) -> Iterator[Item]:
    """Endless items on the device: a thread fetches the next few and copies them on a stream of its own."""
    side = torch.cuda.Stream(device)

    def fetch(_: None) -> tuple[Item, torch.cuda.Event]:
        item = next(items)
        with torch.cuda.stream(side):
            return replace(item, batch=item.batch.to(device)), side.record_event()

    for item, arrived in ahead(fetch, repeat(None), AHEAD):
        stream = torch.cuda.current_stream(device)
        stream.wait_event(arrived)
        for tensor in item.batch.tensors().values():  # do not reuse its memory before this stream has read it
            tensor.record_stream(stream)
        yield item
