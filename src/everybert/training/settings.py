"""The tables of a recipe: one frozen dataclass each, which checks its own keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from everybert.training.tables import KeyProblem

Pair = tuple[float, float]


@dataclass(frozen=True)
class ModelSettings:
    """[model]: a preset and whatever differs from it, or a trained folder to go on from."""

    preset: str | None = None
    """A published configuration, by name."""
    init: str | None = None
    """A model folder to start from, instead of fresh weights."""
    longformer: int | None = None
    """init: make it a Longformer with so many positions, by copying those it has."""
    window: int = 512
    """longformer: how many tokens a token sees, half on each side."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Fields of the encoder configuration that differ from the preset, or from the folder's (dropout …)."""


@dataclass(frozen=True)
class BatchSettings:
    """[batch]: how much text a step sees, in which pieces."""

    tokens: int | tuple[int, int] = 131_072
    """Tokens a step (special tokens counted); two numbers go from the first to the second over each phase."""
    length: int = 512
    """Longest sequence."""
    pack: int = 16_384
    """Tokens computed at once. Memory grows with it; a step is as many packs as make its tokens."""

    def __post_init__(self) -> None:
        at_least("length", self.length, 8)
        at_least("pack", self.pack, self.length, f"a pack must hold a sequence of {self.length} tokens")
        for tokens in pair(self.tokens):
            at_least("tokens", tokens, self.pack, f"a step cannot be smaller than a pack ({self.pack} tokens)")


@dataclass(frozen=True)
class ScheduleSettings:
    """[schedule]: the learning rate, a pure function of the step."""

    peak: float = 1e-4
    """The highest learning rate."""
    kind: Literal["linear", "cosine", "wsd"] = "linear"
    """After warm-up: linear or cosine to the end; wsd: stays, then falls linearly (warmup-stable-decay)."""
    warmup: int | float = 0.01
    """Rising from zero: a whole number of steps, or a share of the run below 1."""
    decay: float = 0.2
    """wsd: the share of the run, at its end, in which the rate falls."""
    floor: float = 0.0
    """Where it ends, as a share of the peak."""

    def __post_init__(self) -> None:
        if self.peak <= 0:
            raise KeyProblem("peak", f"must be above 0, not {self.peak}")
        at_least("warmup", self.warmup, 0)
        if isinstance(self.warmup, float) and self.warmup >= 1:
            raise KeyProblem("warmup", f"is a share below 1, or a whole number of steps, not {self.warmup}")
        within("decay", self.decay, 0, 1)
        within("floor", self.floor, 0, 1)


@dataclass(frozen=True)
class Phase:
    """[[phase]]: a part of the run with its own length, tokens or mask rate; what it omits, the tables above say."""

    share: float
    """Its share of the run's steps."""
    length: int
    """Longest sequence."""
    tokens: tuple[int, int]
    """Tokens a step, at its start and at its end."""
    rate: Pair | None
    """Mask rate at its start and end; None follows [mask]."""


@dataclass(frozen=True)
class PhaseSettings:
    """A [[phase]] as it is written."""

    share: float | None = None
    steps: int | None = None
    length: int | None = None
    tokens: int | tuple[int, int] | None = None
    rate: float | Pair | None = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.steps is None):
            raise KeyProblem("share", "a phase needs either its share of the run or its steps")
        if self.share is not None:
            within("share", self.share, 0, 1)
        if self.steps is not None:
            at_least("steps", self.steps, 1)
        for rate in pair(self.rate) if self.rate is not None else ():
            within("rate", rate, 0, 1, open_ends=True)


@dataclass(frozen=True)
class DistilSettings:
    """[distil]: what the student learns from the teacher, beside or instead of the masked words."""

    temperature: float = 2.0
    """Softens both distributions (Hinton et al. 2015)."""
    ce: float = 5.0
    """Weight of the cross-entropy with the teacher's words, times temperature²."""
    mlm: float = 2.0
    """Weight of the true words."""
    pair: float = 1.0
    """Weight of the teacher's and the true judgement of pairs, where the examples are pairs."""
    cosine: float = 1.0
    """Weight of 1 − cos between the last hidden states (DistilBERT)."""
    hidden: float = 0.0
    """Weight of the squared error between hidden states, layer by layer, through a learned projection (TinyBERT)."""
    relation: float = 0.0
    """Weight of the divergence between query–query, key–key and value–value relations of the last layer (MiniLM v2)."""
    relation_heads: int = 12
    """Into how many heads the relations are cut: need not be the models' own number."""
    copy: bool = True
    """Start the student from every k-th teacher layer where the widths agree."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise KeyProblem("temperature", f"must be above 0, not {self.temperature}")
        for name in ("ce", "mlm", "pair", "cosine", "hidden", "relation"):
            at_least(name, getattr(self, name), 0)
        if not any((self.ce, self.mlm, self.pair, self.cosine, self.hidden, self.relation)):
            raise KeyProblem("ce", "every weight is 0: there is nothing to learn")


@dataclass(frozen=True)
class RunSettings:
    """[run]: how the machine is used and what is kept. Changing these does not change what is learnt."""

    parallel: Literal["data", "sharded"] = "data"
    """Several ranks: data, each holds the whole model; sharded, its share of weights, gradients and moments (FSDP)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute precision; the weights stay in fp32. auto: bfloat16 on CUDA, float32 on the CPU."""
    compile: bool | None = None
    """torch.compile; by default on CUDA only."""
    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    workers: int | None = None
    """Processes that prepare packs (0: none beside the main one); by default 4 on CUDA, 0 on the CPU."""
    tensorboard: bool = True
    """Write TensorBoard's curves too, where it is installed."""
    log_every: int = 10
    """Steps between lines of log.jsonl."""
    evaluate_every: int = 1000
    """Steps between evaluations on the held-out split (0: only at the end)."""
    evaluate_packs: int = 16
    """Packs of held-out text in an evaluation."""
    save_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """How many of the last checkpoints stay, beside the best."""
    spike: float = 3.0
    """Skip a step whose loss is more than so many times its running mean, or not finite (0: only the latter)."""
    patience: int = 20
    """Stop after so many skipped steps in a row."""

    def __post_init__(self) -> None:
        for name in ("log_every", "evaluate_packs", "save_every", "keep", "patience"):
            at_least(name, getattr(self, name), 1)
        for name in ("workers", "evaluate_every", "spike"):
            at_least(name, getattr(self, name) or 0, 0)


def seconds(text: str) -> float:
    """A length of time: "90s", "20m", "1.5h", "2d"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", text)
    if not match or float(match[1]) == 0:
        raise KeyProblem("budget", f'is a time such as "20m" or "24h", not {text!r}')
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def pair(value: Any) -> Any:
    """(from, to) of a setting that may be one number."""
    return value if isinstance(value, tuple) else (value, value)


def at_least(key: str, value: float, least: float, why: str = "") -> None:
    """Refuse a value that is too small."""
    if value < least:
        raise KeyProblem(key, f"{why or f'must be at least {least}'}, not {value}")


def within(key: str, value: float, low: float, high: float, open_ends: bool = False) -> None:
    """Refuse a value outside its range."""
    if not low <= value <= high or (open_ends and value in (low, high)):
        raise KeyProblem(key, f"must lie between {low} and {high}, not {value}")
