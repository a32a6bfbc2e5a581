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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

from everybert.errors import EverybertError

Errors = Literal["strict", "replace"]
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "zstandard"}
RECORD_KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
TEXT_KINDS = (".txt", ".text", ".md", ".raw", ".tok", ".tokens", "")
TEXT_COLUMNS = ("text", "content", "body", "article", "document", "raw_content", "sentence", "sentence1")
CONLLU_FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
BLOCK = 1 << 22  # bytes read at a time
LONGEST = 1 << 28  # characters of one document held in memory; a longer one is split, and counted as such
BLANK_LINES = re.compile(r"\n\s*\n")
LINE_END = re.compile(r"\n")
log = logging.getLogger("everybert")


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class ReadReport:
    """What reading changed or left out; readers update the report that they are given."""

    replaced: int = 0  # undecodable bytes and NULs replaced by U+FFFD
    cut: int = 0  # splits of documents that are too long to hold in memory
    bad: list[str] = field(default_factory=list)  # records left out, as "file:line: reason"
    _done: int = 0
    _raw: IO[bytes] | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, as stored on disk."""
        return self._done + (self._raw.tell() if self._raw is not None and not self._raw.closed else 0)


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


@contextmanager
def open_bytes(path: Path, report: ReadReport | None = None) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file; errors of the file system and of the compression name the file."""
    report = report or ReadReport()
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    try:
        with path.open("rb") as raw:
            report._raw = raw if raw.seekable() else None  # a pipe has no position
            yield _decompress(raw, COMPRESSIONS.get(path.suffix.lower()))
            report._done = report.bytes_read
    except EverybertError:
        raise
    except Exception as error:  # each compression has an error type of its own
        kinds = ("zlib.error", "_lzma.LZMAError", "zstandard.backend_c.ZstdError")
        if (
            not isinstance(error, OSError | EOFError)
            and f"{type(error).__module__}.{type(error).__name__}" not in kinds
        ):
            raise
        raise EverybertError(f"{path} cannot be read ({error}): it may be damaged or cut short") from error
    finally:
        report._raw = None


def _decompress(raw: IO[bytes], module: str | None) -> IO[bytes]:
    if module is None:
        return raw
    try:
        library = importlib.import_module(module)
    except ImportError as error:
        raise EverybertError(f"reading this file needs {module}: pip install {module}") from error
    if module == "zstandard":
        return io.BufferedReader(library.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
    return library.open(raw)


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
            raise EverybertError(
                f"{path} looks binary (a NUL at byte {at + nul}): leave it out, or pass --errors replace"
            )
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise EverybertError(
                f"{path} is not UTF-8 at byte {at + error.start} (0x{data[error.start]:02x}): "
                "convert it with iconv, or pass --errors replace"
            ) from None
    text = data.decode("utf-8", errors="replace").replace("\0", "\ufffd")
    if "\ufffd" in text:
        report.replaced += text.count("\ufffd") - data.count(b"\xef\xbf\xbd")  # less those in the file itself
    return text


def blocks(path: Path, errors: Errors, report: ReadReport, limit: int = 1 << 26) -> Iterator[tuple[str, bool]]:
    """The text of a file in blocks of whole lines, and whether the last line continues in the next block.

    Only a line longer than `limit` bytes is split. \\r\\n is read as \\n.
    """
    with open_bytes(path, report) as stream:
        at, held = 0, bytearray()
        while data := stream.read(BLOCK):
            held += data
            end = held.rfind(b"\n", len(held) - len(data)) + 1
            whole = end > 0
            if not whole:
                if len(held) < limit:
                    continue
                end = _split_point(held)
            yield decode(bytes(held[:end]), path, at, errors, report).replace("\r\n", "\n"), not whole
            at += end
            del held[:end]
        if held:
            yield decode(bytes(held), path, at, errors, report), False


def _split_point(data: bytearray) -> int:
    """Where to split a line that is too long: after its last space, else between two characters."""
    if space := data.rfind(b" ") + 1:
        return space
    end = len(data) - 1
    while end > len(data) - 5 and data[end] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        end -= 1
    return end


def lines(path: Path, errors: Errors = "strict", report: ReadReport | None = None) -> Iterator[tuple[int, str]]:
    """The lines of a file, numbered from 1, without line ends."""
    report = report or ReadReport()
    with open_bytes(path, report) as stream:
        at = 0
        for number, line in enumerate(stream, 1):
            yield number, decode(line, path, at, errors, report).rstrip("\r\n")
            at += len(line)


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
        for text in file_documents(path, column, errors, per_line, report):
            if text := text.strip():
                yield text


def file_documents(path: Path, column: str | None, errors: Errors, per_line: bool, report: ReadReport) -> Iterator[str]:
    """The documents of one file, read by its extension; some may be blank."""
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
    held: list[str] = []  # the current document
    size, continues = 0, False
    for block, continues_next in blocks(path, errors, report):
        # A block starts a line. The line end put before it lets a blank first line end the current document.
        first, *others = separator.split(block if continues else "\n" + block)
        first = first if continues else first[1:]
        continues = continues_next
        for text in others:
            yield "".join([*held, first])
            held, size, first = [], 0, text
        if held and size + len(first) > LONGEST:
            report.cut += 1
            log.warning("%s: a document of more than %d characters is split", path, LONGEST)
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
    """The column that most likely holds the text: one with a usual name, else the only column of strings."""
    strings = [name for name, value in record.items() if isinstance(value, str)]
    for name in TEXT_COLUMNS:
        if name in strings:
            return name
    if len(strings) == 1:
        return strings[0]
    raise EverybertError(f"{path}: which column is the text? It has {', '.join(record)}: pass --column")


# ── records ─────────────────────────────────────────────────────────────────────────────────────────────────

Rows = Iterator[tuple[int, dict[str, Any] | str]]
"""(line or record number, record) pairs. Instead of a record, a bad line has a string with the reason."""


def read_records(
    path: str | Path,
    *,
    skip_bad: bool = False,
    columns: Sequence[str] | None = None,
    errors: Errors = "strict",
    report: ReadReport | None = None,
) -> Iterator[dict[str, Any]]:
    """The records of a csv, tsv, jsonl, json or parquet file.

    csv and tsv files have a header row unless `columns` names their columns. Quotes have a meaning in csv but not in
    tsv files (as in GLUE). A bad line is an error, or with `skip_bad` is left out and listed in `report.bad`.
    """
    path, report = Path(path), report or ReadReport()
    if not path.is_file():
        raise EverybertError(f"{path} is not a file: check the path")
    found = False
    for place, record in _rows(path, columns, errors, report):
        found = True
        if isinstance(record, dict):
            yield record
        elif skip_bad:
            report.bad.append(f"{path}:{place}: {record}")
        else:
            raise EverybertError(f"{path}:{place}: {record}: fix the line, or leave it out with --skip-bad")
    if not found:
        raise EverybertError(f"{path} has no records: check the file")
    if report.bad:
        log.warning("%s: %d bad lines left out, the first at %s", path, len(report.bad), report.bad[0])


def _rows(path: Path, columns: Sequence[str] | None, errors: Errors, report: ReadReport) -> Rows:
    match kind(path):
        case ".csv":
            return _csv_rows(path, columns, errors, report)
        case ".tsv":
            return _tsv_rows(path, columns, errors, report)
        case ".jsonl" | ".ndjson":
            return _jsonl_rows(path, errors, report)
        case ".json":
            return _json_rows(path, errors, report)
        case ".parquet":
            return _parquet_rows(path)
    raise EverybertError(f"{path}: records are read from {', '.join(RECORD_KINDS)}: rename or convert the file")


def _tsv_rows(path: Path, columns: Sequence[str] | None, errors: Errors, report: ReadReport) -> Rows:
    names = list(columns) if columns else None
    for number, line in lines(path, errors, report):
        if names is None:
            names = _header(path, line.split("\t"))
        elif line:
            yield number, _row(names, line.split("\t"))


def _csv_rows(path: Path, columns: Sequence[str] | None, errors: Errors, report: ReadReport) -> Rows:
    csv.field_size_limit(sys.maxsize)
    source = (line + "\n" for _, line in lines(path, errors, report))
    first = next(source, "")
    rows = csv.reader(chain([first], source), delimiter=max(",;\t", key=first.count), strict=True)
    names = list(columns) if columns else None
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if names is None:
                raise EverybertError(f"{path}:{rows.line_num}: the header row cannot be read ({error})") from None
            yield rows.line_num, str(error)
            continue
        if names is None:
            names = _header(path, row)
        elif row:
            yield rows.line_num, _row(names, row)


def _header(path: Path, names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise EverybertError(f"{path}: the header row names a column twice ({', '.join(names)}): is there one?")
    return names


def _row(names: list[str], row: list[str]) -> dict[str, Any] | str:
    if len(row) != len(names):
        return f"{len(row)} columns where the header has {len(names)}"
    return dict(zip(names, row))


def _jsonl_rows(path: Path, errors: Errors, report: ReadReport) -> Rows:
    for number, line in lines(path, errors, report):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, f"not JSON ({error})"
            continue
        yield number, _object(record)


def _object(record: Any) -> dict[str, Any] | str:
    return record if isinstance(record, dict) else f"a {type(record).__name__}, not an object"


def _json_rows(path: Path, errors: Errors, report: ReadReport) -> Rows:
    """A list of objects, an object with such a list under "data", or JSON lines in a .json file."""
    text = _read_text(path, errors, report)
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Extra data"):
            yield from _jsonl_rows(path, errors, ReadReport())
            return
        raise EverybertError(f"{path} is not JSON ({error}): fix the file") from None
    if isinstance(whole, dict):
        whole = whole.get("data", [whole])
    if not isinstance(whole, list):
        raise EverybertError(f"{path}: a {type(whole).__name__}, not a list of objects: convert the file")
    for number, record in enumerate(whole, 1):
        yield number, _object(record)


def _read_text(path: Path, errors: Errors, report: ReadReport) -> str:
    with open_bytes(path, report) as stream:
        return decode(stream.read(), path, 0, errors, report)


def _parquet_rows(path: Path) -> Rows:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise EverybertError("reading parquet files needs pyarrow: pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=1024))
            yield from enumerate(chain.from_iterable(batches), 1)
    except (pyarrow.ArrowException, OSError) as error:
        raise EverybertError(f"{path} cannot be read as parquet ({error}): it may be damaged") from error


# ── task files: CoNLL columns, CoNLL-U trees, SQuAD questions ───────────────────────────────────────────────


def read_conll(path: str | Path) -> Iterator[list[list[str]]]:
    """The sentences of a CoNLL-2003 style file, each a list of rows of columns (word first, tag last).

    Columns are separated by tabs if the line has any, else by white space. Blank lines separate sentences.
    -DOCSTART- lines are left out. Every row of a file has the same number of columns.
    """
    path = _file(path)
    width = 0
    for block in _paragraphs(path):
        sentence = []
        for number, line in block:
            row = line.split("\t") if "\t" in line else line.split()
            if row[0].startswith("-DOCSTART-"):
                continue
            width = width or len(row)
            if len(row) != width or width < 2:
                raise EverybertError(
                    f"{path}:{number}: {len(row)} columns, {max(width, 2)} expected: "
                    "put a word and its tag on every line"
                )
            sentence.append(row)
        if sentence:
            yield sentence
    if not width:
        raise EverybertError(f"{path} has no sentences: it needs a word and its tag on every line")


def read_conllu(path: str | Path) -> Iterator[list[dict[str, str]]]:
    """The sentences of a CoNLL-U file: a dictionary of the ten fields for every word.

    Multiword ranges (3-4) and empty nodes (5.1) are left out: they are no part of the tree.
    """
    path = _file(path)
    found = False
    for block in _paragraphs(path):
        sentence = []
        for number, line in block:
            if line.startswith("#"):
                continue
            row = line.split("\t")
            if len(row) != len(CONLLU_FIELDS):
                raise EverybertError(f"{path}:{number}: {len(row)} columns where CoNLL-U has 10, tab separated")
            if row[0].isdigit():
                sentence.append(dict(zip(CONLLU_FIELDS, row)))
        if sentence:
            found = True
            yield sentence
    if not found:
        raise EverybertError(f"{path} has no sentences: is it a CoNLL-U file?")


def _paragraphs(path: Path) -> Iterator[list[tuple[int, str]]]:
    """Runs of lines that are not blank."""
    held: list[tuple[int, str]] = []
    for number, line in lines(path):
        if line.strip():
            held.append((number, line))
        elif held:
            yield held
            held = []
    if held:
        yield held


def read_squad(path: str | Path) -> Iterator[dict[str, Any]]:
    """The questions of a SQuAD 1.1 or 2.0 file: id, question, context, answers, is_impossible, title.

    `answers` is a list of {"text", "answer_start"}, empty where there is no answer.
    """
    path = _file(path)
    try:
        for article in json.loads(_read_text(path, "strict", ReadReport()))["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    answers = question.get("answers") or []
                    yield {
                        "id": str(question["id"]),
                        "question": question["question"],
                        "context": paragraph["context"],
                        "answers": [{"text": a["text"], "answer_start": a["answer_start"]} for a in answers],
                        "is_impossible": bool(question.get("is_impossible", False)),
                        "title": article.get("title", ""),
                    }
    except json.JSONDecodeError as error:
        raise EverybertError(f"{path} is not JSON ({error}): fix the file") from None
    except (KeyError, TypeError) as error:
        raise EverybertError(
            f"{path} is not a SQuAD file ({error} is missing): it needs data, paragraphs, context, qas, id, question"
        ) from None


def _file(path: str | Path) -> Path:
    path = Path(path)
    if path.is_dir():
        raise EverybertError(f"{path} is a folder: name a file")
    return expand(path)[0]
