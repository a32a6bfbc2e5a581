"""From what the user has (a file, a DataFrame, a list) to examples of a task: what goes in, what should come out."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from everybert.errors import EverybertError
from everybert.tasks import columns as col
from everybert.text.readers import ReadReport, expand, kind, lines, read_records

Source = Any
"""A path, a pandas DataFrame, a list of dictionaries, or a list of tuples whose last entry is the target."""


@dataclass(frozen=True)
class Examples:
    """What a task learns from: inputs and targets side by side."""

    inputs: list[Any]
    targets: list[Any]
    where: str
    """The source, for messages."""
    notes: tuple[str, ...] = ()
    """What was guessed or left out, for the user to read."""
    bad: tuple[str, ...] = field(default=(), repr=False)
    """Rows left out under skip_bad, as "where: why"."""

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Rows:
    """Records of a source as they were read."""

    rows: list[dict[str, Any]]
    where: str
    bad: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_rows(source: Source, fields: Sequence[str], skip_bad: bool = False) -> Rows:
    """The records of any source. `fields` names the entries of tuples; shorter ones lack those before the last."""
    if isinstance(source, str | Path):
        return _read_file(Path(source), skip_bad)
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        rows, where = source.to_dict("records"), "the DataFrame"
    else:
        where = "the data"
        if isinstance(source, Mapping) or not hasattr(source, "__iter__"):
            raise EverybertError(f"{where} is a {type(source).__name__}; give a file, a DataFrame or a list of rows")
        rows = list(source)
    if not rows:
        raise EverybertError(f"{where} has 0 rows; there is nothing to learn from")
    if all(isinstance(row, Mapping) for row in rows):
        return Rows([dict(row) for row in rows], where)
    named = []
    for i, row in enumerate(rows):
        if not isinstance(row, tuple | list) or not 1 < len(row) <= len(fields):
            raise EverybertError(f"{where}, row {i + 1}: expected a tuple ({', '.join(fields)}), not {str(row)[:60]!r}")
        named.append(dict(zip([*fields[: len(row) - 1], fields[-1]], row)))
    return Rows(named, where)


def _read_file(path: Path, skip_bad: bool) -> Rows:
    (path,) = expand(path) if not path.is_dir() else (path,)
    names = _headless(path)
    report = ReadReport()
    rows = list(read_records(path, skip_bad=skip_bad, columns=names, report=report))
    if not rows:
        raise EverybertError(f"{path} has 0 rows; there is nothing to learn from")
    notes = (f"{path} has no header row: its columns are taken as {', '.join(names)}",) if names else ()
    return Rows(rows, str(path), tuple(report.bad), notes)


def _headless(path: Path) -> list[str] | None:
    """Column names for a csv or tsv whose first row is data already; None where it has a header."""
    if kind(path) not in (".csv", ".tsv"):
        return None
    head = [line for _, line in islice(lines(path), 20)]
    if not head:
        return None
    if kind(path) == ".tsv":
        rows = list(csv.reader(head, delimiter="\t", quoting=csv.QUOTE_NONE))
    else:
        rows = list(csv.reader(head, delimiter=max(",;\t", key=head[0].count)))
    rows = [row for row in rows if len(row) == len(rows[0])]
    return col.name_headless(rows, str(path)) if col.looks_headless(rows[0]) else None


class Bad:
    """Rows that cannot be used: the first one is an error, or, under skip_bad, all are left out and listed."""

    def __init__(self, where: str, skip: bool, before: Sequence[str] = ()) -> None:
        self.where, self.skip = where, skip
        self.found: list[str] = list(before)

    def __call__(self, row: int, why: str) -> None:
        """Report row number `row` (from 0)."""
        place = f"{self.where}, row {row + 1}"
        if not self.skip:
            raise EverybertError(f"{place}: {why}; mend the row, or leave such rows out with skip_bad")
        self.found.append(f"{place}: {why}")

    def notes(self) -> list[str]:
        """What to tell the user."""
        if not self.found:
            return []
        return [f"{len(self.found)} bad rows of {self.where} were left out, the first: {self.found[0]}"]


def text_examples(
    source: Source,
    names: Sequence[str],
    chosen: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    target: bool = True,
) -> Examples:
    """Texts or pairs with one target each; `names` are the usual names of the target's column.

    Targets are as they were read. A row with an empty text is bad.
    """
    chosen = chosen or {}
    read = read_rows(source, ("text", "text_pair", "label"), skip_bad)
    rows, where, first = read.rows, read.where, read.rows[0]
    label = col.find(first, "label", names, chosen, where) if target else None
    if target and label is None:
        raise EverybertError(
            f"{where} has no column for the label (it has {', '.join(map(str, first))}); name it (columns: label=…)"
        )
    texts = col.find_texts(first, chosen, where, [label] if label else [])
    bad = Bad(where, skip_bad, read.bad)
    inputs: list[Any] = []
    targets: list[Any] = []
    for i, row in enumerate(rows):
        if missing := [c for c in (*texts, *([label] if label else [])) if c not in row]:
            bad(i, f"no column {missing[0]!r}")
            continue
        values = [row[c] for c in texts]
        if wrong := [c for c, v in zip(texts, values) if not isinstance(v, str)]:
            bad(i, f"the column {wrong[0]!r} is not text ({row[wrong[0]]!r}); are columns swapped?")
            continue
        if empty := [c for c, v in zip(texts, values) if not v.strip()]:
            bad(i, f"the text in column {empty[0]!r} is empty")
            continue
        inputs.append(values[0] if len(values) == 1 else tuple(values))
        targets.append(row[label] if label else None)
    if not inputs:
        raise EverybertError(f"{where} has no usable row; {bad.found[0]}")
    guessed = [c for c in (*texts, label) if c and c not in chosen.values()]
    notes = [*read.notes, *bad.notes()]
    if guessed and isinstance(source, str | Path):
        shown = " and ".join(map(repr, texts)) + (f", label from {label!r}" if label else "")
        notes.append(f"{where}: text read from {shown} (guessed; choose with columns)")
    return Examples(inputs, targets, where, tuple(notes), tuple(bad.found))


def number_targets(examples: Examples, skip_bad: bool = False) -> Examples:
    """The same examples with their targets as finite floats."""
    bad = Bad(examples.where, skip_bad, examples.bad)
    inputs, targets = [], []
    for i, (what, value) in enumerate(zip(examples.inputs, examples.targets)):
        try:
            number = float(value)
        except (TypeError, ValueError):
            bad(i, f"the target {value!r} is not a number")
            continue
        if not math.isfinite(number):
            bad(i, f"the target is {value}")
            continue
        inputs.append(what)
        targets.append(number)
    notes = [n for n in examples.notes if "bad rows" not in n] + bad.notes()
    return Examples(inputs, targets, examples.where, tuple(notes), tuple(bad.found))
