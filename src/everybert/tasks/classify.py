"""Labels and numbers for texts and pairs, by the sequence classifier's head.

classify: p = softmax(W·h + b), or σ for several labels per text (multi-label). regress: one output, trained on targets
in units of their standard deviation, so that any scale of numbers learns alike; `finish` then moves scale and shift
into the head, and the saved model predicts in the units of the data.

Legend: B sequences, E examples, C labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.losses import label_loss
from everybert.model.ragged import Ragged
from everybert.tasks import dataset, metrics
from everybert.tasks.dataset import Examples
from everybert.tasks.task import (
    DIGITS,
    Features,
    Task,
    combine,
    constant,
    label_weights,
    targets_of,
    text_features,
)
from everybert.text.tokenizer import Tokenizer

TEACHER_WEIGHT, TEACHER_TEMPERATURE = 0.8, 2.0
"""α and T of `teacher_loss`."""
Text = str | tuple[str, str]


@dataclass(frozen=True)
class Prediction:
    """The labels of a text."""

    label: str
    """The most probable label."""
    score: float
    """Its probability."""
    scores: dict[str, float]
    """The probability of every label."""
    labels: tuple[str, ...] = ()
    """Multi-label: all labels whose probability reaches the threshold."""
    cut: int = 0
    """Tokens that were cut off, if truncation was asked for."""


@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """One output per text or pair: the weighted mean of the logits of its windows."""

    head = "classify"

    input_reader = staticmethod(dataset.pair_reader)

    def encode(self, tokenizer: Tokenizer, config: EncoderConfig, inputs: Sequence[Text]) -> Features:
        """Windows of each text or pair."""
        texts = [t if isinstance(t, str) else (t[0], t[1]) for t in inputs]
        return text_features(tokenizer, config, texts, self.window)

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """Sequences, with label_E."""
        return self.encode(tokenizer, config, examples.inputs).with_targets(label_E=self.gold(examples))

    def gold(self, examples: Examples) -> np.ndarray:
        """The targets of training."""
        raise NotImplementedError

    def example_logits(self, network: Network, features: Features) -> np.ndarray:
        """(E, C)."""
        return features.combine(self.run(network, features))


@dataclass(frozen=True, kw_only=True)
class Classify(TextTask):
    """One label per text, or several."""

    multi: bool = False
    """Whether a text may have several labels, or none."""
    weights: tuple[float, ...] | None = None
    """What an example of each label counts in the loss."""
    temperature: float = 1.0
    """Logits are divided by it: 1 until calibrated (Guo et al. 2017)."""
    threshold: float = 0.5
    """Multi-label: the probability from which a label is predicted."""
    calibrate: bool = False
    """Whether to fit the temperature on the held-out data after training."""

    name = "classify"
    metrics = ("accuracy", "f1", "f1_macro", "f1_micro", "matthews")
    labelled = True
    saved = {"labels": tuple, "multi": bool, "temperature": float, "threshold": float}

    read = staticmethod(dataset.read_classes)

    @classmethod
    def fit(
        cls,
        examples: Examples,
        labels: Sequence[str] | None = None,
        class_weights: str | Sequence[float] | None = None,
        calibrate: bool = False,
    ) -> dict[str, Any]:
        """The label order and the class weights come from the training examples."""
        multi = isinstance(examples.targets[0], tuple)
        where, targets = examples.where, examples.targets
        counts = Counter([n for t in targets for n in t] if multi else dataset.name_labels(targets, where))
        if multi and not counts:
            raise EverybertError(f"{where}: no row has a label; check the label column")
        if not multi:
            dataset.check_labels(counts, len(targets), where)
        order = tuple(labels) if labels is not None else tuple(dataset.order_labels(counts))
        dataset.label_ids(sorted(counts), order, where)
        weights = label_weights(class_weights, order, counts, len(examples), multi)
        return {"labels": order, "multi": multi, "weights": weights, "calibrate": calibrate}

    def known_metrics(self) -> tuple[str, ...]:
        """Matthews' correlation is of one label per text."""
        return ("f1", "accuracy", "f1_macro", "f1_micro") if self.multi else self.metrics

    def read_options(self) -> dict[str, Any]:
        """Whether labels are split."""
        return {"multi": self.multi}

    @property
    def problem_type(self) -> str:
        """As `transformers` calls it."""
        return "multi_label_classification" if self.multi else "single_label_classification"

    def gold(self, examples: Examples) -> np.ndarray:
        """(E) label numbers, or (E, C) zeros and ones; labels unknown to the model are an error that lists them."""
        if not self.multi:
            names = dataset.name_labels(examples.targets, examples.where)
            return np.asarray(dataset.label_ids(names, self.labels, examples.where), dtype=np.int64)
        gold = np.zeros((len(examples), len(self.labels)), dtype=np.float32)
        for i, names in enumerate(examples.targets):
            gold[i, dataset.label_ids(names, self.labels, examples.where)] = 1.0
        return gold

    def share(self, features: Features, which: np.ndarray) -> float:
        """The number of examples, or the sum of their labels' weights."""
        if self.multi or self.weights is None:
            return float(len(which))
        return float(np.asarray(self.weights)[features.targets["label_E"][which]].sum())

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """Cross-entropy of each example's combined logits, and the distance to a teacher's if there is one."""
        targets = targets_of(batch)
        assert targets.label_E is not None
        logits_EC = combine(self.logits(network, batch), targets)
        weight_C = None if self.weights is None else constant(self.weights, logits_EC.device)
        problem = "multi" if self.multi else "single"
        loss = label_loss(logits_EC, targets.label_E, problem, weight_C)
        return teacher_loss(logits_EC, targets.teacher_E, targets.label_E, loss, problem, weight_C)

    def learns_from(self, teacher: Task) -> bool:
        """A teacher has the same labels in the same order."""
        return isinstance(teacher, Classify) and (teacher.labels, teacher.multi) == (self.labels, self.multi)

    def probabilities(self, logits_EC: np.ndarray) -> np.ndarray:
        """(E, C), after the temperature."""
        scaled = logits_EC / self.temperature
        return metrics.sigmoid(scaled) if self.multi else metrics.softmax(scaled)

    def decode(self, outputs: list[np.ndarray], features: Features, inputs: Sequence[Text]) -> Iterator[Prediction]:
        """One prediction per text or pair."""
        for p_C, cut in zip(self.probabilities(features.combine(outputs)), features.cut):
            best = int(p_C.argmax())
            yield Prediction(
                label=self.labels[best],
                score=float(p_C[best]),
                scores={label: float(p) for label, p in zip(self.labels, p_C)},
                labels=tuple(n for n, p in zip(self.labels, p_C) if p >= self.threshold) if self.multi else (),
                cut=cut,
            )

    def as_columns(self, prediction: Prediction, scores: bool = False) -> dict[str, Any]:
        """The label (multi-label: all of them) and its probability."""
        each = {f"p({label})": round(p, DIGITS) for label, p in prediction.scores.items()} if scores else {}
        label = list(prediction.labels) if self.multi else prediction.label
        return {"prediction": label, "probability": round(prediction.score, DIGITS), **each}

    def score(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """accuracy, f1, f1_macro, f1_micro; with one label per text, matthews and the calibration error ece too."""
        gold = features.targets["label_E"]
        p_EC = self.probabilities(self.example_logits(network, features))
        if self.multi:
            return metrics.multilabel_scores(gold, p_EC >= self.threshold)
        guess = p_EC.argmax(1)
        ece = metrics.calibration_error(p_EC.max(1), guess == gold)
        return {**metrics.classification_scores(gold, guess, len(self.labels)), "ece": ece}

    def confusion(self, network: Network, features: Features) -> np.ndarray | None:
        """(C, C) counts, row the true label; None for multi-label."""
        if self.multi:
            return None
        guess = self.example_logits(network, features).argmax(1)
        return metrics.confusion(features.targets["label_E"], guess, len(self.labels))

    def tuned(self, network: Network, features: Features, examples: Examples) -> Self:
        """With the temperature fitted, if calibration was asked for."""
        if not self.calibrate or self.multi:
            return self
        logits_EC = self.example_logits(network, features)
        return replace(self, temperature=metrics.fit_temperature(logits_EC, features.targets["label_E"]))


@dataclass(frozen=True, kw_only=True)
class Regress(TextTask):
    """One number per text: output · scale + shift."""

    scale: float = 1.0
    shift: float = 0.0

    name = "regress"
    metrics = ("spearman", "pearson")
    saved = {"scale": float, "shift": float}
    outputs = 1
    problem_type = "regression"

    read = staticmethod(dataset.read_numbers)

    @classmethod
    def fit(cls, examples: Examples, standardise: bool = True) -> dict[str, Any]:
        """Scale and shift come from the training targets."""
        targets = np.asarray(examples.targets, dtype=float)
        if np.ptp(targets) == 0:
            raise EverybertError(f"{examples.where}: every target is {targets[0]:g}; there is nothing to learn")
        return {"scale": float(targets.std()), "shift": float(targets.mean())} if standardise else {}

    def gold(self, examples: Examples) -> np.ndarray:
        """(E) targets in the units of training."""
        return ((np.asarray(examples.targets, dtype=np.float64) - self.shift) / self.scale).astype(np.float32)

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """Mean squared error, and the distance to a teacher's values if there is one."""
        targets = targets_of(batch)
        assert targets.label_E is not None
        logits_E1 = combine(self.logits(network, batch), targets)
        loss = label_loss(logits_E1, targets.label_E, "regression")
        teacher_E = None if targets.teacher_E is None else (targets.teacher_E - self.shift) / self.scale
        return teacher_loss(logits_E1, teacher_E, targets.label_E, loss, "regression")

    def learns_from(self, teacher: Task) -> bool:
        """A teacher is a regression too."""
        return isinstance(teacher, Regress)

    def decode(self, outputs: list[np.ndarray], features: Features, inputs: Sequence[Text]) -> Iterator[float]:
        """One number per text or pair."""
        yield from (features.combine(outputs)[:, 0] * self.scale + self.shift).tolist()

    def as_columns(self, prediction: float, scores: bool = False) -> dict[str, Any]:
        """The number."""
        return {"prediction": round(prediction, DIGITS)}

    def score(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """pearson, spearman, mse, mae, in the units of the data."""
        guess = self.example_logits(network, features)[:, 0] * self.scale + self.shift
        return metrics.regression_scores(np.asarray(examples.targets), guess)

    def finish(self, network: Network) -> Self:
        """Move scale and shift into the head's output layer."""
        output = network.heads[self.head].output
        assert isinstance(output, nn.Linear)
        with torch.no_grad():
            output.weight.mul_(self.scale)
            output.bias.mul_(self.scale).add_(self.shift)
        return replace(self, scale=1.0, shift=0.0)


def teacher_loss(
    logits_EC: Tensor,
    teacher_EC: Tensor | None,
    label_E: Tensor,
    loss: Tensor,
    problem: str,
    weight_C: Tensor | None = None,
) -> Tensor:
    """(1 − α) · loss + α · T² · KL(teacher ‖ student) at temperature T (Hinton et al. 2015); `loss` without a teacher.

    For a regression the second term is the squared distance, for several labels their cross-entropies. Examples are
    weighted by their label's weight, as in `loss`.
    """
    if teacher_EC is None:
        return loss
    mine_EC, theirs_EC, t = logits_EC.float(), teacher_EC.float(), TEACHER_TEMPERATURE
    if problem == "regression":
        near = F.mse_loss(mine_EC, theirs_EC)
    elif problem == "multi":
        near = F.binary_cross_entropy_with_logits(mine_EC, torch.sigmoid(theirs_EC), pos_weight=weight_C)
    else:
        near_E = t**2 * F.kl_div(F.log_softmax(mine_EC / t, -1), F.softmax(theirs_EC / t, -1), reduction="none").sum(-1)
        weight_E = torch.ones_like(near_E) if weight_C is None else weight_C[label_E]
        near = (near_E * weight_E).sum() / weight_E.sum()
    return (1 - TEACHER_WEIGHT) * loss + TEACHER_WEIGHT * near
