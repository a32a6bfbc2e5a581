"""A few tokens without Python: an encoder's operations traced once, then run by torch alone.

Each of an encoder's some two hundred operations gives Python's lock away and must have it back, so two threads that
each compute a short text take half as long again as one. A trace runs without the lock, and without the interpreter's
own time: threads of one core each are as fast side by side as alone. One trace serves every batch of few tokens.

A product with few tokens takes the time of reading its weights. Those of a small model are kept a second time as
oneDNN reads them best.

Legend: T tokens in the batch, H hidden, I inputs, O outputs.
"""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everybert.model.adapters import AdaptedLinear
from everybert.model.encoder import Encoder
from everybert.model.ragged import Ragged, Row
from everybert.serving.cores import on_own_core

log = logging.getLogger("everybert")
Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(T) ids, (T) positions, (T) numbers of the sequences → (T, H)."""
MOST = 128
"""Tokens: with more, the products take so long that what is between them does not matter, and most pairs of tokens are
of two sequences, which are computed in vain."""
SHORT = 48
"""Tokens: with more, packed weights are no faster than others."""
LIGHT = 128 * 2**20
"""Bytes of all products' weights: those of a larger model are not kept twice."""
CLOSE = 1e-5
"""Largest difference to what the encoder itself gives."""


class TracedEncoder(nn.Module):
    """Stands where an encoder does, always under the same adapter, for the threads that run it."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.config = encoder.config
        self._real = (encoder,)  # in a tuple: not a part of this module
        self._run: Run | None = None
        self._tracing = threading.Lock()
        self._works = traceable(encoder)

    @property
    def ready(self) -> bool:
        """Whether few tokens run without Python."""
        return self._run is not None

    @property
    def embeddings(self) -> nn.Module:
        """They say where the weights are."""
        return self._real[0].embeddings

    def check(self, batch: Ragged) -> None:
        """As Encoder's."""
        self._real[0].check(batch)

    def forward(self, batch: Ragged, *inside: Any, **more: Any) -> Tensor:
        """As Encoder's: (T) ids → (T, H)."""
        plain = not inside and not more and not batch.extra and batch.segments_T is None
        if not self._works or not plain or len(batch.tokens_T) > MOST:
            return self._real[0](batch, *inside, **more)
        if self._run is None and self._tracing.acquire(blocking=False):
            try:
                self._run = traced(self._real[0])
                self._works = self._run is not None
            finally:
                self._tracing.release()
        if self._run is None:
            return self._real[0](batch)
        given = _tensors(batch)
        with on_own_core():
            return self._run(*given)


def traceable(encoder: Encoder) -> bool:
    """Whether all lengths go through the same operations: windows of attention are chosen by them."""
    if not isinstance(encoder, Encoder):
        return False
    return not encoder.config.global_attention and encoder.config.windows is None


@torch.inference_mode()
def traced(encoder: Encoder) -> Run | None:
    """The encoder's trace, if batches of any lengths have the same vectors by it.

    It is for weights as they are now: packed ones would not follow a change.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated: but torch.compile needs a compiler where the server runs
        try:
            whole = _Whole(packed(encoder) if packable(encoder) else encoder)
            run = torch.jit.trace(whole, _tensors(_batch(encoder, 3, 2)), check_trace=False).forward
        except Exception as error:  # whatever an operation may say: the encoder itself still serves
            log.info("the encoder cannot be traced (%s); it runs step by step", str(error)[:80])
            return None
    for lengths in ((1,), (12,), (2, 7, 2)):
        batch = _batch(encoder, *lengths)
        if not torch.allclose(run(*_tensors(batch)), encoder(batch), rtol=0.0, atol=CLOSE):
            log.info("the encoder's trace differs from it for lengths of %s; it runs step by step", lengths)
            return None
    return run


class _Whole(nn.Module):
    """An encoder whose batch is tensors alone, as a trace wants them."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.train(encoder.training)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, sequence_T: Tensor) -> Tensor:
        return self.encoder(Row.of_sequences(tokens_T, positions_T, sequence_T))


class _PackedLinear(nn.Module):
    """A linear layer that has its weights twice. It is compiled: a trace would keep one of the two ways."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.short = linear.weight, linear.bias, SHORT
        packed_OI = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().clone(), SHORT // 4)
        self.register_buffer("packed_OI", packed_OI)

    def forward(self, x_TI: Tensor) -> Tensor:
        if x_TI.shape[0] <= self.short:
            return torch.ops.mkldnn._linear_pointwise(x_TI, self.packed_OI, self.bias, "none", [], "")
        return nn.functional.linear(x_TI, self.weight, self.bias)


def packable(encoder: nn.Module) -> bool:
    """Whether an encoder's weights may be kept twice: it is small, in fp32, and traced once, not for each adapter."""
    linears = [part for part in encoder.modules() if isinstance(part, nn.Linear)]
    plain = not any(isinstance(part, AdaptedLinear) or part.weight.dtype != torch.float32 for part in linears)
    light = sum(part.weight.nbytes for part in linears) <= LIGHT
    return plain and light and torch.backends.mkldnn.is_available() and torch.cpu._is_avx2_supported()


def packed(part: Any) -> Any:
    """The same module, with its own weights, whose linear layers have them packed too."""
    if type(part) is nn.Linear:
        return torch.jit.script(_PackedLinear(part))
    same = copy.copy(part)
    same._modules = {name: child and packed(child) for name, child in part._modules.items()}
    return same


def _batch(encoder: Encoder, *lengths: int) -> Ragged:
    """Some batch of these lengths."""
    lengths = tuple(min(n, encoder.config.max_positions) for n in lengths)
    ids = [i * 7919 % encoder.config.vocab_size for i in range(sum(lengths))]
    return Ragged.flat(torch.tensor(ids), lengths)


def _tensors(batch: Ragged) -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.from_numpy(np.repeat(np.arange(len(batch.lengths)), batch.lengths))
    return batch.tokens_T, batch.positions_T, numbers
