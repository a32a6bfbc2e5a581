"""CUDA graphs: the kernel launches of a computation are recorded once per batch shape, then replayed as one.

A forward pass of BERT-base launches some 200 kernels, a training step some 700. For small batches a GPU waits for the
launches rather than computes. `Recorder` records a function of a batch, and serves inference (the encoder's forward
pass) and training (a loss with its backward pass). `filled` rounds a batch up to one of a few shapes, so that one
recording serves all batches of about its size. On the CPU nothing is recorded.

Legend: T tokens in the batch, B sequences.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from everybert.model.ragged import Ragged, pinned

log = logging.getLogger("everybert")
Result = TypeVar("Result")
Outputs = Sequence[Tensor | None]

WAVE = 64 * 132
"""Large batches are rounded up to a multiple of this many tokens. With 4 × WAVE, matrix products in tiles of 128 × 256
fill the 132 processors of an H100 or H200 a whole number of times at every width of BERT-base; a round number such as
32,768 leaves 3 % of them idle."""
MOST = 32
"""Shapes that one recorder records; rarer ones run without a recording."""


# ── recordings ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Recording:
    """A recorded computation: `run` reads the tensors `inputs` and writes the tensors `outputs`."""

    inputs: list[Tensor]
    outputs: Outputs
    run: Callable[[], None]


class Recorder:
    """Runs a function of a batch. The first batch of a shape runs as it is, the second is recorded, then replayed.

    All recordings share one memory pool: they never run at the same time, and each one's outputs are taken before the
    next begins. A copy of a recorder (of an encoder that is copied or pickled, say) is empty.
    """

    def __init__(self) -> None:
        self.seen: set[Any] = set()
        self.recordings: dict[Any, Recording] = {}
        self.works = True
        self.lock = threading.Lock()
        self._pool: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Recorder, ()

    def run(
        self,
        work: Callable[[Ragged], Outputs],
        batch: Ragged,
        device: torch.device,
        take: Callable[[Outputs], Result],
        key: Any = None,
    ) -> Result:
        """Compute `take(work(batch))` on the device; the batch may still be on the host.

        `work` must do the same for all batches of one shape, and must not read device values on the host. `take` is
        called before the next batch can overwrite the outputs; what it returns must not share their memory. `key`
        names whatever else a recording depends on, such as the addresses of the weights.
        """
        key = (key, *_shape(batch))
        with self.lock, on_device(device):
            recording = self.recordings.get(key)
            if recording is None and self.works and key in self.seen and len(self.recordings) < MOST:
                recording = self._record(work, batch.to(device))
                if recording is not None:
                    self.recordings[key] = recording
            elif recording is not None:
                for mine, tensor in zip(recording.inputs, batch.tensors().values()):
                    mine.copy_(pinned(tensor, device), non_blocking=True)
            if recording is None:
                self.seen.add(key)
                return take(work(batch.to(device)))
            recording.run()
            return take(recording.outputs)

    def _record(self, work: Callable[[Ragged], Outputs], batch: Ragged) -> Recording | None:
        # A recording holds tensors of its own, and may not depend on lengths that only the host knows.
        batch = replace(batch.map(torch.clone), lengths=())
        try:
            return self.capture(work, batch)
        except (RuntimeError, ValueError) as error:
            self.works = False
            log.info("this computation cannot be recorded as a CUDA graph (%s)", str(error)[:80])
            return None

    def capture(self, work: Callable[[Ragged], Outputs], batch: Ragged) -> Recording:
        """Record `work` on the tensors of this batch as a CUDA graph."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # torch's own capture stream belongs to the device that was used first
        mode = "thread_local"  # other threads may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode=mode):
            outputs = work(batch)
        return Recording(list(batch.tensors().values()), outputs, graph.replay)


def on_device(device: torch.device) -> AbstractContextManager:
    """Make a CUDA device the current one: graphs, streams and Triton kernels start there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _shape(batch: Ragged) -> tuple[Any, ...]:
    """What two batches must share for one recording to serve both: shapes, types, and every value on the host."""
    tensors = tuple((name, tuple(x.shape), x.dtype) for name, x in batch.tensors().items())
    return batch.max_length, tensors, () if batch.targets is None else batch.targets.constants()


# ── batches of few shapes ────────────────────────────────────────────────────────────────────────────────────


def filled(batch: Ragged) -> Ragged:
    """The batch filled up to one of a few shapes, none of which is much larger than the batches it is for.

    Sequences of token 0 fill the number of tokens, then empty sequences the number of sequences. No filler sequence
    is longer than the batch's longest one, so that its positions exist. `lengths` has no entries for the empty
    sequences; targets are dropped.
    """
    size, longest = len(batch.tokens_T), max(batch.lengths)
    step = 64 if size <= 512 else WAVE if size > 8192 else _power(size) // 8
    full = batch.padded(-size % step, longest)
    empty = full.offsets_B1[-1:].expand(_power(len(full.lengths)) - len(full.lengths))
    return replace(full, offsets_B1=torch.cat((full.offsets_B1, empty)), max_length=max(64, _power(longest)))


def _power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
