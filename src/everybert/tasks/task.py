"""The base class of the tasks: the shared life of a task, from the user's data to the scores of a trained model.

    data        read ──▶ Examples ──from_examples──▶ the task, with its labels and other settings
    sequences   encode: inputs ──▶ Features; features: Examples ──▶ Features with targets
    training    make_batch ──▶ logits ──▶ loss; after the last step: tuned, finish
    prediction  predict: encode ──▶ run ──▶ decode ──▶ one prediction per input
    scores      run ──▶ score
    folder      state ──▶ everybert.json ──from_state──▶ the task

Sequences and batches are those of features.py. A subclass is one file, which defines what differs between tasks.

Legend: T tokens, B sequences of a batch, S sequences, E examples, C labels, n tokens of a text, K attribution points.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from typing import Any, ClassVar, Self, get_type_hints

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.files import as_type
from everybert.model.config import EncoderConfig
from everybert.model.engine import ahead, run_head
from everybert.model.heads import Network, head_logits
from everybert.model.ragged import Ragged
from everybert.tasks.dataset import Columns, Examples, Row, Source, Table, View
from everybert.tasks.features import Features, TaskTargets
from everybert.text.tokenizer import Encoding, Tokenizer
from everybert.text.windows import WindowConfig

DIGITS = 5
"""Of a probability in a table: the other sequences of a batch change the seventh."""
Explained = tuple[Callable[[Tensor], Tensor], str]
"""What attribution explains: a value (K) of K points' logits (K, C) or (K, n, C), and its name."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """The settings of a task (labels, window, thresholds), and the methods that use them. Immutable."""

    window: WindowConfig
    labels: tuple[str, ...] = ()
    """The names of the classes in the order of the head's outputs; empty for tasks without classes."""
    metric: str = ""
    """The score by which the best epoch is chosen; higher is better."""

    # What is the same for all models of a task.

    name: ClassVar[str]
    head: ClassVar[str | None]
    """The head of the network that is trained; None for the encoder alone."""
    metrics: ClassVar[tuple[str, ...]]
    """The usual scores; the first is the default metric."""
    saved: ClassVar[tuple[str, ...]] = ()
    """The fields that are saved in the model folder. With `labels` among them, the head has one output per label."""
    window_size: ClassVar[int | None] = None
    """The default window; None is the model's."""
    chunk: ClassVar[int] = 1024
    """Inputs that are tokenized and predicted at a time: memory stays flat however many there are."""
    grouped: ClassVar[bool] = False
    """Whether examples that share their first text are held out together."""
    graph_outputs: ClassVar[tuple[str, ...]] = ("logits",)
    """What an exported graph calls the outputs of the head, together or each by its own name; () without a graph."""
    view: ClassVar[View] = View()
    """How the data doctor reads the examples."""

    # ── data ─────────────────────────────────────────────────────────────────────────────────────────────────

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
        window = window or WindowConfig.for_model(config.max_positions, cls.window_size)
        task = cls(window=window, **cls.fit(examples, **options))
        metrics = task.known_metrics()
        if metric is not None and metric not in metrics:
            raise EverybertError(f"{cls.name} is judged by one of {', '.join(metrics)}, not {metric!r}")
        return replace(task, metric=metric or metrics[0])

    def known_metrics(self) -> tuple[str, ...]:
        """The scores that may choose the best epoch; the first is the default."""
        return self.metrics

    def read_options(self) -> dict[str, Any]:
        """The options of `read` that were used for the training data, to read more data in the same way."""
        return {name: getattr(self, name) for name in signature(self.read).parameters if name in self.saved}

    # ── sequences ────────────────────────────────────────────────────────────────────────────────────────────

    def encode(self, tokenizer: Tokenizer, config: EncoderConfig, inputs: Sequence[Any]) -> Features:
        """The sequences of inputs. A task without a head has neither these nor `decode`."""
        raise EverybertError(f"the task {self.name} only trains and scores; the vectors of texts are Model.embed's")

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """The sequences of examples, with targets: by default label_E."""
        return self.encode(tokenizer, config, examples.inputs).with_targets(label_E=self.gold(examples))

    def gold(self, examples: Examples) -> np.ndarray:
        """The target of each example in the form that the loss reads."""
        raise NotImplementedError

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def outputs(self) -> int | None:
        """The number of outputs of the head."""
        return len(self.labels) or None

    def logits(self, network: Network, batch: Ragged) -> Tensor:
        """(B, C) or (T, C) of the task's head."""
        assert self.head is not None
        targets = batch.targets_as(TaskTargets)
        computed = targets.features_T if targets.features_B is None else targets.features_B
        if computed is None:
            return head_logits(network, batch, self.head)
        return network.heads[self.head](computed)

    @abstractmethod
    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """The mean loss of a batch."""

    def share(self, features: Features, example_E: np.ndarray) -> float:
        """The weight of these examples in the mean loss of a step, which may be computed in parts."""
        return float(len(example_E))

    def tuned(self, network: Network, features: Features, examples: Examples) -> Self:
        """The task with the values that are fitted on held-out data after training (thresholds, temperature)."""
        return self

    def finish(self, network: Network) -> Self:
        """The task as it is saved. May change the weights of the head; called once, after training."""
        return self

    # ── prediction ───────────────────────────────────────────────────────────────────────────────────────────

    def predict(
        self, network: Network, tokenizer: Tokenizer, inputs: Sequence[Any], budget: int | None = None, **options: Any
    ) -> Iterator[Any]:
        """One prediction per input, in order; one chunk is tokenized while the one before is computed."""
        chunks = [inputs[i : i + self.chunk] for i in range(0, len(inputs), self.chunk)]
        for chunk, features in ahead(lambda chunk: (chunk, self.encode(tokenizer, network.config, chunk)), chunks):
            yield from self.decode(self.run(network, features, budget), features, chunk, **options)

    @torch.inference_mode()
    def run(self, network: Network, features: Features, budget: int | None = None) -> list[np.ndarray]:
        """The head's output for each sequence: (C,) or (n, C)."""
        assert self.head is not None
        whole = "features_B" in features.targets
        computed = features.targets.get("features_B" if whole else "features_T")
        if computed is None:
            return run_head(network, features, self.head, budget)
        head, training = network.heads[self.head].eval(), network.training
        rows = head(torch.from_numpy(computed if whole else np.concatenate(computed))).float().cpu().numpy()
        head.train(training)
        return list(rows) if whole else np.split(rows, features.lengths_S.cumsum()[:-1])

    def decode(self, outputs: list[np.ndarray], features: Features, inputs: Sequence[Any]) -> Iterable[Any]:
        """One prediction per input. Further parameters of a subclass are options of `predict`."""
        raise NotImplementedError

    def as_columns(self, prediction: Any, scores: bool = False) -> dict[str, Any]:
        """A prediction as columns of a table; `scores` adds the probability of every label."""
        return {"prediction": round(prediction, DIGITS) if isinstance(prediction, float) else prediction}

    def explained(self, predict: Callable[..., Any], encoding: Encoding, label: str | None) -> Explained:
        """What attribution explains in the prediction for one input; `predict` returns that prediction."""
        raise EverybertError(f"attribution explains classify, regress, rank and answer, not {self.name}")

    @classmethod
    def global_tokens(cls, encoding: Encoding) -> list[int]:
        """Longformer's global tokens of a text or pair that fits into one window: [CLS]."""
        return [0]

    # ── scores ───────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def score(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """Scores of the network's predictions."""

    def confusion(self, network: Network, features: Features) -> np.ndarray | None:
        """(C, C) counts, row the true label; None for tasks without one label per example."""
        return None

    # ── the model folder ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def problem_type(self) -> str | None:
        """The name that config.json has for the loss of a sequence classifier."""
        return None

    def state(self) -> dict[str, Any]:
        """JSON values for the model folder."""
        values = {name: getattr(self, name) for name in self.saved}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {"task": self.name, "window": asdict(self.window), **values}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], config: EncoderConfig) -> Self:
        """The task from the values that `state` returned; missing fields have their defaults."""
        window = WindowConfig.for_model(config.max_positions, **(state.get("window") or {"size": cls.window_size}))
        types, values = get_type_hints(cls), {}
        for name in set(cls.saved) & state.keys():
            try:
                values[name] = as_type(state[name], types[name])
            except TypeError as wanted:
                raise ValueError(f"{name} must be {wanted}, not {str(state[name])[:60]}") from None
        return cls(window=window, metric=cls.metrics[0], **values)
