"""A few tokens without Python: an encoder's operations traced once, then run by torch alone.

Each of an encoder's some two hundred operations gives Python's lock away and must have it back, so two threads that
each compute a short text take half as long again as one. A trace runs without the lock, and without the interpreter's
own time: threads of one core each are as fast side by side as alone. One trace serves every batch of few tokens.

Legend: T tokens in the batch, H hidden.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everybert.model.encoder import Encoder
from everybert.model.ragged import Ragged, Row
from everybert.serving.cores import on_own_core

log = logging.getLogger("everybert")
Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(T) ids, (T) positions, (T) numbers of the sequences → (T, H)."""
MOST = 128
"""Tokens: with more, the products take so long that what is between them does not matter, and most pairs of tokens are
of two sequences, which are computed in vain."""
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

    It holds the weights as they are now: none may need a gradient.
    """

    def whole(tokens_T: Tensor, positions_T: Tensor, sequence_T: Tensor) -> Tensor:
        return encoder(Row.of_sequences(tokens_T, positions_T, sequence_T))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated: but torch.compile needs a compiler where the server runs
        try:
            run = torch.jit.trace(whole, _tensors(_batch(encoder, 3, 2)), check_trace=False)
        except Exception as error:  # whatever an operation may say: the encoder itself still serves
            log.info("the encoder cannot be traced (%s); it runs step by step", str(error)[:80])
            return None
    for lengths in ((1,), (12,), (2, 7, 2)):
        batch = _batch(encoder, *lengths)
        if not torch.allclose(run(*_tensors(batch)), encoder(batch), rtol=0.0, atol=CLOSE):
            log.info("the encoder's trace differs from it for lengths of %s; it runs step by step", lengths)
            return None
    return run


def _batch(encoder: Encoder, *lengths: int) -> Ragged:
    """Some batch of these lengths."""
    lengths = tuple(min(n, encoder.config.max_positions) for n in lengths)
    ids = [i * 7919 % encoder.config.vocab_size for i in range(sum(lengths))]
    return Ragged.flat(torch.tensor(ids), lengths)


def _tensors(batch: Ragged) -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.from_numpy(np.repeat(np.arange(len(batch.lengths)), batch.lengths))
    return batch.tokens_T, batch.positions_T, numbers
