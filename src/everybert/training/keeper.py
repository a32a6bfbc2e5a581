"""What a fine-tuning run remembers: its log, and the weights of its best epoch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from everybert.tasks.features import Features
from everybert.tasks.records import Examples
from everybert.tasks.task import Task
from everybert.training.checkpoint import Progress
from everybert.training.distributed import World
from everybert.training.logs import Logs
from everybert.training.step import Compute


class History(Logs):
    """Logs that remember what they were told."""

    def __init__(self, quiet: bool) -> None:
        super().__init__(None, quiet=quiet)
        self.rows: list[dict[str, Any]] = []

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Keep the row."""
        self.rows.append({"step": step, **values})


class Keeper:
    """Scores every epoch, or more often, and keeps the weights of the best."""

    def __init__(
        self, task: Task, compute: Compute, features: Features, dev: Examples, each: int, patience: int | None
    ) -> None:
        self.task, self.compute, self.features, self.dev, self.each = task, compute, features, dev, each
        self.patience = patience
        self.best: float | None = None
        self.epoch = self.step = 0
        self.weights: dict[str, Tensor] = {}

    def evaluate(self, progress: Progress) -> tuple[float, dict[str, float]]:
        """(−score, scores); ends the run when patience is over."""
        scores = self.task.evaluate(self.compute.network, self.features, self.dev)
        score, epoch = scores[self.task.metric], math.ceil(progress.step / self.each)
        if self.best is None or score > self.best:
            self.best, self.epoch, self.step = score, epoch, progress.step
            trained = self.compute.master.named_parameters()
            self.weights = {name: p.detach().clone() for name, p in trained if p.requires_grad}
        elif self.patience is not None and progress.step - self.step >= self.patience * self.each:
            progress.total = progress.step
        return -score, scores

    @torch.no_grad()
    def restore(self, world: World) -> None:
        """Put the best epoch's weights back, on every rank; the last ones stay where no epoch was finished."""
        for name, parameter in self.compute.master.named_parameters():
            if name in self.weights:
                parameter.copy_(self.weights[name])
        world.share([p for p in self.compute.master.parameters() if p.requires_grad])
        self.epoch = int(world.agree(self.epoch)[0])
        self.compute.refresh()
