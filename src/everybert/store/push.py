"""A folder to the hub, through huggingface-hub: what is sent is known before, and lands in one commit or not at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everybert import __version__
from everybert.errors import EverybertError
from everybert.files import EDITABLE, MANIFEST, inside, read_manifest, verify_folder

CARD = "README.md"
SENT = (".json", ".safetensors", ".txt", ".model", ".md", ".png", ".onnx", ".data")
"""Ends of the names of what everybert writes; anything else is no part of a model."""


@dataclass(frozen=True)
class Parcel:
    """What would be sent of a folder."""

    folder: Path
    files: dict[str, int]
    """Name → bytes."""
    left_out: tuple[str, ...]
    """Files that everybert did not write."""

    @property
    def size(self) -> int:
        """Bytes together."""
        return sum(self.files.values())


def pack(folder: str | Path) -> Parcel:
    """Check a folder against its list, and say what would be sent: listed files, card and licence, nothing else.

    The list itself stays here: the hub has hashes of its own, and whoever downloads a part may do without the rest.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise EverybertError(f"there is no folder {folder}; give the folder of a model")
    listed = read_manifest(folder)
    if listed is None:
        raise EverybertError(
            f"{folder} has no {MANIFEST}, so what belongs to it is not known; load it and save it with everybert first"
        )
    verify_folder(folder)
    if not (folder / CARD).is_file():
        raise EverybertError(
            f"{folder} has no card: write {CARD} (what the model is, its data, its licence) and push again"
        )
    present = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    names = [n for n in present if n in EDITABLE or (n in listed and n.endswith(SENT))]
    left = tuple(n for n in present if n not in names and n != MANIFEST)
    return Parcel(folder, {name: inside(folder, name).stat().st_size for name in names}, left)


def push(parcel: Parcel, repository: str, private: bool = False) -> str:
    """Send it to `org/name`, which is made where there is none; returns its address.

    The token is the one of `hf auth login` or of HF_TOKEN. A repository that is public already is not made private.
    """
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository):
        raise EverybertError(f"{repository!r} is not a name on the hub; write it as org/name")
    try:
        from huggingface_hub import CommitOperationAdd, HfApi, get_token
    except ImportError:
        raise EverybertError("pushing needs huggingface-hub; pip install it") from None
    if get_token() is None:
        raise EverybertError("there is no token for the hub; run `hf auth login`, or set HF_TOKEN")
    api = HfApi(library_name="everybert", library_version=__version__)
    with _explained(repository):
        made: Any = api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise EverybertError(f"{repository} is public; make it private on its page, or leave out --private")
        files = [CommitOperationAdd(name, str(parcel.folder / name)) for name in parcel.files]
        api.create_commit(repository, files, commit_message=f"everybert {__version__}: {len(files)} files")
    return str(made)


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """The client's errors as one line. Its HTTP library changes between versions: statuses are read where there are."""
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise EverybertError("HF_HUB_OFFLINE is set; unset it to push") from None
    except errors.HFValidationError as error:
        raise EverybertError(f"{repository!r} is not a name on the hub ({_first_line(error)})") from None
    except EverybertError:
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        network = type(error).__module__.split(".")[0] in ("httpx", "httpx2", "requests", "httpcore", "urllib3")
        if status is None and not network and not isinstance(error, (OSError, TimeoutError)):
            raise
        why = {
            None: "the hub is not reachable; connect and push again",
            401: "the hub does not know the token; run `hf auth login` again, or check HF_TOKEN",
            403: "the token may not write there; give one with write access, or another org/name",
            404: "there is no such repository, or the token may not see it",
            413: "the hub finds the files too large",
            429: "the hub asks to slow down; wait and push again",
        }.get(status, f"the hub answered {status} ({_first_line(error)}); try again")
        raise EverybertError(f"{repository} was not pushed: {why}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
