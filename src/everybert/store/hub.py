"""From a model's name to its folder (a path, a bundled model, a hub id), and from a folder to the hub.

Downloads are cached and can be pinned by revision; HF_HUB_OFFLINE is respected. A push is one commit, or nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everybert import __version__
from everybert.errors import EverybertError
from everybert.files import EDITABLE, MANIFEST, inside, read_manifest, recover, verify_folder

BUNDLED = Path(__file__).parent.parent / "models"

KNOWN = {
    "bert-base-uncased": "google-bert/bert-base-uncased",
    "bert-base-cased": "google-bert/bert-base-cased",
    "bert-base-chinese": "google-bert/bert-base-chinese",
    "bert-base-multilingual-cased": "google-bert/bert-base-multilingual-cased",
    "bert-base-multilingual-uncased": "google-bert/bert-base-multilingual-uncased",
    "bert-large-uncased": "google-bert/bert-large-uncased",
    "bert-large-cased": "google-bert/bert-large-cased",
    "roberta-base": "FacebookAI/roberta-base",
    "roberta-large": "FacebookAI/roberta-large",
    "xlm-roberta-base": "FacebookAI/xlm-roberta-base",
    "xlm-roberta-large": "FacebookAI/xlm-roberta-large",
    "distilbert-base-uncased": "distilbert/distilbert-base-uncased",
    "distilbert-base-cased": "distilbert/distilbert-base-cased",
    "distilroberta-base": "distilbert/distilroberta-base",
    "albert-base-v2": "albert/albert-base-v2",
    "albert-large-v2": "albert/albert-large-v2",
    "albert-xlarge-v2": "albert/albert-xlarge-v2",
    "albert-xxlarge-v2": "albert/albert-xxlarge-v2",
    "longformer-base-4096": "allenai/longformer-base-4096",
    "longformer-large-4096": "allenai/longformer-large-4096",
    "modernbert-base": "answerdotai/ModernBERT-base",
    "modernbert-large": "answerdotai/ModernBERT-large",
    "all-MiniLM-L6-v2": "sentence-transformers/all-MiniLM-L6-v2",
}
"""Short names of published models → hub id."""

DOWNLOADED = ["*.json", "*.txt", "*.model", "model.safetensors", "model-*-of-*.safetensors", "*/model.safetensors"]
DOWNLOADED += ["model.int8.safetensors"]
PICKLES = ["pytorch_model.bin", "pytorch_model-*-of-*.bin"]
IGNORED = ["onnx/*", "openvino/*", "*.onnx", "coreml/*", "flax*", "tf_*"]
PUSHED = (".json", ".safetensors", ".txt", ".model", ".md", ".png", ".onnx", ".data")
"""Endings of the files that everybert writes into a model folder."""
HUB_ID = r"\w[\w.-]*/\w[\w.-]*"


def resolve(name: str | Path, revision: str | None = None, allow_pickle: bool = False) -> Path:
    """The folder of a model given as a path, a bundled name, a known short name, or a hub id `org/name`."""
    text, path = str(name), Path(name).expanduser()
    if not text.strip():
        raise EverybertError("the model's name is empty; give a folder, a bundled model or a hub id (org/name)")
    if recover(path).is_dir():
        if revision is not None:
            raise EverybertError(f"{text} is a folder, which has no revisions; leave the revision out")
        return path
    if path.is_file():
        raise EverybertError(f"{text} is a file; give the folder that holds it")
    if (found := bundled(text)) is not None:
        return found
    if isinstance(name, str) and (text in KNOWN or re.fullmatch(HUB_ID, text)):
        return _download(KNOWN.get(text, text), revision, allow_pickle)
    if text.startswith("everybert-"):
        have = ", ".join(bundled_names()) or "none yet"
        raise EverybertError(
            f"{text} does not come with this version (bundled: {have}); upgrade, or give another model"
        )
    looks_local = isinstance(name, Path) or text.startswith((".", "~")) or "/" in text or "\\" in text
    what = f"there is no folder {text}" if looks_local else f"{text!r} is no folder, bundled model or known name"
    raise EverybertError(f"{what}; {_suggestion(text) or 'give a folder, or a hub id as org/name'}")


def bundled(name: str) -> Path | None:
    """The folder of a model that comes with the library, or None."""
    return BUNDLED / name if name in bundled_names() else None


def bundled_names() -> list[str]:
    """The models that come with the library."""
    return sorted(p.name for p in BUNDLED.iterdir() if (p / "config.json").is_file()) if BUNDLED.is_dir() else []


def _suggestion(text: str) -> str:
    """`did you mean …?` from folders nearby, bundled models and known names; empty if none is similar."""
    from everybert.model.config import PRESETS

    parent = Path(text).expanduser().parent
    nearby = {str(parent / p.name) for p in parent.iterdir() if p.is_dir()} if parent.is_dir() else set()
    names = [*nearby, *bundled_names(), *KNOWN, *KNOWN.values()]
    if text in PRESETS and text not in names:
        return "it is a preset, a shape without weights: pre-train it, or give a model that has weights"
    close = difflib.get_close_matches(text, names, n=3, cutoff=0.7)
    return f"did you mean {' or '.join(close)}?" if close else ""


def _download(repository: str, revision: str | None, allow_pickle: bool) -> Path:
    """Fetch a repository from the cache or the hub: no code, and pickles only if allowed."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise EverybertError(f"{repository} needs huggingface-hub; pip install it, or give a folder") from None
    patterns = DOWNLOADED + (PICKLES if allow_pickle else [])
    at = f" at revision {revision!r}" if revision else ""
    hint = _suggestion(repository)
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=IGNORED))
    except errors.GatedRepoError:
        why = "asks its users to accept its terms; accept them on its page, and log in with `hf auth login`"
    except errors.RevisionNotFoundError:
        why = "has no such revision; give a branch, tag or commit of it"
    except errors.RepositoryNotFoundError:
        why = f"is not on the hub, or is private; {hint or 'check its name, or log in with `hf auth login`'}"
    except errors.HFValidationError as error:
        why = f"is not a hub id ({_first_line(error)})"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        why = f"is not in the cache, and the hub is not reachable; {hint or 'connect, or give a folder'}"
    except (OSError, errors.EntryNotFoundError) as error:
        why = f"could not be fetched ({_first_line(error)}); try again"
    raise EverybertError(f"{repository}{at} {why}")


# ── pushing ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Upload:
    """The files of a folder that a push sends."""

    folder: Path
    files: dict[str, int]
    """Name → size in bytes."""
    left_out: tuple[str, ...]
    """Files that everybert did not write."""

    @property
    def size(self) -> int:
        """Total size in bytes."""
        return sum(self.files.values())


def prepare_push(folder: str | Path) -> Upload:
    """Verify a folder and list the files to send: those of its manifest, the card and the licence.

    The manifest itself is not sent: the hub has hashes of its own, and users may download a part of the files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise EverybertError(f"there is no folder {folder}; give the folder of a model")
    listed = read_manifest(folder)
    if listed is None:
        raise EverybertError(
            f"{folder} has no {MANIFEST}, so its files are not known; load it and save it with everybert first"
        )
    verify_folder(folder)
    if not (folder / "README.md").is_file():
        raise EverybertError(
            f"{folder} has no card: write README.md (what the model is, its data, its licence) and push again"
        )
    present = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    names = [n for n in present if n in EDITABLE or (n in listed and n.endswith(PUSHED))]
    left = tuple(n for n in present if n not in names and n != MANIFEST)
    return Upload(folder, {name: inside(folder, name).stat().st_size for name in names}, left)


def push(upload: Upload, repository: str, private: bool = False) -> str:
    """Send files to `org/name` in one commit and return the address; the repository is created if needed.

    The token is that of `hf auth login` or HF_TOKEN. An existing public repository is not made private.
    """
    if not re.fullmatch(HUB_ID, repository):
        raise EverybertError(f"{repository!r} is not a name on the hub; write it as org/name")
    try:
        from huggingface_hub import CommitOperationAdd, HfApi, get_token
    except ImportError:
        raise EverybertError("pushing needs huggingface-hub; pip install it") from None
    if get_token() is None:
        raise EverybertError("there is no token for the hub; run `hf auth login`, or set HF_TOKEN")
    api = HfApi(library_name="everybert", library_version=__version__)
    with _push_errors(repository):
        made: Any = api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise EverybertError(f"{repository} is public; make it private on its page, or leave out --private")
        files = [CommitOperationAdd(name, str(upload.folder / name)) for name in upload.files]
        api.create_commit(repository, files, commit_message=f"everybert {__version__}: {len(files)} files")
    return str(made)


PUSH_ERRORS = {
    None: "the hub is not reachable; connect and push again",
    401: "the hub does not know the token; run `hf auth login` again, or check HF_TOKEN",
    403: "the token may not write there; give one with write access, or another org/name",
    404: "there is no such repository, or the token may not see it",
    413: "the hub finds the files too large",
    429: "the hub asks to slow down; wait and push again",
}
"""HTTP status → reason; None for errors without a response."""


@contextmanager
def _push_errors(repository: str) -> Iterator[None]:
    """Turn errors of the hub client into one-line errors. Its HTTP library differs between versions."""
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
        if status is None and not network and not isinstance(error, OSError):
            raise
        reason = PUSH_ERRORS.get(status, f"the hub answered {status} ({_first_line(error)}); try again")
        raise EverybertError(f"{repository} was not pushed: {reason}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
