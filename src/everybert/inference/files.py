"""Predictions over files: rows in, the same rows with predictions out.

Rows are read, predicted and written in chunks, so memory stays constant. An interrupted run resumes after the last row
of its output, once it has checked that the output was made from this input.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everybert.errors import EverybertError
from everybert.tasks import TASKS
from everybert.text.readers import RECORD_KINDS, ReadReport, kind, lines, read_records

if TYPE_CHECKING:
    from everybert.inference.model import Model

CHUNK = 512
"""Rows that are read, predicted and written at a time."""
WRITTEN = (".csv", ".tsv", ".jsonl", ".ndjson")
Row = dict[str, Any]


@dataclass(frozen=True)
class Scored:
    """The outcome of a prediction over files."""

    rows: int
    """Rows in the output."""
    before: int
    """Rows that an earlier run had written."""
    bad: tuple[str, ...] = ()
    """Lines of the input that could not be read and were left out."""
    stopped: bool = False
    """Whether the run was interrupted. Run again to resume."""


def predict_file(
    model: Model,
    task: str,
    source: str | Path,
    out: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    scores: bool = False,
    skip_bad: bool = False,
    fresh: bool = False,
    progress: Callable[[int], None] = lambda rows: None,
) -> Scored:
    """Predict every row of a csv, tsv, jsonl, json, parquet or text file (one text per line) into csv, tsv or jsonl.

    `columns` names the columns to read (text, pair; question, context; prompt); they are guessed if not given.
    `scores` adds the probability of every label. `progress` receives the rows done. Ctrl-C keeps what is written.
    """
    source, out = Path(source), Path(out)
    if kind(out) not in WRITTEN:
        raise EverybertError(f"{out}: predictions are written as {', '.join(WRITTEN)}; give --out such a name")
    if out.exists() and out.resolve() == source.resolve():
        raise EverybertError(f"{out} is the input too; write to another file")
    report = ReadReport()
    rows = read_rows(source, skip_bad, report)
    first = next(rows)
    pick = TASKS[task].input_reader(first, columns, str(source))
    as_columns = model.task(task).as_columns
    if fresh:
        out.unlink(missing_ok=True)
    done, stopped = 0, False
    rows = chain([first], rows)
    with closing(Writer(out)) as writer:
        before = writer.rows
        try:
            while chunk := list(islice(rows, CHUNK)):
                skip = min(max(before - done, 0), len(chunk))
                if skip:
                    writer.check(chunk[skip - 1], done + skip, source)
                todo = chunk[skip:]
                found = model.predict(task, [pick(row) for row in todo])
                writer.write([_joined(row, as_columns(r, scores), source) for row, r in zip(todo, found)])
                done += len(chunk)
                progress(done)
            if before > done:
                raise EverybertError(f"{out} has {before} rows, {source} only {done}; give another --out, or --fresh")
        except KeyboardInterrupt:
            stopped = True
        return Scored(writer.rows, before, tuple(report.bad), stopped)


def read_rows(path: Path, skip_bad: bool, report: ReadReport) -> Iterator[Row]:
    """The rows of a file. A text file has one text per line."""
    if kind(path) in RECORD_KINDS:
        yield from read_records(path, skip_bad=skip_bad, report=report)
        return
    if not path.is_file():
        raise EverybertError(f"{path} is not a file: check the path")
    found = False
    for _, line in lines(path, report=report):
        found = True
        yield {"text": line}
    if not found:
        raise EverybertError(f"{path} has no lines; give a file with one text per line")


def _joined(row: Row, more: Row, source: Path) -> Row:
    if clash := set(row) & set(more):
        raise EverybertError(f"{source} has a column {sorted(clash)[0]!r} already; rename it, or leave it out")
    return row | more


# ── the output ───────────────────────────────────────────────────────────────────────────────────────────────


class Writer:
    """Appends rows to a csv, tsv or jsonl file, after the complete rows that it has; a partial last row is removed."""

    def __init__(self, path: Path) -> None:
        self.path, self.kind = path, kind(path)
        self.header = self.kind in (".csv", ".tsv")
        self.names: list[str] | None = None
        self.last = b""
        self.rows = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("r+b" if path.exists() else "w+b")
        except OSError as error:
            raise EverybertError(f"{path} could not be written ({error.strerror}); give another --out") from None
        self.file.truncate(self._count())
        self.file.seek(0, io.SEEK_END)

    def _count(self) -> int:
        """Count the complete rows; returns where they end."""
        end, record = 0, b""
        for line in self.file:
            record += line
            if not line.endswith(b"\n") or (self.kind == ".csv" and record.count(b'"') % 2):
                continue  # partial, or a line break within quotes
            if self.header and self.names is None:
                self.names = self._cells(record)
            else:
                self.rows, self.last = self.rows + 1, record
            end, record = end + len(record), b""
        return end

    def _cells(self, record: bytes) -> list[str]:
        text = record.decode("utf-8").rstrip("\r\n")
        return text.split("\t") if self.kind == ".tsv" else next(csv.reader(io.StringIO(text)))

    def _cell(self, value: Any) -> Any:
        """A value as the file holds it."""
        if not self.header:
            return json.loads(json.dumps(value))
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
        return "" if value is None else " ".join(text.split()) if self.kind == ".tsv" else text

    def check(self, row: Row, number: int, source: Path) -> None:
        """Raise an error where the last row of the output was not made from this row of the input."""
        if number < self.rows:
            return
        there = dict(zip(self.names or [], self._cells(self.last))) if self.header else json.loads(self.last)
        if any(there.get(name) != self._cell(value) for name, value in row.items()):
            raise EverybertError(
                f"{self.path} was not made from {source} (row {number} differs); give another --out, or --fresh"
            )

    def write(self, rows: list[Row]) -> None:
        """Append rows, and flush them."""
        if not rows:
            return
        text = self._table(rows) if self.header else "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
        try:
            self.file.write(text.encode("utf-8", "replace"))
            self.file.flush()
        except OSError as error:
            raise EverybertError(
                f"{self.path} could not be written ({error.strerror}); {self.rows} rows are there: run again to resume"
            ) from None
        self.rows += len(rows)

    def _table(self, rows: list[Row]) -> str:
        records = [[self._cell(value) for value in row.values()] for row in rows]
        if self.names is None:
            self.names = [str(name) for name in rows[0]]
            records.insert(0, self.names)
        if any([str(name) for name in row] != self.names for row in rows):
            raise EverybertError(f"{self.path} has the columns {', '.join(self.names)}; give another --out")
        if self.kind == ".tsv":
            return "".join("\t".join(cells) + "\n" for cells in records)
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(records)
        return buffer.getvalue()

    def close(self) -> None:
        """Close the file."""
        self.file.close()
