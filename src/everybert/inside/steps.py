"""The forward pass step by step: each with its equation, an explanation, and the arrays that it reads and makes.

`everybert explain` prints these steps and the playground draws them. The texts are in steps.toml.

Legend: n tokens, H hidden, A heads, D head size, I intermediate width, V vocabulary, E embedding width.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from everybert.errors import EverybertError
from everybert.inside.trace import Trace
from everybert.model.config import EncoderConfig

NORM = "y = γ ⊙ (x − μ) / √(σ² + ε) + β"
CURVE = {
    "gelu": "GELU(x) = x·Φ(x)",
    "gelu_tanh": "GELU(x) ≈ x·½(1 + tanh(√(2/π)(x + 0.0447x³)))",
    "gelu_sigmoid": "GELU(x) ≈ x·σ(1.702x)",
    "relu": "ReLU(x) = max(0, x)",
    "silu": "SiLU(x) = x·σ(x)",
}
EMBEDDINGS = {"token": "the token", "segment": "its segment", "position": "its position"}
Kind = Literal["vectors", "matrix", "vocabulary", "scores"]
"""A vector per token; token × token; a distribution per token; the outputs of a head."""


@dataclass(frozen=True)
class Part:
    """An array that a step reads or makes."""

    label: str
    name: str
    """Its name in the trace."""
    kind: Kind = "vectors"
    head: int | None = None
    """The head, if the array has heads and one of them is shown."""


@dataclass(frozen=True)
class Step:
    """One step of the forward pass."""

    group: str
    title: str
    equation: str
    words: str
    parts: tuple[Part, ...] = ()


@cache
def _texts() -> dict[str, dict[str, str]]:
    return tomllib.loads((files("everybert.inside") / "steps.toml").read_text("utf-8"))


def _step(group: str, key: str, *parts: Part, **values: Any) -> Step:
    """A step with its texts from steps.toml."""
    text = {name: template.format(norm=NORM, **values) for name, template in _texts()[key].items()}
    return Step(group, text["title"], text["equation"], text["words"], parts)


def part_value(trace: Trace, part: Part) -> np.ndarray:
    """(n, …): the array of a part. All heads together are concatenated."""
    value = trace[part.name]
    if part.name.endswith(("attention.q", "attention.k", "attention.v", "attention.scores", "attention.weights")):
        return value[part.head or 0]
    if part.name.endswith("attention.mixed"):
        return value[part.head] if part.head is not None else value.transpose(1, 0, 2).reshape(value.shape[1], -1)
    return value


def needed(layer: int) -> Callable[[str], bool]:
    """Which intermediate results the steps through one layer show, for `trace(keep=…)`."""
    own = (f"layers.{layer}.", f"layers.{layer - 1}.output")
    return lambda name: not name.startswith("layers.") or name.startswith(own)


def story(trace: Trace, layer: int = 0, head: int = 0) -> list[Step]:
    """The steps of a trace: the embeddings, one layer with one head in detail, and the heads that predict."""
    config = trace.config
    layers = len(config.layer_order)
    if not 0 <= layer < layers:
        raise EverybertError(f"there is no layer {layer}: the model's layers are 0 to {layers - 1}")
    if not 0 <= head < config.heads:
        raise EverybertError(f"there is no head {head}: a layer's heads are 0 to {config.heads - 1}")
    return [*_embedding(trace), *_attention(config, layer, head), *_feed_forward(config, layer), *_prediction(trace)]


def _embedding(trace: Trace) -> list[Step]:
    config = trace.config
    parts = [name for name in EMBEDDINGS if f"embeddings.{name}" in trace]
    terms = " + ".join(f"{name}[{index}]" for name, index in zip(parts, ("t", "s", "i")))
    reasons = ", ".join(f"one for {EMBEDDINGS[name]}" for name in parts)
    summed = tuple(Part(name, f"embeddings.{name}") for name in [*parts, "sum"])
    steps = [
        _step("Input", "tokens", vocabulary=config.vocab_size, n=len(trace.tokens)),
        _step("Input", "embeddings", *summed, terms=terms, width=config.embedding_width, reasons=reasons),
    ]
    if config.embedding_norm or config.embedding_size is not None:
        narrow, hidden = config.embedding_size, config.hidden_size
        widened = f" Then a matrix maps {narrow} numbers to {hidden}." if narrow else ""
        after = (Part("before", "embeddings.sum"), Part("after", "embeddings"))
        steps.append(_step("Input", "embedding_norm", *after, widened=widened))
    return steps


def _attention(config: EncoderConfig, layer: int, head: int) -> list[Step]:
    at, hidden, d = f"layers.{layer}.attention.", config.hidden_size, config.head_size
    one, whole = f"Layer {layer}, head {head}", f"Layer {layer}"
    rotary = " Q and K are rotated by the angles of their positions." if config.positions == "rotary" else ""
    sliding = config.window(layer // config.inner_layers) is not None
    window = " Tokens outside the sliding window get −∞." if sliding else ""
    q, k, v = (Part(name.upper(), at + name, "vectors", head) for name in ("q", "k", "v"))
    mixed, output = Part("o", at + "mixed", "vectors", head), Part("after W_O", at + "output")
    scores, weights = (Part(name, at + name, "matrix", head) for name in ("scores", "weights"))
    entering = Part("x, entering the layer", "embeddings" if layer == 0 else f"layers.{layer - 1}.output")
    added = (entering, Part("attention adds", at + "output"), Part("sum", at + "residual"))
    norm = _step(whole, "attention_norm", Part("after", at + "norm"))
    steps = [
        _step(one, "qkv", q, k, v, hidden=hidden, d=d, rotary=rotary),
        _step(one, "scores", scores, d=d, window=window),
        _step(one, "softmax", weights),
        _step(one, "mixed", mixed),
        _step(whole, "joined", Part("heads side by side", at + "mixed"), output, heads=config.heads, hidden=hidden),
        _step(whole, "attention_residual", *added),
    ]
    return [norm, *steps] if config.norm == "pre" else [*steps, norm]


def _feed_forward(config: EncoderConfig, layer: int) -> list[Step]:
    at, whole = f"layers.{layer}.feed_forward.", f"Layer {layer}"
    curve = CURVE[config.activation]
    texts = {
        "name": curve.split("(")[0],
        "gate": " ⊙ W₃x" if config.feed_forward == "glu" else "",
        "curve": curve,
        "intermediate": config.intermediate_size,
    }
    adds = Part("feed-forward adds", at + "output")
    before = Part("x", f"layers.{layer}.attention.{'residual' if config.norm == 'pre' else 'norm'}")
    added = (before, adds, Part("x, leaving the layer", f"layers.{layer}.output"))
    steps = [
        _step(whole, "feed_forward", Part("before", at + "input"), Part("after", at + "active"), **texts),
        _step(whole, "feed_forward_output", adds, hidden=config.hidden_size),
    ]
    if config.norm == "pre":
        norm = _step(whole, "feed_forward_norm", Part("after", at + "norm"))
        return [norm, *steps, _step(whole, "pre_norm_residual", *added)]
    return [*steps, _step(whole, "post_norm_residual", *added)]


def _prediction(trace: Trace) -> list[Step]:
    config, group = trace.config, "Prediction"
    final = ", followed by one last LayerNorm" if config.norm == "pre" else ""
    steps = [_step(group, "output", Part("h", "output"), layers=len(config.layer_order), final=final)]
    if "mlm.logits" in trace:
        tied = "the token embeddings" if config.tied else "a separate matrix"
        dense = (Part("W·h + b", "mlm.dense"), Part("act", "mlm.active"), Part("g", "mlm.norm"))
        probabilities = Part("p", "mlm.probabilities", "vocabulary")
        steps.append(_step(group, "mlm", *dense))
        steps.append(_step(group, "vocabulary", probabilities, tied=tied, vocabulary=config.vocab_size))
    if "pooler" in trace:
        steps.append(_step(group, "pooler", Part("p", "pooler")))
    for name in ("nsp", "classify", "choose", "tag", "answer"):
        if f"{name}.logits" in trace:
            steps.append(_step(group, "head", Part("z", f"{name}.logits", "scores"), name=name))
    return steps
