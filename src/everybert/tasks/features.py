"""Examples as the encoder reads them: flat arrays of tokens, in windows where a text is long; and batches of them.

The same features serve training and prediction. An example is one sequence, or several where its text is longer
than the window: each token of the text is owned by exactly one of them, and a window's `weight` is the share of the
example that it owns. What is said of the example is the weighted mean of what is said of its windows.

Legend: N tokens of all sequences, S sequences, E examples; in a batch: T tokens, B sequences, E examples, C labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Tokenizer
from everybert.text.windows import windows

BUDGET = 8192
"""Tokens of a batch at prediction: enough to fill the cores, little enough to stay in memory."""
MOST_WINDOWS = 16
"""Windows of one example that a training step reads, spread evenly; prediction reads all."""


@dataclass(frozen=True)
class Reading:
    """How long texts are read."""

    size: int
    """Tokens of a sequence, special ones included."""
    overlap: int
    """Tokens that neighbouring windows share at least."""
    long: str = "window"
    """"window": cover all of the text; "cut": read its beginning, the longer text of a pair losing first."""

    @classmethod
    def of(
        cls, config: EncoderConfig, size: int | None = None, overlap: int | None = None, long: str = "window"
    ) -> Reading:
        """The model's own window unless told otherwise; a quarter of it overlaps, at most 128 tokens."""
        size = min(size or config.max_positions, config.max_positions)
        if size < 8:
            raise EverybertError(f"a window of {size} tokens leaves no room for text; take 8 or more")
        if long not in ("window", "cut"):
            raise EverybertError(f"long texts are read by window or cut, not {long!r}")
        return cls(size, min(128, size // 4) if overlap is None else overlap, long)

    def state(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {"size": self.size, "overlap": self.overlap, "long": self.long}

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None, config: EncoderConfig) -> Reading:
        """From what `state` gave; the model's own window where there is nothing."""
        return cls.of(config, **(state or {}))


@dataclass(frozen=True)
class Encoded:
    """One sequence for the encoder."""

    ids: list[int]
    segments: list[int] | None = None
    globals: Iterable[int] = ()
    """Longformer's global tokens."""
    weight: float = 1.0
    """The share of its example that it stands for."""


@dataclass(frozen=True)
class Features:
    """Sequences laid end to end, in the order of their examples."""

    tokens_N: np.ndarray
    starts_S1: np.ndarray
    example_S: np.ndarray
    """The number of each sequence's example, ascending."""
    weight_S: np.ndarray
    segments_N: np.ndarray | None = None
    globals_N: np.ndarray | None = None
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    """Targets, by the suffix of their name: _E one an example, _B one a sequence, _T one a token."""
    cut_E: np.ndarray | None = None
    """Tokens of each example that were left out; None where none were."""
    size: int = 0
    """The window: no sequence is longer."""
    most: int | None = None
    """Sequences of an example that a training batch takes, spread evenly; None takes all."""
    back: list[Any] = field(default_factory=list)
    """What leads from tokens back to the texts, as the task keeps it."""

    def __len__(self) -> int:
        return len(self.first_E1) - 1

    @cached_property
    def first_E1(self) -> np.ndarray:
        """Where each example's sequences begin, and their end."""
        count = int(self.example_S[-1]) + 1 if len(self.example_S) else 0
        return np.searchsorted(self.example_S, np.arange(count + 1))

    @cached_property
    def lengths_S(self) -> np.ndarray:
        """Tokens of each sequence."""
        return np.diff(self.starts_S1)

    @cached_property
    def lengths_E(self) -> np.ndarray:
        """Tokens of each example, all its sequences together."""
        return np.diff(self.starts_S1[self.first_E1])

    def labelled(self, **labels: Any) -> Features:
        """The same with targets."""
        return replace(self, labels={name: np.asarray(value) for name, value in labels.items()})


def lay(
    examples: Iterable[Sequence[Encoded]], config: EncoderConfig, reading: Reading, back: list[Any] | None = None
) -> Features:
    """Examples, each a list of sequences, as flat arrays."""
    tokens: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    marks: list[np.ndarray] = []
    example: list[int] = []
    weight: list[float] = []
    paired = config.segments > 1
    for number, sequences in enumerate(examples):
        for one in sequences:
            tokens.append(np.asarray(one.ids, dtype=np.int32))
            if paired:
                segments.append(np.asarray(one.segments or [0] * len(one.ids), dtype=np.uint8))
            if config.global_attention:
                mark = np.zeros(len(one.ids), dtype=bool)
                mark[list(one.globals)] = True
                marks.append(mark)
            example.append(number)
            weight.append(one.weight)
    if not tokens:
        raise EverybertError("there is nothing to read: no text was given")
    return Features(
        tokens_N=np.concatenate(tokens),
        starts_S1=np.concatenate(([0], np.cumsum([len(t) for t in tokens]))).astype(np.int64),
        example_S=np.asarray(example, dtype=np.int64),
        weight_S=np.asarray(weight, dtype=np.float32),
        segments_N=np.concatenate(segments) if paired else None,
        globals_N=np.concatenate(marks) if any(mark.any() for mark in marks) else None,
        size=reading.size,
        back=back or [],
    )


# ── texts and pairs ──────────────────────────────────────────────────────────────────────────────────────────


def text_features(
    tokenizer: Tokenizer,
    config: EncoderConfig,
    texts: Sequence[str | tuple[str, str]],
    reading: Reading,
    read_globals: Callable[[list[int]], Iterable[int]] = lambda ids: (0,),
) -> Features:
    """Texts and pairs of any length. `read_globals` picks Longformer's global tokens: [CLS] unless told otherwise."""
    first = tokenizer.ids_batch([t if isinstance(t, str) else t[0] for t in texts], specials=False)
    second = iter(tokenizer.ids_batch([t[1] for t in texts if not isinstance(t, str)], specials=False))
    examples, cut = [], np.zeros(len(texts), dtype=np.int64)
    for i, (text, a) in enumerate(zip(texts, first)):
        b = None if isinstance(text, str) else next(second)
        parts, cut[i] = cover(a, b, tokenizer.single_special if b is None else tokenizer.pair_special, reading)
        total = sum(weight for *_, weight in parts)
        sequences = []
        for part_a, part_b, weight in parts:
            ids, segments = tokenizer.build(part_a, part_b)
            marks = read_globals(ids) if config.global_attention else ()
            sequences.append(Encoded(ids, segments, marks, weight / total))
        examples.append(sequences)
    return replace(lay(examples, config, reading), cut_E=cut if cut.any() else None, most=MOST_WINDOWS)


def cover(
    a: list[int], b: list[int] | None, special: int, reading: Reading
) -> tuple[list[tuple[list[int], list[int] | None, float]], int]:
    """The sequences' own ids for a text or pair, each with its weight; and how many ids were cut off.

    A pair that is too long shares the room: the shorter text gets what it needs up to half, and each window of one
    meets each window of the other, weighing own(a) · own(b).
    """
    room = reading.size - special
    if len(a) + len(b or ()) <= room:
        return [(a, b, 1.0)], 0
    if reading.long == "cut":
        keep_a, keep_b = longest_first(len(a), len(b or ()), room)
        return [(a[:keep_a], None if b is None else b[:keep_b], 1.0)], len(a) + len(b or ()) - keep_a - keep_b
    if b is None:
        spans = windows(len(a), room, min(reading.overlap, room - 1))
        return [(a[w.start : w.stop], None, float(w.own_stop - w.own_start)) for w in spans], 0
    room_a, room_b = longest_first(len(a), len(b), room)
    spans_a = windows(len(a), max(room_a, 1), min(reading.overlap, max(room_a, 1) // 2))
    spans_b = windows(len(b), max(room_b, 1), min(reading.overlap, max(room_b, 1) // 2))
    return [
        (a[u.start : u.stop], b[v.start : v.stop], float(max(u.own_stop - u.own_start, 1) * (v.own_stop - v.own_start)))
        for u in spans_a
        for v in spans_b
    ], 0


def longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """How much of each text stays when the longer loses until both are equal, then both; as `tokenizers` has it."""
    if a + b <= room:
        return a, b
    short = min(a, b, room // 2)
    return (room - short, short) if a > b else (short, room - short)


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────


def batch(
    features: Features,
    which: np.ndarray,
    *,
    fill: int | None = None,
    pad_id: int = 0,
    device: torch.device | str | None = None,
) -> Ragged:
    """The examples numbered `which` as one ragged batch, their targets in `extra`.

    `fill` rounds the number of tokens up to a multiple of it by one sequence of padding, the last, which belongs to
    no example: compiled code then meets few shapes. `extra["counts"]` says how many sequences each example has.
    """
    which = np.asarray(which)
    which = which[np.argsort(features.lengths_E[which], kind="stable")]  # equal lengths lie together: fewer copies
    at_B, counts_E = _sequences(features, which)
    lengths = features.lengths_S[at_B]
    index_T = _ranges(features.starts_S1[at_B], lengths)
    extra: dict[str, Any] = {}
    for name, values in features.labels.items():
        at = {"E": which, "B": at_B, "T": index_T}[name[-1]]
        extra[name] = values[at]
    if len(at_B) > len(which):
        weight, example_B = features.weight_S[at_B], np.repeat(np.arange(len(which)), counts_E)
        extra["weight_B"] = (weight / np.bincount(example_B, weight)[example_B]).astype(np.float32)
        extra["example_B"] = example_B
    tokens, sizes = features.tokens_N[index_T], lengths.tolist()
    segments = None if features.segments_N is None else features.segments_N[index_T]
    marks = None if features.globals_N is None else features.globals_N[index_T]
    if fill is not None:
        gap = fill - len(tokens) % fill
        tokens, sizes = _pad(tokens, gap, pad_id), [*sizes, gap]
        segments = None if segments is None else _pad(segments, gap, 0)
        marks = None if marks is None else _pad(marks, gap, 0)
        for name in features.labels:  # −100 and −1 are no label and no place
            if name[-1] != "E":
                extra[name] = _pad(extra[name], gap, -100) if name[-1] == "T" else _pad(extra[name], 1, -1)
    ragged = Ragged.flat(
        torch.from_numpy(tokens.astype(np.int64)),
        sizes,
        None if segments is None else torch.from_numpy(segments.astype(np.int64)),
        None if marks is None else torch.from_numpy(marks),
        max_length=None if fill is None else max(features.size, fill),
    )
    extra = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in extra.items()}
    extra["counts"] = tuple(counts_E.tolist())
    return replace(ragged, extra=extra).to(device)


def _sequences(features: Features, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sequences of the examples, and how many each has."""
    first, last = features.first_E1[which], features.first_E1[which + 1]
    counts = last - first
    if (counts == 1).all():
        return first, counts
    most = features.most
    picked = [
        np.arange(a, b) if most is None or b - a <= most else a + (np.arange(most) * (b - a)) // most
        for a, b in zip(first, last)
    ]
    return np.concatenate(picked), np.array([len(p) for p in picked])


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start … start + length − 1 of each, one after the other."""
    ends = lengths.cumsum()
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)


def _pad(x: np.ndarray, count: int, value: int) -> np.ndarray:
    return np.concatenate((x, np.full((count, *x.shape[1:]), value, dtype=x.dtype)))


def combine(logits_BC: Tensor, batch: Ragged) -> Tensor:
    """(B, C) of sequences → (E, C) of examples: the mean over an example's windows, by the share each owns."""
    extra = batch.extra
    if "example_B" not in extra:
        return logits_BC[: len(extra["counts"])]
    example_B, weight_B = extra["example_B"], extra["weight_B"]
    share_BC = logits_BC[: len(example_B)].float() * weight_B[:, None]
    return share_BC.new_zeros(len(extra["counts"]), logits_BC.shape[1]).index_add(0, example_B, share_BC)


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A small tensor made once: a step recorded as a CUDA graph may not copy from the host."""
    return torch.tensor(values, device=device)


# ── prediction ───────────────────────────────────────────────────────────────────────────────────────────────

Read = Callable[[Ragged], Tensor]
"""What is read off a batch: (B, …) or (T, …)."""


def plan(lengths: np.ndarray, budget: int = BUDGET) -> Iterator[np.ndarray]:
    """Sequences in batches of at most `budget` tokens (or one sequence), longest first."""
    order = np.argsort(-lengths, kind="stable")
    start, total = 0, 0
    for i, at in enumerate(order):
        if i > start and total + lengths[at] > budget:
            yield order[start:i]
            start, total = i, 0
        total += int(lengths[at])
    if start < len(order):
        yield order[start:]


@torch.inference_mode()
def run(network: Network, features: Features, read: Read, budget: int = BUDGET) -> list[np.ndarray]:
    """What `read` gives for each sequence, in order: an array a sequence. Batches are made by token budget."""
    device = network.encoder.embeddings.token.weight.device
    known = {name: x for name, x in features.labels.items() if name.startswith("features_")}
    alone = replace(features, example_S=np.arange(len(features.lengths_S)), labels=known)
    out: list[Any] = [None] * len(features.lengths_S)
    was = network.training
    network.eval()
    try:
        for which in plan(features.lengths_S, budget):
            ragged = batch(alone, which, device=device)
            order = which[np.argsort(features.lengths_S[which], kind="stable")]
            values = read(ragged).float().cpu()
            rows = ragged.split(values) if len(values) == len(ragged.tokens_T) else values.unbind()
            for at, value in zip(order, rows):
                out[at] = value.numpy()
    finally:
        network.train(was)
    return out


def gather(values: list[np.ndarray], features: Features) -> np.ndarray:
    """(E, C): each example's weighted mean over its sequences, as `combine` has it in training."""
    total = np.zeros((len(features), *values[0].shape), dtype=np.float64)
    np.add.at(total, features.example_S, np.stack(values) * features.weight_S.reshape(-1, *[1] * values[0].ndim))
    return total
