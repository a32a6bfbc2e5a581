"""How a model does on labelled data: the task's own scores, and for classification the confusion matrix.

Legend: C labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from everybert.errors import EverybertError
from everybert.inference.model import Model, load
from everybert.inference.task_use import chosen, settle, using
from everybert.tasks.classify import Classify
from everybert.tasks.folder import MODULES
from everybert.tasks.metrics import prf
from everybert.tasks.records import Examples, Source


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on data."""

    task: str
    metric: str
    """The one that counts."""
    scores: dict[str, float]
    examples: int
    notes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    confusion: np.ndarray | None = None
    """(C, C) counts, row the true label; for one label a text."""

    def each_label(self) -> list[dict[str, Any]]:
        """Precision, recall and F1 of every label, where there is a confusion matrix."""
        if self.confusion is None:
            return []
        columns = zip(self.labels, *prf(self.confusion), self.confusion.sum(1))
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

    Without `adapter`, a trunk that comes with adapters takes the one that its task takes by itself.
    """
    if task not in MODULES:
        raise EverybertError(f"the tasks are {', '.join(MODULES)}; there is no {task!r}")
    model = model if isinstance(model, Model) else load(model)
    with using(model, adapter or own_adapter(model, task, data, columns)):
        settled = settle(model, task)
        examples = read(task, settled, data, columns, skip_bad)
        features = settled.features(model.tokenizer, model.config, examples)
        scores = settled.evaluate(model.network, features, examples)
        single = isinstance(settled, Classify) and not settled.multi
        return Evaluation(
            task=task,
            metric=settled.metric if settled.metric in scores else next(iter(scores)),
            scores=scores,
            examples=len(examples),
            notes=examples.notes,
            labels=tuple(getattr(settled, "labels", ())),
            confusion=settled.confusion(model.network, features) if single else None,
        )


def own_adapter(model: Model, task: str, data: Source, columns: Mapping[str, str] | None) -> str | None:
    """The bundled adapter for a task; of classify's two by whether the data is of pairs."""
    found = chosen(model, task)
    if found is None or task != "classify":
        return found
    first = MODULES["classify"].read(data, columns, True).inputs[0]  # type: ignore[attr-defined]
    return chosen(model, task, pair=not isinstance(first, str))


def read(task: str, settled: Any, data: Source, columns: Mapping[str, str] | None, skip_bad: bool) -> Examples:
    """The data as the model's task reads it: multi-label and tag scheme as they were in training."""
    options: dict[str, Any] = {}
    if task == "classify":
        options["multi"] = settled.multi
    elif task == "tag" and settled.scheme in ("BIO", "BIOES"):
        options["scheme"] = settled.scheme
    examples: Examples = MODULES[task].read(data, columns, skip_bad, **options)  # type: ignore[attr-defined]
    return examples
