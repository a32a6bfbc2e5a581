"""Who attends to whom, head by head: the weights as data, and as one self-contained page.

Legend: L layers, A heads, n tokens of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding

LIMIT = 1 << 30
"""Bytes of attention weights held at once: L·A·n² floats grow fast (BERT-base at 4,096 tokens: 9.7 GB)."""
DRAWN = 48 << 20
"""Weights up to which a page of its own holds them all (BERT-base: 591 tokens)."""
THUMBNAIL = 32
"""Rows and columns of a head's small picture, at most."""


@dataclass(frozen=True)
class Attention:
    """What every head of every layer looked at in one text. Shows itself in a notebook."""

    tokens: list[str]
    weights: np.ndarray = field(repr=False)
    """float32 (L, A, n, n): row i is what token i draws from, and sums to 1."""
    offsets: list[tuple[int, int]] = field(default_factory=list, repr=False)
    segments: list[int] = field(default_factory=list, repr=False)
    texts: list[int | None] = field(default_factory=list, repr=False)
    """Which text a token came from, 0 or 1; None for special tokens."""
    labels: list[str] = field(default_factory=list, repr=False)
    """The tokens as pictures show them: in letters, where the vocabulary spells bytes."""

    def html(self, title: str = "Attention") -> str:
        """A page of its own that asks for nothing else: all heads as thumbnails, one large, as lines or a matrix."""
        from everybert.inside.page import attention_page

        if self.weights.size > DRAWN:
            layers, heads, n, _ = self.weights.shape
            raise EverybertError(
                f"{n} tokens in {layers} layers of {heads} heads have {self.weights.size:,} weights, too many for a "
                "page; give a shorter text, or look at .weights"
            )
        return attention_page(self, title)

    def _repr_html_(self) -> str:
        """The page in a frame: its styles and scripts stay its own."""
        from everybert.inside.page import frame

        try:
            return frame(self.html())
        except EverybertError as error:
            return f"<p>{error}</p>"

    def thumbnails(self, size: int = THUMBNAIL) -> np.ndarray:
        """uint8 (L, A, s, s), s ≤ size: each head's weights, the largest of each block, 255 standing for 1."""
        n = self.weights.shape[-1]
        if n <= size:
            return np.rint(self.weights * 255).astype(np.uint8)
        edges = np.linspace(0, n, size + 1).astype(int)[:-1]
        rows = np.maximum.reduceat(self.weights, edges, axis=2)
        return np.rint(np.maximum.reduceat(rows, edges, axis=3) * 255).astype(np.uint8)


def quantised(weights: np.ndarray) -> np.ndarray:
    """Weights in [0, 1] as little-endian uint16 for the page: off by at most 7.7e-6."""
    return np.rint(weights.astype(np.float64) * 65535).astype("<u2")


@torch.inference_mode()
def attention(
    network: Network,
    encoding: Encoding,
    global_tokens: Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
) -> Attention:
    """Run one text and keep every head's weights; `global_tokens` are Longformer's, `labels` what pictures show."""
    layers, heads, n = len(network.config.layer_order), network.config.heads, len(encoding)
    room = layers * heads * n * n * 4
    if room > LIMIT:
        most = int((LIMIT / (layers * heads * 4)) ** 0.5)
        raise EverybertError(
            f"{n} tokens in {layers} layers of {heads} heads have {room / 2**30:.1f} GiB of attention weights; "
            f"give at most {most} tokens"
        )
    weights = np.empty((layers, heads, n, n), dtype=np.float32)

    def watch(name: str, value: Tensor) -> None:
        if name.endswith("attention.weights"):
            weights[int(name.split(".")[1])] = value.float().cpu().numpy()

    device = network.encoder.embeddings.token.weight.device
    chosen = None if global_tokens is None else [global_tokens]
    batch = Ragged.of([encoding.ids], [encoding.segments], chosen, device)
    network.encoder.check(batch)
    network.encoder(batch, watch=watch)
    labels = list(labels or encoding.tokens)
    return Attention(encoding.tokens, weights, encoding.offsets, encoding.segments, encoding.sequence, labels)
