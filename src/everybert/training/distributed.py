"""Data parallel training under `torchrun`: ranks share the packs of a step and add up their gradients.

Gradients are summed flat, in one fixed order: DistributedDataParallel rebuilds its buckets after the first step, so
that a resumed run would add in another order and differ in the last bits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

FLAT = 1 << 26
"""Most numbers in one all-reduce (256 MB): large enough to fill the links, small enough to spare the memory."""


@dataclass(frozen=True)
class World:
    """This process' place among those that train together; alone, every method does nothing."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @classmethod
    def join(cls) -> World:
        """Meet the other processes that `torchrun` started, if it did."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timedelta(minutes=30))
        return cls(dist.get_rank(), size, int(os.environ.get("LOCAL_RANK", "0")))

    @property
    def first(self) -> bool:
        """Whether this process writes the files and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on every rank, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace each gradient by its sum over the ranks. A rank without packs adds zeros."""
        if self.size == 1:
            return
        used = self.sum(torch.tensor([float(p.grad is not None) for p in parameters])).tolist()
        parameters = [p for p, ranks in zip(parameters, used) if ranks]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for group in _groups(parameters):
            grads = [p.grad for p in group if p.grad is not None]
            flat = self.sum(torch.cat([g.reshape(-1) for g in grads]))
            torch._foreach_copy_(
                grads, [part.view_as(g) for part, g in zip(flat.split([g.numel() for g in grads]), grads)]
            )

    def agree(self, value: float) -> float:
        """The first rank's number, on every rank (clocks differ)."""
        if self.size == 1:
            return value
        held = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(held, 0)
        return float(held)

    def barrier(self) -> None:
        """Wait until all are here."""
        if self.size > 1:
            self.sum(torch.zeros(1))

    def leave(self) -> None:
        """Part from the others."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _groups(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters in their own order, cut into runs of at most FLAT numbers."""
    groups: list[list[Tensor]] = [[]]
    held = 0
    for parameter in parameters:
        if groups[-1] and held + parameter.numel() > FLAT:
            groups.append([])
            held = 0
        groups[-1].append(parameter)
        held += parameter.numel()
    return groups
