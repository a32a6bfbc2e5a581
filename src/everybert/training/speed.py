"""How long a training step takes on a GPU: counted work, at rates fitted to what was measured.

A step's time is a sum: matrix products and the optimizer at rates known from a profile, and attention, element-wise
work, dropout and Muon at four rates that `fitted` finds by least squares over the points below (relative errors).
Each of the four occurs in two points or more, so that every point can be left out and predicted from the others.
Another GPU is taken to reach the same share of its own peak and bandwidth: that part is not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from everybert.model.config import EncoderConfig
from everybert.model.presets import preset


@dataclass(frozen=True)
class Gpu:
    """A GPU by its maker's data sheet."""

    flops: float
    """Dense bf16 FLOP/s."""
    bandwidth: float
    """Bytes a second to and from its memory."""
    memory: float
    """Bytes."""
    link: float
    """Bytes a second to its neighbours in the same machine, one way: NVLink, or PCIe where there is none."""


GPUS = {
    "h200": Gpu(989e12, 4.8e12, 141e9, 450e9),
    "h100": Gpu(989e12, 3.35e12, 80e9, 450e9),
    "a100": Gpu(312e12, 2.039e12, 80e9, 300e9),
    "l40s": Gpu(362e12, 0.864e12, 48e9, 32e9),
    "l4": Gpu(121e12, 0.3e12, 24e9, 32e9),
    "4090": Gpu(165e12, 1.008e12, 24e9, 32e9),
}
MEASURED_ON = GPUS["h200"]

PRODUCTS = 740e12 / 989e12
"""Matrix products reach so much of the peak (docs/LOG.md: 47 ms of products at 740 TFLOP/s)."""
OPTIMIZER_BYTES = 52
"""A parameter's traffic in a step: gradient widened (6), norm and clipping (12), AdamW (28), bf16 copy (6)."""
LOGIT_BYTES = 12
"""A logit's traffic: written, read for the loss and again for its gradient, which two products read."""


@dataclass(frozen=True)
class Work:
    """What one GPU does in a step."""

    config: EncoderConfig
    length: float
    """Tokens that a token sees: the length of sequences, Σn² / Σn where they differ."""
    tokens: int
    masked: float = 0.15
    muon: bool = False

    @property
    def parameters(self) -> float:
        """Matrices and tables; biases and norms are too few to matter for time."""
        config = self.config
        positions = config.max_positions if config.positions == "learned" else 0
        tables = config.embedding_width * (config.vocab_size + positions)
        return len(set(config.layer_order)) * layer_weights(config) + tables


@dataclass(frozen=True)
class Point:
    """A measured speed. `said` is how docs/LOG.md writes it."""

    name: str
    work: Work
    tokens_per_second: float
    said: str


def _base(**changes: float) -> EncoderConfig:
    return preset("bert-base-uncased").replace(
        **{"vocab_size": 30528, "dropout": 0.0, "attention_dropout": 0.0, **changes}
    )


_DROPPED = _base(dropout=0.1, attention_dropout=0.1)
_SMALL = preset("prenorm-bert-base").replace(
    layers=6, hidden_size=512, heads=8, intermediate_size=2048, vocab_size=30016, dropout=0.0, attention_dropout=0.0
)
POINTS = (
    Point("BERT-base, 128", Work(_base(), 128, 65536), 860e3, "**860k**"),
    Point("BERT-base, 512", Work(_base(), 512, 65536), 760e3, "**760k**"),
    # log-normal lengths of at most 512 have mean 148 and Σn² / Σn = 232
    Point("BERT-base, natural lengths", Work(_base(), 232, 65536), 807e3, "**807k**"),
    Point("BERT-base, 128, dropout", Work(_DROPPED, 128, 65536), 751e3, "751k"),
    Point("BERT-base, 512, dropout", Work(_DROPPED, 512, 65536), 655e3, "655k"),
    Point("BERT-base, 128, Muon", Work(_base(), 128, 65536, muon=True), 809e3, "809k"),
    # the whole pipeline by the recipe small-20m, which masks a quarter; the middle of what was seen
    Point("6×512, 128, Muon", Work(_SMALL, 128, 98304, masked=0.25, muon=True), 2.69e6, "2.66M–2.72M tokens/s"),
)
"""One H200, bf16, compiled, the whole step."""


def layer_weights(config: EncoderConfig) -> int:
    """Matrix weights of one layer."""
    hidden = config.hidden_size
    return 4 * hidden * hidden + (3 if config.feed_forward == "glu" else 2) * hidden * config.intermediate_size


def product_flops(config: EncoderConfig, masked: float) -> float:
    """Operations a token in matrix products, forward and backward: 6 for each weight that it meets."""
    width, hidden = config.embedding_width, config.hidden_size
    factors = width * hidden if config.embedding_size is not None else 0
    head = masked * (hidden * width + width * config.vocab_size)
    return 6.0 * (layer_weights(config) * len(config.layer_order) + factors + head)


def attention_flops(config: EncoderConfig, length: float) -> float:
    """Operations a token in attention, forward and backward: 12·n·H a layer; a sliding window bounds n."""
    seen = (length if (w := config.window(i)) is None else min(length, 2 * w + 1) for i in range(config.layers))
    return 12.0 * config.hidden_size * config.inner_layers * sum(seen)


def muon_flops(config: EncoderConfig) -> float:
    """Operations a step in five Newton–Schulz iterations: 4m²n + 2m³ for each m × n matrix of a layer, m ≤ n."""
    hidden, inner = config.hidden_size, config.intermediate_size
    m, n = sorted((hidden, (2 if config.feed_forward == "glu" else 1) * inner))
    k, p = sorted((hidden, inner))
    layer = 4 * 6 * hidden**3 + (4 * m * m * n + 2 * m**3) + (4 * k * k * p + 2 * k**3)
    return 5.0 * layer * len(set(config.layer_order))


def known_seconds(work: Work, gpu: Gpu) -> tuple[float, float]:
    """(seconds a token, seconds a step) of what the profile gives rates for."""
    logits = work.masked * work.config.vocab_size * LOGIT_BYTES / gpu.bandwidth
    token = product_flops(work.config, work.masked) / (PRODUCTS * gpu.flops) + logits
    return token, OPTIMIZER_BYTES * work.parameters / gpu.bandwidth


def counted(work: Work, gpu: Gpu) -> tuple[np.ndarray, np.ndarray]:
    """Seconds (a token, a step) that attention, element-wise work, dropout and Muon would take at a rate of 1."""
    config = work.config
    wide = 2.0 * len(config.layer_order) * (config.hidden_size + config.intermediate_size) / gpu.bandwidth
    dropped = wide if config.dropout or config.attention_dropout else 0.0
    step = muon_flops(config) / gpu.flops if work.muon else 0.0
    return np.array([attention_flops(config, work.length) / gpu.flops, wide, dropped, 0.0]), np.array([0, 0, 0, step])


@cache
def fitted(points: tuple[Point, ...] = POINTS) -> np.ndarray:
    """How many times its counted time each of the four takes: least squares over the relative errors of points."""
    rows, left = [], []
    for point in points:
        seconds = point.work.tokens / point.tokens_per_second
        (a_token, a_step), (token, step) = known_seconds(point.work, MEASURED_ON), counted(point.work, MEASURED_ON)
        rows.append((point.work.tokens * token + step) / seconds)
        left.append(1 - (point.work.tokens * a_token + a_step) / seconds)
    return np.linalg.lstsq(np.array(rows), np.array(left), rcond=None)[0]


def step_seconds(work: Work, gpu: Gpu = MEASURED_ON, points: Sequence[Point] = POINTS) -> tuple[float, float]:
    """(seconds of forward and backward, seconds of the optimizer) of a step on one GPU."""
    rates = fitted(tuple(points))
    (a_token, a_step), (token, step) = known_seconds(work, gpu), counted(work, gpu)
    return work.tokens * (a_token + float(token @ rates)), a_step + float(step @ rates)
