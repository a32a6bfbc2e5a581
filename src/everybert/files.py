"""Files and folders that are complete or absent, JSON, and hashes.

A folder is written to a temporary sibling, synced, listed with its hashes in `manifest.json` and renamed into
place. A crash at any point leaves the old version or the new one, complete; `recover` finds it. A folder from
elsewhere has no manifest and is read without verification.
"""

import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
import types
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Union, get_args, get_origin

from everybert.errors import EverybertError

MANIFEST = "manifest.json"
FORMAT = 1
JSON_LIMIT = 64 << 20
"""Size in bytes of the largest JSON file that is read."""
EDITABLE = ("README.md", "LICENSE", "NOTICE")
"""Files that people edit in a finished folder. The library reads nothing from them, so they are not verified."""
TEXT = (".json", ".txt", ".model")
"""Endings of JSON and tokenizer files."""
STALE_AFTER = 24 * 3600
"""Seconds after which a temporary folder of another machine counts as abandoned."""
FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_ERRORS = (*FULL, errno.EIO, errno.EFBIG, errno.EROFS)
UNCHANGED = "what was there before is unchanged"


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` when the block ends, or is removed if the block raises.

    An existing folder is replaced only if it is empty or holds nothing but files that everybert wrote.
    """
    path = Path(path).expanduser().resolve()
    temporary = _draft(path)
    try:
        yield temporary
        with disk_errors(path):
            _write_manifest(temporary, _files(temporary))
            replace_folder(temporary, path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # A failure of the disk, not of what the block read or computed; libraries in Rust say it in their text.
        if getattr(error, "errno", None) in DISK_ERRORS or "(os error " in str(error):
            raise _explain(error, path) from error
        raise


def check_folder(path: str | Path) -> None:
    """Refuse what `atomic_folder` would refuse: to be called before long work whose result is written there."""
    _draft(Path(path).expanduser().resolve()).rmdir()


def _draft(path: Path) -> Path:
    with disk_errors(path):
        _refuse_foreign(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(path.parent)
        temporary = _sibling(path, "tmp")
        temporary.mkdir()
    return temporary


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
    """Rename the finished folder `new` to `path` and remove the older version; on failure, both are where they were."""
    old: Path | None = None
    with suppress(FileNotFoundError):
        old = path.rename(_sibling(path, "old"))
    try:
        new.rename(path)
        sync(path.parent)
    except OSError:
        if not new.exists():  # renamed, but not synced
            path.rename(new)
        if old is not None and not path.exists():  # else another process has written it
            old.rename(path)
        raise
    finally:
        if old is not None and path.exists():
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def disk_errors(path: str | Path, consequence: str = UNCHANGED) -> Iterator[None]:
    """Turn an OSError of the block into a one-line error about writing `path`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
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


def _write_manifest(folder: Path, files: list[Path]) -> None:
    """Sync files and list size and hash of each. The folder is complete once the manifest is on disk."""
    for file in files:
        if not file.is_symlink():  # some writers create private files: give them the folder's permissions
            file.chmod(file.stat().st_mode | (folder.stat().st_mode & 0o666))
        sync(file)
    listed = {f.relative_to(folder).as_posix(): dict(zip(("size", "sha256"), size_and_hash(f))) for f in files}
    draft = folder / (MANIFEST + ".tmp")
    draft.write_text(json.dumps({"everybert": FORMAT, "files": listed}, indent=2) + "\n", encoding="utf-8")
    sync(draft)
    draft.replace(folder / MANIFEST)
    for inner in sorted({file.parent for file in files} | {folder}, reverse=True):
        sync(inner)


def _refuse_foreign(path: Path) -> None:
    """Replacing a folder deletes it: allow it only if everybert wrote everything in it."""
    if path in (Path.cwd(), *Path.cwd().parents):
        raise EverybertError(f"{path} holds the current folder and cannot be replaced; choose another folder")
    if path.is_file():
        raise EverybertError(f"{path} is a file; give a folder to write to")
    names = [file.relative_to(path).as_posix() for file in _files(path)]
    listed = (read_manifest(path) or {}) if names else {}
    if foreign := [name for name in names if name not in listed]:
        raise EverybertError(f"{path} holds {foreign[0]}, which everybert did not write; choose another folder")


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if (p.is_symlink() or not p.is_dir()) and p != folder / MANIFEST)


def _explain(error: BaseException, path: Path, consequence: str = UNCHANGED) -> EverybertError:
    if getattr(error, "errno", None) in FULL or "No space left on device" in str(error):
        return EverybertError(f"the disk is full: {path} was not written, {consequence}; free some space")
    why = getattr(error, "strerror", None) or str(error)
    return EverybertError(f"{path} could not be written ({why}), {consequence}; choose a place that you may write to")


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def read_json(path: str | Path, remedy: str = "restore or download it again", kind: type = dict) -> Any:
    """Read a JSON file. A file that is missing, too large, too deep or does not hold a `kind` is a one-line error."""
    path = Path(path)
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise ValueError(f"it is larger than {JSON_LIMIT >> 20} MiB")
        value = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(value, kind):
            raise ValueError(f"it holds no {'object' if kind is dict else kind.__name__}")
        return value
    except FileNotFoundError:
        raise EverybertError(f"there is no file {path}; {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
    raise EverybertError(f"{path} could not be read as JSON ({reason}); {remedy}")


def changes(file: Path, plan: Mapping[str, Any]) -> list[str]:
    """The keys of a plan whose values differ in the file that recorded the plan of an earlier run."""
    recorded = read_json(file, "start over with fresh=True")
    return [key for key, value in plan.items() if recorded.get(key) != value]


def as_type(value: Any, hint: Any) -> Any:
    """A value of JSON or TOML as the type of a field: lists become tuples, whole numbers floats. Else a TypeError."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal and value not in parts:
        raise TypeError(f"one of {', '.join(map(str, parts))}")
    if origin in (Union, types.UnionType):
        wanted = []
        for part in parts:
            try:
                return as_type(value, part)
            except TypeError as error:
                wanted.append(str(error))
        raise TypeError(" or ".join(kind for kind in wanted if kind != "nothing"))
    if origin is tuple:
        if not isinstance(value, list | tuple) or (parts[-1] is not ... and len(value) != len(parts)):
            raise TypeError("a list" if parts[-1] is ... else f"a list of {len(parts)}")
        return tuple(as_type(v, p) for v, p in zip(value, parts[:1] * len(value) if parts[-1] is ... else parts))
    if hint is float and type(value) in (int, float) and abs(value) < 1e300:  # neither NaN nor infinite
        return float(value)
    if origin is Literal or (type(value) is hint and hint is not float):
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "nothing"}
    raise TypeError(names[hint])


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
        manifest = read_json(inside(folder, MANIFEST))
    except FileNotFoundError:
        return None
    files = manifest.get("files") if "everybert" in manifest else None
    if not isinstance(files, dict):
        return None
    for name, entry in files.items():
        if not isinstance(entry, dict) or [type(entry.get(key)) for key in ("size", "sha256")] != [int, str]:
            raise EverybertError(f"{folder / MANIFEST} is damaged at {name!r}; restore the folder or delete that file")
    return files


def verify_folder(path: str | Path, hashes: bool = True) -> None:
    """Compare a folder with its manifest, if it has one: sizes and, by default, hashes.

    A difference is an error. Only in the folder of a model, JSON and tokenizer files may be edited: then it is a
    warning. Links of such files that lead out of the folder are refused with or without a manifest.
    """
    path = Path(path)
    for file in path.glob("*"):
        if file.suffix in TEXT and file.is_symlink() and file.is_file():
            inside(path, file.name)
    changed = _differences(path, hashes)
    edited = [name for name in changed if is_model(path) and name.endswith(TEXT) and (path / name).exists()]
    remedy = f", or accept the folder as it is: everybert info --accept {path}" if is_model(path) else ""
    for name in [name for name in changed if name not in edited]:
        raise EverybertError(f"{path / name} {changed[name]}; restore it{remedy}")
    if edited:
        warnings.warn(f"{path}: {', '.join(edited)} changed since everybert wrote it; restore it{remedy}", stacklevel=3)


def _differences(path: Path, hashes: bool) -> dict[str, str]:
    """The files that differ from the manifest, and how."""
    found: dict[str, str] = {}
    for name, entry in (read_manifest(path) or {}).items():
        try:
            file = inside(path, name)
        except FileNotFoundError:
            found[name] = "is missing"
            continue
        if (size := file.stat().st_size) != entry["size"]:
            found[name] = f"has {size} bytes where {MANIFEST} says {entry['size']}"
        elif hashes and sha256(file) != entry["sha256"]:
            found[name] = f"is damaged or was edited: its hash differs from {MANIFEST}"
    return {name: how for name, how in found.items() if name not in EDITABLE}


def is_model(path: Path) -> bool:
    """Whether a folder holds a model or an adapter, not a checkpoint or a corpus."""
    return any((path / name).is_file() for name in ("config.json", "adapter_config.json", "modules.json"))


def accept_folder(path: str | Path) -> list[str]:
    """Write the manifest of a model folder anew, from its files as they are; returns the names of changed ones."""
    path = Path(path)
    listed = read_manifest(path)
    if listed is None or not is_model(path):
        raise EverybertError(f"{path} is no model folder that everybert wrote; there is nothing to accept")
    changed = list(_differences(path, hashes=True))
    with disk_errors(path):
        _write_manifest(path, [path / name for name in listed if (path / name).exists()])
    return changed


def is_complete(path: str | Path) -> bool:
    """Whether the folder has a manifest and every file that it lists, with the listed size."""
    path = Path(path)
    try:
        return read_manifest(path) is not None and not _differences(path, hashes=False)
    except (EverybertError, OSError):
        return False


# ── after a crash ───────────────────────────────────────────────────────────────────────────────────────────


def recover(path: str | Path) -> Path:
    """Return `path`. If a crash left it absent, its newest complete version is renamed to it first."""
    path = Path(path)
    left: list[Path] = []
    for wait in (0.0, 0.02, 0.1):  # a running writer needs far less than this between its two renames
        time.sleep(wait)
        if path.is_dir() or not path.parent.is_dir():
            return path
        left = [p for p in path.parent.glob(f".{glob.escape(path.name)}.*") if _parse(p) and is_complete(p)]
        if not any(_parse(p)["kind"] == "old" for p in left):  # not replaced, so not needed by a reader yet
            left = [p for p in left if not _in_use(p)]
        if not any(map(_in_use, left)):
            break
    for newest in sorted(left, key=lambda p: (_parse(p)["kind"] == "old", _age(p)))[:1]:
        with suppress(OSError):  # another process renamed it first
            newest.rename(path)
    return path


def remove_stale(parent: str | Path) -> None:
    """Remove the temporary files of crashed writers from `parent`, after recovering versions that are needed."""
    for left in Path(parent).glob(".*-*-*-*"):
        if not _parse(left) or _in_use(left):
            continue
        if left.is_dir():
            recover(left.with_name(_parse(left)["name"]))
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _sibling(path: Path, kind: str) -> Path:
    """A hidden name beside `path` that identifies its writer: `.name.kind-host-pid-random`."""
    return path.with_name(f".{path.name}.{kind}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def _parse(path: Path) -> dict[str, str]:
    """The name, kind, host and pid in a path that `_sibling` made; empty for any other."""
    match = re.fullmatch(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-(?P<host>\w+)-(?P<pid>\d+)-\w+", path.name)
    return match.groupdict() if match else {}


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _in_use(path: Path) -> bool:
    """Whether the writer of a temporary folder may still be running."""
    writer = _parse(path)
    if writer["host"] != _host() or os.name == "nt":
        return _age(path) < STALE_AFTER
    return is_alive(int(writer["pid"]))


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a run's folder: a second run in it is refused while the process that the file names is alive."""
    path, host, pid = folder / "lock", socket.gethostname(), os.getpid()
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        other, _, number = (path.read_text("utf-8") if path.exists() else "").partition(" ")
        if number.isdigit() and (other != host or (int(number) != pid and is_alive(int(number)))):
            raise EverybertError(
                f"{folder} is in use by process {number} on {other}: wait for it, or choose another folder "
                f"(if it is gone, delete {path})"
            )
        path.write_text(f"{host} {pid}", encoding="utf-8")
    try:
        yield
    finally:
        with suppress(OSError):  # what is left of it is stale, and known as such
            path.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
