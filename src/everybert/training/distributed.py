"""Data-parallel training on several ranks, started by `torchrun`.

Each rank holds the whole model and runs some packs of a step; gradients are summed: flat, in one fixed order.
(DistributedDataParallel rebuilds its buckets after the first step, so that a resumed run would add in another order
and differ in the last bits.) An error on one rank is raised on all of them.
"""

import atexit
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from everybert.errors import EverybertError
from everybert.model.engine import pick_device

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others: to start, and to do their part of a step, an evaluation or a save."""


def refuse_ranks(what: str) -> None:
    """Refuse to start under `torchrun`."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise EverybertError(f"{what} runs in one process: start it without torchrun")


@dataclass(frozen=True)
class World:
    """The ranks that train together. In a single process every method does nothing."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls) -> "World":
        """Connect to the other processes that `torchrun` started, if it did."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
            # `torchrun` keeps its store when it restarts the ranks, with the addresses of those that are gone.
            before = (store.add(f"joined {size}", 1) - 1) // size
            store = dist.PrefixStore(f"start {before} of {size} ranks", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
            atexit.register(dist.destroy_process_group)
        return cls(dist.get_rank(), size)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the files and prints."""
        return self.rank == 0

    def device(self, name: str | None) -> torch.device:
        """The device of this rank: the requested one, else its own GPU, else the CPU."""
        device = pick_device(name)
        if device.type == "cuda" and device.index is None:
            local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            if local >= count:
                raise EverybertError(f"this host has {count} GPUs: start no more ranks on it, or use device cpu")
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        return device

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace each gradient by its sum over the ranks, through one copy of all; a rank without packs adds zeros."""
        if self.size == 1:
            return
        used = self.sum(torch.tensor([float(p.grad is not None) for p in parameters])).tolist()
        shared = [p for p, ranks in zip(parameters, used) if ranks]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in shared]
        flat = self.sum(torch.cat([g.reshape(-1) for g in grads]))
        for parameter, part in zip(shared, flat.split([p.numel() for p in shared])):
            parameter.grad = part.view_as(parameter)

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise the error of one rank on all of them, so that none waits for a rank that has left."""
        message = ""
        try:
            yield
        except EverybertError as error:
            if self.size == 1:
                raise
            message = str(error)
        for rank, text in enumerate(self.gather(message)):
            if text:
                raise EverybertError(f"rank {rank}: {text}" if rank else text)

    def require_same(self, what: str, value: Any) -> None:
        """Refuse to start if a rank has another recipe or corpus than rank 0."""
        values = self.gather(value)
        other = [rank for rank, theirs in enumerate(values) if theirs != values[0]]
        if other:
            raise EverybertError(f"rank {other[0]} has another {what} than rank 0: start every rank with the same one")
