"""One file per task: data, sequences, loss, predictions and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everybert.errors import EverybertError
from everybert.model.heads import Network
from everybert.tasks.answer import AnswerQuestions
from everybert.tasks.choose import Choose
from everybert.tasks.classify import Classify, Regress
from everybert.tasks.embed import Embed
from everybert.tasks.tag import Tag
from everybert.tasks.task import Task

TASKS: dict[str, type[Task]] = {task.name: task for task in (Classify, Regress, Tag, AnswerQuestions, Choose, Embed)}


def task_class(name: str) -> type[Task]:
    """The class of a task, by name."""
    if name not in TASKS:
        raise EverybertError(f"the tasks are {', '.join(TASKS)}; there is no {name!r}")
    return TASKS[name]


def load_task(
    name: str,
    network: Network,
    labels: Sequence[str] | None = None,
    problem_type: str | None = None,
    extras: Mapping[str, Any] | None = None,
) -> Task:
    """One of a model's tasks with the settings of its folder: everybert.json (`extras`), else config.json's labels."""
    task = task_class(name)
    saved = (extras or {}).get("task") or {}
    if task.head is not None and task.head not in network.heads:
        has = ", ".join(network.heads) or "none"
        raise EverybertError(
            f"this model has no {task.head} head (it has: {has}); fine-tune one: everybert finetune {name}"
        )
    own = saved.get("task") or ("regress" if problem_type == "regression" else None)
    if {name, own} == {"classify", "regress"}:
        does = "predicts a number" if own == "regress" else "predicts labels"
        raise EverybertError(f"this model {does}; use {own}, not {name}")
    state: dict[str, Any] = dict(saved) if saved.get("task") == name else {}
    if task.labelled:
        outputs = network.heads[str(task.head)].output.out_features  # type: ignore[union-attr]
        state.setdefault("labels", list(labels or [f"LABEL_{i}" for i in range(int(outputs))]))  # type: ignore[arg-type]
        state.setdefault("multi", problem_type == "multi_label_classification")
    return task.from_state(state, network.config)
