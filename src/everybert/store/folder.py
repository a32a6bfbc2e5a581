"""Folders that are complete or absent.

An artefact is written to a temporary sibling folder, synced, listed with its hashes in `manifest.json`, and
renamed into place. A crash at any point leaves the old version or the new one, whole; `recover` finds it.
Folders from elsewhere have no list, and are read all the same.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from everybert.errors import EverybertError

MANIFEST = "manifest.json"
FORMAT = 1
JSON_LIMIT = 64 << 20
"""Bytes of the largest JSON file read whole; real ones are a thousandth of it."""
BY_HAND = ("README.md", "LICENSE", "NOTICE")
"""What people edit in a finished folder; nothing is read from them, so they may differ from the list."""
STALE_AFTER = 24 * 3600
"""Seconds after which a temporary folder of another machine counts as abandoned."""


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path`, whole, when the block ends, or vanishes if it raises.

    An existing folder is replaced only if it is empty or holds nothing but what everybert wrote there.
    """
    path = Path(path).expanduser().resolve()
    try:
        _refuse_foreign(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(path.parent)
        temporary = _sibling(path, "tmp")
        temporary.mkdir()
    except OSError as error:
        raise _explain(error, path) from error
    try:
        yield temporary
        try:
            _seal(temporary)
            _swap(temporary, path)
        except OSError as error:
            raise _explain(error, path) from error
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, Exception) and _is_of_disk(error):
            raise _explain(error, path) from error
        raise


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file that becomes `path` when the block ends: readers see the old content or the new.

    What is no plain file (a device, a pipe) is written to as it is.
    """
    path = Path(path).expanduser().resolve()
    if path.exists() and not path.is_file():
        yield path
        return
    temporary = _sibling(path, "tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _explain(error, path) from error
        raise


def write_json(path: str | Path, value: Any) -> None:
    """Write one JSON file so that readers see the old content or the new, never a part."""
    with atomic_file(path) as draft:
        draft.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _seal(folder: Path) -> None:
    """Sync every file, list them with size and hash, sync the list: from here on the folder is complete."""
    files = _files(folder)
    for file in files:
        if not file.is_symlink():  # some writers make theirs private: let the folder's permissions hold for all
            file.chmod(file.stat().st_mode | (folder.stat().st_mode & 0o666))
        _sync(file)
    listed = {
        file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "sha256": _sha256(file)} for file in files
    }
    text = json.dumps({"everybert": FORMAT, "files": listed}, indent=2) + "\n"
    draft = folder / (MANIFEST + ".tmp")
    draft.write_text(text, encoding="utf-8")
    _sync(draft)
    draft.replace(folder / MANIFEST)
    for inner in sorted({file.parent for file in files} | {folder}, reverse=True):
        _sync(inner)


def _swap(temporary: Path, path: Path) -> None:
    """Rename into place, moving an older version aside first. Retries when another writer gets in between."""
    for _ in range(10):
        aside: Path | None = None
        with suppress(FileNotFoundError):
            aside = path.rename(_sibling(path, "old"))
        try:
            temporary.rename(path)
            _sync(path.parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                _discard(aside)
                continue
            taken = error.errno == errno.ENOENT and is_complete(path)  # a reader has put it in place: see recover
            if not taken:
                if not temporary.exists():
                    path.rename(temporary)
                if aside is not None:
                    aside.rename(path)
                raise
        _discard(aside)
        return
    raise EverybertError(f"{path} is being written by several processes at once; give each its own folder")


def _discard(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_foreign(path: Path) -> None:
    """Replacing a folder deletes it: do so only where everything in it is ours."""
    here = Path.cwd()
    if path == here or path in here.parents:
        raise EverybertError(f"{path} holds the current folder and cannot be replaced; write to a folder of its own")
    if not path.exists():
        return
    if not path.is_dir():
        raise EverybertError(f"{path} is a file; give a folder to write to")
    if not any(path.iterdir()):
        return
    listed = contents(path)
    if listed is None:
        raise EverybertError(f"{path} was not written by everybert and is not empty; choose another folder")
    for file in _files(path):
        name = file.relative_to(path).as_posix()
        if name not in listed:
            raise EverybertError(f"{path} holds {name}, which everybert did not write; move it away first")


def _sibling(path: Path, kind: str) -> Path:
    """`.name.kind-host-pid-random` beside `path`: hidden, and says whose it is."""
    return path.with_name(f".{path.name}.{kind}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _sync(path: Path) -> None:
    """Have the disk confirm a file's content, or a folder's entries."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if (p.is_symlink() or not p.is_dir()) and p != folder / MANIFEST)


def _is_of_disk(error: BaseException) -> bool:
    """Whether the disk failed, rather than something that the block read or computed."""
    told = type(error).__name__ == "SafetensorError" and "os error" in str(error)  # Rust's words for an errno
    return _is_full(error) or told or getattr(error, "errno", None) in (errno.EIO, errno.EFBIG, errno.EROFS)


def _is_full(error: BaseException) -> bool:
    code = getattr(error, "errno", None)
    return code in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def _explain(error: BaseException, path: Path) -> EverybertError:
    if _is_full(error):
        return EverybertError(
            f"the disk is full: {path} was not written, what was there before is unchanged; free some space"
        )
    reason = getattr(error, "strerror", None) or str(error)
    return EverybertError(f"{path} could not be written ({reason}); what was there before is unchanged")


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def check(path: str | Path, hashes: bool = True) -> None:
    """Compare a folder with its list, when it has one: sizes always, content by hash unless told not to.

    Files that are read by others (a tokenizer's) are looked at here for links that lead out of the folder.
    """
    path = Path(path)
    for file in path.glob("*"):
        if file.suffix in (".json", ".txt", ".model") and file.is_symlink() and file.is_file():
            inside(path, file.name)
    listed = contents(path)
    for name, entry in (listed or {}).items():
        if name in BY_HAND:
            continue
        remedy = f"restore the folder, or delete its {MANIFEST} to accept it as it is"
        try:
            file = inside(path, name)
        except FileNotFoundError:
            raise EverybertError(f"{path} is incomplete: {name} is missing; {remedy}") from None
        size = file.stat().st_size
        if size != entry["size"]:
            raise EverybertError(f"{file} has {size} bytes where {MANIFEST} says {entry['size']}; {remedy}")
        if hashes and _sha256(file) != entry["sha256"]:
            raise EverybertError(f"{file} is damaged or was edited: its hash differs from {MANIFEST}; {remedy}")


def is_complete(path: str | Path) -> bool:
    """Whether the folder has a list and every file on it, at its size."""
    path = Path(path)
    try:
        check(path, hashes=False)
        return contents(path) is not None
    except (EverybertError, OSError):
        return False


def recover(path: str | Path) -> Path:
    """`path`; where a crash left it absent, its newest complete version is put back first."""
    path = Path(path)
    for wait in (0.0, 0.02, 0.1):  # a live writer is between its two renames for far less than this
        time.sleep(wait)
        if path.is_dir() or not path.parent.is_dir():
            return path
        left = sorted(path.parent.glob(f".{glob.escape(path.name)}.*-*-*-*"), key=_age)
        owned = [(kind, folder) for folder in left if (kind := _whose(folder)[1]) and is_complete(folder)]
        replacing = any(kind == "old" for kind, _ in owned)
        owned = [(k, folder) for k, folder in owned if replacing or not _in_use(folder)]
        if not any(_in_use(folder) for _, folder in owned):
            break
    for _, folder in sorted(owned, key=lambda item: item[0] == "old")[:1]:  # the new version, else the old
        with suppress(OSError):  # someone else was quicker: then it is there
            folder.rename(path)
    return path


def remove_stale(parent: str | Path) -> None:
    """Remove what crashed writers left in `parent`; a version that nothing succeeded is put back first."""
    for left in Path(parent).glob(".*-*-*-*"):
        name, kind, _, _ = _whose(left)
        if not kind or _in_use(left):
            continue
        if left.is_dir():
            recover(left.with_name(name))
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def read_json(path: str | Path) -> Any:
    """A JSON file's value; one that is missing, too large, too deep or not JSON is a one-line error."""
    path = Path(path)
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise EverybertError(f"{path} is larger than {JSON_LIMIT >> 20} MiB and is not read; is it the right file?")
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, RecursionError, ValueError) as error:
        if isinstance(error, EverybertError):
            raise
        reason = getattr(error, "strerror", None) or (
            "nested too deeply" if isinstance(error, RecursionError) else error
        )
        raise EverybertError(f"{path} could not be read as JSON ({reason}); restore or download it again") from None


def inside(folder: str | Path, name: str) -> Path:
    """The regular file `name` of a folder; names and links that lead out of the folder are refused.

    A hub cache keeps `snapshots/REVISION/FILE` as links into the `blobs` folder beside it: they are followed.
    """
    folder = Path(folder)
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or "\0" in name:
        raise EverybertError(f"{folder} names a file outside itself ({name!r}); do not use this folder")
    file = folder / pure
    real, root = file.resolve(strict=True), folder.resolve()
    homes = [root] + [p.parent / "blobs" for p in (root, *root.parents) if p.name == "snapshots"]
    if not any(home in real.parents for home in homes):
        raise EverybertError(f"{file} is a link out of its folder; put the file itself there")
    if not real.is_file():
        raise EverybertError(f"{file} is not a regular file; put the file itself there")
    return file


def contents(folder: Path) -> dict[str, dict[str, Any]] | None:
    """The folder's list of files, or None where there is none of ours."""
    try:
        found = read_json(inside(folder, MANIFEST))
    except FileNotFoundError:
        return None
    files = found.get("files") if isinstance(found, dict) and "everybert" in found else None
    if not isinstance(files, dict):
        return None
    for name, entry in files.items():
        if not (
            isinstance(entry, dict) and isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str)
        ):
            raise EverybertError(f"{folder / MANIFEST} is damaged at {name!r}; restore the folder or delete that file")
    return files


def _whose(path: Path) -> tuple[str, str, str, int]:
    """('model', 'tmp', host, pid) of a name that `_sibling` made; ('', '', '', 0) of any other."""
    stem, _, rest = path.name.rpartition(".")
    parts = rest.split("-")
    if stem.startswith(".") and len(parts) == 4 and parts[0] in ("tmp", "old") and parts[2].isdigit():
        return stem[1:], parts[0], parts[1], int(parts[2])
    return "", "", "", 0


def _in_use(path: Path) -> bool:
    """Whether the writer of a temporary folder may still be at work."""
    _, _, host, pid = _whose(path)
    if host != _host() or os.name == "nt":
        return _age(path) < STALE_AFTER
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
