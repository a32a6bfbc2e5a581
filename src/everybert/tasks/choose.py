"""Multiple choice (SWAG): each ending is read with the prompt as a pair; softmax over one score per ending.

A prompt and ending longer than the window are truncated, the longer first, and the result says by how much.

Legend: B sequences, E examples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.tasks import dataset, metrics
from everybert.tasks.dataset import Examples, View
from everybert.tasks.features import Features, TaskTargets, text_features
from everybert.tasks.task import DIGITS, Task
from everybert.text.tokenizer import Tokenizer

Prompt = tuple[str, Sequence[str]]
"""A prompt and its endings."""


@dataclass(frozen=True)
class Choice:
    """The ending that fits best."""

    index: int
    text: str
    score: float
    """Its probability among the endings."""
    scores: tuple[float, ...]
    """The probability of each ending."""
    cut: int = 0
    """Tokens of prompt and endings that did not fit the window."""


@dataclass(frozen=True, kw_only=True)
class Choose(Task):
    """The best of several endings."""

    name = "choose"
    head = "choose"
    metrics = ("accuracy",)
    graph_outputs = ()
    outputs = 1
    chunk = 256
    view = View(sequences=lambda example: [(example[0], ending) for ending in example[1]], cuts=True)

    read = staticmethod(dataset.read_choices)
    input_reader = staticmethod(dataset.choice_reader)

    def encode(self, tokenizer: Tokenizer, config: EncoderConfig, inputs: Sequence[Prompt]) -> Features:
        """One sequence per ending. Longformer's global tokens are those of the ending."""
        if any(isinstance(endings, str) or len(endings) < 1 for _, endings in inputs):
            raise EverybertError("choose needs a list of one ending or more for each prompt")
        pairs = [(prompt, ending) for prompt, endings in inputs for ending in endings]
        each = text_features(tokenizer, config, pairs, replace(self.window, long="cut"), "second")
        return each.grouped([len(endings) for _, endings in inputs])

    def gold(self, examples: Examples) -> np.ndarray:
        """(E) the number of the right ending."""
        return np.asarray(examples.targets, dtype=np.int64)

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """Cross-entropy among the endings of each prompt."""
        targets = batch.targets_as(TaskTargets)
        assert targets.label_E is not None
        logits_B = self.logits(network, batch)[: sum(targets.counts), 0]
        return choice_loss(logits_B, targets.counts, targets.label_E)

    def _probabilities(self, outputs: list[np.ndarray], features: Features) -> list[np.ndarray]:
        """For each prompt, the probabilities of its endings."""
        return [metrics.softmax(part) for part in np.split(np.concatenate(outputs), features.first_E1[1:-1])]

    def decode(self, outputs: list[np.ndarray], features: Features, inputs: Sequence[Prompt]) -> Iterator[Choice]:
        """The best ending of each prompt."""
        for (_, endings), p, cut in zip(inputs, self._probabilities(outputs, features), features.cut):
            best = int(p.argmax())
            yield Choice(best, endings[best], float(p[best]), tuple(p.tolist()), cut)

    def as_columns(self, prediction: Choice, scores: bool = False) -> dict[str, Any]:
        """The best ending, its number and probability."""
        each = {f"p(ending{i})": round(p, DIGITS) for i, p in enumerate(prediction.scores)} if scores else {}
        best = {"prediction": prediction.index, "ending": prediction.text}
        return {**best, "probability": round(prediction.score, DIGITS), **each}

    def score(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """accuracy."""
        guess = [p.argmax() for p in self._probabilities(self.run(network, features), features)]
        return {"accuracy": float((np.array(guess) == np.asarray(examples.targets)).mean())}


def choice_loss(logits_B: Tensor, counts: tuple[int, ...], labels_E: Tensor) -> Tensor:
    """Cross-entropy among the endings of each prompt, of which there are `counts[e]`."""
    rows = pad_sequence(logits_B.float().split(counts), batch_first=True, padding_value=float("-inf"))
    return F.cross_entropy(rows, labels_E)
