"""What every task has in common, so that one fine-tuning loop serves them all."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch import Tensor

from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.tasks.features import Features
from everybert.tasks.records import Examples
from everybert.text.tokenizer import Tokenizer


class Task(Protocol):
    """A task's settings (labels, window, thresholds) and what is done with them. All are frozen dataclasses."""

    @property
    def name(self) -> str:
        """classify, regress, tag, answer, choose or embed."""

    @property
    def head(self) -> str | None:
        """The network's head it trains; None for the encoder alone."""

    @property
    def outputs(self) -> int | None:
        """How many outputs the head has; None where the head fixes them."""

    @property
    def metric(self) -> str:
        """The score, higher being better, that chooses the best epoch."""

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """The examples as sequences with their targets."""

    def share(self, features: Features, which: np.ndarray) -> float:
        """How much these examples count in the mean over a step: losses of parts add up by it."""

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """The mean loss of a batch."""

    def evaluate(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """Scores of the network's predictions."""

    def tuned(self, network: Network, features: Features, examples: Examples) -> Task:
        """The task with what is set on held-out data after training (thresholds, temperature)."""

    def state(self) -> dict[str, Any]:
        """The settings as JSON keeps them in the model folder."""
