"""The LoRA adapters that came with a model's folder.

The everybert.json of a folder may list adapters: {"adapters": {"sentiment": ["classify"], "nli": ["classify pair"]}}.
Each name is a folder below `adapters`, with the tasks that it is the default for; it is loaded when it is first used.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everybert.errors import EverybertError
from everybert.store.adapters import read_adapter
from everybert.store.hub import resolve

FOLDER = "adapters"
TASKS = ("classify", "classify pair", "regress", "tag", "answer", "choose", "embed", "rank")


@dataclass(frozen=True)
class Bundle:
    """The adapters in a model's own folder."""

    folders: Mapping[str, Path] = field(default_factory=dict)
    """By name."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """By task ("classify pair" for pairs of texts), the adapter that is used for it."""

    def default(self, task: str, pair: bool = False) -> str | None:
        """The adapter for a task, on single texts or on pairs; None if there is none."""
        if task == "classify" and pair:
            return self.defaults.get("classify pair") or self.defaults.get(task)
        return self.defaults.get(task)


def read_bundle(folder: Path, extras: Mapping[str, Any]) -> Bundle:
    """The adapters that a folder's everybert.json (`extras`) lists."""
    listed = extras.get(FOLDER, {})
    if not isinstance(listed, dict) or not all(isinstance(tasks, list) for tasks in listed.values()):
        raise EverybertError(f"{folder}: everybert.json lists its adapters wrongly; restore the folder")
    folders: dict[str, Path] = {}
    defaults: dict[str, str] = {}
    for name, tasks in listed.items():
        if not re.fullmatch(r"\w[\w-]*", name) or not set(tasks) <= set(TASKS):
            raise EverybertError(f"{folder}: everybert.json has an odd adapter {name[:40]!r}; restore the folder")
        folders[name] = folder / FOLDER / name
        defaults.update(dict.fromkeys(tasks, name))
    return Bundle(folders, defaults)


def base_of(folder: Path) -> Path:
    """The folder of the model that an adapter was trained on."""
    base = read_adapter(folder).base
    try:
        return resolve(base)
    except EverybertError as error:
        missing = f"{folder} is an adapter for {base or 'an unnamed model'}, which is not there ({error})"
        raise EverybertError(f"{missing}; load that model, then model.add_adapter(folder)") from None
