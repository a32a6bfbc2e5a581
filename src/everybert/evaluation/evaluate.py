"""The scores of a model on labelled data. Legend: C labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from everybert.inference.model import Model, load
from everybert.tasks import task_class
from everybert.tasks.dataset import Source
from everybert.tasks.metrics import ratios


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
        columns = (*ratios(np.diag(self.confusion), guessed_C, true_C), true_C)
        names = ("label", "precision", "recall", "f1", "examples")
        return [dict(zip(names, row)) for row in zip(self.labels, *(column.tolist() for column in columns))]


def evaluate(
    task: str,
    model: Model | str,
    data: Source,
    *,
    columns: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    adapter: str | None = None,
    allow_pickle: bool = False,
) -> Evaluation:
    """Score a model on a file, a DataFrame or a list of rows. Labels that the model does not have are an error.

    Without `adapter`, a model that comes with adapters uses its default one for the task and kind of input.
    `allow_pickle` reads .bin weights (see `load`).
    """
    kind = task_class(task)
    model = model if isinstance(model, Model) else load(model, allow_pickle=allow_pickle)
    if adapter is None and model.adapter_for(task) is not None:
        first = kind.read(data, columns, True).inputs[0]
        adapter = model.adapter_for(task, pair=not isinstance(first, str))
    with model.using(adapter):
        settled = model.task(task)
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
