"""Training on several ranks, started by `torchrun`: data parallel, or fully sharded.

Data parallel: each rank runs some packs of a step on the whole model, and gradients are summed: flat, in one fixed
order. (DistributedDataParallel rebuilds its buckets after the first step, so that a resumed run would add in another
order and differ in the last bits.) Sharded (torch's FSDP2): each rank holds its rows of every weight, gradient and
moment. An error on one rank is raised on all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from everybert.errors import EverybertError
from everybert.model.engine import pick_device
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.training.step import Compute, LossFunction, T, steady

FLAT = 1 << 26
"""Most numbers in one all-reduce (256 MB): enough to fill the links, few enough to save memory."""
TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others: to start, and to do their part of a step, an evaluation or a save."""
LINGER = 0.3
"""Seconds that a process waits before it exits; see `leave`."""


@dataclass(frozen=True)
class World:
    """The ranks that train together. In a single process every method does nothing."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @classmethod
    def join(cls) -> World:
        """Connect to the other processes that `torchrun` started, if it did."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
            store = fresh_store(store, rank, size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
            atexit.register(leave)
        return cls(dist.get_rank(), size, int(os.environ.get("LOCAL_RANK", "0")))

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the files and prints."""
        return self.rank == 0

    def device(self, asked: str | None) -> torch.device:
        """The device of this rank: the one asked for, else its own GPU, else the CPU."""
        found = pick_device(asked)
        if found.type == "cuda" and found.index is None:
            count = torch.cuda.device_count()
            if self.local >= count:
                raise EverybertError(f"this host has {count} GPUs: start no more ranks on it, or give --device cpu")
            found = torch.device("cuda", self.local)
            torch.cuda.set_device(found)
        return found

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum(torch.zeros(1))

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
            parts = flat.split([g.numel() for g in grads])
            torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads)])

    def agree(self, *values: float) -> list[float]:
        """The numbers of rank 0, on every rank."""
        if self.size == 1:
            return list(values)
        held = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(held, 0)
        return held.tolist()

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the tensors of rank 0, in place."""
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor.detach(), 0)

    def texts(self, text: str) -> list[str]:
        """The text of each rank, on every rank."""
        found = [text] * self.size
        if self.size > 1:
            dist.all_gather_object(found, text)
        return found

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
        for rank, text in enumerate(self.texts(message)):
            if text:
                raise EverybertError(f"rank {rank}: {text}" if rank else text)

    def same(self, what: str, digest: str) -> None:
        """Refuse to start if a rank has another recipe or corpus than rank 0."""
        found = self.texts(digest)
        other = [rank for rank, text in enumerate(found) if text != found[0]]
        if other:
            raise EverybertError(
                f"rank {other[0]} has another {what} than rank 0: start every rank with the same command, files and "
                "version of everybert"
            )

    def see(self, path: Path, patience: float = 15.0) -> None:
        """Make sure that every rank sees a file that rank 0 wrote (network file systems take a moment)."""
        with self.together():
            deadline = time.monotonic() + patience
            while not path.exists():
                if time.monotonic() > deadline:
                    raise EverybertError(
                        f"{path}, which rank 0 has, is not there: --out must lie on a file system that all hosts share"
                    )
                time.sleep(0.05)


def fresh_store(store: dist.Store, rank: int, size: int) -> dist.Store:
    """A part of the rendezvous store that only this start of the ranks uses.

    `torchrun` keeps its store when it restarts the ranks, with the addresses of the ranks that are gone, and its hosts
    do not agree on the number of restarts. So each rank registers with a new random number, and rank 0 answers that
    number with a random prefix for all keys, until all ranks have confirmed it.
    """
    if rank:
        mine = secrets.token_hex(8)
        store.set(f"hello/{rank}", mine)
        prefix = store.get(f"welcome/{mine}").decode()
        store.set(f"{prefix}/{rank}", "here")
        return dist.PrefixStore(prefix, store)
    prefix, missing = secrets.token_hex(8), set(range(1, size))
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"hello/{other}"]):
                store.set("welcome/" + store.get(f"hello/{other}").decode(), prefix)
        missing = {other for other in missing if not store.check([f"{prefix}/{other}"])}
        if time.monotonic() > deadline:
            raise EverybertError(f"ranks {sorted(missing)} did not start within {TIMEOUT}: see their hosts' logs")
        time.sleep(0.005)
    return dist.PrefixStore(prefix, store)


def leave() -> None:
    """Disconnect from the other ranks.

    A gloo thread releases its last tensor some time after the exchange, and needs the interpreter for it. If Python is
    shutting down by then, the process aborts ("terminate called without an active exception"). FSDP keeps the process
    group alive, so destroying it does not wait for the threads: we wait instead.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(LINGER)


def _groups(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters in their order, in groups of at most FLAT numbers."""
    groups: list[list[Tensor]] = [[]]
    held = 0
    for parameter in parameters:
        if groups[-1] and held + parameter.numel() > FLAT:
            groups.append([])
            held = 0
        groups[-1].append(parameter)
        held += parameter.numel()
    return groups


# ── sharded weights ──────────────────────────────────────────────────────────────────────────────────────────


class Root(nn.Module):
    """A module whose forward calls a function with the network: inside it, FSDP has gathered the weights."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, work: Callable[[Network], T]) -> T:
        """work(network)."""
        return work(self.network)


class Sharded(Compute):
    """`Compute` over ranks that each hold a share of the weights. Every rank must run the same number of packs.

    The weights of a layer are gathered while it computes; embeddings and heads stay gathered for the whole pass.
    Gradients accumulate on each rank over the packs of a step, and are summed and scattered after the last.
    """

    def __init__(
        self,
        network: Network,
        loss: LossFunction,
        device: torch.device,
        dtype: torch.dtype,
        compile: bool,
        world: World,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if compile and device.type != "cuda":
            raise EverybertError("compile needs a CUDA device: set [run] compile = false")
        self.device, self.loss, self.compiled, self.world = device, loss, compile, world
        self.shape = copy.deepcopy(network).to("meta")
        half = dtype != torch.float32
        # Inputs are not cast: FSDP would round the rotary tables, which are fp32 on purpose.
        types = {"param_dtype": dtype, "reduce_dtype": torch.float32} if half else {}
        policy = MixedPrecisionPolicy(**types, cast_forward_inputs=False)
        mesh = init_device_mesh(device.type, (world.size,))
        for layer in network.encoder.layers:
            if compile:  # layer by layer: FSDP's hooks between them cannot be compiled
                layer.compile(dynamic=False)
            if network.config.layer_groups is None:  # weights shared by many layers stay gathered, with the root's
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.root: Any = Root(network)
        fully_shard(self.root, mesh=mesh, mp_policy=policy)
        for module in self.root.modules():
            if isinstance(module, FSDPModule):  # the losses divide by the counts of the step: sum, do not average
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.master = self.network = network

    def run(self, batch: Ragged, last: bool = True) -> Tensor:
        """Forward and backward of one pack; ranks exchange gradients after the last of the step."""
        self.root.set_requires_gradient_sync(last)
        batch = steady(batch) if self.compiled else batch
        loss, figures = self.root(lambda network: self.loss(network, batch))
        loss.backward()
        return figures.detach()

    def reduce(self, world: World) -> None:
        """Nothing to do: the last backward pass summed the gradients."""

    def refresh(self) -> None:
        """Nothing to do: half-precision weights are made when they are gathered."""

    @torch.no_grad()
    def apply(self, work: Callable[[Network], T]) -> T:
        """Call a function with the network, on every rank at once."""
        try:
            return self.root(work)
        finally:
            self.root.reshard()

    def whole(self) -> Network | None:
        """The whole network on the CPU of rank 0; None on the others. Every rank must call it."""
        weights = gather(self.master.state_dict(), self.world.first)
        if not self.world.first:
            return None
        network = copy.deepcopy(self.shape)
        network.load_state_dict(weights, assign=True)
        return network


def gather(state: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors on the CPU if `keep`, one after the other; ranks that do not keep them only send their rows."""
    out = {}
    for name, tensor in state.items():
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        if keep:
            out[name] = tensor.detach().cpu().contiguous()
    return out


def local_rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor (the same memory); any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def as_sharded(parameter: Tensor, rows: Tensor) -> Tensor:
    """This rank's rows as a sharded tensor with the layout of a parameter; nothing is sent."""
    if not hasattr(parameter, "placements"):
        return rows
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)


def row_range(parameter: Tensor) -> slice:
    """The rows of a sharded parameter that this rank holds: those of torch.chunk, the last ranks perhaps none."""
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    each = -(-parameter.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * each, parameter.shape[0])
    return slice(first, min(first + each, parameter.shape[0]))
