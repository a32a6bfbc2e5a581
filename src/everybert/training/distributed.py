"""Ranks under `torchrun`: they share the packs of a step, add up their gradients, and fail together.

Gradients are summed flat, in one fixed order: DistributedDataParallel rebuilds its buckets after the first step, so
that a resumed run would add in another order and differ in the last bits. sharded.py cuts the weights up as well.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from everybert.errors import EverybertError
from everybert.model.device import pick_device

FLAT = 1 << 26
"""Most numbers in one all-reduce (256 MB): large enough to fill the links, small enough to spare the memory."""
PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others: to start, and to do their part of a step, an evaluation or a save."""
WORDS = 2048
"""Bytes of a message that ranks exchange."""
LINGER = 0.3
"""Seconds that a rank stays after its last exchange: see `leave`."""


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
            store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
            dist.init_process_group(
                backend, store=meet(store, rank, size), rank=rank, world_size=size, timeout=PATIENCE
            )
            atexit.register(leave)
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

    def agree(self, *values: float) -> list[float]:
        """The first rank's numbers, on every rank."""
        if self.size == 1:
            return list(values)
        held = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(held, 0)
        return held.tolist()

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the first rank's tensors, in place."""
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor.detach(), 0)

    def words(self, text: str) -> list[str]:
        """What each rank says, by rank, on every rank."""
        if self.size == 1:
            return [text]
        mine = torch.zeros(WORDS, dtype=torch.uint8)
        said = text.encode()[:WORDS]
        mine[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
        heard = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(heard, mine)
        return [bytes(x.tolist()).rstrip(b"\0").decode(errors="ignore") for x in heard]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is refused on one rank is refused on all of them, so that none waits for one that has left."""
        said = ""
        try:
            yield
        except EverybertError as error:
            if self.size == 1:
                raise
            said = str(error)
        for rank, text in enumerate(self.words(said)):
            if text:
                raise EverybertError(f"rank {rank}: {text}" if rank else text)

    def same(self, what: str, digest: str) -> None:
        """Refuse to start when a rank was given something else than the first."""
        found = self.words(digest)
        other = [rank for rank, text in enumerate(found) if text != found[0]]
        if other:
            raise EverybertError(
                f"rank {other[0]} has another {what} than rank 0: start every rank with the same command, files and "
                "version of everybert"
            )

    def see(self, path: Path, patience: float = 15.0) -> None:
        """Make sure that every rank sees what the first one wrote (network file systems take a moment)."""
        with self.together():
            deadline = time.monotonic() + patience
            while not path.exists():
                if time.monotonic() > deadline:
                    raise EverybertError(
                        f"{path}, which rank 0 has, is not there: --out must lie on a file system that all hosts share"
                    )
                time.sleep(0.05)

    def device(self, asked: str | None) -> torch.device:
        """Where this rank computes: what was asked for, else its own GPU, else the CPU."""
        found = pick_device(asked)
        if found.type == "cuda" and found.index is None:
            count = torch.cuda.device_count()
            if self.local >= count:
                raise EverybertError(f"this host has {count} GPUs: start no more ranks on it, or give --device cpu")
            found = torch.device("cuda", self.local)
            torch.cuda.set_device(found)
        return found

    def barrier(self) -> None:
        """Wait until all are here."""
        if self.size > 1:
            self.sum(torch.zeros(1))


def meet(store: dist.Store, rank: int, size: int) -> dist.Store:
    """A corner of the ranks' store that belongs to this start of theirs alone.

    `torchrun` keeps its store when it restarts the ranks, and in it the addresses of those that are gone; its hosts
    do not count restarts alike. So the first rank draws a name for the corner and tells it to whoever greets it with
    a number drawn just now, until all have answered.
    """
    if rank:
        mine = secrets.token_hex(8)
        store.set(f"hello/{rank}", mine)
        name = store.get(f"welcome/{mine}").decode()
        store.set(f"{name}/{rank}", "here")
        return dist.PrefixStore(name, store)
    name, missing = secrets.token_hex(8), set(range(1, size))
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"hello/{other}"]):
                store.set("welcome/" + store.get(f"hello/{other}").decode(), name)
        missing = {other for other in missing if not store.check([f"{name}/{other}"])}
        if time.monotonic() > deadline:
            raise EverybertError(f"ranks {sorted(missing)} did not start within {PATIENCE}: see their hosts' logs")
        time.sleep(0.005)
    return dist.PrefixStore(name, store)


def leave() -> None:
    """Part from the other ranks.

    A thread of gloo lets go of the last tensor some time after the exchange is done, and needs Python for it. When
    Python is being taken down by then, the process is aborted ("terminate called without an active exception").
    FSDP keeps the group, so that destroying it does not wait for its threads: we do.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(LINGER)


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor (the same memory); any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def like(parameter: Tensor, rows: Tensor) -> Tensor:
    """This rank's rows as the sharded tensor they are a part of, cut up as a parameter is; nothing is sent."""
    if not hasattr(parameter, "placements"):
        return rows
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)


def own_rows(parameter: Tensor) -> slice:
    """Which rows of a sharded parameter this rank holds: those of torch.chunk, the last ranks perhaps none."""
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    each = -(-parameter.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * each, parameter.shape[0])
    return slice(first, min(first + each, parameter.shape[0]))


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
