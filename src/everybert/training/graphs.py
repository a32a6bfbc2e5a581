"""CUDA graphs: a step's forward and backward as one launch.

Fine-tuning batches are small, so a GPU spends its time waiting for hundreds of launches rather than on arithmetic. A
graph records them once for each shape of batch and replays them as one; `features.batch` rounds tokens up, so a data
set meets few shapes. A loss that cannot be recorded (it asks the device for a value) runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from everybert.model.heads import Network
from everybert.model.ragged import Ragged

log = logging.getLogger("everybert")
MOST = 24
"""Shapes recorded; each keeps its own memory, so rarer ones run as they are."""
PARTS = ("tokens_T", "offsets_B1", "positions_T", "segments_T", "globals_T")


@dataclass
class Recording:
    """A graph, the tensors it reads, the figures it writes, and the gradients it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    figures: Tensor
    gradients: list[Tensor | None]


class Recorder:
    """Runs forward and backward of a loss: the first time of a shape as it is, the second recorded, then replayed."""

    def __init__(self, network: Network, loss: Callable[[Network, Ragged], tuple[Tensor, Tensor]]) -> None:
        self.network, self.loss = network, loss
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.seen: set[Any] = set()
        self.made: dict[Any, Recording] = {}
        self.works = True

    def run(self, batch: Ragged) -> Tensor:
        """The figures to log; gradients are on the network's parameters."""
        key = _shape(batch)
        if key in self.made:
            return self._replay(self.made[key], batch)
        if self.works and key in self.seen and len(self.made) < MOST:
            try:
                self.made[key] = self._record(batch)
                return self._replay(self.made[key], batch)
            except RuntimeError as error:
                self.works = False
                log.info("this loss cannot be recorded as a CUDA graph (%s); it runs step by step", str(error)[:80])
        self.seen.add(key)
        loss, figures = self.loss(self.network, batch)
        loss.backward()
        return figures.detach()

    def _record(self, batch: Ragged) -> Recording:
        held = _copied(batch)
        graph = torch.cuda.CUDAGraph()
        for parameter in self.parameters:
            parameter.grad = None
        with torch.cuda.graph(graph):
            loss, figures = self.loss(self.network, held)
            loss.backward()
        recording = Recording(graph, _tensors(held), figures.detach(), [p.grad for p in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        return recording

    def _replay(self, recording: Recording, batch: Ragged) -> Tensor:
        for mine, given in zip(recording.inputs, _tensors(batch)):
            mine.copy_(given, non_blocking=True)
        recording.graph.replay()
        for parameter, gradient in zip(self.parameters, recording.gradients):
            parameter.grad = gradient
        return recording.figures.clone()


def _tensors(batch: Ragged) -> list[Tensor]:
    """Every tensor of a batch, in a fixed order."""
    parts = [getattr(batch, name) for name in PARTS] + [batch.extra[name] for name in sorted(batch.extra)]
    return [x for x in parts if isinstance(x, Tensor)]


def _copied(batch: Ragged) -> Ragged:
    """The batch in tensors of its own, for a graph to read from."""

    def own(x: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) else x

    parts = {name: own(getattr(batch, name)) for name in PARTS}
    return replace(batch, **parts, extra={name: own(x) for name, x in batch.extra.items()})


def _shape(batch: Ragged) -> Any:
    """What two batches must share for one graph to serve both: shapes, kinds, and whatever lies on the host."""
    parts = {name: getattr(batch, name) for name in PARTS} | batch.extra
    return batch.max_length, tuple(
        (name, tuple(x.shape), x.dtype) if isinstance(x, Tensor) else (name, x) for name, x in sorted(parts.items())
    )
