"""Files and folders that are complete or absent, JSON, and hashes.

A folder is written to a temporary sibling, synced, listed with its hashes in `manifest.json` and renamed into
place. A crash at any point leaves the old version or the new one, complete; `recover` finds it. A folder from
elsewhere has no manifest and is read without verification.
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
"""Size in bytes of the largest JSON file that is read."""
EDITABLE = ("README.md", "LICENSE", "NOTICE")
"""Files that people edit in a finished folder. The library reads nothing from them, so they are not verified."""
STALE_AFTER = 24 * 3600
"""Seconds after which a temporary folder of another machine counts as abandoned."""
UNCHANGED = "what was there before is unchanged"


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` when the block ends, or is removed if the block raises.

    An existing folder is replaced only if it is empty or holds nothing but files that everybert wrote.
    """
    path = Path(path).expanduser().resolve()
    with disk_errors(path):
        _refuse_foreign(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(path.parent)
        temporary = _sibling(path, "tmp")
        temporary.mkdir()
    try:
        yield temporary
        with disk_errors(path):
            _write_manifest(temporary)
            replace_folder(temporary, path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, Exception) and _is_disk_error(error):
            raise _explain(error, path) from error
        raise


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` when the block ends: readers see the old content or the new.

    A path that is not a regular file (a device, a pipe) is yielded itself.
    """
    path = Path(path).expanduser().resolve()
    if path.exists() and not path.is_file():
        yield path
        return
    temporary = _sibling(path, "tmp")
    try:
        with disk_errors(path):
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_file(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def replace_folder(new: Path, path: Path) -> None:
    """Rename the finished folder `new` to `path` and remove the older version.

    Retries when another process writes the same path; on failure, both folders are where they were.
    """
    for _ in range(10):
        old: Path | None = None
        with suppress(FileNotFoundError):
            old = path.rename(_sibling(path, "old"))
        try:
            new.rename(path)
            sync(path.parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                _remove(old)
                continue
            if not (error.errno == errno.ENOENT and is_complete(path)):  # else a reader renamed it: see `recover`
                if not new.exists():
                    path.rename(new)
                if old is not None:
                    old.rename(path)
                raise
        _remove(old)
        return
    raise EverybertError(f"{path} is being written by several processes at once; give each its own folder")


@contextmanager
def disk_errors(path: str | Path, consequence: str = UNCHANGED) -> Iterator[None]:
    """Turn an OSError of the block into a one-line error about writing `path`."""
    try:
        yield
    except OSError as error:
        raise _explain(error, Path(path), consequence) from error


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_manifest(folder: Path) -> None:
    """Sync every file and list size and hash of each. The folder is complete once the manifest is on disk."""
    files = _files(folder)
    for file in files:
        if not file.is_symlink():  # some writers create private files: give them the folder's permissions
            file.chmod(file.stat().st_mode | (folder.stat().st_mode & 0o666))
        sync(file)
    listed = {
        file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "sha256": sha256(file)} for file in files
    }
    draft = folder / (MANIFEST + ".tmp")
    draft.write_text(json.dumps({"everybert": FORMAT, "files": listed}, indent=2) + "\n", encoding="utf-8")
    sync(draft)
    draft.replace(folder / MANIFEST)
    for inner in sorted({file.parent for file in files} | {folder}, reverse=True):
        sync(inner)


def _refuse_foreign(path: Path) -> None:
    """Replacing a folder deletes it: allow it only if everybert wrote everything in it."""
    here = Path.cwd()
    if path == here or path in here.parents:
        raise EverybertError(f"{path} holds the current folder and cannot be replaced; choose another folder")
    if not path.exists():
        return
    if not path.is_dir():
        raise EverybertError(f"{path} is a file; give a folder to write to")
    if not any(path.iterdir()):
        return
    listed = read_manifest(path)
    if listed is None:
        raise EverybertError(f"{path} was not written by everybert and is not empty; choose another folder")
    for file in _files(path):
        name = file.relative_to(path).as_posix()
        if name not in listed:
            raise EverybertError(f"{path} holds {name}, which everybert did not write; move it away first")


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if (p.is_symlink() or not p.is_dir()) and p != folder / MANIFEST)


def _is_disk_error(error: BaseException) -> bool:
    """Whether the disk failed, rather than something that the block read or computed."""
    from_rust = type(error).__name__ == "SafetensorError" and "os error" in str(error)
    return _is_full(error) or from_rust or getattr(error, "errno", None) in (errno.EIO, errno.EFBIG, errno.EROFS)


def _is_full(error: BaseException) -> bool:
    code = getattr(error, "errno", None)
    return code in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def _explain(error: BaseException, path: Path, consequence: str = UNCHANGED) -> EverybertError:
    if _is_full(error):
        return EverybertError(f"the disk is full: {path} was not written, {consequence}; free some space")
    reason = getattr(error, "strerror", None) or str(error)
    return EverybertError(f"{path} could not be written ({reason}); {consequence}")


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def read_json(path: str | Path, remedy: str = "restore or download it again") -> Any:
    """Read a JSON file. A file that is missing, too large, nested too deeply or not JSON is a one-line error."""
    path = Path(path)
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise EverybertError(f"{path} is larger than {JSON_LIMIT >> 20} MiB and is not read; is it the right file?")
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        reason: Any = "nested too deeply"
    except (OSError, ValueError) as error:
        if isinstance(error, EverybertError):
            raise
        reason = getattr(error, "strerror", None) or error
    raise EverybertError(f"{path} could not be read as JSON ({reason}); {remedy}")


def inside(folder: str | Path, name: str) -> Path:
    """The path of the regular file `name` in a folder. Names and links that lead out of the folder are refused.

    Links from `snapshots/REVISION/FILE` into the `blobs` folder of a hub cache are followed.
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


def sha256(path: Path) -> str:
    """The hash of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_folder(folder: Path) -> str:
    """One hash of the names and contents of all files in a folder."""
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(folder).as_posix()} ".encode())
        digest.update(bytes.fromhex(sha256(file)))
    return digest.hexdigest()


def size_and_hash(path: Path) -> list[Any]:
    """[size, sha256] of a file."""
    return [path.stat().st_size, sha256(path)]


def read_manifest(folder: Path) -> dict[str, dict[str, Any]] | None:
    """The files that a folder's manifest lists, with size and hash; None if there is no manifest of everybert."""
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


def verify_folder(path: str | Path, hashes: bool = True) -> None:
    """Compare a folder with its manifest, if it has one: sizes and, by default, hashes.

    Links of JSON and tokenizer files that lead out of the folder are refused with or without a manifest.
    """
    path = Path(path)
    for file in path.glob("*"):
        if file.suffix in (".json", ".txt", ".model") and file.is_symlink() and file.is_file():
            inside(path, file.name)
    remedy = f"restore the folder, or delete its {MANIFEST} to accept it as it is"
    for name, entry in (read_manifest(path) or {}).items():
        if name in EDITABLE:
            continue
        try:
            file = inside(path, name)
        except FileNotFoundError:
            raise EverybertError(f"{path} is incomplete: {name} is missing; {remedy}") from None
        size = file.stat().st_size
        if size != entry["size"]:
            raise EverybertError(f"{file} has {size} bytes where {MANIFEST} says {entry['size']}; {remedy}")
        if hashes and sha256(file) != entry["sha256"]:
            raise EverybertError(f"{file} is damaged or was edited: its hash differs from {MANIFEST}; {remedy}")


def is_complete(path: str | Path) -> bool:
    """Whether the folder has a manifest and every file that it lists, with the listed size."""
    path = Path(path)
    try:
        verify_folder(path, hashes=False)
        return read_manifest(path) is not None
    except (EverybertError, OSError):
        return False


# ── after a crash ───────────────────────────────────────────────────────────────────────────────────────────


def recover(path: str | Path) -> Path:
    """Return `path`. If a crash left it absent, its newest complete version is renamed to it first."""
    path = Path(path)
    for wait in (0.0, 0.02, 0.1):  # a running writer needs far less than this between its two renames
        time.sleep(wait)
        if path.is_dir() or not path.parent.is_dir():
            return path
        left = sorted(path.parent.glob(f".{glob.escape(path.name)}.*-*-*-*"), key=_age)
        found = [(kind, folder) for folder in left if (kind := _parse(folder)[1]) and is_complete(folder)]
        replacing = any(kind == "old" for kind, _ in found)
        found = [(kind, folder) for kind, folder in found if replacing or not _in_use(folder)]
        if not any(_in_use(folder) for _, folder in found):
            break
    for _, folder in sorted(found, key=lambda item: item[0] == "old")[:1]:  # the new version, else the old one
        with suppress(OSError):  # another process renamed it first
            folder.rename(path)
    return path


def remove_stale(parent: str | Path) -> None:
    """Remove the temporary files of crashed writers from `parent`, after recovering versions that are needed."""
    for left in Path(parent).glob(".*-*-*-*"):
        name, kind, _, _ = _parse(left)
        if not kind or _in_use(left):
            continue
        if left.is_dir():
            recover(left.with_name(name))
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _sibling(path: Path, kind: str) -> Path:
    """A hidden name beside `path` that tells its writer: `.name.kind-host-pid-random`."""
    return path.with_name(f".{path.name}.{kind}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def _parse(path: Path) -> tuple[str, str, str, int]:
    """(name, kind, host, pid) of a path that `_sibling` made; ("", "", "", 0) for any other."""
    stem, _, rest = path.name.rpartition(".")
    parts = rest.split("-")
    if stem.startswith(".") and len(parts) == 4 and parts[0] in ("tmp", "old") and parts[2].isdigit():
        return stem[1:], parts[0], parts[1], int(parts[2])
    return "", "", "", 0


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _in_use(path: Path) -> bool:
    """Whether the writer of a temporary folder may still be running."""
    _, _, host, pid = _parse(path)
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
