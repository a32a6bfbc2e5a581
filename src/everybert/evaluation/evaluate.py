"""The scores of a model, or of its exported graph, on labelled data.

Legend: C labels, B sequences, T tokens in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.inference.export import FILE, Exported, Session, opened
from everybert.inference.model import Model, load
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.tasks import TASKS, task_class
from everybert.tasks.dataset import Source
from everybert.tasks.metrics import ratios
from everybert.tasks.task import Task


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on data."""

    task: str
    metric: str
    """The score that counts."""
    scores: dict[str, float]
    examples: int
    notes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    confusion: np.ndarray | None = None
    """(C, C) counts, row the true label; only with one label per text."""

    def each_label(self) -> list[dict[str, Any]]:
        """Precision, recall and F1 of every label, if there is a confusion matrix."""
        if self.confusion is None:
            return []
        guessed_C, true_C = self.confusion.sum(0), self.confusion.sum(1)
        columns = zip(self.labels, *ratios(np.diag(self.confusion), guessed_C, true_C), true_C)
        return [
            {"label": label, "precision": float(p), "recall": float(r), "f1": float(f), "examples": int(n)}
            for label, p, r, f, n in columns
        ]


def evaluate(
    model: Model | str,
    task: str,
    data: Source,
    *,
    columns: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    adapter: str | None = None,
) -> Evaluation:
    """Score a model on a file, a DataFrame or a list of rows. Labels that the model has not are an error.

    Without `adapter`, a model that comes with adapters uses its default one for the task and kind of input.
    """
    kind = task_class(task)
    model = model if isinstance(model, Model) else load(model)
    if adapter is None and model.adapter_for(task) is not None:
        first = kind.read(data, columns, True).inputs[0]
        adapter = model.adapter_for(task, pair=not isinstance(first, str))
    with model.using(adapter):
        settled: Task = model.task(task)
        examples = kind.read(data, columns, skip_bad, **settled.read_options())
        features = settled.features(model.tokenizer, model.config, examples)
        scores = settled.score(model.network, features, examples)
        return Evaluation(
            task=task,
            metric=settled.metric if settled.metric in scores else next(iter(scores)),
            scores=scores,
            examples=len(examples),
            notes=examples.notes,
            labels=settled.labels,
            confusion=settled.confusion(model.network, features),
        )


# ── exported graphs ──────────────────────────────────────────────────────────────────────────────────────────


def evaluate_export(name: str | Path, done: Exported, data: Path, adapter: str | None = None) -> dict[str, Any]:
    """Score a model and its export on a file with the model's task: examples, and the scores of both."""
    if done.task not in TASKS:
        raise EverybertError(f"{done.task} has no score; --check is for {', '.join(TASKS)}")
    model = opened(name, adapter, done.task)
    exported = copy(model)
    session = Session(Path(done.folder) / FILE, done.task, model.config.pad_id)
    exported.network = cast(Network, GraphNetwork(model.network, session))
    before, after = evaluate(model, done.task, data), evaluate(exported, done.task, data)
    return {"examples": before.examples, "model": before.scores, "export": after.scores}


class GraphNetwork(nn.Module):
    """An exported graph with the interface of a Network, so that tasks read its logits."""

    def __init__(self, network: Network, session: Session) -> None:
        super().__init__()
        self.config = network.config
        self.encoder = _GraphEncoder(network, session)
        self.heads = nn.ModuleDict()
        for name, head in network.heads.items():  # tasks read the number of outputs of a head
            self.heads[name] = nn.ModuleDict({"output": head.output} if hasattr(head, "output") else {})  # type: ignore[dict-item]

    def head(self, name: str) -> nn.Module:
        """The head of that name: the graph contains it."""
        return self.heads[name]

    def sequence_logits(self, logits_BC: Tensor, batch: Ragged, name: str) -> Tensor:
        """(B, C), unchanged."""
        return logits_BC

    def token_logits(self, logits_TC: Tensor, name: str) -> Tensor:
        """(T, C), unchanged."""
        return logits_TC


class _GraphEncoder(nn.Module):
    """Returns the graph's first output (hidden states or logits), or the two of `answer` stacked."""

    def __init__(self, network: Network, session: Session) -> None:
        super().__init__()
        self.embeddings = network.encoder.embeddings  # only its device is read
        self.session = session

    def check(self, batch: Ragged) -> None:
        """The graph checks its inputs itself."""

    def forward(self, batch: Ragged, *_: Any) -> Tensor:
        found = list(self.session(batch).values())
        return torch.stack(found, dim=-1) if self.session.task == "answer" else found[0]
