"""Attention weights of every head, as arrays and as a self-contained HTML page.

Legend: L layers, A heads, n tokens of the text, H hidden, D head size.
"""

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.engine import device_of
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding

MOST_BYTES = 1 << 30
"""Largest size in bytes of what is kept of a text. L·A·n² weights grow fast (BERT-base at 4,096 tokens: 9.7 GB)."""
PAGE_WEIGHTS = 24 << 20
"""Most weights that a page holds, with sixteen bits each (BERT-base: 418 tokens)."""
THUMBNAIL = 32
"""Largest number of rows and columns of a head's thumbnail."""


@dataclass(frozen=True)
class Attention:
    """The attention weights of one text. Displays itself in a notebook."""

    tokens: list[str]
    weights: np.ndarray = field(repr=False)
    """float32 (L, A, n, n): row i holds the weights with which token i attends to each token, and sums to 1."""
    offsets: list[tuple[int, int]] = field(default_factory=list, repr=False)
    segments: list[int] = field(default_factory=list, repr=False)
    texts: list[int | None] = field(default_factory=list, repr=False)
    """The text of each token, 0 or 1; None for special tokens."""
    labels: list[str] = field(default_factory=list, repr=False)
    """The tokens as pictures show them: decoded, if the vocabulary is byte-level."""

    def html(self, title: str = "Attention") -> str:
        """A self-contained page: thumbnails of all heads, and one head as lines or as a matrix."""
        n = len(self.tokens)
        if self.weights.size > PAGE_WEIGHTS:
            raise EverybertError(f"{n} tokens have {self.weights.size:,} weights, too many for a page; see .weights")
        weights = base64.b64encode(zlib.compress(quantised(self.weights).tobytes())).decode()
        data = self.overview() | {"weights": weights}
        parts = {
            "__TITLE__": escape(title),
            "__STYLE__": asset("colours.css") + asset("attention-view.css"),
            "__SCRIPT__": inlined("attention-draw.js", "attention-view.js"),
            # "<" would let a token end the script element; JSON may spell it otherwise.
            "__DATA__": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        }
        page = asset("page.html")
        for mark, text in parts.items():
            page = page.replace(mark, text)
        return page

    def _repr_html_(self) -> str:
        """The page in a frame, so that its styles and scripts do not affect the notebook."""
        try:
            page = escape(self.html())
        except EverybertError as error:
            return f"<p>{error}</p>"
        return f'<iframe title="everybert" srcdoc="{page}" style="width: 100%; height: 720px; border: 0"></iframe>'

    def overview(self) -> dict[str, Any]:
        """What the viewer draws first: the tokens, and thumbnails of all heads in base64."""
        small = self.thumbnails()
        return {
            "tokens": self.labels or self.tokens,
            "texts": self.texts or [0] * len(self.tokens),
            **dict(zip(("layers", "heads", "size"), small.shape)),
            "thumbnails": base64.b64encode(small.tobytes()).decode(),
        }

    def thumbnails(self, size: int = THUMBNAIL) -> np.ndarray:
        """uint8 (L, A, s, s), s ≤ size: the maximum of each block of a head's weights, scaled to 255."""
        n = self.weights.shape[-1]
        edges = np.linspace(0, n, min(n, size) + 1).astype(int)[:-1]
        rows = np.maximum.reduceat(self.weights, edges, axis=2)
        return np.rint(np.maximum.reduceat(rows, edges, axis=3) * 255).astype(np.uint8)


def quantised(weights: np.ndarray) -> np.ndarray:
    """Weights in [0, 1] as little-endian uint16, with an error of at most 7.7e-6."""
    return np.rint(weights.astype(np.float64) * 65535).astype("<u2")


def asset(name: str) -> str:
    """A file of the attention viewer."""
    return (files("everybert.inside") / "web" / name).read_text(encoding="utf-8")


def inlined(*names: str) -> str:
    """JavaScript modules as one script: their imports from each other are in scope."""
    lines = [line for name in names for line in asset(name).splitlines() if not line.startswith("import ")]
    return "\n".join(line.removeprefix("export ") for line in lines)


def batch_of(
    network: Network, encoding: Encoding, global_tokens: Sequence[int] | None = None, copies: int = 1
) -> Ragged:
    """A batch of one text, or of several copies of it, on the network's device."""
    marked = None if global_tokens is None else [global_tokens] * copies
    batch = Ragged.of([encoding.ids] * copies, [encoding.segments] * copies, marked, device_of(network.encoder))
    network.encoder.check(batch)
    return batch


@torch.inference_mode()
def read_attention(
    network: Network,
    encoding: Encoding,
    global_tokens: Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
) -> Attention:
    """Run one text and keep the weights of every head. `global_tokens` are Longformer's, `labels` are for pictures."""
    layers, heads, n = len(network.config.layer_order), network.config.heads, len(encoding)
    size = layers * heads * n * n * 4
    if size > MOST_BYTES:
        most = int((MOST_BYTES / (layers * heads * 4)) ** 0.5)
        raise EverybertError(f"{n} tokens have {size / 2**30:.1f} GiB of attention weights; give at most {most} tokens")
    weights = np.empty((layers, heads, n, n), dtype=np.float32)

    def watch(name: str, value: Tensor) -> None:
        if name.endswith("attention.weights"):
            weights[int(name.split(".")[1])] = value.float().cpu().numpy()

    network.encoder(batch_of(network, encoding, global_tokens), watch=watch)
    labels = list(labels or encoding.tokens)
    return Attention(encoding.tokens, weights, encoding.offsets, encoding.segments, encoding.sequence, labels)


@torch.inference_mode()
def without_heads(network: Network, encoding: Encoding, heads: Sequence[tuple[int, int]]) -> Tensor:
    """(n, H): the final hidden states if these heads, (layer, head) each, contribute nothing (Michel et al. 2019)."""
    for layer, head in heads:
        if not (0 <= layer < len(network.config.layer_order) and 0 <= head < network.config.heads):
            raise EverybertError(f"there is no layer {layer} with a head {head} in this model")

    def watch(name: str, mixed_AnD: Tensor) -> None:
        for layer, head in heads:
            if name == f"layers.{layer}.attention.mixed":
                mixed_AnD[head] = 0.0

    return network.encoder(batch_of(network, encoding), watch=watch)
