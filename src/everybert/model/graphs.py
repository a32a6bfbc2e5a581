"""CUDA graphs for the encoder: the launches of a forward pass recorded once a shape, then replayed as one.

A batch is filled up to one of a few shapes, with sequences that nothing reads; so a graph that was recorded for one
batch serves all of about its size. On the CPU the same steps run without a graph, which is how they are tested.

Legend: T tokens in the batch, B sequences, H hidden.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from everybert.model.encoder import Encoder
from everybert.model.ragged import Ragged, pinned

log = logging.getLogger("everybert")
WAVE = 64 * 132
"""Tokens of large shapes come in these: with 4, the products' tiles of 128 × 256 fill the 132 processors of an H100 or
H200 a whole number of times, at every width of BERT-base (a round number such as 32,768 leaves 3 % of them idle)."""
MOST = 32
"""Shapes recorded for an encoder; rarer ones run as they are."""
INPUTS = ("tokens_T", "positions_T", "offsets_B1", "segments_T")


@dataclass(frozen=True)
class Shape:
    """What two batches must share for one graph to serve both."""

    tokens: int
    sequences: int
    longest: int


def rounded(batch: Ragged) -> Shape:
    """The shape that a batch is filled up to: few of them, none much larger than what needs it."""
    size = len(batch.tokens_T)
    step = 64 if size <= 512 else WAVE if size > 8192 else _power(size) // 8
    tokens = -(-size // step) * step
    longest = max(batch.lengths)
    filler = -(-(tokens - size) // longest)
    return Shape(tokens, _power(len(batch.lengths) + filler), max(64, _power(longest)))


def _power(n: int) -> int:
    """The power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def filled(batch: Ragged, shape: Shape) -> Ragged:
    """The batch in that shape: sequences of token 0 up to the number of tokens, then empty ones.

    Filler is no longer than the longest sequence, so that it has positions; `lengths` are of what is not empty.
    """
    size, longest = len(batch.tokens_T), max(batch.lengths)
    gap = shape.tokens - size
    lengths = [*batch.lengths, *[longest] * (gap // longest), *[gap % longest] * (gap % longest > 0)]
    ends = np.full(shape.sequences + 1, shape.tokens, dtype=np.int32)
    ends[0] = 0
    np.cumsum(lengths, out=ends[1 : len(lengths) + 1])
    places = torch.from_numpy(np.arange(gap, dtype=np.int64) % longest).to(batch.device)
    zeros = torch.zeros(gap, dtype=torch.int64, device=batch.device)
    return Ragged(
        tokens_T=joined((batch.tokens_T, zeros)),
        offsets_B1=torch.from_numpy(ends).to(batch.device),
        lengths=tuple(lengths),
        positions_T=joined((batch.positions_T, places)),
        segments_T=None if batch.segments_T is None else joined((batch.segments_T, zeros)),
        max_length=shape.longest,
    )


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One after the other. On the host by numpy: torch wakes all its threads for more than 32,768 numbers, which takes
    milliseconds while other threads tokenize."""
    if any(part.device.type != "cpu" for part in parts):
        return torch.cat(tuple(parts))
    return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))


@dataclass(frozen=True)
class Recording:
    """A recorded forward pass: the tensors it reads, and how to run it anew for a batch copied into them."""

    inputs: list[Tensor]
    run: Callable[[Ragged], Tensor]


Record = Callable[[Encoder, Ragged, Any], Recording]


def record_graph(encoder: Encoder, batch: Ragged, pool: Any) -> Recording:
    """A CUDA graph of the encoder on the tensors of this batch. Graphs that never run at once may share a pool."""
    held = replace(batch, lengths=())  # what a graph holds must not depend on the lengths that the host knows
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads use the device too
        x_TH = encoder(held)

    def run(_: Ragged) -> Tensor:
        graph.replay()
        return x_TH

    return Recording(_inputs(held), run)


class Replays:
    """The recordings of one encoder. The first batch of a shape runs as it is, the second is recorded."""

    def __init__(self, device: torch.device, record: Record = record_graph) -> None:
        self.device = device
        self.record = record
        self.seen: set[Any] = set()
        self.made: dict[Any, Recording] = {}
        self.works = True
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.lock = threading.Lock()  # the inputs of a recording are written by one batch at a time

    @torch.inference_mode()
    def __call__(self, encoder: Encoder, batch: Ragged) -> Tensor:
        """The hidden states (T, H) of a batch, which may still lie on the host."""
        size = len(batch.tokens_T)
        full = filled(batch, rounded(batch))
        with self.lock:
            key = self._key(encoder, full)
            recording = self.made.get(key)
            if recording is None:
                on_device = moved(full, self.device)
                recording = self._recorded(key, encoder, on_device)
                if recording is None:
                    return encoder(on_device)[:size]
            else:
                for mine, given in zip(recording.inputs, _inputs(full)):
                    mine.copy_(pinned(given, self.device), non_blocking=True)
            return recording.run(full)[:size].clone()  # the next batch will be written where this one was

    def _recorded(self, key: Any, encoder: Encoder, batch: Ragged) -> Recording | None:
        if not self.works or key not in self.seen or len(self.made) >= MOST:
            self.seen.add(key)
            return None
        try:
            self.made[key] = self.record(encoder, batch, self.pool)
        except RuntimeError as error:
            self.works = False
            log.info("the encoder cannot be recorded as a CUDA graph (%s); it runs step by step", str(error)[:80])
            return None
        return self.made[key]

    def _key(self, encoder: Encoder, batch: Ragged) -> Any:
        """A graph reads the weights where they were; one whose weights have moved is never used again."""
        where = hash(tuple(p.data_ptr() for p in encoder.parameters()))
        return where, len(batch.tokens_T), len(batch), batch.max_length, batch.segments_T is None


REPLAYS: WeakKeyDictionary[Encoder, Replays] = WeakKeyDictionary()


def forward(encoder: nn.Module, batch: Ragged) -> Tensor:
    """The hidden states (T, H) of a batch on any device, by graphs where they serve."""
    if not isinstance(encoder, Encoder):  # a server's, which gathers batches before it moves them
        return encoder(batch)
    if not recordable(encoder) or batch.extra or batch.globals_T is not None:
        return encoder(moved(batch, device_of(encoder)))
    if encoder not in REPLAYS:
        REPLAYS[encoder] = Replays(device_of(encoder))
    return REPLAYS[encoder](encoder, batch)


def device_of(encoder: Any) -> torch.device:
    """Where an encoder's weights are."""
    return encoder.embeddings.token.weight.device


def recordable(encoder: Encoder) -> bool:
    """Whether the launches depend on nothing but a batch's shape: CUDA, half precision, no adapters to switch."""
    weight = encoder.embeddings.token.weight
    half = weight.dtype in (torch.bfloat16, torch.float16)
    one_kernel = half and encoder.config.head_size % 8 == 0  # else attention goes by the lengths, which the host knows
    if not weight.is_cuda or not one_kernel or encoder.training or encoder.config.global_attention:
        return False
    return all(type(m) is nn.Linear for m in encoder.modules() if isinstance(m, nn.Linear))


def moved(batch: Ragged, device: torch.device) -> Ragged:
    """The batch on a device; the copy runs beside what the host does next."""
    return batch if batch.device.type == device.type else batch.to(device)


def _inputs(batch: Ragged) -> list[Tensor]:
    return [x for name in INPUTS if (x := getattr(batch, name)) is not None]
