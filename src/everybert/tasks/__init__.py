"""One file per task: data, sequences, loss, predictions and scores."""

from collections.abc import Mapping, Sequence
from typing import Any

from everybert.errors import EverybertError
from everybert.model.heads import Network
from everybert.tasks.answer import AnswerQuestions
from everybert.tasks.choose import Choose
from everybert.tasks.classify import Classify, Regress
from everybert.tasks.embed import Embed
from everybert.tasks.rank import Rank
from everybert.tasks.tag import Tag
from everybert.tasks.task import Task

TASKS: dict[str, type[Task]] = {t.name: t for t in (Classify, Regress, Tag, AnswerQuestions, Choose, Embed, Rank)}
ADAPTED = (*TASKS, "classify pair")
"""What an adapter in a model's own folder can be the default for; a pair of texts may have another than a text."""


def task_class(name: str) -> type[Task]:
    """The class of a task, by name."""
    if name not in TASKS:
        raise EverybertError(f"the tasks are {', '.join(TASKS)}; there is no {name!r}")
    return TASKS[name]


def trained_task(extras: Mapping[str, Any], problem_type: str | None) -> Any:
    """The task that a folder was trained for: as its everybert.json (`extras`) says, else config.json, for numbers."""
    return (extras.get("task") or {}).get("task") or ("regress" if problem_type == "regression" else None)


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
    if not isinstance(saved, dict):
        raise EverybertError("everybert.json: the task's settings are not an object; fix the file")
    if task.head is not None and task.head not in network.heads:
        has = ", ".join(network.heads) or "none"
        raise EverybertError(f"this model has no {name} head (it has: {has}); train one: everybert finetune {name}")
    outputs = getattr(getattr(network.heads[task.head], "output", None), "out_features", 0) if task.head else 0
    trained = trained_task(extras or {}, problem_type)
    if name == "rank" and outputs != 1:
        wrong = f"this model has {outputs} labels, and rank needs one output"
        raise EverybertError(f"{wrong}; use classify, or train a reranker: everybert finetune rank")
    if trained == "regress" and outputs > 1 and name in ("classify", "regress"):
        raise EverybertError(f"this model predicts {outputs} numbers per text, regress one: everybert finetune regress")
    if name == "regress" and outputs != 1:
        trained = "classify"
    if {name, trained} == {"classify", "regress"}:
        does = "predicts a number" if trained == "regress" else "predicts labels"
        raise EverybertError(f"this model {does}; use {trained}, not {name}")
    state: dict[str, Any] = dict(saved) if saved.get("task") == name else {}
    if "labels" in task.saved:
        state.setdefault("labels", list(labels or [f"LABEL_{i}" for i in range(int(outputs))]))
        # One output is the logit of one label, which a text may have or not.
        state.setdefault("multi", problem_type == "multi_label_classification" or outputs == 1)
    try:
        loaded = task.from_state(state, network.config)
        if "labels" in task.saved and not len(loaded.labels) == len(set(loaded.labels)) == outputs:
            raise ValueError(f"{len(set(loaded.labels))} different labels, but the head has {outputs} outputs")
    except EverybertError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        wrong = f"the folder's settings of {name} cannot be used ({error}); fix everybert.json or config.json"
        raise EverybertError(wrong) from None
    return loaded
