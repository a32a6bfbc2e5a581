"""What all tasks share: inputs → sequences → batches → loss, or predictions and scores; and the saved settings.

A `Task` is a frozen dataclass. An input becomes one sequence, or several windows if it is longer than the model's
window. Training reads batches of examples; prediction runs all sequences through the engine and decodes its outputs.

Legend: S sequences, E examples; in a batch: T tokens, B sequences, E examples, C labels; K points of an attribution,
n tokens of a text.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from inspect import signature
from operator import index
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_type_hints

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.files import as_type
from everybert.model.config import EncoderConfig
from everybert.model.engine import Inputs, ahead, run_head
from everybert.model.heads import Network, head_logits
from everybert.model.ragged import Ragged, Targets
from everybert.tasks.dataset import Columns, Examples, Row, Source, Table, View
from everybert.text.tokenizer import Encoding, Tokenizer
from everybert.text.windows import Window, windows

DIGITS = 5
"""Of a probability in a table: the other sequences of a batch change the seventh."""
MOST_WINDOWS = 16
"""Windows of one example that a training step reads, spread evenly; prediction reads all."""
Explained = tuple[Callable[[Tensor], Tensor], str]
"""What attribution explains: a value (K) of K points' logits (K, C) or (K, n, C), and its name."""


# ── sequences ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class WindowConfig:
    """How texts longer than the model's window are read."""

    size: int
    """Tokens of a sequence, special tokens included."""
    overlap: int
    """Tokens that neighbouring windows share at least."""
    long: str = "window"
    """"window": cover the whole text; "cut": truncate it, the longer text of a pair first."""

    @classmethod
    def for_model(
        cls, config: EncoderConfig, size: int | None = None, overlap: int | None = None, long: str = "window"
    ) -> "WindowConfig":
        """By default the model's own window, a quarter of it overlapping, at most 128 tokens."""
        size = min(index(size or config.max_positions), config.max_positions)
        if size < 8:
            raise EverybertError(f"a window of {size} tokens leaves no room for text; take 8 or more")
        if long not in ("window", "cut"):
            raise EverybertError(f"long texts are read by window or cut, not {long!r}")
        overlap = min(128, size // 4) if overlap is None else index(overlap)
        if overlap < 0:
            raise EverybertError(f"windows cannot overlap by {overlap} tokens; take 0 or more")
        return cls(size, overlap, long)

    def cover(self, n: int, room: int) -> tuple[list[Window], int]:
        """Windows of at most `room` tokens over a text of n tokens, and how many tokens were cut."""
        room = max(room, 1)
        if self.long == "cut" and n > room:
            return [Window(0, room, 0, room)], n - room
        return windows(n, room, min(self.overlap, room // 2)), 0


class Encoded(NamedTuple):
    """One sequence for the encoder."""

    ids: list[int]
    segments: list[int] | None = None
    global_tokens: Sequence[int] = ()
    """Longformer's global tokens."""
    weight: float = 1.0
    """Its share of the example: windows are weighted by the tokens they own."""


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
    """The class of each token; −100 where there is none."""
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
    most: int = 1 << 30
    """Sequences of an example that a training batch takes at most, spread evenly."""
    back: list[Any] = field(default_factory=list)
    """Per input, what leads from tokens back to the text; its form is the task's own."""

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
        """With one sequence per input: the next `counts[i]` inputs as example i."""
        cut = np.add.reduceat(self.cut, np.cumsum([0, *counts[:-1]])).tolist()
        return replace(self, example_S=np.repeat(np.arange(len(counts)), counts), cut=cut, most=1 << 30)

    def combine(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """(C) of each sequence → (E, C) of examples."""
        x_SC, weight_S = torch.from_numpy(np.stack(outputs)), torch.from_numpy(self.weight_S).double()
        return weighted_mean(x_SC, torch.from_numpy(self.example_S), weight_S, len(self)).numpy()


def make_features(
    examples: Iterable[Sequence[Encoded]], config: EncoderConfig, size: int, cut: Sequence[int], back: Any = ()
) -> Features:
    """The features of examples, each a list of sequences. `cut` counts the tokens cut off each input."""
    flat = [(number, one) for number, sequences in enumerate(examples) for one in sequences]
    if not flat:
        raise EverybertError("there is nothing to read: no text was given")
    segments = [np.asarray(one.segments or [0] * len(one.ids), dtype=np.uint8) for _, one in flat]
    marked = config.global_attention and any(one.global_tokens for _, one in flat)
    return Features(
        ids=[np.asarray(one.ids, dtype=np.int32) for _, one in flat],  # type: ignore[misc]
        segments=segments if config.segments > 1 else None,  # type: ignore[arg-type]
        global_tokens=[one.global_tokens for _, one in flat] if marked else None,
        example_S=np.asarray([number for number, _ in flat], dtype=np.int64),
        weight_S=np.asarray([one.weight for _, one in flat], dtype=np.float32),
        size=size,
        cut=cut,
        back=list(back),
    )


def text_features(
    tokenizer: Tokenizer,
    config: EncoderConfig,
    texts: Sequence[str | Sequence[str]],
    window: WindowConfig,
    marked: Literal["first", "second", "none"] = "first",
) -> Features:
    """Texts and pairs of any length. For Longformer, [CLS] is global, or the tokens of the second text, or none."""
    first = tokenizer.ids_batch([t if isinstance(t, str) else t[0] for t in texts], specials=False)
    second = iter(tokenizer.ids_batch([t[1] for t in texts if not isinstance(t, str)], specials=False))
    examples: list[list[Encoded]] = []
    cut = []
    for text, a in zip(texts, first):
        b = None if isinstance(text, str) else next(second)
        special = tokenizer.single_special if b is None else tokenizer.pair_special
        parts, lost = cover_pair(a, b, special, window)
        cut.append(lost)
        total = sum(weight for *_, weight in parts)
        examples.append([])
        for x, y, weight in parts:
            ids, segments = tokenizer.build(x, y)
            marks = {"first": range(1), "second": range(len(x) + special - 1, len(ids)), "none": ()}[marked]
            examples[-1].append(Encoded(ids, segments, marks, weight / total))
    return replace(make_features(examples, config, window.size, cut), most=MOST_WINDOWS)


def cover_pair(
    a: list[int], b: list[int] | None, special: int, window: WindowConfig
) -> tuple[list[tuple[list[int], list[int] | None, float]], int]:
    """The windows of a text or pair, each with its weight; and how many ids were cut off.

    A pair that is too long shares the room: the shorter text gets what it needs up to half, and each window of one
    is combined with each window of the other, with weight own(a) · own(b).
    """
    room_a, room_b = longest_first(len(a), len(b or ()), window.size - special)
    (spans_a, cut_a), (spans_b, cut_b) = window.cover(len(a), room_a), window.cover(len(b or ()), room_b)

    def own(w: Window) -> int:
        return max(w.own_stop - w.own_start, 1)

    return [
        (a[u.start : u.stop], None if b is None else b[v.start : v.stop], float(own(u) * own(v)))
        for u in spans_a
        for v in spans_b
    ], cut_a + cut_b


def longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """How many tokens of each text stay if the longer is cut until both are equal, then both; as in `tokenizers`."""
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
    longest: int | None = None,
    pad_id: int = 0,
    share: float = 1.0,
) -> Ragged:
    """The examples numbered `which` as one ragged batch with TaskTargets, on the host.

    `fill` rounds the number of tokens up to a multiple of it by one last sequence of padding, which belongs to no
    example: recorded and compiled code then sees few shapes. `longest` is an upper bound of the lengths of all batches;
    without it each batch has its own, a multiple of `fill`.
    """
    which = np.asarray(which)
    which = which[np.argsort(features.lengths_E[which], kind="stable")]  # equal lengths together: fewer copies
    first, last = features.first_E1[which], features.first_E1[which + 1]
    counts = np.minimum(last - first, features.most)
    at_B = np.concatenate([a + np.arange(n) * (b - a) // n for a, b, n in zip(first, last, counts)])
    rows = {"E": which, "B": at_B}
    targets = {
        name: np.concatenate([values[i] for i in at_B]) if name[-1] == "T" else values[rows[name[-1]]]
        for name, values in features.targets.items()
    }
    if len(at_B) > len(which):
        weight, example_B = features.weight_S[at_B], np.repeat(np.arange(len(which)), counts)
        targets["weight_B"] = (weight / np.bincount(example_B, weight)[example_B]).astype(np.float32)
        targets["example_B"] = example_B
    ragged = features.batch(at_B.tolist())
    if fill is not None:
        gap = fill - len(ragged.tokens_T) % fill
        ragged = ragged.padded(gap, gap, pad_id)
        ragged = replace(ragged, max_length=max(longest or -(-max(ragged.lengths) // fill) * fill, fill))
        for name in (name for name in features.targets if name[-1] != "E"):
            count, none = (gap, -100) if name[-1] == "T" else (1, -1)  # no label, no position
            targets[name] = np.concatenate((targets[name], np.full_like(targets[name][:1], none).repeat(count, 0)))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in targets.items()}
    return replace(ragged, targets=TaskTargets(counts=tuple(counts.tolist()), share=torch.tensor(share), **tensors))


def targets_of(batch: Ragged) -> TaskTargets:
    """The batch's targets, which must be a task's."""
    assert isinstance(batch.targets, TaskTargets)
    return batch.targets


def weighted_mean(x_SC: Tensor, example_S: Tensor, weight_S: Tensor, count: int) -> Tensor:
    """(S, C) of windows → (E, C) of the `count` examples they belong to, in each of which the weights sum to 1."""
    share_SC = x_SC * weight_S[:, None]
    return share_SC.new_zeros(count, x_SC.shape[1]).index_add(0, example_S, share_SC)


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A small tensor made once: a step recorded as a CUDA graph may not copy from the host."""
    return torch.tensor(values, device=device)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """The settings of a task (labels, window, thresholds) and what is done with them."""

    window: WindowConfig
    labels: tuple[str, ...] = ()
    """The names of the classes in the order of the head's outputs; empty for tasks without classes."""
    metric: str = ""
    """The score, higher being better, that chooses the best epoch."""

    name: ClassVar[str]
    head: ClassVar[str | None]
    """The head of the network that is trained; None for the encoder alone."""
    metrics: ClassVar[tuple[str, ...]]
    """The usual scores; the first is the default metric."""
    graph_outputs: ClassVar[tuple[str, ...]] = ("logits",)
    """What an exported graph calls the outputs of the head, together or each by its own name; () without a graph."""
    window_size: ClassVar[int | None] = None
    """The default window; None is the model's."""
    saved: ClassVar[tuple[str, ...]] = ()
    """The further fields that a model folder keeps; with labels, the head has one output per label."""
    chunk: ClassVar[int] = 1024
    """Inputs that are tokenized and predicted at a time: memory stays flat however many there are."""
    grouped: ClassVar[bool] = False
    """Whether examples that share their first text are held out together."""
    view: ClassVar[View] = View()
    """How the data doctor reads the examples."""

    # Data and settings.

    @staticmethod
    @abstractmethod
    def read(source: Source, columns: Columns = None, skip_bad: bool = False) -> Examples:
        """Examples from what the user has. Further parameters of a subclass are options of the task."""

    @staticmethod
    @abstractmethod
    def input_reader(table: Table) -> Callable[[Row], Any]:
        """A function from rows without targets to inputs; columns are found in the first row of the table."""

    @classmethod
    def fit(cls, examples: Examples) -> dict[str, Any]:
        """The fields that depend on the examples. Further parameters of a subclass are options of the task."""
        return {}

    @classmethod
    def from_examples(
        cls,
        examples: Examples,
        config: EncoderConfig,
        *,
        window: WindowConfig | None = None,
        metric: str | None = None,
        **options: Any,
    ) -> Self:
        """The task for training on these examples; `options` are those of `fit`."""
        task = cls(window=window or WindowConfig.for_model(config, cls.window_size), **cls.fit(examples, **options))
        known = task.known_metrics()
        if metric is not None and metric not in known:
            raise EverybertError(f"{cls.name} is judged by one of {', '.join(known)}, not {metric!r}")
        return replace(task, metric=metric or known[0])

    def known_metrics(self) -> tuple[str, ...]:
        """The scores that may choose the best epoch; the first is the default."""
        return self.metrics

    @classmethod
    def from_state(cls, state: Mapping[str, Any], config: EncoderConfig) -> Self:
        """From the values that `state` returned; fields that are missing keep their defaults."""
        window = WindowConfig.for_model(config, **(state.get("window") or {"size": cls.window_size}))
        hints, known = get_type_hints(cls), {}
        for name in set(cls.saved) & state.keys():
            try:
                known[name] = as_type(state[name], hints[name])
            except TypeError as wanted:
                raise ValueError(f"{name} must be {wanted}, not {str(state[name])[:60]}") from None
        return cls(window=window, metric=cls.metrics[0], **known)

    def state(self) -> dict[str, Any]:
        """JSON values for the model folder."""
        own = {name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in self.saved}
        return {"task": self.name, "window": asdict(self.window), **own}

    def read_options(self) -> dict[str, Any]:
        """Options of `read` under which further data is read as the training data was."""
        return {name: getattr(self, name) for name in signature(self.read).parameters if name in self.saved}

    @property
    def outputs(self) -> int | None:
        """The number of outputs of the head."""
        return len(self.labels) or None

    @property
    def problem_type(self) -> str | None:
        """The name that config.json has for the loss of a sequence classifier."""
        return None

    # From inputs to sequences.

    def encode(self, tokenizer: Tokenizer, config: EncoderConfig, inputs: Sequence[Any]) -> Features:
        """The sequences of inputs. A task without a head has neither these nor `decode`."""
        raise EverybertError(f"the task {self.name} only trains and scores; the vectors of texts are Model.embed's")

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """The sequences of examples, with targets: by default label_E."""
        return self.encode(tokenizer, config, examples.inputs).with_targets(label_E=self.gold(examples))

    def gold(self, examples: Examples) -> np.ndarray:
        """The target of each example in the form that the loss reads."""
        raise NotImplementedError

    def share(self, features: Features, which: np.ndarray) -> float:
        """How much these examples count in the mean over a step; the losses of parts are weighted by it."""
        return float(len(which))

    # Training.

    def logits(self, network: Network, batch: Ragged) -> Tensor:
        """(B, C) or (T, C) of the task's head."""
        assert self.head is not None
        targets = targets_of(batch)
        known = targets.features_B if targets.features_B is not None else targets.features_T
        if known is None:
            return head_logits(network, batch, self.head)
        weight = next(network.heads[self.head].parameters())
        return network.heads[self.head](known.to(weight.dtype))

    @abstractmethod
    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """The mean loss of a batch."""

    def finish(self, network: Network) -> Self:
        """The task as it is saved; may change the head's weights once, after training."""
        return self

    # Prediction.

    @torch.inference_mode()
    def run(self, network: Network, features: Features, budget: int | None = None) -> list[np.ndarray]:
        """The head's output for each sequence: (C,) or (n, C)."""
        assert self.head is not None
        known = features.targets.get("features_B", features.targets.get("features_T"))
        if known is None:
            return run_head(network, features, self.head, budget)
        head, training = network.heads[self.head].eval(), network.training
        like = next(head.parameters())
        whole = "features_B" in features.targets
        flat = torch.from_numpy(known if whole else np.concatenate(known))
        out = head(flat.to(like.device, like.dtype)).float().cpu().numpy()
        head.train(training)
        return list(out) if whole else np.split(out, features.lengths_S.cumsum()[:-1])

    def decode(self, outputs: list[np.ndarray], features: Features, inputs: Sequence[Any]) -> Iterable[Any]:
        """One prediction per input. Further parameters of a subclass are options of `predict`."""
        raise NotImplementedError

    def predict(
        self, network: Network, tokenizer: Tokenizer, inputs: Sequence[Any], budget: int | None = None, **options: Any
    ) -> Iterator[Any]:
        """One prediction per input, in order; one chunk is tokenized while the one before is computed."""
        chunks = [inputs[i : i + self.chunk] for i in range(0, len(inputs), self.chunk)]
        for chunk, features in ahead(lambda chunk: (chunk, self.encode(tokenizer, network.config, chunk)), chunks):
            yield from self.decode(self.run(network, features, budget), features, chunk, **options)

    def as_columns(self, prediction: Any, scores: bool = False) -> dict[str, Any]:
        """A prediction as columns of a table; `scores` adds the probability of every label."""
        return {"prediction": round(prediction, DIGITS) if isinstance(prediction, float) else prediction}

    def explained(self, predict: Callable[..., Any], encoding: Encoding, label: str | None) -> Explained:
        """What attribution explains in the prediction for one input; `predict` gives the prediction."""
        raise EverybertError(f"attribution explains classify, regress, rank and answer, not {self.name}")

    @classmethod
    def global_tokens(cls, encoding: Encoding) -> list[int]:
        """Longformer's global tokens of a text or pair that fits into one window: [CLS]."""
        return [0]

    @abstractmethod
    def score(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """Scores of the network's predictions."""

    def confusion(self, network: Network, features: Features) -> np.ndarray | None:
        """(C, C) counts, row the true label; None for tasks without one label per example."""
        return None

    def tuned(self, network: Network, features: Features, examples: Examples) -> Self:
        """The task with the values that are fitted on held-out data after training (thresholds, temperature)."""
        return self
