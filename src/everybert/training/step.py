"""One training step's arithmetic: fp32 master weights, a bf16 copy that computes, and the pre-training losses.

On CUDA in bf16 the network that computes is a half-precision copy of the master, refreshed after each optimizer
step: no casts inside the graph, and the optimizer works in fp32. On the CPU the two are one.

Legend: T tokens in the batch, B sequences, H hidden, V vocabulary, M masked positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.model.graphs import Recorder
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.training.distributed import World

T = TypeVar("T")
LossFunction = Callable[[Network, Ragged], tuple[Tensor, Tensor]]
"""(network, batch) → (the loss to differentiate, a vector of figures to log)."""


class Compute:
    """Runs a loss forward and backward; gradients add up in fp32 on the master's parameters.

    `compile` suits large batches of one size, `graphs` small ones of a few sizes.
    """

    def __init__(
        self,
        network: Network,
        loss: LossFunction,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        compile: bool = False,
        graphs: bool = False,
    ) -> None:
        self.device = torch.device(device)
        if (compile or graphs) and (self.device.type != "cuda" or dtype == torch.float32):
            raise EverybertError("compile needs a CUDA device and bfloat16: without them attention works by lengths")
        self.master = network.to(self.device, torch.float32)
        self.network = self.master if dtype == torch.float32 else copy.deepcopy(self.master).to(dtype)
        self.loss = torch.compile(loss, dynamic=False) if compile else loss
        self.compiled = compile
        self.recorder = Recorder() if graphs else None
        pairs = zip(self.master.parameters(), self.network.parameters())
        self.pairs = [(big, small) for big, small in pairs if big is not small and big.requires_grad]

    def run(self, batch: Ragged, last: bool = True) -> Tensor:
        """Forward and backward of one pack, perhaps the step's last; returns the figures to log, detached."""
        if self.compiled:
            batch = steady(batch)
        if self.recorder is not None:
            figures = self._recorded(batch, self.recorder)
        else:
            loss, figures = self.loss(self.network, batch)
            loss.backward()
        self._collect()
        return figures.detach()

    def _recorded(self, batch: Ragged, recorder: Recorder) -> Tensor:
        """Forward and backward as one CUDA graph per shape of batch, where the loss can be recorded."""
        parameters = [p for p in self.network.parameters() if p.requires_grad]

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

    def reduce(self, world: World) -> None:
        """Sum the step's gradients over the ranks."""
        world.sum_gradients([p for p in self.master.parameters() if p.requires_grad])

    def apply(self, work: Callable[[Network], T]) -> T:
        """Do something with the network that computes, other than training."""
        return work(self.network)

    def whole(self) -> Network | None:
        """The trained network, for the first rank to write."""
        return self.master

    @torch.no_grad()
    def _collect(self) -> None:
        """Add the half-precision gradients to the master's and forget them."""
        first: list[tuple[Tensor, Tensor]] = []
        later: list[tuple[Tensor, Tensor]] = []
        for big, small in self.pairs:
            if small.grad is not None:
                if big.grad is None:
                    big.grad = torch.empty_like(big)
                    first.append((big.grad, small.grad))
                else:
                    later.append((big.grad, small.grad))
                small.grad = None
        if first:
            torch._foreach_copy_([g for g, _ in first], [h for _, h in first])
        if later:  # adding across types is slow: widen first
            wide = [torch.empty_like(g) for g, _ in later]
            torch._foreach_copy_(wide, [h for _, h in later])
            torch._foreach_add_([g for g, _ in later], wide)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the master's weights into the network that computes, after the optimizer moved them."""
        if self.pairs:
            torch._foreach_copy_([small for _, small in self.pairs], [big for big, _ in self.pairs])


def steady(batch: Ragged) -> Ragged:
    """The batch as compiled code wants it: no host-side lengths to specialise on, sizes that may vary marked so.

    "maybe": a size that happens to equal another one (256 sequences at hidden size 256) is compiled as a constant,
    and compiled again when it changes.
    """
    for value in batch.extra.values():
        if isinstance(value, Tensor) and value.dim():
            torch._dynamo.maybe_mark_dynamic(value, 0)
    torch._dynamo.maybe_mark_dynamic(batch.offsets_B1, 0)
    return replace(batch, lengths=())


def pretrain_loss(network: Network, batch: Ragged) -> tuple[Tensor, Tensor]:
    """Masked LM plus, where pairs are labelled, next sentence or sentence order.

    batch.extra holds `mask_index` (M), `mask_label` (M; −100 does not count), `pair_label` (B) and the *step's*
    `masked` and `pairs` counts (0-d), so that packs, accumulation and ranks add up to the loss of one large batch:
    L = Σ −log p(token) / masked + Σ −log p(pair) / pairs.
    """
    return word_and_pair_losses(network, network.encoder(batch), batch)


def word_and_pair_losses(network: Network, x_TH: Tensor, batch: Ragged) -> tuple[Tensor, Tensor]:
    """`pretrain_loss` of hidden states that are there already: (loss, (mlm, nsp) to log)."""
    extra = batch.extra
    logits_MV = network.mlm_logits(x_TH, extra["mask_index"])
    mlm = F.cross_entropy(logits_MV.float(), extra["mask_label"], ignore_index=-100, reduction="sum")
    loss = mlm = mlm / extra["masked"]
    nsp = torch.zeros_like(mlm)
    if "nsp" in network.heads and "pair_label" in extra:
        logits_B2 = network.sequence_logits(x_TH, batch, "nsp")
        nsp = F.cross_entropy(logits_B2.float(), extra["pair_label"], ignore_index=-100, reduction="sum")
        nsp = nsp / extra["pairs"]
        loss = loss + nsp
    return loss, torch.stack((mlm.detach(), nsp.detach()))


def collate(
    pack: dict[str, Any],
    *,
    masked: float,
    pairs: float,
    max_length: int,
    pad_id: int = 0,
    capacity: int | None = None,
) -> Ragged:
    """A pack's arrays as a batch.

    With a `capacity` the tail is filled with sequences of padding that nothing reads, so that compiled code always
    sees the same number of tokens; masked positions are rounded up to 64 likewise.
    """
    lengths = [int(n) for n in pack["lengths"]]
    tokens = np.asarray(pack["tokens"], dtype=np.int64)
    gap = 0 if capacity is None else capacity - len(tokens)
    fill: Sequence[int] = [max_length] * (gap // max_length) + ([gap % max_length] if gap % max_length else [])

    def padded(name: str, size: int, value: int) -> Tensor:
        array = np.asarray(pack[name], dtype=np.int64)
        if capacity is not None:
            array = np.concatenate((array, np.full(size - len(array), value, dtype=np.int64)))
        return torch.from_numpy(array)

    total = len(tokens) + gap
    # Never few slots: the compiler treats small matrices in another way, so a block's last, short pack would recompile.
    slots = -(-max(len(pack["mask_index"]), total // 8) // 64) * 64
    extra = {
        "mask_index": padded("mask_index", slots, 0),
        "mask_label": padded("mask_label", slots, -100),
        "masked": torch.tensor(float(max(masked, 1.0))),
    }
    if pack.get("pair_label") is not None:
        extra["pair_label"] = padded("pair_label", len(lengths) + len(fill), -100)
        extra["pairs"] = torch.tensor(float(max(pairs, 1.0)))
    segments_T = padded("segments", total, 0) if pack.get("segments") is not None else None
    batch = Ragged.flat(padded("tokens", total, pad_id), [*lengths, *fill], segments_T, max_length=max_length)
    return replace(batch, extra=extra)
