"""Streaming readers: files become documents (strings), records (dictionaries) or the examples of task files.

Text files hold documents separated by blank lines; jsonl, json, csv, tsv and parquet hold one per record. All but
parquet may be compressed (.gz .bz2 .xz .zst). Streams are read in blocks, so a file may be larger than memory.
Errors name the file and the line or byte.
"""

import csv
import importlib
import io
import json
import logging
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal

from everybert.errors import EverybertError

Errors = Literal["strict", "replace"]
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "zstandard"}
TEXT_KINDS = (".txt", ".text", ".md", ".raw", ".tok", ".tokens", "")
TEXT_COLUMNS = ("text", "content", "body", "article", "document", "raw_content", "sentence", "sentence1")
CONLLU_FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
BLOCK = 1 << 22  # bytes read at a time
LONGEST = 1 << 22  # characters of a document in a text file from which it is split, and counted as such
LINE = 1 << 26  # bytes of a line in other files; a longer one is an error
SPAN = 1 << 20  # lines of a quoted field in a csv file
WHOLE = 1 << 29  # bytes of a JSON document
BLANK_LINES = re.compile(r"\n\s*\n")
LINE_END = re.compile(r"\n")
log = logging.getLogger("everybert")


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class ReadReport:
    """What reading changed or left out; readers update the report that they are given."""

    replaced: int = 0  # undecodable bytes and NULs replaced by U+FFFD
    cut: int = 0  # splits of documents that are too long
    duplicates: int = 0  # documents left out because the same text came before


def expand(paths: Iterable[str | Path] | str | Path) -> list[Path]:
    """The files to read, in order: a folder means all files below it, sorted; "-" is standard input."""
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(path)
        if path.is_dir():
            below = sorted(file for file in path.rglob("*") if file.is_file())
            visible = [f for f in below if not any(part.startswith(".") for part in f.relative_to(path).parts)]
            if not visible:
                raise EverybertError(f"the folder {path} has no files: check the path")
            files += visible
        elif str(path) == "-" or path.exists():
            files.append(path)
        else:
            raise EverybertError(f"{path} does not exist: check the path")
    if not files:
        raise EverybertError("no input files: name at least one file or folder")
    return files


def kind(path: Path) -> str:
    """The extension of a file in lower case, without that of a compression: "reviews.csv.gz" → ".csv"."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def plain_size(paths: Sequence[Path]) -> int | None:
    """The bytes of files, if that is about their length in characters: of plain files, not of compressed ones."""
    packed = {*COMPRESSIONS, ".parquet", ".arrow", ".feather", ".xlsx"}
    plain = all(path.is_file() and path.suffix.lower() not in packed for path in paths)
    return sum(path.stat().st_size for path in paths) if plain else None


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file; errors of the file system and of the compression name the file."""
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    name = COMPRESSIONS.get(path.suffix.lower())
    try:
        library: Any = importlib.import_module(name) if name else None
    except ImportError as error:
        raise EverybertError(f"reading this file needs {name}: pip install {name}") from error
    try:
        with path.open("rb") as raw:
            if name == "zstandard":
                yield io.BufferedReader(library.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
            else:
                yield library.open(raw) if library else raw
    except Exception as error:  # each compression has an error type of its own
        damage = isinstance(error, OSError | EOFError) or type(error).__name__ in ("error", "LZMAError", "ZstdError")
        if not damage:
            raise
        reason = getattr(error, "strerror", None)
        remedy = "check the path and its permissions" if reason else "it may be damaged or cut short"
        raise EverybertError(f"{path} cannot be read ({reason or error}): {remedy}") from error


def decode(data: bytes, path: Path, at: int, errors: Errors, report: ReadReport) -> str:
    """Decode UTF-8; `at` is the offset of the first byte in the decompressed file.

    A byte that is not UTF-8, or a NUL, is an error with "strict"; with "replace" it becomes U+FFFD and is counted.
    """
    if at == 0 and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise EverybertError(f"{path} is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`")
    if at == 0 and data[:3] == b"\xef\xbb\xbf":
        data, at = data[3:], 3
    if errors == "strict":
        if (nul := data.find(0)) >= 0:
            raise EverybertError(f"{path} looks binary (a NUL at byte {at + nul}): leave it out or convert it to UTF-8")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise EverybertError(
                f"{path} is not UTF-8 at byte {at + error.start} (0x{data[error.start]:02x}): "
                "convert it, for example with `iconv -f LATIN1 -t UTF-8`"
            ) from None
    text = data.decode("utf-8", errors="replace").replace("\0", "\ufffd")
    if "\ufffd" in text:
        report.replaced += text.count("\ufffd") - data.count(b"\xef\xbf\xbd")  # less those in the file itself
    return text


def blocks(path: Path, errors: Errors, report: ReadReport, limit: int) -> Iterator[str]:
    """The text of a file in blocks of whole lines, with \\n for \\r\\n; only lines over `limit` bytes are split."""
    with open_bytes(path) as stream:
        at, held = 0, b""
        while data := held + stream.read(BLOCK):
            rest = b"" if data.endswith(b"\n") else stream.readline(limit)
            data += rest
            end = len(data)
            if len(rest) == limit and not rest.endswith(b"\n"):  # at a space, else between two characters of UTF-8
                starts = (i for i in range(end - 1, 0, -1) if data[i] & 0xC0 != 0x80)
                end = data.rfind(b" ", end - limit) + 1 or next(starts, end)
            yield decode(data[:end], path, at, errors, report).replace("\r\n", "\n")
            at, held = at + end, data[end:]


def lines(path: Path, errors: Errors = "strict", report: ReadReport | None = None) -> Iterator[tuple[int, str]]:
    """The lines of a file, numbered from 1, without line ends."""
    number, last = 0, ""
    for text in blocks(path, errors, report or ReadReport(), LINE):
        if last:  # the block before ended within a line
            raise EverybertError(f"{path}: line {number + 1} is longer than {LINE >> 20} MB: split it")
        *found, last = text.split("\n")
        for line in found:
            number += 1
            yield number, line.rstrip("\r")
    if last:
        yield number + 1, last.rstrip("\r")


# ── documents ───────────────────────────────────────────────────────────────────────────────────────────────


def read_documents(
    paths: Iterable[str | Path] | str | Path,
    *,
    column: str | None = None,
    errors: Errors = "strict",
    per_line: bool = False,
    report: ReadReport | None = None,
) -> Iterator[str]:
    """The non-empty documents of files and folders in order, without surrounding white space.

    `column` names the text column of records (None guesses it). `errors="replace"` puts U+FFFD where bytes are not
    UTF-8 and counts them in `report`; "strict" raises an error. With `per_line`, every line of a text file is a
    document.
    """
    report = report or ReadReport()
    for path in expand(paths):
        extension = kind(path)
        if extension == ".xml":
            raise EverybertError(
                f"{path} is XML; extract the text of a wiki dump with "
                f"`python contrib/mediawiki.py {path} --out FILE.txt` from the source of everybert"
            )
        if extension not in (*TEXT_KINDS, *RECORD_KINDS):
            log.warning("%s: unknown extension %s, read as text", path, extension)
        if extension in RECORD_KINDS:
            texts = _column(path, column, errors, report)
        else:
            texts = _text_documents(path, LINE_END if per_line else BLANK_LINES, errors, report)
        yield from filter(None, map(str.strip, texts))


def _text_documents(path: Path, separator: re.Pattern[str], errors: Errors, report: ReadReport) -> Iterator[str]:
    held = ""  # the current document
    for block in blocks(path, errors, report, LONGEST):
        if len(held) > LONGEST:
            if not report.cut:
                log.warning("%s: a document of more than %d characters is split", path, LONGEST)
            report.cut += 1
            yield held
            held = ""
        *whole, held = separator.split(held + block)
        yield from whole
    yield held


def _column(path: Path, column: str | None, errors: Errors, report: ReadReport) -> Iterator[str]:
    """A column of a file of records; None is the first with a usual name, else the only column of strings."""
    for number, record in enumerate(read_records(path, errors, report), 1):
        if column is None:
            strings = [name for name, value in record.items() if isinstance(value, str)]
            names = [name for name in TEXT_COLUMNS if name in strings][:1] or strings
            if len(names) != 1:
                raise EverybertError(f"{path}: which column is the text? It has {', '.join(record)}: name it (column)")
            column = names[0]
        if not isinstance(record.get(column, 0), str | None):
            problem = type(record[column]).__name__ if column in record else f"missing, it has {', '.join(record)}"
            raise EverybertError(f"{path}, record {number}: column {column!r} is no text ({problem}): name it (column)")
        yield record[column] or ""


# ── records ─────────────────────────────────────────────────────────────────────────────────────────────────

Rows = Iterator[tuple[int, dict[str, Any] | str]]
"""(line or record number, record) pairs. Instead of a record, a bad line has a string with the reason."""


def read_records(
    path: str | Path, errors: Errors = "strict", report: ReadReport | None = None
) -> Iterator[dict[str, Any]]:
    """The records of a csv, tsv, jsonl, json, parquet, arrow, feather or xlsx file; a bad line is an error."""
    for place, record in read_rows(Path(path), errors, report):
        if isinstance(record, str):
            raise EverybertError(f"{path}:{place}: {record}: fix the line")
        yield record


def read_rows(path: Path, errors: Errors = "strict", report: ReadReport | None = None) -> Rows:
    """The records of a file with their places; a bad line has the reason instead of a record."""
    if kind(path) not in RECORD_KINDS:
        raise EverybertError(f"{path}: records are read from {', '.join(RECORD_KINDS)}: rename or convert the file")
    place = 0
    for place, record in RECORDS[kind(path)](path, errors, report or ReadReport()):
        yield place, record
    if not place:
        raise EverybertError(f"{path} has no records: check the file")


def _table_rows(path: Path, errors: Errors, report: ReadReport) -> Rows:
    """The rows of a csv or tsv file under the names of its header row. Quotes are letters in tsv files (as in GLUE)."""
    names: list[str] = []
    numbered = lines(path, errors, report)
    split = ((number, line.split("\t")) for number, line in numbered) if kind(path) == ".tsv" else _csv_rows(numbered)
    for number, row in split:
        if isinstance(row, str):
            if not names:
                raise EverybertError(f"{path}:{number}: the header row cannot be read ({row}): fix the line")
            yield number, row
            continue
        if not names:
            cola = len(row) == 4 and row[1] in ("0", "1") and row[2] in ("", "*")  # CoLA's files have no header row
            names = ["source", "label", "mark", "sentence"] if cola else row
            if len(set(row)) < len(row) and not cola:
                raise EverybertError(f"{path}: the header row names a column twice ({', '.join(row)}): is there one?")
        if row is not names and (any(row) or len(row) > 1):
            same = len(row) == len(names)
            yield number, dict(zip(names, row)) if same else f"{len(row)} columns where the header has {len(names)}"


def _csv_rows(numbered: Iterator[tuple[int, str]]) -> Iterator[tuple[int, list[str] | str]]:
    """Each record with the number of its first line; the reason where it cannot be read.

    A quoted field may span lines. If its quote never closes, only the first line is bad: reading resumes after it.
    """
    csv.field_size_limit((1 << 31) - 1)
    ahead = deque(islice(numbered, 1))
    delimiter = max(",;\t", key=ahead[0][1].count) if ahead else ","
    read: list[tuple[int, str]] = []  # the lines of this record

    def feed() -> Iterator[str]:
        while (line := ahead.popleft() if ahead else next(numbered, None)) is not None:
            if len(read) > SPAN:
                raise csv.Error("a quote that never closes")
            read.append(line)
            yield line[1] + "\n"

    rows = csv.reader(feed(), delimiter=delimiter, strict=True)
    while True:
        read.clear()
        try:
            row: list[str] | str = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            row = str(error).replace("unexpected end of data", "a quote that never closes").partition(" - ")[0]
            ahead.extendleft(reversed(read[1:]))
            rows = csv.reader(feed(), delimiter=delimiter, strict=True)
        yield read[0][0], row


def _jsonl_rows(path: Path, errors: Errors, report: ReadReport) -> Rows:
    for number, line in lines(path, errors, report):
        if not line.strip():
            continue
        try:
            yield number, _object(json.loads(line))
        except (ValueError, RecursionError) as error:
            yield number, f"not JSON ({error})"


def _object(record: Any) -> dict[str, Any] | str:
    return record if isinstance(record, dict) else f"a {type(record).__name__}, not an object"


def _json_rows(path: Path, errors: Errors, report: ReadReport) -> Rows:
    """A list of objects, an object with such a list under "data", or JSON lines in a .json file."""
    with open_bytes(path) as stream:
        data = stream.read(WHOLE + 1)
    if len(data) > WHOLE:
        raise EverybertError(f"{path} has more than {WHOLE >> 20} MB of JSON: convert it to jsonl, a record per line")
    try:
        whole = json.loads(decode(data, path, 0, errors, report))
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Extra data"):
            yield from _jsonl_rows(path, errors, ReadReport())
            return
        raise EverybertError(f"{path} is not JSON ({error}): fix the file") from None
    if isinstance(whole, dict):
        whole = whole.get("data", [whole])
    if not isinstance(whole, list):
        raise EverybertError(f"{path}: a {type(whole).__name__}, not a list of objects: convert the file")
    yield from enumerate(map(_object, whole), 1)


def _arrow_rows(path: Path, *_: Any) -> Rows:
    """The rows of a parquet file, or of an Arrow file (.arrow, .feather) in either of its two formats."""
    name = kind(path).removeprefix(".")
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise EverybertError(f"reading {name} files needs pyarrow: pip install pyarrow") from error
    with open_bytes(path) as stream:
        try:
            if name == "parquet":
                batches = parquet.ParquetFile(stream).iter_batches(batch_size=1024)
            elif stream.read(6) == b"ARROW1":
                file = ipc.open_file(stream)
                batches = map(file.get_batch, range(file.num_record_batches))
            else:
                stream.seek(0)
                batches = ipc.open_stream(stream)
            yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1)
        except pyarrow.ArrowException as error:
            raise EverybertError(f"{path} cannot be read as {name} ({error}): it may be damaged") from error


def _excel_rows(path: Path, *_: Any) -> Rows:
    """The rows of a workbook with one sheet, by pandas and openpyxl; cells as text."""
    try:
        from pandas import read_excel

        sheets = read_excel(path, sheet_name=None, dtype=str, keep_default_na=False)
    except ImportError:
        wrong = f"{path}: reading xlsx files needs pandas and openpyxl"
        raise EverybertError(f"{wrong}: pip install pandas openpyxl, or save the sheet as csv") from None
    except Exception as error:  # a damaged archive fails in many ways
        raise EverybertError(f"{path} cannot be read as xlsx ({error}): it may be damaged; save it as csv") from error
    filled = [sheet for sheet in sheets.values() if len(sheet)]
    if len(filled) > 1:
        raise EverybertError(f"{path} has {len(filled)} sheets ({', '.join(sheets)}): save the one to read as csv")
    yield from enumerate((row for sheet in filled for row in sheet.to_dict("records")), 2)


RECORDS: dict[str, Callable[[Path, Errors, ReadReport], Rows]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), _jsonl_rows),
    ".json": _json_rows,
    **dict.fromkeys((".csv", ".tsv"), _table_rows),
    **dict.fromkeys((".parquet", ".arrow", ".feather"), _arrow_rows),
    ".xlsx": _excel_rows,
}
"""How the records of each kind of file are read."""
RECORD_KINDS = tuple(RECORDS)


# ── task files: CoNLL columns, CoNLL-U trees, SQuAD questions ───────────────────────────────────────────────


def read_conll(path: str | Path) -> Iterator[list[list[str]]]:
    """The sentences of a CoNLL-2003 style file, each a list of rows of columns (word first, tag last).

    Columns are separated by tabs if the line has any, else by white space. Blank lines separate sentences.
    -DOCSTART- lines are left out. Every row of a file has the same number of columns.
    """
    for _, rows in _sentences(Path(path), "-DOCSTART-", 0, "put a word and its tag on every line"):
        yield rows


def read_conllu(path: str | Path) -> Iterator[list[dict[str, str]]]:
    """The sentences of a CoNLL-U file: for every word a dictionary of the ten fields, and its `document` (# newdoc).

    Multiword ranges (3-4) and empty nodes (5.1) are left out: they are no part of the tree.
    """
    for document, rows in _sentences(Path(path), "#", len(CONLLU_FIELDS), "separate the fields of CoNLL-U by tabs"):
        yield [dict(zip(CONLLU_FIELDS, row), document=document) for row in rows if row[0].isdigit()]


def _sentences(path: Path, comment: str, width: int, remedy: str) -> Iterator[tuple[str, list[list[str]]]]:
    """The number of a document, and a run of lines that are not blank as rows of `width` columns.

    A width of 0 is that of the first row.
    """
    rows: list[list[str]] = []
    documents = 0
    any_rows = False
    for number, line in chain(lines(path), [(0, "")]):
        if line.startswith(comment):
            documents += line.startswith(("# newdoc", "-DOCSTART-"))
            continue
        if line.strip():
            rows.append(line.split("\t") if "\t" in line else line.split())
            width = width or max(2, len(rows[0]))
            if len(rows[-1]) != width:
                raise EverybertError(f"{path}:{number}: {len(rows[-1])} columns, {width} expected: {remedy}")
        elif rows:
            any_rows = True
            yield str(documents), rows
            rows = []
    if not any_rows:
        raise EverybertError(f"{path} has no sentences: they are lines of columns, separated by blank lines")


def read_squad(path: str | Path, articles: Iterable[Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """The questions of a SQuAD 1.1 or 2.0 file, or of its `articles`: id, question, context, answers.

    `answers` is a list of {"text", "answer_start"}, empty where there is no answer.
    """
    try:
        questions = [
            {
                "id": str(question["id"]),
                "question": question["question"],
                "context": paragraph["context"],
                "answers": [{k: a[k] for k in ("text", "answer_start")} for a in question.get("answers") or []],
            }
            for article in (read_records(path) if articles is None else articles)
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
    except (KeyError, TypeError) as error:
        raise EverybertError(f"{path} is not a SQuAD file ({error} is missing): it needs paragraphs") from None
    if not questions:
        raise EverybertError(f"{path} has 0 questions: is it a SQuAD file?")
    return questions
