"""Whatever a command writes is whole or absent: files are opened for writing under another name, then renamed.

Here every command is watched; kills, full disks and failing writes at every step: tests/robustness/test_writes.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_options import SLOW, TABLE, outcome, place  # noqa: F401  (place is a fixture)

GROWING = ("log.jsonl", "lock", "tensorboard")
"""What a run writes in place: lines that are added, who runs, and curves."""
seen: list[Path] = []
watched: list[str] = []


def hook(event: str, given: Any) -> None:
    writes = event == "open" and isinstance(given[0], str | bytes | os.PathLike)
    if watched and writes and any(letter in str(given[1] or "") for letter in "wax+"):
        path = Path(os.fsdecode(given[0])).absolute()
        if path.is_relative_to(watched[0]):
            seen.append(path.relative_to(watched[0]))


sys.addaudithook(hook)


@contextmanager
def watching(folder: Path) -> Iterator[list[Path]]:
    seen.clear()
    watched.append(str(folder.resolve()))
    try:
        yield seen
    finally:
        watched.clear()


def is_draft(path: Path) -> bool:
    """Whether a part of the path is a temporary name, a folder that a later run continues, or what grows."""
    return any(part.startswith(".") or ".building" in part or part in GROWING for part in path.parts)


LINES = [(name, line) for name, (line, _) in TABLE.items() if "OUT" in line]
LINES += [
    ("embed", "embed 'the film' --model @ --out OUT/v.npy"),
    ("embed", "embed data.tsv --model @ --out OUT/v.jsonl"),
    ("classify", "classify rows.parquet --model @ --out OUT/parts"),
    ("squad", "squad squad.json --model @ --out OUT/a.json"),
]


@pytest.mark.parametrize(
    ("name", "line"), [pytest.param(*one, marks=[pytest.mark.slow] if one[0] in SLOW else []) for one in LINES]
)
def test_a_command_writes_beside_and_renames(name, line, place, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(place)
    monkeypatch.setattr("everybert.quickstart.quickstart", lambda out, console: {})
    with watching(tmp_path / "out") as written:
        code, _, said, files = outcome(line.replace("@", "model"), place, tmp_path / "out")
    assert code == 0, said
    assert not [path for path in written if not is_draft(path) and path.name != "there.jsonl"]
    assert not [name for name in files if Path(name).name.startswith(".") or ".building" in name]
    assert name == "quickstart" or len(files) > 1
