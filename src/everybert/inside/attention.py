"""Who attends to whom, head by head: the weights as data, and as a small page that shows itself in a notebook.

Legend: L layers, A heads, n tokens of the text.
"""

from __future__ import annotations

import json
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
SHOWN = 128
"""Tokens up to which a notebook draws the weights."""


@dataclass(frozen=True)
class Attention:
    """What every head of every layer looked at in one text."""

    tokens: list[str]
    weights: np.ndarray = field(repr=False)
    """float32 (L, A, n, n): row i is what token i draws from, and sums to 1."""
    offsets: list[tuple[int, int]] = field(default_factory=list, repr=False)
    segments: list[int] = field(default_factory=list, repr=False)

    def _repr_html_(self) -> str:
        """A self-contained view: choose a layer and a head, point at a token."""
        layers, heads, n, _ = self.weights.shape
        if n > SHOWN:
            return f"<p>Attention of {n} tokens, {layers} layers, {heads} heads: too wide to draw; see .weights</p>"
        data = {
            "tokens": self.tokens,
            "weights": np.rint(self.weights * 255).astype(np.uint8).tolist(),
        }
        # "</" would end the script element early, were it part of a token.
        return PAGE.replace("__DATA__", json.dumps(data, separators=(",", ":")).replace("</", "<\\/"))


@torch.inference_mode()
def attention(network: Network, encoding: Encoding) -> Attention:
    """Run one text and keep every head's weights."""
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
    batch = Ragged.of([encoding.ids], [encoding.segments], device=device)
    network.encoder.check(batch)
    network.encoder(batch, watch=watch)
    return Attention(encoding.tokens, weights, encoding.offsets, encoding.segments)


PAGE = """
<div class="everybert-attention" style="font: 13px/1.5 sans-serif">
  <label>layer <select></select></label> <label>head <select></select></label>
  <span style="color: #777">point at a token to see what it attends to</span>
  <div style="margin-top: .5em"></div>
</div>
<script>
(() => {
  const data = __DATA__;
  const root = document.currentScript.previousElementSibling;
  const [layer, head] = root.querySelectorAll("select");
  const line = root.querySelector("div");
  const choose = (select, count, also) => {
    if (also) select.add(new Option(also, "-1"));
    for (let i = 0; i < count; i++) select.add(new Option(i, i));
  };
  choose(layer, data.weights.length);
  choose(head, data.weights[0].length, "mean");
  layer.value = data.weights.length - 1;
  let from = 0;
  const spans = data.tokens.map((token, i) => {
    const span = document.createElement("span");
    span.textContent = token;
    span.style.cssText = "display: inline-block; padding: 0 .3em; margin: .1em; border-radius: .2em; cursor: default";
    span.onmouseenter = () => { from = i; draw(); };
    line.append(span);
    return span;
  });
  const draw = () => {
    const heads = data.weights[layer.value];
    const rows = head.value === "-1" ? heads.map((h) => h[from]) : [heads[head.value][from]];
    spans.forEach((span, j) => {
      const weight = rows.reduce((sum, row) => sum + row[j], 0) / rows.length / 255;
      span.style.background = `rgba(230, 120, 20, ${weight})`;
      span.style.outline = j === from ? "1px solid #555" : "none";
      span.title = weight.toFixed(3);
    });
  };
  layer.onchange = head.onchange = draw;
  draw();
})();
</script>
"""
