"""The arithmetic of one training step: forward, backward, and gradients that add up in fp32.

On CUDA in bf16, forward and backward run on a half-precision copy of the network. Its gradients are added to those of
the fp32 master weights, which the optimizer updates; then the copy is refreshed. So there are no casts inside the
compiled graph. On the CPU the copy and the master are one network.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.graphs import Recorder
from everybert.model.heads import Network
from everybert.model.ragged import Ragged

LossFunction = Callable[[Network, Ragged], tuple[Tensor, Tensor]]
"""(network, batch) → (the loss to differentiate, a vector of figures to log)."""


class Compute:
    """Runs a loss forward and backward on a network."""

    def __init__(
        self,
        network: Network,
        loss: LossFunction,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        compile: bool = False,
        graphs: bool = False,
    ) -> None:
        """`compile` suits large batches of one size, `graphs` (CUDA graphs) small batches of a few sizes."""
        self.device = torch.device(device)
        if (compile or graphs) and (self.device.type != "cuda" or dtype == torch.float32):
            raise EverybertError("compile needs a CUDA device and bfloat16: without them attention works by lengths")
        self.master = network.to(self.device, torch.float32)
        self.network = self.master if dtype == torch.float32 else copy.deepcopy(self.master).to(dtype)
        self.compiled = compile and network.config.relative == "none"
        self.loss = torch.compile(loss, dynamic=False) if self.compiled else loss
        self.recorder = Recorder() if graphs else None
        pairs = zip(self.master.parameters(), self.network.parameters())
        self.pairs = [(big, small) for big, small in pairs if big is not small and big.requires_grad]

    def run(self, batch: Ragged) -> Tensor:
        """Forward and backward of one pack, which may still be on the host. Returns the figures to log, detached."""
        if self.compiled:
            batch = steady(batch)
        if self.recorder is not None:
            figures = self._recorded(batch, self.recorder)
        else:
            loss, figures = self.loss(self.network, batch.to(self.device))
            loss.backward()
        self._collect()
        return figures.detach()

    def _recorded(self, batch: Ragged, recorder: Recorder) -> Tensor:
        """Forward and backward as one CUDA graph per shape of batch, where the loss can be recorded."""
        parameters = [small for _, small in self.pairs]

        def work(batch: Ragged) -> list[Tensor | None]:
            for parameter in parameters:
                parameter.grad = None
            loss, figures = self.loss(self.network, batch)
            loss.backward()
            return [figures.detach(), *(p.grad for p in parameters)]

        def take(outputs: Sequence[Tensor | None]) -> Tensor:
            figures, *gradients = outputs
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient
            assert figures is not None
            return figures.clone()

        return recorder.run(work, batch, self.device, take)

    @torch.no_grad()
    def _collect(self) -> None:
        """Add the half-precision gradients to those of the master, and clear them."""
        pairs = [(big, small.grad) for big, small in self.pairs if small.grad is not None]
        wide = [torch.empty_like(big) for big, _ in pairs]  # adding across types is slow: convert to fp32 first
        if pairs:
            torch._foreach_copy_(wide, [grad for _, grad in pairs])
        later = [(big.grad, new) for (big, _), new in zip(pairs, wide) if big.grad is not None]
        if later:
            torch._foreach_add_([grad for grad, _ in later], [new for _, new in later])
        for (big, _), new in zip(pairs, wide):
            big.grad = new if big.grad is None else big.grad
        for _, small in self.pairs:
            small.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the master weights into the half-precision network, after the optimizer changed them."""
        if self.pairs:
            torch._foreach_copy_([small for _, small in self.pairs], [big for big, _ in self.pairs])


def steady(batch: Ragged) -> Ragged:
    """The batch as compiled code needs it: no lengths on the host, and the sizes that vary marked as dynamic.

    "maybe": a size that happens to equal another one (256 sequences at hidden size 256) is compiled as a constant,
    and compiled again when it changes.
    """
    for value in batch.targets.tensors().values() if batch.targets else ():
        if value.dim():
            torch._dynamo.maybe_mark_dynamic(value, 0)
    torch._dynamo.maybe_mark_dynamic(batch.offsets_B1, 0)
    return replace(batch, lengths=())
