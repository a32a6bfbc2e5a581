"""Text and pair classification, one label or several (multi-label): p = softmax(W·h + b), or σ for several.

Legend: B sequences, E examples, C labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.features import head_logits
from everybert.model.heads import Network, label_loss
from everybert.model.ragged import Ragged
from everybert.tasks import columns as col
from everybert.tasks import metrics
from everybert.tasks.features import BUDGET, Features, Reading, combine, constant, gather, run, text_features
from everybert.tasks.records import Examples, Source, text_examples
from everybert.tasks.taught import taught_loss
from everybert.text.tokenizer import Tokenizer

CHUNK = 1024
"""Texts that are tokenized and predicted at a time: memory stays flat however many there are."""
Text = str | tuple[str, str]


@dataclass(frozen=True)
class Prediction:
    """What the model says of a text."""

    label: str
    """The most probable label."""
    score: float
    """Its probability."""
    scores: dict[str, float]
    """The probability of every label."""
    labels: tuple[str, ...] = ()
    """Multi-label: all labels whose probability reaches the threshold."""
    cut: int = 0
    """Tokens that were left out because truncation was asked for."""


@dataclass(frozen=True)
class Classify:
    """How texts are classified."""

    labels: tuple[str, ...]
    reading: Reading
    multi: bool = False
    """Whether a text may bear several labels, or none."""
    weights: tuple[float, ...] | None = None
    """What an example of each label counts in the loss."""
    metric: str = "accuracy"
    temperature: float = 1.0
    """Logits are divided by it: 1 until calibrated (Guo et al. 2017)."""
    threshold: float = 0.5
    """Multi-label: the probability from which a label is given."""
    calibrate: bool = False
    """Whether to fit the temperature on the held-out data after training."""

    name = "classify"
    head = "classify"

    @property
    def outputs(self) -> int:
        """One for each label."""
        return len(self.labels)

    @property
    def problem(self) -> str:
        """label_loss's word for it."""
        return "multi" if self.multi else "single"

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """Sequences, and label_E: (E) label numbers, or (E, C) zeros and ones."""
        features = text_features(tokenizer, config, examples.inputs, self.reading)
        return features.labelled(label_E=self.gold(examples))

    def gold(self, examples: Examples) -> np.ndarray:
        """(E) label numbers, or (E, C) zeros and ones; labels unknown to the model are an error that lists them."""
        if not self.multi:
            names = col.name_labels(examples.targets, examples.where)
            return np.asarray(col.label_ids(names, self.labels, examples.where), dtype=np.int64)
        gold = np.zeros((len(examples), len(self.labels)), dtype=np.float32)
        for i, names in enumerate(examples.targets):
            gold[i, col.label_ids(names, self.labels, examples.where)] = 1.0
        return gold

    def share(self, features: Features, which: np.ndarray) -> float:
        """The examples' number, or the sum of their labels' weights."""
        if self.multi or self.weights is None:
            return float(len(which))
        return float(np.asarray(self.weights)[features.labels["label_E"][which]].sum())

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """Cross-entropy of each example's combined logits, and nearness to the teacher's where there is one."""
        logits_EC = combine(head_logits(network, batch, self.head), batch)
        weight_C = None if self.weights is None else constant(self.weights, logits_EC.device)
        plain = label_loss(logits_EC, batch.extra["label_E"], self.problem, weight_C)
        return taught_loss(logits_EC, batch, plain, self.problem, weight_C)

    def logits(self, network: Network, features: Features, budget: int = BUDGET) -> np.ndarray:
        """(E, C)."""
        return gather(run(network, features, lambda batch: head_logits(network, batch, self.head), budget), features)

    def probabilities(self, logits_EC: np.ndarray) -> np.ndarray:
        """(E, C), after the temperature."""
        scaled = logits_EC / self.temperature
        return metrics.sigmoid(scaled) if self.multi else metrics.softmax(scaled)

    def evaluate(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """accuracy, f1, f1_macro, f1_micro; with one label a text, matthews and the calibration error ece too."""
        gold = features.labels["label_E"]
        p_EC = self.probabilities(self.logits(network, features))
        if self.multi:
            return metrics.multilabel_scores(gold, p_EC >= self.threshold)
        guess = p_EC.argmax(1)
        ece = metrics.calibration_error(p_EC.max(1), guess == gold)
        return {**metrics.classification_scores(gold, guess, len(self.labels)), "ece": ece}

    def confusion(self, network: Network, features: Features) -> np.ndarray:
        """(C, C) counts, row the true label."""
        guess = self.logits(network, features).argmax(1)
        return metrics.confusion(features.labels["label_E"], guess, len(self.labels))

    def tuned(self, network: Network, features: Features, examples: Examples) -> Classify:
        """With the temperature fitted, where calibration was asked for."""
        if not self.calibrate or self.multi:
            return self
        return replace(
            self,
            temperature=metrics.fit_temperature(self.logits(network, features), features.labels["label_E"]),
        )

    def state(self) -> dict[str, Any]:
        """What the model folder keeps; the labels are in config.json too."""
        return {
            "task": self.name,
            "labels": list(self.labels),
            "multi": self.multi,
            "window": self.reading.state(),
            "temperature": self.temperature,
            "threshold": self.threshold,
        }


def read(
    source: Source, columns: Mapping[str, str] | None = None, skip_bad: bool = False, multi: bool | None = None
) -> Examples:
    """Texts or pairs with their labels. Multi-label where labels are lists, or `multi` says so ("a|b" is split)."""
    examples = text_examples(source, col.LABELS, columns, skip_bad)
    lists = any(isinstance(t, list | tuple | set) for t in examples.targets)
    if not (lists if multi is None else multi):
        return examples
    return replace(examples, targets=[_split_labels(t, i, examples.where) for i, t in enumerate(examples.targets)])


def _split_labels(value: Any, row: int, where: str) -> tuple[str, ...]:
    """("a", "b") of ["a", "b"], "a|b" or "a;b"; () of an empty list or text."""
    if isinstance(value, str):
        value = [part for part in value.replace(";", "|").split("|") if part.strip()]
    elif not isinstance(value, list | tuple | set):
        value = [value]
    names = [col.label_name(v) for v in value]
    if any(not name for name in names):
        raise EverybertError(f"{where}, row {row + 1}: one of the labels is missing ({value!r}); fill it in")
    return tuple(str(name) for name in names)


def begin(
    examples: Examples,
    config: EncoderConfig,
    *,
    reading: Reading | None = None,
    labels: Sequence[str] | None = None,
    class_weights: str | Sequence[float] | None = None,
    metric: str | None = None,
    calibrate: bool = False,
) -> Classify:
    """Settle the label order and the weights by the training examples.

    class_weights "balanced" counts a label by rows / (labels · rows with it), as scikit-learn does; for multi-label
    a positive counts by negatives / positives.
    """
    multi = isinstance(examples.targets[0], tuple)
    names = [n for t in examples.targets for n in t] if multi else col.name_labels(examples.targets, examples.where)
    counts = Counter(names)
    if multi and not counts:
        raise EverybertError(f"{examples.where}: no row has a label; check the label column")
    if not multi:
        col.check_labels(counts, len(names), examples.where)
    order = tuple(labels) if labels is not None else tuple(col.order_labels(counts))
    col.label_ids(sorted(counts), order, examples.where)
    weights: tuple[float, ...] | None = None
    if class_weights == "balanced":
        rows = len(examples)
        if multi:
            weights = tuple((rows - counts[n]) / max(counts[n], 1) for n in order)
        else:
            weights = tuple(rows / (len(order) * max(counts[n], 1)) for n in order)
    elif class_weights is not None:
        weights = tuple(float(w) for w in class_weights)
        if len(weights) != len(order) or min(weights) <= 0:
            raise EverybertError(f"class_weights needs one positive number for each of {', '.join(order)}")
    known = ("accuracy", "f1", "f1_macro", "f1_micro") + (() if multi else ("matthews",))
    chosen = metric or ("f1" if multi else "accuracy")
    if chosen not in known:
        raise EverybertError(f"classify is judged by one of {', '.join(known)}, not {chosen!r}")
    return Classify(order, reading or Reading.of(config), multi, weights, chosen, calibrate=calibrate)


def of(state: Mapping[str, Any], config: EncoderConfig) -> Classify:
    """From what `state` gave, or from a folder's labels alone."""
    return Classify(
        labels=tuple(state["labels"]),
        reading=Reading.from_state(state.get("window"), config),
        multi=bool(state.get("multi", False)),
        temperature=float(state.get("temperature", 1.0)),
        threshold=float(state.get("threshold", 0.5)),
    )


def predict(
    network: Network, tokenizer: Tokenizer, task: Classify, texts: Sequence[Text], budget: int = BUDGET
) -> Iterator[Prediction]:
    """One prediction a text or pair, in order, chunk after chunk."""
    for start in range(0, len(texts), CHUNK):
        part = [t if isinstance(t, str) else (t[0], t[1]) for t in texts[start : start + CHUNK]]
        features = text_features(tokenizer, network.config, part, task.reading)
        cuts = features.cut_E if features.cut_E is not None else np.zeros(len(part), dtype=int)
        for p_C, cut in zip(task.probabilities(task.logits(network, features, budget)), cuts):
            best = int(p_C.argmax())
            yield Prediction(
                label=task.labels[best],
                score=float(p_C[best]),
                scores={label: float(p) for label, p in zip(task.labels, p_C)},
                labels=tuple(n for n, p in zip(task.labels, p_C) if p >= task.threshold) if task.multi else (),
                cut=int(cut),
            )
