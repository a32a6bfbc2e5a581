"""The forward pass as a story: one step after the other, each with its equation, in words, and the arrays it makes.

`everybert explain` prints these steps and the playground's "Step through" draws them.

Legend: n tokens, H hidden, A heads, D head size, I intermediate width, V vocabulary, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from everybert.errors import EverybertError
from everybert.inside.trace import Trace
from everybert.model.config import EncoderConfig

PREDICTION = "Prediction"
NORM = "y = γ ⊙ (x − μ) / √(σ² + ε) + β"
CURVE = {
    "gelu": "GELU(x) = x·Φ(x)",
    "gelu_tanh": "GELU(x) ≈ x·½(1 + tanh(√(2/π)(x + 0.0447x³)))",
    "gelu_sigmoid": "GELU(x) ≈ x·σ(1.702x)",
    "relu": "ReLU(x) = max(0, x)",
    "silu": "SiLU(x) = x·σ(x)",
}


Kind = Literal["vectors", "matrix", "vocabulary", "scores"]
"""A vector for each token; token against token; a distribution at each token; a head's outputs."""


@dataclass(frozen=True)
class Part:
    """An array that a step reads or makes."""

    label: str
    name: str
    """Its name in the trace."""
    kind: Kind = "vectors"
    head: int | None = None
    """Which head's share of it; None where it has no heads."""


@dataclass(frozen=True)
class Step:
    """One step of the forward pass."""

    group: str
    title: str
    equation: str
    words: str
    parts: tuple[Part, ...] = ()


def part_value(trace: Trace, part: Part) -> np.ndarray:
    """(n, …): the array of a part; heads that are joined lie side by side."""
    value = trace[part.name]
    if part.name.endswith(("attention.q", "attention.k", "attention.v", "attention.scores", "attention.weights")):
        return value[part.head or 0]
    if part.name.endswith("attention.mixed"):
        return value[part.head] if part.head is not None else value.transpose(1, 0, 2).reshape(value.shape[1], -1)
    return value


def needed(layer: int) -> Callable[[str], bool]:
    """Which intermediates the story of one layer tells: for `trace(keep=…)`."""
    own = (f"layers.{layer}.", f"layers.{layer - 1}.output")
    return lambda name: not name.startswith("layers.") or name.startswith(own)


def story(trace: Trace, layer: int = 0, head: int = 0) -> list[Step]:
    """The steps of a trace: the embeddings, one layer with one head in detail, and the head that predicts."""
    config = trace.config
    layers = len(config.layer_order)
    if not 0 <= layer < layers:
        raise EverybertError(f"there is no layer {layer}: the model's layers are 0 to {layers - 1}")
    if not 0 <= head < config.heads:
        raise EverybertError(f"there is no head {head}: a layer's heads are 0 to {config.heads - 1}")
    return [*_embedding(trace), *_attention(config, layer, head), *_feed_forward(config, layer), *_prediction(trace)]


def _embedding(trace: Trace) -> list[Step]:
    config = trace.config
    known = {
        "token": "what the piece is",
        "segment": "which text it is in",
        "position": "where it stands",
    }
    parts = [name for name in known if f"embeddings.{name}" in trace]
    why = ", ".join(f"one for {known[name]}" for name in parts)
    steps = [
        Step(
            "Input",
            "Text to pieces",
            "text → (t₁, …, tₙ)",
            f"The tokenizer cuts the text into pieces that its vocabulary of {config.vocab_size:,} knows, and puts "
            f"special pieces around it. From here on the text is {len(trace.tokens)} numbers.",
        ),
        Step(
            "Input",
            "Embeddings, summed",
            "x = " + " + ".join(f"{name}[{index}]" for name, index in zip(parts, ("t", "s", "i"))),
            f"Every piece looks up vectors of {config.embedding_width} numbers, which are added: {why}.",
            tuple(Part(name, f"embeddings.{name}") for name in [*parts, "sum"]),
        ),
    ]
    if config.embedding_norm or config.embedding_size is not None:
        widen = (
            f" Then a matrix widens {config.embedding_size} to {config.hidden_size}." if config.embedding_size else ""
        )
        steps.append(
            Step(
                "Input",
                "LayerNorm",
                NORM,
                "Each vector is shifted and scaled to mean 0 and variance 1 over its own numbers, then given the "
                f"learnt scale γ and shift β.{widen}",
                (Part("before", "embeddings.sum"), Part("after", "embeddings")),
            )
        )
    return steps


def _entering(config: EncoderConfig, layer: int) -> Part:
    """What layer ℓ reads."""
    return Part("x, entering the layer", "embeddings" if layer == 0 else f"layers.{layer - 1}.output")


def _attention(config: EncoderConfig, layer: int, head: int) -> list[Step]:
    at, d = f"layers.{layer}.attention.", config.head_size
    here, whole = f"Layer {layer}, head {head}", f"Layer {layer}"
    turned = " Q and K are turned by their positions' angles (rotary)." if config.positions == "rotary" else ""
    seen = "" if config.window(layer // config.inner_layers) is None else " Pieces outside the sliding window get −∞."
    q, k, v = (Part(name.upper(), at + name, "vectors", head) for name in ("q", "k", "v"))
    mixed = Part("o", at + "mixed", "vectors", head)
    scores, weights = (Part(name, at + name, "matrix", head) for name in ("scores", "weights"))
    norm = Step(
        whole,
        "LayerNorm",
        NORM,
        "Normalised again, so that no layer's numbers run away.",
        (Part("after", at + "norm"),),
    )
    steps = [
        Step(
            here,
            "Queries, keys, values",
            "q = W_Q·x + b,  k = W_K·x + b,  v = W_V·x + b",
            f"Three matrices make three short vectors of {d} numbers from each piece's {config.hidden_size}: what it "
            f"looks for (q), what it can be found by (k), what it has to give (v).{turned}",
            (q, k, v),
        ),
        Step(
            here,
            "Scores",
            f"S = Q·Kᵀ / √{d}",
            "How well each piece's query fits each piece's key: their product, divided by √D so that it does not grow "
            f"with the vectors' length.{seen}",
            (scores,),
        ),
        Step(
            here,
            "Softmax",
            "Aᵢⱼ = exp Sᵢⱼ / Σₖ exp Sᵢₖ",
            "Each row becomes shares that are positive and sum to 1: the attention weights.",
            (weights,),
        ),
        Step(
            here,
            "Values mixed",
            "o = A·V",
            "Each piece takes from all pieces' values, as much as its weights say.",
            (mixed,),
        ),
        Step(
            whole,
            "Heads joined",
            "W_O·[o₁; …; o_A] + b",
            f"The {config.heads} heads' vectors, laid side by side, are {config.hidden_size} numbers again; one more "
            "matrix lets the heads speak together.",
            (Part("heads side by side", at + "mixed"), Part("after W_O", at + "output")),
        ),
        Step(
            whole,
            "Residual",
            "x ← x + Attention(x)",
            "What attention found is added to what the piece was: nothing is overwritten.",
            (_entering(config, layer), Part("attention adds", at + "output"), Part("sum", at + "residual")),
        ),
    ]
    return [norm, *steps] if config.norm == "pre" else [*steps, norm]


def _feed_forward(config: EncoderConfig, layer: int) -> list[Step]:
    at, whole = f"layers.{layer}.feed_forward.", f"Layer {layer}"
    gate = " ⊙ W₃x" if config.feed_forward == "glu" else ""
    curve = CURVE[config.activation]
    adds = Part("feed-forward adds", at + "output")
    leaves = Part("x, leaving the layer", f"layers.{layer}.output")
    stays = Part("x", f"layers.{layer}.attention.{'residual' if config.norm == 'pre' else 'norm'}")
    steps = [
        Step(
            whole,
            f"Feed-forward, {curve.split('(')[0]}",
            f"a = act(W₁x + b₁){gate},  {curve}",
            f"Each piece alone: widened to {config.intermediate_size} numbers and bent, which lets what is small or "
            "negative fade and what is large through.",
            (Part("before", at + "input"), Part("after", at + "active")),
        ),
        Step(
            whole,
            "Feed-forward, back",
            "W₂·a + b₂",
            f"And narrowed to {config.hidden_size} numbers again.",
            (adds,),
        ),
    ]
    if config.norm == "pre":
        before = Step(whole, "LayerNorm", NORM, "Before the feed-forward block.", (Part("after", at + "norm"),))
        last = Step(whole, "Residual", "x ← x + FF(LN(x))", "Added to the stream.", (stays, adds, leaves))
        return [before, *steps, last]
    last = Step(
        whole,
        "Residual and LayerNorm",
        "x ← LN(x + FF(x))",
        "Added to what was there and normalised: this is what the next layer reads.",
        (stays, adds, leaves),
    )
    return [*steps, last]


def _prediction(trace: Trace) -> list[Step]:
    config = trace.config
    layers = len(config.layer_order)
    final = " and one last LayerNorm" if config.norm == "pre" else ""
    steps = [
        Step(
            PREDICTION,
            f"After all {layers} layers",
            "h = xᴸ",
            f"The same again, layer after layer{final}. Each piece now has a vector that knows its whole text.",
            (Part("h", "output"),),
        )
    ]
    if "mlm.logits" in trace:
        tied = "the token embeddings once more" if config.tied else "a matrix of its own"
        steps += [
            Step(
                PREDICTION,
                "The masked-word head",
                "g = LN(act(W·h + b))",
                "Turned towards the vocabulary.",
                (Part("W·h + b", "mlm.dense"), Part("act", "mlm.active"), Part("g", "mlm.norm")),
            ),
            Step(
                PREDICTION,
                "The vocabulary",
                "p = softmax(E·g + c)",
                f"Compared with every word's vector ({tied}), and made into probabilities: at each position, over all "
                f"{config.vocab_size:,} pieces.",
                (Part("p", "mlm.probabilities", "vocabulary"),),
            ),
        ]
    if "pooler" in trace:
        steps.append(
            Step(
                PREDICTION,
                "The pooler",
                "p = tanh(W·h₁ + b)",
                "The first piece's vector, as the summary of the text.",
                (Part("p", "pooler"),),
            )
        )
    for name in ("nsp", "classify", "choose", "tag", "answer"):
        if f"{name}.logits" in trace:
            steps.append(
                Step(
                    PREDICTION,
                    f"The {name} head",
                    "z = W·h + b",
                    "One number for each outcome; the larger, the likelier.",
                    (Part("z", f"{name}.logits", "scores"),),
                )
            )
    return steps
