"""Labels and numbers for texts and pairs, by the sequence classifier's head.

classify: p = softmax(W·h + b), or σ for several labels per text (multi-label). regress: one output, trained on targets
in units of their standard deviation, so that any scale of numbers learns alike; `finish` then moves scale and shift
into the head, and the saved model predicts in the units of the data.

Legend: E examples, C labels of the head, L labels of a zero-shot prediction, K points of an attribution.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.losses import label_loss
from everybert.model.ragged import Ragged
from everybert.tasks import dataset, metrics
from everybert.tasks.dataset import Examples, View
from everybert.tasks.features import Features, TaskTargets, constant, text_features
from everybert.tasks.task import DIGITS, Explained, Task
from everybert.text.tokenizer import Encoding, Tokenizer

Text = str | tuple[str, str]
TEMPLATE = "This example is {}."
"""The hypothesis of a label, by which an entailment model classifies."""


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


def prediction(labels: Sequence[str], p_C: np.ndarray, threshold: float | None, cut: int) -> Prediction:
    """The labels by their probabilities; multi-label with a `threshold`."""
    best = int(p_C.argmax())
    return Prediction(
        label=labels[best],
        score=float(p_C[best]),
        scores={label: float(p) for label, p in zip(labels, p_C)},
        labels=() if threshold is None else tuple(n for n, p in zip(labels, p_C) if p >= threshold),
        cut=cut,
    )


@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """One output per text or pair: the weighted mean of the logits of its windows."""

    weights: tuple[float, ...] | None = None
    """The weight of each label's examples in the loss."""

    head = "classify"

    input_reader = staticmethod(dataset.pair_reader)

    def encode(self, tokenizer: Tokenizer, config: EncoderConfig, inputs: Sequence[Text]) -> Features:
        """Windows of each text or pair."""
        return text_features(tokenizer, config, inputs, self.window)

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """The loss of each example's combined logits, by the form of the targets."""
        targets = batch.targets_as(TaskTargets)
        assert targets.label_E is not None
        logits_EC = targets.combine(self.logits(network, batch))
        weight_C = None if self.weights is None else constant(self.weights, logits_EC.device)
        return label_loss(logits_EC, targets.label_E, weight_C)

    def example_logits(self, network: Network, features: Features) -> np.ndarray:
        """(E, C)."""
        return features.combine(self.run(network, features))


@dataclass(frozen=True, kw_only=True)
class Classify(TextTask):
    """One label per text, or several."""

    multi: bool = False
    """Whether a text may have several labels, or none."""
    temperature: float = 1.0
    """Logits are divided by it: 1 until calibrated (Guo et al. 2017)."""
    threshold: float = 0.5
    """Multi-label: the probability from which a label is predicted."""
    calibrate: bool = False
    """Whether to fit the temperature on the held-out data after training."""

    name = "classify"
    metrics = ("accuracy", "f1", "f1_macro", "f1_micro", "matthews")
    saved = ("labels", "multi", "temperature", "threshold")
    view = View(labels=lambda target: target if isinstance(target, tuple) else [target])

    read = staticmethod(dataset.read_classes)

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}")

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
        counts = Counter([n for t in targets for n in t] if multi else targets)
        if multi and not counts:
            raise EverybertError(f"{where}: no row has a label; check the label column")
        if labels is None and not multi:
            dataset.check_labels(counts, len(targets), where)
        order = tuple(labels) if labels is not None else tuple(dataset.order_labels(counts))
        dataset.label_ids(sorted(counts), order, where)
        weights = label_weights(class_weights, order, counts, len(examples), multi)
        return {"labels": order, "multi": multi, "weights": weights, "calibrate": calibrate}

    def known_metrics(self) -> tuple[str, ...]:
        """Matthews' correlation is of one label per text."""
        return ("f1", "accuracy", "f1_macro", "f1_micro") if self.multi else self.metrics

    @property
    def problem_type(self) -> str:
        """As `transformers` calls it."""
        return "multi_label_classification" if self.multi else "single_label_classification"

    def gold(self, examples: Examples) -> np.ndarray:
        """(E) label numbers, or (E, C) zeros and ones; labels unknown to the model are an error that lists them."""
        if not self.multi:
            return np.asarray(dataset.label_ids(examples.targets, self.labels, examples.where), dtype=np.int64)
        gold = np.zeros((len(examples), len(self.labels)), dtype=np.float32)
        for i, names in enumerate(examples.targets):
            gold[i, dataset.label_ids(names, self.labels, examples.where)] = 1.0
        return gold

    def share(self, features: Features, example_E: np.ndarray) -> float:
        """The number of examples, or the sum of their labels' weights."""
        if self.multi or self.weights is None:
            return float(len(example_E))
        return float(np.asarray(self.weights)[features.targets["label_E"][example_E]].sum())

    def probabilities(self, logits_EC: np.ndarray) -> np.ndarray:
        """(E, C), after the temperature."""
        scaled = logits_EC / self.temperature
        return metrics.sigmoid(scaled) if self.multi else metrics.softmax(scaled)

    def decode(self, outputs: list[np.ndarray], features: Features, inputs: Sequence[Text]) -> Iterator[Prediction]:
        """One prediction per text or pair."""
        for p_C, cut in zip(self.probabilities(features.combine(outputs)), features.cut):
            yield prediction(self.labels, p_C, self.threshold if self.multi else None, cut)

    def predict(
        self,
        network: Network,
        tokenizer: Tokenizer,
        inputs: Sequence[Any],
        budget: int | None = None,
        labels: Sequence[str] | None = None,
        template: str = TEMPLATE,
        multi: bool = False,
        **options: Any,
    ) -> Iterator[Prediction]:
        """As for every task; or zero-shot, for `labels` that the model was not trained on (Yin et al. 2019).

        An entailment model reads each text with the hypothesis of each label. Probabilities are a softmax of
        entailment over the labels, or with `multi` of entailment and contradiction for each label by itself.
        """
        if labels is None:
            yield from super().predict(network, tokenizer, inputs, budget, **options)
            return
        entailed = next((i for i, name in enumerate(self.labels) if name.lower().startswith("entail")), None)
        if entailed is None or self.multi or len(self.labels) < 2:
            has = ", ".join(self.labels[:5])
            raise EverybertError(f"labels= needs an entailment model (MNLI …); this one has no such label, but {has}")
        claims = [template.format(label) for label in labels]
        if not claims or len(set(claims)) < len(claims) or not all(label.strip() for label in labels):
            raise EverybertError("labels= takes different names, one or more, and a template with {} in it")
        multi = multi or len(claims) == 1
        contradicted, step = (-1 if entailed == 0 else 0), max(1, self.chunk // len(claims))
        for first in range(0, len(inputs), step):
            pairs = [(text, claim) for text in inputs[first : first + step] for claim in claims]
            features = self.encode(tokenizer, network.config, pairs)
            logits_EC = features.combine(self.run(network, features, budget)) / self.temperature
            logits_ELC = logits_EC.reshape(-1, len(claims), len(self.labels))
            each_EL = metrics.softmax(logits_ELC[..., [contradicted, entailed]])[..., 1]
            p_EL = each_EL if multi else metrics.softmax(logits_ELC[..., entailed])
            cuts = np.reshape(features.cut, (-1, len(claims))).max(1)
            for p_L, cut in zip(p_EL, cuts):
                yield prediction(labels, p_L, self.threshold if multi else None, int(cut))

    def explained(self, predict: Callable[..., Any], encoding: Encoding, label: str | None) -> Explained:
        """The log-odds of a label, ln p / (1 − p); by default of the most probable one."""
        if label is None:
            label = next(predict()).label
        if label not in self.labels:
            raise EverybertError(f"there is no label {label!r}; the model's labels are {', '.join(self.labels)}")
        at = self.labels.index(label)

        def log_odds(logits_KC: Tensor) -> Tensor:
            z_KC = logits_KC / self.temperature
            if self.multi or len(self.labels) == 1:
                return z_KC[:, at]
            others = torch.arange(z_KC.shape[1], device=z_KC.device) != at
            return z_KC[:, at] - z_KC[:, others].logsumexp(-1)

        return log_odds, f"log-odds of {label}"

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
        return {**metrics.classification_scores(gold, guess, range(len(self.labels))), "ece": ece}

    def confusion(self, network: Network, features: Features) -> np.ndarray | None:
        """(C, C) counts, row the true label; None for multi-label."""
        if self.multi:
            return None
        from sklearn.metrics import confusion_matrix

        guess = self.example_logits(network, features).argmax(1)
        return confusion_matrix(features.targets["label_E"], guess, labels=range(len(self.labels)))

    def tuned(self, network: Network, features: Features, examples: Examples) -> Self:
        """With the temperature fitted, if `calibrate` is set."""
        if not self.calibrate or self.multi:
            return self
        logits_EC = self.example_logits(network, features)
        return replace(self, temperature=metrics.fit_temperature(logits_EC, features.targets["label_E"]))


@dataclass(frozen=True, kw_only=True)
class Regress(TextTask):
    """One number per text: output · scale + shift, trained by the squared error."""

    scale: float = 1.0
    shift: float = 0.0

    name = "regress"
    metrics = ("spearman", "pearson")
    saved = ("scale", "shift")
    outputs = 1
    problem_type = "regression"

    read = staticmethod(dataset.read_numbers)

    @classmethod
    def fit(cls, examples: Examples) -> dict[str, Any]:
        """Scale and shift come from the training targets."""
        targets = np.asarray(examples.targets, dtype=float)
        if np.ptp(targets) == 0:
            raise EverybertError(f"{examples.where}: every target is {targets[0]:g}; there is nothing to learn")
        return {"scale": float(targets.std()), "shift": float(targets.mean())}

    def gold(self, examples: Examples) -> np.ndarray:
        """(E) targets in the units of training."""
        return ((np.asarray(examples.targets, dtype=np.float64) - self.shift) / self.scale).astype(np.float32)

    def decode(self, outputs: list[np.ndarray], features: Features, inputs: Sequence[Text]) -> Iterator[float]:
        """One number per text or pair."""
        yield from (features.combine(outputs)[:, 0] * self.scale + self.shift).tolist()

    def score(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """pearson, spearman, mse, mae, in the units of the data."""
        guess = self.example_logits(network, features)[:, 0] * self.scale + self.shift
        return metrics.regression_scores(np.asarray(examples.targets), guess)

    def explained(self, predict: Callable[..., Any], encoding: Encoding, label: str | None) -> Explained:
        """The output itself."""
        return lambda logits_KC: logits_KC[:, 0], "the number predicted, as the head gives it"

    def finish(self, network: Network) -> Self:
        """Move scale and shift into the head's output layer."""
        output = network.heads[self.head].output
        assert isinstance(output, nn.Linear)
        with torch.no_grad():
            output.weight.mul_(self.scale)
            output.bias.mul_(self.scale).add_(self.shift)
        return replace(self, scale=1.0, shift=0.0)


def label_weights(
    class_weights: str | Sequence[float] | None, order: Sequence[str], counts: Mapping[str, int], rows: int, multi: bool
) -> tuple[float, ...] | None:
    """The weight of each label's examples in the loss.

    "balanced" is rows / (labels · rows with it), as in scikit-learn; for multi-label negatives / positives.
    """
    if class_weights is None:
        return None
    if class_weights == "balanced":
        if multi:
            return tuple((rows - counts[n]) / max(counts[n], 1) for n in order)
        return tuple(rows / (len(order) * max(counts[n], 1)) for n in order)
    try:
        weights = tuple(map(float, class_weights.split(",") if isinstance(class_weights, str) else class_weights))
    except (TypeError, ValueError):
        weights = ()
    if isinstance(class_weights, Mapping) or len(weights) != len(order) or not all(0 < w < math.inf for w in weights):
        raise EverybertError(f"wrong class_weights={class_weights}: give balanced, or a number for {', '.join(order)}")
    return weights
