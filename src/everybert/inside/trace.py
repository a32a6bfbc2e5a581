"""The forward pass of a text: every intermediate result as a named array, and the steps that explain them.

The names, in the order in which they are computed (ℓ counts applied layers from 0):

    embeddings.token, .segment, .position, .sum    embeddings
    layers.ℓ.attention.q, .k, .v, .scores, .weights, .mixed, .output, .residual, .norm
    layers.ℓ.feed_forward.input, .active, .output, .residual (or .norm)    layers.ℓ.output
    output    mlm.dense, .active, .norm, .logits, .probabilities    pooler    nsp.logits …

A step has its equation, an explanation, and the arrays that it reads and makes. `everybert explain` prints the steps
and the playground draws them. The texts are in steps.toml.

Legend: n tokens of the text, B sequences (one), A heads, D head size, H hidden, I intermediate width, V vocabulary,
E embedding width, L layers.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.inside.attention import MOST_BYTES, batch_of
from everybert.model.config import EncoderConfig
from everybert.model.encoder import activate
from everybert.model.heads import MaskedLM, Network, head_logits
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding, Tokenizer

TEXTS: dict[str, dict[str, Any]] = tomllib.loads((files("everybert.inside") / "steps.toml").read_text("utf-8"))
EMBEDDINGS = {"token": ("t", "the token"), "segment": ("s", "its segment"), "position": ("i", "its position")}
KINDS = {"scores": "matrix", "weights": "matrix", "probabilities": "vocabulary", "logits": "scores"}
"""By the end of its name, what an array is: token × token, a distribution per token, or the outputs of a head."""


# ── the arrays ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Trace:
    """The intermediate results of one text's forward pass: `trace["layers.0.attention.weights"]`."""

    tokens: list[str]
    ids: list[int]
    segments: list[int]
    values: dict[str, np.ndarray] = field(repr=False)
    """In the order of computation. float32: (n, …) per token, (A, n, …) per head and token, (1, …) for the whole."""
    config: EncoderConfig = field(repr=False)
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


def read_trace(
    network: Network,
    encoding: Encoding,
    keep: Callable[[str], bool] | None = None,
    global_tokens: Sequence[int] | None = None,
) -> Trace:
    """Run one text and keep its intermediate results: all, or those for whose name `keep` returns true."""
    n, config = len(encoding), network.config
    layers = [i for i in range(len(config.layer_order)) if keep is None or keep(f"layers.{i}.attention.scores")]
    per_layer = 2 * config.heads * n * n + n * (9 * config.hidden_size + 2 * config.intermediate_size)
    size = 4 * (len(layers) * per_layer + 2 * n * config.vocab_size)
    if size > MOST_BYTES:
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
    return Trace(encoding.tokens, encoding.ids, encoding.segments, values, config, gap)


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


# ── the steps ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Part:
    """An array that a step reads or makes."""

    label: str
    name: str
    """Its name in the trace."""
    head: int | None = None
    """The head, if the array has heads and one of them is shown."""

    @property
    def kind(self) -> str:
        """matrix, vocabulary, scores; or vectors, one per token."""
        return KINDS.get(self.name.rpartition(".")[2], "vectors")


@dataclass(frozen=True)
class ExplainedStep:
    """One step of the forward pass."""

    group: str
    title: str
    equation: str
    words: str
    parts: tuple[Part, ...] = ()


def part_value(trace: Trace, part: Part) -> np.ndarray:
    """(n, …): the array of a part. All heads together are concatenated."""
    value = trace[part.name]
    if part.head is not None:
        return value[part.head]
    return value.transpose(1, 0, 2).reshape(value.shape[1], -1) if value.ndim == 3 else value


def needed(layer: int) -> Callable[[str], bool]:
    """Which intermediate results the steps through one layer show, for `read_trace(keep=…)`."""
    prefixes = (f"layers.{layer}.", f"layers.{layer - 1}.output")
    return lambda name: not name.startswith("layers.") or name.startswith(prefixes)


def explain_steps(trace: Trace, layer: int = 0, head: int = 0) -> list[ExplainedStep]:
    """The steps of a trace: the embeddings, one layer with one head in detail, and the heads that predict."""
    config = trace.config
    layers = len(config.layer_order)
    if not 0 <= layer < layers:
        raise EverybertError(f"there is no layer {layer}: the model's layers are 0 to {layers - 1}")
    if not 0 <= head < config.heads:
        raise EverybertError(f"there is no head {head}: a layer's heads are 0 to {config.heads - 1}")
    pre = config.norm == "pre"
    normed = pre and (layer > 0 or config.first_attention_norm)
    shown = {"shown_layer": layer + 1, "shown_head": head + 1}  # as the literature counts
    values = {"layer": layer, "head": head, **shown, **_values(trace, layer, pre, normed)}
    summed = any(f"embeddings.{name}" in trace.values for name in ("segment", "position"))
    keys = ["tokens", "embeddings" if summed else "lookup"]
    keys += ["embedding_norm"] if config.embedding_norm or config.embedding_size is not None else []
    keys += ["attention_norm"] if normed else []
    keys += ["qkv", "scores", "softmax", "mixed", "joined", "attention_residual"]
    keys += ["feed_forward_norm"] if pre else ["attention_norm"]
    keys += ["feed_forward", "feed_forward_output", "pre_norm_residual" if pre else "post_norm_residual", "output"]
    keys += ["mlm"] if "mlm.dense" in trace.values else []
    keys += ["vocabulary"] if "mlm.logits" in trace.values else []
    keys += ["pooler"] if "pooler" in trace.values else []
    steps = [_step(trace, key, values) for key in keys]
    heads = [name for name in ("nsp", "classify", "choose", "tag", "answer") if f"{name}.logits" in trace.values]
    return steps + [_step(trace, "head", {"name": name}) for name in heads]


def _step(trace: Trace, key: str, values: dict[str, Any]) -> ExplainedStep:
    """A step with its texts from steps.toml, and those of its arrays that the architecture has."""
    texts = dict(TEXTS[key])
    named = [(label, name.format(**values)) for label, name in texts.pop("parts", [])]
    head = values["head"] if "{shown_head}" in texts["group"] else None
    parts = tuple(Part(label, name, head) for label, name in named if name in trace.values)
    return ExplainedStep(**{field: text.format(**values) for field, text in texts.items()}, parts=parts)


def _values(trace: Trace, layer: int, pre: bool, normed: bool) -> dict[str, Any]:
    """What the texts of the steps leave open. `normed`: whether attention reads normalised vectors."""
    config = trace.config
    summed = [name for name in EMBEDDINGS if f"embeddings.{name}" in trace.values]
    norm = "RMSNorm" if config.norm_kind == "rms" else "LayerNorm"
    curve, widened = TEXTS["curves"][config.activation], "y" if pre else "x"
    projected = f" Then a matrix maps {config.embedding_size} numbers to {config.hidden_size}."
    sliding = config.window(layer // config.inner_layers)
    return {
        "n": len(trace.tokens),
        "config": config,
        "layers": len(config.layer_order),
        "terms": " + ".join(f"{name}[{EMBEDDINGS[name][0]}]" for name in summed),
        "reasons": ", ".join(f"one for {EMBEDDINGS[name][1]}" for name in summed),
        "norm": TEXTS["norms"][config.norm_kind] + (" + β" if config.norm_bias else ""),
        "norm_name": norm,
        "shift": " and moved by the learnt shift β" if config.norm_bias else "",
        "projected": projected if config.embedding_size else "",
        "rotary": " Q and K are rotated by the angles of their positions." if config.positions == "rotary" else "",
        "bias": " + B" if config.relative != "none" else "",
        "relative": TEXTS["relative"][config.relative],
        "window": " Tokens outside the sliding window get −∞." if sliding is not None else "",
        "when": "before attention" if pre else "again",
        "attended": "y" if normed else "x",
        "inner": "LN(x)" if normed else "x",
        "entering": "embeddings" if layer == 0 else f"layers.{layer - 1}.output",
        "b": " + b" if config.linear_bias else "",
        "head_b": " + b" if config.head_bias else "",
        "widened": widened,
        "activation": curve.split("(")[0],
        "curve": curve,
        "gate": f" ⊙ W₃{widened}" if config.feed_forward == "glu" else "",
        "final": f", followed by one last {norm}" if pre else "",
        "logits": "E·g + c" if "mlm.dense" in trace.values else "E·h",
        "tied": "the token embeddings" if config.tied else "a separate matrix",
    }
