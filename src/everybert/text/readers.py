"""Streaming readers: files of any common kind become documents (strings) or records (dictionaries).

Text files hold documents separated by blank lines; jsonl, json, csv, tsv and parquet hold one per record.
All but parquet may be packed (.gz .bz2 .xz .zst).
"""

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from everybert.errors import EverybertError
from everybert.text.files import Errors, ReadReport, blocks, decode, expand, kind, lines, log, open_bytes

RECORD_KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
TEXT_KINDS = (".txt", ".text", ".md", ".raw", ".tok", ".tokens", "")
TEXT_COLUMNS = ("text", "content", "body", "article", "document", "raw_content", "sentence", "sentence1")
LONGEST = 1 << 28  # characters of one document held in memory; a longer one is cut, and counted as such
BLANK_LINES = re.compile(r"\n\s*\n")
LINE_END = re.compile(r"\n")


def read_documents(
    paths: Iterable[str | Path] | str | Path,
    *,
    column: str | None = None,
    errors: Errors = "strict",
    per_line: bool = False,
    report: ReadReport | None = None,
) -> Iterator[str]:
    """The documents of files and folders in order, stripped of outer white space, none of them empty.

    `column` names the records' text (guessed when None). `errors="replace"` puts U+FFFD where bytes are not
    UTF-8 and counts them in `report`; "strict" stops with the file and the byte offset. With `per_line` every
    line of a text file is a document.
    """
    report = report or ReadReport()
    for path in expand(paths):
        for text in file_documents(path, column, errors, per_line, report):
            if text := text.strip():
                yield text


def file_documents(path: Path, column: str | None, errors: Errors, per_line: bool, report: ReadReport) -> Iterator[str]:
    """The documents of one file by its extension, some of them blank."""
    extension = kind(path)
    if extension in RECORD_KINDS:
        return _column(path, column, errors, report)
    if extension == ".xml":
        raise EverybertError(
            f"{path} is XML; extract the text of a wiki dump with "
            f"`python contrib/mediawiki.py {path} --out FILE.txt` from the source of everybert"
        )
    if extension not in TEXT_KINDS:
        log.warning("%s: unknown extension %s, read as text", path, extension)
    return _text_documents(path, LINE_END if per_line else BLANK_LINES, errors, report)


def _text_documents(path: Path, separator: re.Pattern[str], errors: Errors, report: ReadReport) -> Iterator[str]:
    held: list[str] = []  # the document so far
    size, goes_on = 0, False
    for run, goes_on_next in blocks(path, errors, report):
        # A run starts a line: with a line end before it, a blank first line ends the document held.
        first, *others = separator.split(run if goes_on else "\n" + run)
        first = first if goes_on else first[1:]
        goes_on = goes_on_next
        for text in others:
            yield "".join([*held, first])
            held, size, first = [], 0, text
        if held and size + len(first) > LONGEST:
            report.cut += 1
            log.warning("%s: more than %d characters without a blank line, cut there", path, LONGEST)
            yield "".join(held)
            held, size = [], 0
        held.append(first)
        size += len(first)
    yield "".join(held)


def _column(path: Path, column: str | None, errors: Errors, report: ReadReport) -> Iterator[str]:
    """The text column of a file of records."""
    for number, record in enumerate(read_records(path, errors=errors, report=report), 1):
        if column is None:
            column = guess_column(record, path)
        if column not in record:
            raise EverybertError(
                f"{path}, record {number}: no column {column!r}, it has {', '.join(record)}: pass --column"
            )
        text = record[column]
        if isinstance(text, str):
            yield text
        elif text is not None:
            raise EverybertError(
                f"{path}, record {number}: column {column!r} is a {type(text).__name__}, not text: pass --column"
            )


def guess_column(record: dict[str, Any], path: Path) -> str:
    """The column that most likely holds the text."""
    strings = [name for name, value in record.items() if isinstance(value, str)]
    for name in TEXT_COLUMNS:
        if name in strings:
            return name
    if len(strings) == 1:
        return strings[0]
    raise EverybertError(f"{path}: which column is the text? It has {', '.join(record)}: pass --column")


def read_records(
    path: str | Path,
    *,
    skip_bad: bool = False,
    columns: Sequence[str] | None = None,
    errors: Errors = "strict",
    report: ReadReport | None = None,
) -> Iterator[dict[str, Any]]:
    """The records of a csv, tsv, jsonl, json or parquet file.

    csv and tsv start with a header row unless `columns` names the columns; quotes mean something in csv and
    nothing in tsv (as in GLUE's files). A bad line stops with its file and number or, with `skip_bad`, is
    left out and listed in `report.bad`.
    """
    path, report = Path(path), report or ReadReport()
    extension = kind(path)
    if not path.is_file():
        raise EverybertError(f"{path} is not a file: check the path")
    if extension == ".csv":
        rows = _csv_records(path, columns, errors, report)
    elif extension == ".tsv":
        rows = _tsv_records(path, columns, errors, report)
    elif extension in (".jsonl", ".ndjson"):
        rows = _jsonl_records(path, errors, report)
    elif extension == ".json":
        rows = _json_records(path, errors, report)
    elif extension == ".parquet":
        rows = _parquet_records(path)
    else:
        raise EverybertError(f"{path}: records are read from {', '.join(RECORD_KINDS)}: rename or convert the file")
    found = False
    for place, record in rows:
        found = True
        if isinstance(record, dict):
            yield record
        elif skip_bad:
            report.bad.append(f"{path}:{place}: {record}")
        else:
            raise EverybertError(f"{path}:{place}: {record}: mend the line, or leave it out with --skip-bad")
    if not found:
        raise EverybertError(f"{path} has no records: check the file")
    if report.bad:
        log.warning("%s: %d bad lines left out, the first at %s", path, len(report.bad), report.bad[0])


# Each reader below yields (line number, record), the record a string that says what is wrong with a bad line.
Rows = Iterator[tuple[int, dict[str, Any] | str]]


def _tsv_records(path: Path, columns: Sequence[str] | None, errors: Errors, report: ReadReport) -> Rows:
    names = list(columns) if columns else None
    for number, line in lines(path, errors, report):
        if names is None:
            names = _header(path, line.split("\t"))
        elif line:
            yield number, _row(names, line.split("\t"))


def _csv_records(path: Path, columns: Sequence[str] | None, errors: Errors, report: ReadReport) -> Rows:
    csv.field_size_limit(sys.maxsize)
    source = (line + "\n" for _, line in lines(path, errors, report))
    first = next(source, "")
    rows = csv.reader(chain([first], source), delimiter=max(",;\t", key=first.count), strict=True)
    try:
        names = list(columns) if columns else _header(path, next(rows))
    except csv.Error as error:
        raise EverybertError(f"{path}:{rows.line_num}: the header row cannot be read ({error}): mend it") from None
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield rows.line_num, str(error)
            continue
        if row:
            yield rows.line_num, _row(names, row)


def _header(path: Path, names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise EverybertError(f"{path}: the header row names a column twice ({', '.join(names)}): is there one?")
    return names


def _row(names: list[str], row: list[str]) -> dict[str, Any] | str:
    if len(row) != len(names):
        return f"{len(row)} columns where the header has {len(names)}"
    return dict(zip(names, row))


def _jsonl_records(path: Path, errors: Errors, report: ReadReport) -> Rows:
    for number, line in lines(path, errors, report):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, f"not JSON ({error})"
            continue
        yield number, record if isinstance(record, dict) else f"a {type(record).__name__}, not an object"


def _json_records(path: Path, errors: Errors, report: ReadReport) -> Rows:
    """A list of objects, an object with such a list under "data", or JSON lines under the name .json."""
    with open_bytes(path, report) as stream:
        text = decode(stream.read(), path, 0, errors, report)
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Extra data"):
            yield from _jsonl_records(path, errors, ReadReport())
            return
        raise EverybertError(f"{path} is not JSON ({error}): mend the file") from None
    if isinstance(whole, dict):
        whole = whole.get("data", [whole])
    if not isinstance(whole, list):
        raise EverybertError(f"{path}: a {type(whole).__name__}, not a list of objects: convert the file")
    for number, record in enumerate(whole, 1):
        yield number, record if isinstance(record, dict) else f"a {type(record).__name__}, not an object"


def _parquet_records(path: Path) -> Rows:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise EverybertError("reading parquet files needs pyarrow: pip install pyarrow") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except (pyarrow.ArrowException, OSError) as error:
        raise EverybertError(f"{path} cannot be read as parquet ({error}): it may be damaged") from error
