"""Fully sharded training (torch's FSDP2): a rank holds its rows of every weight, gradient and moment.

A layer's weights are gathered while it computes and let go afterwards; embeddings and heads stay gathered for the
whole pass. Gradients add up on each rank over the packs of a step, and are summed and cut into rows after the last.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from everybert.errors import EverybertError
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.training.distributed import World
from everybert.training.state import gather
from everybert.training.step import Compute, LossFunction, T, steady


class Root(nn.Module):
    """Whatever is done with the network is done inside this module's forward, where FSDP has its weights whole."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, work: Callable[[Network], T]) -> T:
        """work(network)."""
        return work(self.network)


class Sharded(Compute):
    """`Compute` over ranks that hold a share each. Every rank must run as many packs as the others."""

    def __init__(
        self,
        network: Network,
        loss: LossFunction,
        device: torch.device,
        dtype: torch.dtype,
        compile: bool,
        world: World,
    ) -> None:
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
            if compile:  # layer by layer, since FSDP's hooks between them are not for the compiler
                layer.compile(dynamic=False)
            if network.config.layer_groups is None:  # weights that many layers share stay gathered, with the root's
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.root: Any = Root(network)
        fully_shard(self.root, mesh=mesh, mp_policy=policy)
        for module in self.root.modules():
            if isinstance(module, FSDPModule):  # the losses divide by the step's counts already: add, do not average
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.master = self.network = network

    def run(self, batch: Ragged, last: bool = True) -> Tensor:
        """Forward and backward of one pack; ranks exchange gradients after the step's last."""
        self.root.set_requires_gradient_sync(last)
        batch = steady(batch) if self.compiled else batch
        loss, figures = self.root(lambda network: self.loss(network, batch))
        loss.backward()
        return figures.detach()

    def reduce(self, world: World) -> None:
        """The last backward pass has done it."""

    def refresh(self) -> None:
        """Nothing to copy: half-precision weights are made as they are gathered."""

    @torch.no_grad()
    def apply(self, work: Callable[[Network], T]) -> T:
        """Do something with the network, on every rank at once."""
        try:
            return self.root(work)
        finally:
            self.root.reshard()

    def whole(self) -> Network | None:
        """The network on the first rank's CPU; None on the others. Every rank must ask."""
        weights = gather(self.master.state_dict(), self.world.first)
        if not self.world.first:
            return None
        network = copy.deepcopy(self.shape)
        network.load_state_dict(weights, assign=True)
        return network
