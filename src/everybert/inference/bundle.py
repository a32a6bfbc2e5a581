"""A trunk that comes with adapters: which there are, and which one a task takes where none is named.

The folder's everybert.json says {"adapters": {"sentiment": ["classify"], "entailment": ["classify pair"], …}}: each
name is a folder below `adapters`, with the tasks it is the default for. One is put on the trunk when first asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everybert.errors import EverybertError

FOLDER = "adapters"
TASKS = ("classify", "classify pair", "regress", "tag", "answer", "choose", "embed")


@dataclass(frozen=True)
class Bundle:
    """The adapters in a trunk's own folder."""

    folders: Mapping[str, Path] = field(default_factory=dict)
    """By name."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Task ("classify pair" is a pair's) → the adapter that does it."""

    def default(self, task: str, pair: bool = False) -> str | None:
        """The adapter for a task, of one text or of a pair; None where there is none."""
        if task == "classify" and pair:
            return self.defaults.get("classify pair") or self.defaults.get(task)
        return self.defaults.get(task)


def read_bundle(folder: Path, extras: Mapping[str, Any]) -> Bundle:
    """What a model's folder says of its adapters; folders without any have an empty bundle."""
    said = extras.get(FOLDER, {})
    if not isinstance(said, dict) or not all(isinstance(tasks, list) for tasks in said.values()):
        raise EverybertError(f"{folder}: everybert.json lists its adapters wrongly; restore the folder")
    folders: dict[str, Path] = {}
    defaults: dict[str, str] = {}
    for name, tasks in said.items():
        if not re.fullmatch(r"\w[\w-]*", name) or not set(tasks) <= set(TASKS):
            raise EverybertError(f"{folder}: everybert.json has an odd adapter {name[:40]!r}; restore the folder")
        folders[name] = folder / FOLDER / name
        defaults.update(dict.fromkeys(tasks, name))
    return Bundle(folders, defaults)
