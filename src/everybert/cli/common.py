"""What the commands share: the options of a model, texts in, tables out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.inference.model import Model

DEFAULT = "everybert-small"
Count = Annotated[int, {"min": 1}]
OptionalCount = Annotated[int | None, {"min": 1}]
Name = Annotated[str | None, {"metavar": "NAME"}]
Source = Annotated[str, "A folder, a bundled model, or a hub id (org/name).", {"metavar": "MODEL"}]
Device = Annotated[Name, "cpu or cuda. If not given: a GPU where there is one."]
Quiet = Annotated[bool, "Show no progress."]
Seed = Annotated[int, "The first seed."]
Long = Literal["window", "cut"]


@dataclass(frozen=True)
class ModelOptions:
    """Model."""

    model: Annotated[str, {"metavar": "NAME"}] = "everybert-small"
    """A folder, a bundled model, or a hub id (org/name)."""
    device: Name = None
    """cpu or cuda. If not given: a GPU where there is one."""

    def load(self) -> Model:
        """Load the model."""
        from everybert.inference.model import load

        return load(self.model, device=self.device, dtype=getattr(self, "dtype", None))


@dataclass(frozen=True)
class Use(ModelOptions):
    """Model."""

    dtype: Name = None
    """float32, bfloat16, float16, or int8 (faster on a CPU). If not given: as the model was saved."""


def read_texts(texts: list[str] | None, file: Path | None) -> list[str]:
    """The texts of the command line, or the lines of a file."""
    if texts and file is not None:
        raise EverybertError("give texts or --file, not both")
    if texts:
        return texts
    if file is None:
        raise EverybertError("there is no text; give one in quotes, or --file F (- for standard input)")
    from everybert.text.readers import lines

    found = [line for _, line in lines(file)]
    if not found:
        raise EverybertError(f"{file} has no lines; give a file with one text per line")
    return found


def pairs_of(values: Iterable[str] | None, option: str, example: str) -> Iterator[tuple[str, str]]:
    """(key, value) of each KEY=VALUE."""
    for text in values or ():
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise EverybertError(f"{option} {text}: write it as {example}")
        yield key.strip(), value


def table(rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Rows as lines with aligned columns; the columns numbered in `right` are aligned to the right."""
    rows, right = list(rows), set(right)
    widths = [max(map(len, column)) for column in zip(*rows)]
    aligned = ([f"{c:>{w}}" if i in right else f"{c:{w}}" for i, (c, w) in enumerate(zip(row, widths))] for row in rows)
    return ["  ".join(cells).rstrip() for cells in aligned]


def report(data: Any) -> list[str]:
    """JSON data as text: a table of records; or names with their values, then a table for each list of records."""
    if isinstance(data, Mapping) and data and all(isinstance(value, Mapping) for value in data.values()):
        data = [{"": name, **record} for name, record in data.items()]
    if not isinstance(data, Mapping):
        return _records(data)
    plain = {name: value for name, value in data.items() if not _nested(value)}
    right = [1] if all(isinstance(value, int | float) for value in plain.values()) else []
    lines = table([[_title(name), cell(value)] for name, value in plain.items()], right)
    for name, value in data.items():
        lines += ["", _title(name), *report(value)] if name not in plain and value else []
    return lines[1:] if not plain else lines


def _records(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line per record. Columns of numbers are aligned to the right."""
    rows = list(rows)
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    right = [i for i, name in enumerate(names) if all(isinstance(row.get(name, 0), int | float) for row in rows)]
    return table([list(map(_title, names)), *([cell(row.get(name)) for name in names] for row in rows)], right)


def _nested(value: Any) -> bool:
    """Whether a value is shown as a table of its own."""
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Mapping) or any(isinstance(one, Mapping) for one in values)


def _title(name: str) -> str:
    return name.replace("_", " ")


def cell(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, list | tuple):
        shown = ", ".join(map(cell, value[:6]))
        return shown if len(value) <= 6 else f"{shown} … ({len(value)} values)"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell(one)}" for name, one in value.items())
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return (
            f"{value:,.1f}"
            if abs(value) >= 100
            else f"{value:.4f}"
            if abs(value) >= 1e-3 or not value
            else f"{value:.1e}"
        )
    return f"{value:,}" if isinstance(value, int) else str(value)


def histogram(title: str, counts: Mapping[str, float], most: int = 20) -> list[str]:
    """Counts or shares with bars, under a title."""
    top = max(counts.values(), default=1) or 1
    rows = [[f"  {name}", cell(count), bar(count / top)] for name, count in list(counts.items())[:most]]
    left = len(counts) - most
    return ["", title, *table(rows, (1,)), *([f"  … and {left} more"] if left > 0 else [])]


def grouped(groups: Iterable[tuple[str, Iterable[Mapping[str, Any]]]]) -> Iterator[str]:
    """Titles, each with a table of its records."""
    for title, records in groups:
        yield title
        yield from (f"  {line}" for line in report(records))


def shorten(text: str, width: int = 60) -> str:
    """The start of a text."""
    return text if len(text) <= width else text[: width - 1] + "…"


def bar(share: float, width: int = 30) -> str:
    """A bar of block characters."""
    return "█" * round(share * width)


@contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """A line on standard error with the current step. Yields a function that sets it."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda step: status.update(f"{step} …")


def log_notes(quiet: bool) -> None:
    """Print what the library logs: columns that were guessed, rows that were left out."""
    if not quiet:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("note: %(message)s"))
        log = logging.getLogger("everybert")
        log.handlers[:] = [handler]
        log.setLevel(logging.INFO)
