"""A task from what its model folder says: everybert.json where it is there, else config.json's labels alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everybert.errors import EverybertError
from everybert.model.heads import Network
from everybert.tasks import answer, choose, classify, embed, regress, tag
from everybert.tasks.task import Task

MODULES = {"classify": classify, "regress": regress, "tag": tag, "answer": answer, "choose": choose, "embed": embed}


def task_of(
    name: str,
    network: Network,
    labels: Sequence[str] | None = None,
    problem_type: str | None = None,
    extras: Mapping[str, Any] | None = None,
) -> Task:
    """The settings of one of a model's tasks; what the model was not made for is an error that says so."""
    if name not in MODULES:
        raise EverybertError(f"the tasks are {', '.join(MODULES)}; there is no {name!r}")
    saved = (extras or {}).get("task") or {}
    head = {"regress": "classify", "embed": None}.get(name, name)
    if head is not None and head not in network.heads:
        has = ", ".join(network.heads) or "none"
        raise EverybertError(f"this model has no {head} head (it has: {has}); fine-tune one: everybert finetune {name}")
    own = saved.get("task") or ("regress" if problem_type == "regression" else None)
    if {name, own} == {"classify", "regress"}:
        does = "predicts a number" if own == "regress" else "predicts labels"
        raise EverybertError(f"this model {does}; use {own}, not {name}")
    state: dict[str, Any] = dict(saved) if saved.get("task") == name else {}
    if name in ("classify", "tag"):
        outputs = network.heads[name].output.out_features  # type: ignore[union-attr]
        state.setdefault("labels", list(labels or [f"LABEL_{i}" for i in range(int(outputs))]))  # type: ignore[arg-type]
        state.setdefault("multi", problem_type == "multi_label_classification")
    task: Task = MODULES[name].of(state, network.config)
    return task
