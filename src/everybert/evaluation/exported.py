"""Scores of an exported graph on labelled data, beside those of its model."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.evaluation.evaluate import evaluate
from everybert.inference.export import FILE, Exported, Session, opened
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.tasks import TASKS


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
