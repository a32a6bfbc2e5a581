"""All intermediate results of a forward pass, as named arrays, from the embeddings to the heads.

The names, in the order in which they are computed (ℓ counts applied layers from 0):

    embeddings.token, .segment, .position, .sum    embeddings
    layers.ℓ.attention.q, .k, .v, .scores, .weights, .mixed, .output, .residual, .norm
    layers.ℓ.feed_forward.input, .active, .output, .residual (or .norm)    layers.ℓ.output
    output    mlm.dense, .active, .norm, .logits, .probabilities    pooler    nsp.logits …

Legend: n tokens of the text, A heads, D head size, H hidden, I intermediate width, V vocabulary, L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.inside.attention import batch_of
from everybert.model.config import EncoderConfig
from everybert.model.encoder import activate
from everybert.model.heads import MaskedLM, Network, head_logits
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding, Tokenizer

LIMIT = 1 << 30
"""Largest size in bytes of the intermediate results."""


@dataclass(frozen=True)
class Trace:
    """The intermediate results of one text's forward pass: `trace["layers.0.attention.weights"]`."""

    tokens: list[str]
    ids: list[int]
    segments: list[int]
    values: dict[str, np.ndarray] = field(repr=False)
    """In the order of computation. float32: (n, …) per token, (A, n, …) per head and token, (1, …) for the whole."""
    config: EncoderConfig = field(repr=False)
    text: str = ""
    pair: str | None = None
    gap: float = 0.0
    """The largest difference between the output of this pass and of the usual one."""

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.values:
            close = [known for known in self.values if name.rpartition(".")[2] in known][:3]
            raise EverybertError(f"the trace has no {name!r}" + (f"; it has {', '.join(close)} …" if close else ""))
        return self.values[name]

    def vocabulary(self, tokenizer: Tokenizer, top: int = 5) -> list[list[tuple[str, float]]]:
        """The most probable tokens of the MLM head at every position."""
        p_nV = self["mlm.probabilities"][:, : tokenizer.size]
        best = np.argsort(-p_nV, axis=1)[:, :top]
        return [[(tokenizer.token(int(v)), float(row[v])) for v in order] for row, order in zip(p_nV, best)]


def trace(
    network: Network,
    encoding: Encoding,
    text: str = "",
    pair: str | None = None,
    keep: Callable[[str], bool] | None = None,
    global_tokens: Sequence[int] | None = None,
) -> Trace:
    """Run one text and keep its intermediate results: all, or those for whose name `keep` returns true."""
    n, config = len(encoding), network.config
    layers = [i for i in range(len(config.layer_order)) if keep is None or keep(f"layers.{i}.attention.scores")]
    per_layer = 2 * config.heads * n * n + n * (9 * config.hidden_size + 2 * config.intermediate_size)
    size = 4 * (len(layers) * per_layer + 2 * n * config.vocab_size)
    if size > LIMIT:
        raise EverybertError(f"{n} tokens have {size / 2**30:.1f} GiB of intermediates; give a shorter text")
    values: dict[str, np.ndarray] = {}

    def watch(name: str, value: Tensor) -> None:
        if keep is None or keep(name):
            values[name] = value.float().cpu().numpy().copy()

    batch = batch_of(network, encoding, global_tokens)
    with torch.inference_mode():
        x_nH = network.encoder(batch, watch=watch)
        gap = float((network.encoder(batch).float() - x_nH.float()).abs().max())
        _heads(network, x_nH, batch, watch)
    return Trace(encoding.tokens, encoding.ids, encoding.segments, values, config, text, pair, gap)


def _heads(network: Network, x_nH: Tensor, batch: Ragged, watch: Callable[[str, Tensor], None]) -> None:
    """The outputs of every head of the network."""
    if network.pooler is not None:
        watch("pooler", network.pooler(x_nH[batch.first_B]))
    for name, head in network.heads.items():
        if not isinstance(head, MaskedLM):
            watch(f"{name}.logits", head_logits(network, batch, name, lambda _: x_nH))
            continue
        if head.dense is not None and head.norm is not None:
            dense_nE = head.dense(x_nH)
            active_nE = activate(dense_nE, head.activation)
            watch("mlm.dense", dense_nE)
            watch("mlm.active", active_nE)
            watch("mlm.norm", head.norm(active_nE))
        logits_nV = network.mlm_logits(x_nH)
        watch("mlm.logits", logits_nV)
        watch("mlm.probabilities", logits_nV.float().softmax(-1))
