"""From inputs to sequences, and from sequences to batches: what the tasks and the training loop exchange.

    texts ──text_features──▶ Features ──make_batch──▶ Ragged with TaskTargets

A text that is longer than the window becomes several sequences, each with a weight: the share of its example that the
window owns. Prediction reads the sequences of Features through the engine; training reads batches of examples.

Legend: S sequences, E examples; in a batch: T tokens, B sequences, E examples, C labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.engine import Inputs
from everybert.model.losses import IGNORE
from everybert.model.ragged import Ragged, Targets
from everybert.text.tokenizer import Tokenizer
from everybert.text.windows import WindowConfig, cover_pair

MOST_WINDOWS = 16
"""Windows of one example that a training step reads, spread evenly; prediction reads all."""


# ── sequences ────────────────────────────────────────────────────────────────────────────────────────────────


class Encoded(NamedTuple):
    """One sequence for the encoder."""

    ids: list[int]
    segments: list[int] | None = None
    global_tokens: Sequence[int] = ()
    """Longformer's global tokens."""
    weight: float = 1.0
    """Its share of the example: windows are weighted by the tokens they own."""


@dataclass(frozen=True, kw_only=True)
class Features(Inputs):
    """The sequences of inputs or examples, in order, as the engine and training read them."""

    example_S: np.ndarray
    """The number of each sequence's example, ascending."""
    weight_S: np.ndarray
    size: int
    """The window: no sequence is longer."""
    cut: Sequence[int]
    """Tokens cut off each input."""
    targets: dict[str, Any] = field(default_factory=dict)
    """Fields of TaskTargets: an array with a row per example (_E) or sequence (_B), an array per sequence (_T)."""
    most_windows: int = 1 << 30
    """The most sequences of an example in a training batch, spread evenly."""
    origins: list[Any] = field(default_factory=list)
    """Per input, what maps tokens back to the text (tag: a TaggedText, answer: a Passage); else empty."""

    def __len__(self) -> int:
        return len(self.first_E1) - 1

    @cached_property
    def first_E1(self) -> np.ndarray:
        """Where each example's sequences begin, and their end."""
        return np.searchsorted(self.example_S, np.arange(self.example_S[-1] + 2))

    @cached_property
    def lengths_S(self) -> np.ndarray:
        """Tokens of each sequence."""
        return np.array([len(ids) for ids in self.ids])

    @cached_property
    def lengths_E(self) -> np.ndarray:
        """Tokens of each example, all its sequences together."""
        return np.add.reduceat(self.lengths_S, self.first_E1[:-1])

    def with_targets(self, **targets: Any) -> "Features":
        """The same sequences with more targets."""
        return replace(self, targets=self.targets | targets)

    def grouped(self, counts: Sequence[int]) -> "Features":
        """Example i made of the next `counts[i]` inputs, each of which is one sequence."""
        cut = np.add.reduceat(self.cut, np.cumsum([0, *counts[:-1]])).tolist()
        return replace(self, example_S=np.repeat(np.arange(len(counts)), counts), cut=cut, most_windows=1 << 30)

    def combine(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """(C) of each sequence → (E, C) of examples."""
        x_SC, weight_S = torch.from_numpy(np.stack(outputs)), torch.from_numpy(self.weight_S).double()
        return weighted_mean(x_SC, torch.from_numpy(self.example_S), weight_S, len(self)).numpy()


def make_features(
    examples: Sequence[Sequence[Encoded]], config: EncoderConfig, size: int, cut: Sequence[int], origins: Any = ()
) -> Features:
    """The features of examples, each a list of sequences. `cut` counts the tokens cut off each input."""
    sequences = [sequence for example in examples for sequence in example]
    if not sequences:
        raise EverybertError("there is nothing to read: no text was given")
    segments = [np.asarray(s.segments or [0] * len(s.ids), dtype=np.uint8) for s in sequences]
    has_globals = config.global_attention and any(s.global_tokens for s in sequences)
    return Features(
        ids=[np.asarray(s.ids, dtype=np.int32) for s in sequences],  # type: ignore[misc]
        segments=segments if config.segments > 1 else None,  # type: ignore[arg-type]
        global_tokens=[s.global_tokens for s in sequences] if has_globals else None,
        example_S=np.repeat(np.arange(len(examples)), [len(example) for example in examples]),
        weight_S=np.asarray([s.weight for s in sequences], dtype=np.float32),
        size=size,
        cut=cut,
        origins=list(origins),
    )


def text_features(
    tokenizer: Tokenizer,
    config: EncoderConfig,
    texts: Sequence[str | Sequence[str]],
    window: WindowConfig,
    global_tokens: Literal["first", "second", "none"] = "first",
) -> Features:
    """Texts and pairs of any length. For Longformer, [CLS] is global, or the tokens of the second text, or none."""
    first_texts = tokenizer.ids_batch([t if isinstance(t, str) else t[0] for t in texts], specials=False)
    second_texts = iter(tokenizer.ids_batch([t[1] for t in texts if not isinstance(t, str)], specials=False))
    examples: list[list[Encoded]] = []
    cut = []
    for text, first in zip(texts, first_texts):
        second = None if isinstance(text, str) else next(second_texts)
        special = tokenizer.single_special if second is None else tokenizer.pair_special
        parts, lost = cover_pair(first, second, special, window)
        cut.append(lost)
        total = sum(weight for *_, weight in parts)
        examples.append([])
        for a, b, weight in parts:
            ids, segments = tokenizer.build(a, b)
            marked = {"first": range(1), "second": range(len(a) + special - 1, len(ids)), "none": ()}[global_tokens]
            examples[-1].append(Encoded(ids, segments, marked, weight / total))
    return replace(make_features(examples, config, window.size, cut), most_windows=MOST_WINDOWS)


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TaskTargets(Targets):
    """What the loss of a task reads besides the tokens; each task uses some of the fields."""

    counts: tuple[int, ...]
    """How many sequences each example has."""
    share: Tensor | None = None
    """0-d: the part of the step's mean that this batch stands for."""
    example_B: Tensor | None = None
    weight_B: Tensor | None = None
    """The example of each sequence and its weight there; None if each example is one sequence."""
    label_E: Tensor | None = None
    """The target of each example: a class, (E, C) classes, a number, the right choice."""
    tag_T: Tensor | None = None
    """The class of each token; IGNORE where there is none."""
    start_B: Tensor | None = None
    end_B: Tensor | None = None
    """The first and last token of the answer in each sequence; −1 where there is none."""
    features_B: Tensor | None = None
    features_T: Tensor | None = None
    """Mode frozen: what the head reads, computed once."""

    def combine(self, logits_BC: Tensor) -> Tensor:
        """(B, C) of sequences → (E, C) of examples."""
        if self.example_B is None or self.weight_B is None:
            return logits_BC[: len(self.counts)]
        return weighted_mean(logits_BC[: len(self.example_B)].float(), self.example_B, self.weight_B, len(self.counts))


def make_batch(
    features: Features,
    example_E: np.ndarray,
    *,
    fill: int | None = None,
    longest: int | None = None,
    pad_id: int = 0,
    share: float = 1.0,
) -> Ragged:
    """The examples with these numbers as one ragged batch with TaskTargets, on the host.

    `fill` rounds the number of tokens up to a multiple of it by one last sequence of padding, which belongs to no
    example: recorded and compiled code then sees few shapes. `longest` is an upper bound of the lengths of all batches;
    without it each batch has its own, a multiple of `fill`.
    """
    example_E = np.asarray(example_E)
    example_E = example_E[np.argsort(features.lengths_E[example_E], kind="stable")]  # equal lengths: fewer copies
    first_E, stop_E = features.first_E1[example_E], features.first_E1[example_E + 1]
    count_E = np.minimum(stop_E - first_E, features.most_windows)
    spread = [first + np.arange(n) * (stop - first) // n for first, stop, n in zip(first_E, stop_E, count_E)]
    sequence_B = np.concatenate(spread)
    rows = {"E": example_E, "B": sequence_B}
    targets = {
        name: np.concatenate([values[i] for i in sequence_B]) if name[-1] == "T" else values[rows[name[-1]]]
        for name, values in features.targets.items()
    }
    if len(sequence_B) > len(example_E):
        weight_B, owner_B = features.weight_S[sequence_B], np.repeat(np.arange(len(example_E)), count_E)
        targets["weight_B"] = (weight_B / np.bincount(owner_B, weight_B)[owner_B]).astype(np.float32)
        targets["example_B"] = owner_B
    ragged = features.batch(sequence_B.tolist())
    if fill is not None:
        gap = fill - len(ragged.tokens_T) % fill
        ragged = ragged.padded(gap, gap, pad_id)
        ragged = replace(ragged, max_length=max(longest or -(-max(ragged.lengths) // fill) * fill, fill))
        for name in (name for name in features.targets if name[-1] != "E"):
            count, none = (gap, IGNORE) if name[-1] == "T" else (1, -1)  # no label, no position
            targets[name] = np.concatenate((targets[name], np.full_like(targets[name][:1], none).repeat(count, 0)))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in targets.items()}
    return replace(ragged, targets=TaskTargets(counts=tuple(count_E.tolist()), share=torch.tensor(share), **tensors))


def weighted_mean(x_SC: Tensor, example_S: Tensor, weight_S: Tensor, count: int) -> Tensor:
    """(S, C) of windows → (E, C) of the `count` examples they belong to, in each of which the weights sum to 1."""
    share_SC = x_SC * weight_S[:, None]
    return share_SC.new_zeros(count, x_SC.shape[1]).index_add(0, example_S, share_SC)


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A small tensor made once: a step recorded as a CUDA graph may not copy from the host."""
    return torch.tensor(values, device=device)
