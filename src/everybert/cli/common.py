"""What the commands share: the options of a model, texts in, tables out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
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
Source = Annotated[str, {"metavar": "MODEL"}]
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


def rich_table(title: str | None, names: Sequence[str], left: Sequence[str] = ("",), **more: Any) -> Any:
    """A rich table; columns are aligned to the right, except those named in `left`."""
    from rich.box import SIMPLE
    from rich.table import Table

    made = Table(title=title, box=SIMPLE, title_justify="left", title_style="", caption_justify="left", **more)
    for name in names:
        made.add_column(name, justify="left" if name in left else "right")
    return made


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
