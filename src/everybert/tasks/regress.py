"""Regression on texts and pairs (STS-B): one number a text, by the sequence classifier's head with one output.

While training, targets are counted from their mean in units of their spread, so that any scale of numbers learns
alike; `fold` then moves both into the head, and the saved model predicts in the units of the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.features import head_logits
from everybert.model.heads import Network, label_loss
from everybert.model.ragged import Ragged
from everybert.tasks import columns as col
from everybert.tasks import metrics
from everybert.tasks.classify import CHUNK, Text
from everybert.tasks.features import BUDGET, Features, Reading, combine, gather, run, text_features
from everybert.tasks.records import Examples, Source, number_targets, text_examples
from everybert.tasks.taught import taught_loss
from everybert.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Regress:
    """How numbers are predicted: output · scale + shift."""

    reading: Reading
    scale: float = 1.0
    shift: float = 0.0
    metric: str = "spearman"

    name = "regress"
    head = "classify"
    outputs = 1

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """Sequences, and label_E in the units of training."""
        features = text_features(tokenizer, config, examples.inputs, self.reading)
        target_E = (np.asarray(examples.targets, dtype=np.float64) - self.shift) / self.scale
        return features.labelled(label_E=target_E.astype(np.float32))

    def share(self, features: Features, which: np.ndarray) -> float:
        """The examples' number."""
        return float(len(which))

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """Mean squared error, and nearness to the teacher's values where there is one."""
        logits_E1 = combine(head_logits(network, batch, self.head), batch)
        plain = label_loss(logits_E1, batch.extra["label_E"], "regression")
        return taught_loss(logits_E1, batch, plain, "regression")

    def values(self, network: Network, features: Features, budget: int = BUDGET) -> np.ndarray:
        """(E) predictions in the units of the data."""
        out = run(network, features, lambda batch: head_logits(network, batch, self.head), budget)
        return gather(out, features)[:, 0] * self.scale + self.shift

    def evaluate(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """pearson, spearman, mse, mae."""
        return metrics.regression_scores(np.asarray(examples.targets), self.values(network, features))

    def tuned(self, network: Network, features: Features, examples: Examples) -> Regress:
        """As it is: nothing is set after training."""
        return self

    def fold(self, network: Network) -> Regress:
        """Move scale and shift into the head's output layer; returns the task without them."""
        output = network.heads[self.head].output
        assert isinstance(output, nn.Linear)
        with torch.no_grad():
            output.weight.mul_(self.scale)
            output.bias.mul_(self.scale).add_(self.shift)
        return replace(self, scale=1.0, shift=0.0)

    def state(self) -> dict[str, Any]:
        """What the model folder keeps."""
        return {"task": self.name, "window": self.reading.state(), "scale": self.scale, "shift": self.shift}


def read(source: Source, columns: Mapping[str, str] | None = None, skip_bad: bool = False) -> Examples:
    """Texts or pairs with a finite number each."""
    return number_targets(text_examples(source, col.SCORES, columns, skip_bad), skip_bad)


def begin(
    examples: Examples,
    config: EncoderConfig,
    *,
    reading: Reading | None = None,
    metric: str | None = None,
    standardise: bool = True,
) -> Regress:
    """Settle scale and shift by the training targets."""
    targets = np.asarray(examples.targets, dtype=float)
    if np.ptp(targets) == 0:
        raise EverybertError(f"{examples.where}: every target is {targets[0]:g}; there is nothing to learn")
    if metric not in (None, "pearson", "spearman"):
        raise EverybertError(f"regress is judged by pearson or spearman, not {metric!r}")
    scale, shift = (float(targets.std()), float(targets.mean())) if standardise else (1.0, 0.0)
    return Regress(reading or Reading.of(config), scale, shift, metric or "spearman")


def of(state: Mapping[str, Any], config: EncoderConfig) -> Regress:
    """From what `state` gave."""
    reading = Reading.from_state(state.get("window"), config)
    return Regress(reading, float(state.get("scale", 1.0)), float(state.get("shift", 0.0)))


def predict(
    network: Network, tokenizer: Tokenizer, task: Regress, texts: Sequence[Text], budget: int = BUDGET
) -> Iterator[float]:
    """One number a text or pair, in order."""
    for start in range(0, len(texts), CHUNK):
        features = text_features(tokenizer, network.config, texts[start : start + CHUNK], task.reading)
        yield from task.values(network, features, budget).tolist()
