"""What an exported graph scores on labelled data, beside the model that it was made from."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from everybert.data import documents
from everybert.errors import EverybertError
from everybert.evaluation.evaluate import evaluate
from everybert.inference.export import FILE, Exported, opened
from everybert.inference.graph import GraphNetwork, Session
from everybert.model.heads import Network
from everybert.tasks.folder import MODULES

SENTENCES = 200


@dataclass(frozen=True)
class Scores:
    """The task's scores, of both."""

    examples: int
    model: dict[str, float]
    export: dict[str, float]


def scores(name: str | Path, done: Exported, data: Path, adapter: str | None = None) -> Scores:
    """Score a model and its export on a file, by the model's own task."""
    if done.task not in MODULES:
        raise EverybertError(f"{done.task} has no score; --check is for {', '.join(MODULES)}")
    model = opened(name, adapter, done.task)
    exported = copy(model)
    session = Session(Path(done.folder) / FILE, done.task, model.config.pad_id)
    exported.network = cast(Network, GraphNetwork(model.network, session))
    before, after = evaluate(model, done.task, data), evaluate(exported, done.task, data)
    return Scores(before.examples, before.scores, after.scores)


def bundled_sentences() -> list[str]:
    """Sentences and paragraphs, to compare outputs on where there is no data."""
    texts = documents(SENTENCES)
    return [text if i % 2 else text.partition(". ")[0] for i, text in enumerate(texts)]
