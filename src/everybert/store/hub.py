"""From a name to a folder: a path, a bundled model, or a hub id (cached, pinned by revision, offline if so set)."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from everybert.errors import EverybertError
from everybert.files import recover

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
"""Short names of published models, and where they are."""

WANTED = ["*.json", "*.txt", "*.model", "model.safetensors", "model-*-of-*.safetensors", "*/model.safetensors"]
WANTED += ["model.int8.safetensors"]
PICKLED = ["pytorch_model.bin", "pytorch_model-*-of-*.bin"]
UNWANTED = ["onnx/*", "openvino/*", "*.onnx", "coreml/*", "flax*", "tf_*"]


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
    if isinstance(name, str) and (text in KNOWN or re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text)):
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
    """`did you mean …?` from folders nearby, bundled models and known names; empty where nothing is close."""
    from everybert.model.presets import PRESETS

    parent = Path(text).expanduser().parent
    nearby = {str(parent / p.name) for p in parent.iterdir() if p.is_dir()} if parent.is_dir() else set()
    names = [*nearby, *bundled_names(), *KNOWN, *KNOWN.values()]
    if text in PRESETS and text not in names:
        return "it is a preset, a shape without weights: pre-train it, or give a model that has weights"
    close = difflib.get_close_matches(text, names, n=3, cutoff=0.7)
    return f"did you mean {' or '.join(close)}?" if close else ""


def _download(repository: str, revision: str | None, allow_pickle: bool) -> Path:
    """The repository's files, from the cache or the hub; never code, and pickles only if allowed."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise EverybertError(f"{repository} needs huggingface-hub; pip install it, or give a folder") from None
    patterns = WANTED + (PICKLED if allow_pickle else [])
    at = f" at revision {revision!r}" if revision else ""
    hint = _suggestion(repository)
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=UNWANTED))
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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
