"""Predictions over files: rows in, the same rows with predictions out, a chunk at a time.

Memory stays flat however long the file is. What is written stays written: a run that was stopped goes on where its
output ends, after checking that the output was made from this input.
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
    """What was done."""

    rows: int
    """Rows in the output."""
    before: int
    """Rows that an earlier run had written."""
    bad: tuple[str, ...] = ()
    """Lines of the input that could not be read and were left out."""
    stopped: bool = False
    """Whether it was interrupted: run again to go on."""


def predict_file(
    model: Model,
    task: str,
    source: str | Path,
    out: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    adapter: str | None = None,
    scores: bool = False,
    skip_bad: bool = False,
    fresh: bool = False,
    progress: Callable[[int], None] = lambda rows: None,
) -> Scored:
    """Predict every row of a csv, tsv, jsonl, json, parquet or text file (one text a line) into csv, tsv or jsonl.

    `columns` names the columns to read (text, pair; question, context; prompt): guessed where not given. `scores`
    adds the probability of every label. `progress` is told how many rows are done. Ctrl-C keeps what is written.
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
    with model.using(adapter):
        described = model.task(task).as_columns
    if fresh:
        out.unlink(missing_ok=True)
    done = 0
    stopped = False
    with closing(Writer(out)) as writer:
        before = writer.rows
        try:
            for chunk in chunks(chain([first], rows), CHUNK):
                skip = min(max(before - done, 0), len(chunk))
                if skip:
                    writer.check(chunk[skip - 1], done + skip, source)
                todo = chunk[skip:]
                found = model.predict(task, [pick(row) for row in todo], adapter)
                writer.write([_joined(row, described(r, scores), source) for row, r in zip(todo, found)])
                done += len(chunk)
                progress(done)
            if before > done:
                raise EverybertError(f"{out} has {before} rows, {source} only {done}; give another --out, or --fresh")
        except KeyboardInterrupt:
            stopped = True
        return Scored(writer.rows, before, tuple(report.bad), stopped)


def read_rows(path: Path, skip_bad: bool, report: ReadReport) -> Iterator[Row]:
    """The rows of a file; a text file has one text a line."""
    if kind(path) in RECORD_KINDS:
        return read_records(path, skip_bad=skip_bad, report=report)
    if not path.is_file():
        raise EverybertError(f"{path} is not a file: check the path")
    return _lines(path, report)


def _lines(path: Path, report: ReadReport) -> Iterator[Row]:
    found = False
    for _, line in lines(path, report=report):
        found = True
        yield {"text": line}
    if not found:
        raise EverybertError(f"{path} has no lines; give a file with one text a line")


def chunks(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    """So many rows at a time."""
    while part := list(islice(rows, size)):
        yield part


# ── rows to inputs, results to columns ───────────────────────────────────────────────────────────────────────


def _joined(row: Row, more: Row, source: Path) -> Row:
    if clash := set(row) & set(more):
        raise EverybertError(f"{source} has a column {sorted(clash)[0]!r} already; rename it, or leave it out")
    return row | more


# ── the output, to which a later run can add ─────────────────────────────────────────────────────────────────


class Writer:
    """Appends rows to a csv, tsv or jsonl file after those that are whole; a torn last row is cut off."""

    def __init__(self, path: Path) -> None:
        self.path, self.kind = path, kind(path)
        self.names: list[str] | None = None
        self.last: str = ""
        whole, self.rows = self._resume(path) if path.exists() else (0, 0)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("r+b" if path.exists() else "wb")
        except OSError as error:
            raise EverybertError(f"{path} could not be written ({error.strerror}); give another --out") from None
        self.file.truncate(whole)
        self.file.seek(whole)

    def _resume(self, path: Path) -> tuple[int, int]:
        """(bytes, rows) of the whole records that are there; the header is no row."""
        end, held, count = 0, b"", 0
        header = self.kind in (".csv", ".tsv")
        with path.open("rb") as file:
            for line in file:
                held += line
                if not line.endswith(b"\n") or (self.kind == ".csv" and held.count(b'"') % 2):
                    continue  # torn, or a line end within quotes
                if header and self.names is None:
                    self.names = self._cells(held)
                else:
                    count += 1
                    self.last = held.decode("utf-8")
                end += len(held)
                held = b""
        return end, count

    def _cells(self, record: bytes) -> list[str]:
        text = record.decode("utf-8").rstrip("\r\n")
        return text.split("\t") if self.kind == ".tsv" else next(csv.reader(io.StringIO(text)))

    def check(self, row: Row, number: int, source: Path) -> None:
        """Stop where the output's last row was not made from this row of the input."""
        if number < self.rows:
            return
        if self.kind in (".csv", ".tsv"):
            there: Row = dict(zip(self.names or [], self._cells(self.last.encode())))
            same = all(there.get(name) == self._cell(value) for name, value in row.items())
        else:
            there = json.loads(self.last)
            same = all(there.get(name) == json.loads(json.dumps(value)) for name, value in row.items())
        if not same:
            raise EverybertError(
                f"{self.path} was not made from {source} (row {number} differs); give another --out, or --fresh"
            )

    def _cell(self, value: Any) -> str:
        if value is None:
            return ""
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
        return " ".join(text.split()) if self.kind == ".tsv" else text

    def write(self, rows: list[Row]) -> None:
        """Append, and hand to the system at once."""
        if not rows:
            return
        if self.kind in (".jsonl", ".ndjson"):
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        else:
            text = self._table(rows)
        try:
            self.file.write(text.encode("utf-8", "replace"))
            self.file.flush()
        except OSError as error:
            raise EverybertError(
                f"{self.path} could not be written ({error.strerror}); {self.rows} rows are there: run again to go on"
            ) from None
        self.rows += len(rows)

    def _table(self, rows: list[Row]) -> str:
        buffer = io.StringIO()
        lines_out: list[list[str]] = []
        if self.names is None:
            self.names = [str(name) for name in rows[0]]
            lines_out.append(self.names)
        for row in rows:
            if [str(name) for name in row] != self.names:
                raise EverybertError(f"{self.path} has the columns {', '.join(self.names)}; give another --out")
            lines_out.append([self._cell(value) for value in row.values()])
        if self.kind == ".tsv":
            return "".join("\t".join(cells) + "\n" for cells in lines_out)
        csv.writer(buffer, lineterminator="\n").writerows(lines_out)
        return buffer.getvalue()

    def close(self) -> None:
        """Put the file away."""
        self.file.close()
