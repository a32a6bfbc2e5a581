"""What the commands share: the options of a model, texts in, tables out."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import everybert
from everybert.errors import EverybertError
from everybert.text.readers import RECORD_KINDS, kind, lines

DEFAULT = "everybert-small"
LECTURE = "everybert-classic"
"""The default of the commands that show how BERT works: small, and exactly as in the paper."""
Count = Annotated[int, {"min": 1}]
OptionalCount = Annotated[int | None, {"min": 1}]
Name = Annotated[str | None, {"metavar": "NAME"}]
ModelName = Annotated[str, "A folder, a bundled model, or a hub id (org/name).", {"metavar": "NAME"}]
Source = Annotated[ModelName, {"metavar": "MODEL"}]
Device = Annotated[Name, "cpu or cuda. If not given: a GPU where there is one."]
Pickle = Annotated[bool, "Read .bin weights, which can hide code, by torch's restricted reader."]
Quiet = Annotated[bool, "Show no progress."]
Long = Literal["window", "cut"]
OFFICE = (".xlsx", ".xls", ".ods", ".docx", ".doc", ".odt", ".pdf", ".csv", ".tsv", ".jsonl", ".parquet", ".json")
"""Names that end so are files, whether they exist or not."""


@dataclass(frozen=True)
class ModelOptions:
    """Model."""

    model: ModelName = DEFAULT
    device: Device = None
    allow_pickle: Pickle = False

    def load(self) -> "everybert.Model":
        """Load the model."""
        return everybert.load(self.model, self.device, getattr(self, "dtype", None), allow_pickle=self.allow_pickle)


@dataclass(frozen=True)
class LectureOptions(ModelOptions):
    """Model."""

    model: Annotated[ModelName, "A folder, a bundled model, or a hub id. By default BERT as in its paper."] = LECTURE


@dataclass(frozen=True)
class Use(ModelOptions):
    """Model."""

    dtype: Annotated[Name, "float32, bfloat16, float16, int8 (CPU) or fp8 (GPU). If not given: as saved."] = None


def read_texts(texts: list[str] | None, file: Path | None, tabs: bool = False) -> list[str]:
    """The texts of the command line, or the lines of a file; tables are refused, except with `tabs` those of tabs."""
    if texts and file is not None:
        raise EverybertError("give texts or --file, not both")
    if texts:
        return refuse_files(texts)
    if file is None:
        raise EverybertError("there is no text; give one in quotes, or --file F (- for standard input)")
    if kind(file) in RECORD_KINDS and not (tabs and kind(file) == ".tsv"):
        raise EverybertError(f"{file} is a table, not lines of text; give a file with one text per line")
    texts = [line for _, line in lines(file)]
    if not texts:
        raise EverybertError(f"{file} has no lines; give a file with one text per line")
    return texts


def refuse_files(texts: list[str]) -> list[str]:
    """The texts; an error if one of them is the name of a file."""
    for text in texts:
        if re.fullmatch(r"\S{1,200}\.\w{1,8}", text) and (Path(text).suffix.lower() in OFFICE or Path(text).is_file()):
            raise EverybertError(f"{text} is a file, not a text; give --file or --context-file, or its text in quotes")
    return texts


def pairs_of(values: Iterable[str] | None, option: str, example: str, many: bool = False) -> Iterator[tuple[str, str]]:
    """(key, value) of each KEY=VALUE; a key may occur once, or `many` times."""
    keys: set[str] = set()
    for text in values or ():
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise EverybertError(f"{option} {text}: write it as {example}")
        if (key := key.strip()) in keys and not many:
            raise EverybertError(f"{option} names {key} twice: give it once, as {example}")
        keys.add(key)
        yield key, value


def report(data: Any) -> Iterator[str]:
    """JSON data as text: names with their values, then what is nested; of records a table, or each by itself."""
    if isinstance(data, Mapping) and data and all(isinstance(value, Mapping) for value in data.values()):
        data = [{"": name, **record} for name, record in data.items()]
    if isinstance(data, Mapping):
        plain = {name: value for name, value in data.items() if not _nested(value)}
        yield from _table([_title(name), cell(value)] for name, value in plain.items())
        for name, value in data.items():
            if name not in plain and value:
                yield from ("", _title(name), *report(value))
        return
    rows = iter(data)
    first = next(rows, None)
    if isinstance(first, Mapping) and any(map(_nested, first.values())):
        yield from report(first)
        for row in rows:  # one by one: there may be many
            yield from ("", *report(row))
    elif first is not None:
        numbered = ([row] if isinstance(row, Mapping) else row for row in chain([first], rows))
        every = [{"": i, **one} if len(some) > 1 else one for i, some in enumerate(numbered, 1) for one in some]
        names = list(dict.fromkeys(name for row in every for name in row))
        yield from _table([list(map(_title, names)), *([shorten(cell(row.get(n))) for n in names] for row in every)])


def _nested(value: Any) -> bool:
    """Whether a value is shown as a table of its own."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, Mapping | list)


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(f"{c:{w}}" for c, w in zip(row, widths)).rstrip() for row in rows]


def _title(name: str) -> str:
    return str(name).replace("_", " ")


def cell(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, list | tuple):
        shown = ", ".join(map(cell, value[:6]))
        return shown if len(value) <= 6 else f"{shown} … ({len(value)} values)"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell(entry)}" for name, entry in value.items())
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        size = abs(value)
        return f"{value:,.1f}" if size >= 100 else f"{value:.4f}" if size >= 1e-3 or not size else f"{value:.1e}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def shorten(text: str, width: int = 100) -> str:
    """The start of a text."""
    return text if len(text) <= width else text[: width - 1] + "…"
