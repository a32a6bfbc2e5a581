"""Opening text files of any packing, with errors that name the file and the byte.

Streams are read in blocks and never whole, so a file may be larger than memory.
"""

import io
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from everybert.errors import EverybertError

Errors = Literal["strict", "replace"]
PACKINGS = (".gz", ".bz2", ".xz", ".zst")
BLOCK = 1 << 22  # bytes read at a time
log = logging.getLogger("everybert")


@dataclass
class ReadReport:
    """What reading changed or left out; readers fill it in when given one."""

    replaced: int = 0  # undecodable bytes and NULs turned into U+FFFD
    cut: int = 0  # documents too long to hold, cut into several
    bad: list[str] = field(default_factory=list)  # records left out, as "file:line: why"
    _done: int = 0
    _raw: IO[bytes] | None = None

    @property
    def bytes_read(self) -> int:
        """How far reading has come, in bytes of the files as they lie on disk."""
        return self._done + (self._raw.tell() if self._raw is not None and not self._raw.closed else 0)


def expand(paths: Iterable[str | Path] | str | Path) -> list[Path]:
    """Files to read, in order: a folder means the files below it, sorted; "-" is standard input."""
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(path)
        if path.is_dir():
            below = path.rglob("*")
            inside = sorted(f for f in below if f.is_file() and not _hidden(f.relative_to(path)))
            if not inside:
                raise EverybertError(f"the folder {path} has no files: check the path")
            files += inside
        elif str(path) == "-" or path.exists():
            files.append(path)
        else:
            raise EverybertError(f"{path} does not exist: check the path")
    if not files:
        raise EverybertError("no input files: name at least one file or folder")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def kind(path: Path) -> str:
    """The file's extension in lower case without its packing: "wiki.xml.bz2" is ".xml"."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKINGS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


@contextmanager
def open_bytes(path: Path, report: ReadReport | None = None) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked; failures of the file system or the packing are told with its name."""
    report = report or ReadReport()
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    try:
        with path.open("rb") as raw:
            report._raw = raw if raw.seekable() else None  # a pipe cannot say how far it has come
            yield _unpack(raw, path.suffix.lower())
            report._done = report.bytes_read
    except EverybertError:
        raise
    except Exception as error:  # each packing has errors of its own
        if not _is_reading_error(error):
            raise
        raise EverybertError(f"{path} cannot be read ({error}): it may be damaged or cut short") from error
    finally:
        report._raw = None


def _unpack(raw: IO[bytes], suffix: str) -> IO[bytes]:
    if suffix == ".gz":
        import gzip

        return gzip.open(raw)  # type: ignore[return-value]
    if suffix == ".bz2":
        import bz2

        return bz2.open(raw)  # type: ignore[return-value]
    if suffix == ".xz":
        import lzma

        return lzma.open(raw)  # type: ignore[return-value]
    if suffix == ".zst":
        unpacked = _zstandard().ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(unpacked)
    return raw


def _zstandard():
    try:
        import zstandard
    except ImportError as error:
        raise EverybertError("reading .zst files needs zstandard: pip install zstandard") from error
    return zstandard


def _is_reading_error(error: Exception) -> bool:
    named = ("zlib.error", "_lzma.LZMAError", "zstandard.backend_c.ZstdError")
    return isinstance(error, OSError | EOFError) or f"{type(error).__module__}.{type(error).__name__}" in named


def decode(data: bytes, path: Path, at: int, errors: Errors, report: ReadReport) -> str:
    """Bytes as UTF-8; `at` is the offset of their first byte in the (unpacked) file.

    A byte that is not UTF-8, or a NUL, is an error under "strict"; under "replace" it becomes U+FFFD and counts.
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
        report.replaced += text.count("\ufffd") - data.count(b"\xef\xbf\xbd")  # those were there before
    return text


def blocks(path: Path, errors: Errors, report: ReadReport, limit: int = 1 << 26) -> Iterator[tuple[str, bool]]:
    """The file's text in runs of whole lines, and whether the last line goes on in the next run.

    Only a line longer than `limit` bytes does; \\r\\n is read as \\n.
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
                end = _break(held)
            yield decode(bytes(held[:end]), path, at, errors, report).replace("\r\n", "\n"), not whole
            at += end
            del held[:end]
        if held:
            yield decode(bytes(held), path, at, errors, report), False


def _break(data: bytearray) -> int:
    """Where to cut an endless line: after its last space, or else between characters."""
    if space := data.rfind(b" ") + 1:
        return space
    end = len(data) - 1
    while end > len(data) - 5 and data[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return end


def lines(path: Path, errors: Errors = "strict", report: ReadReport | None = None) -> Iterator[tuple[int, str]]:
    """The file's lines, numbered from 1, without their ends."""
    report = report or ReadReport()
    with open_bytes(path, report) as stream:
        at = 0
        for number, line in enumerate(stream, 1):
            yield number, decode(line, path, at, errors, report).rstrip("\r\n")
            at += len(line)
