"""From a model's name (a path, a bundled model, a hub id) to its folder.

Downloads are cached and can be pinned by revision; HF_HUB_OFFLINE is respected.
"""

import difflib
import re
import tomllib
from pathlib import Path

from everybert.errors import EverybertError, one_line
from everybert.files import is_model, recover

BUNDLED = Path(__file__).parent.parent / "models"
KNOWN: dict[str, str] = tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))
"""Short names of published models → hub id."""
DOWNLOADED = ["*.json", "*.txt", "*.model", "model.safetensors", "model-*-of-*.safetensors", "*/model.safetensors"]
DOWNLOADED += ["model.int8.safetensors", "adapter_model.safetensors", "head.safetensors"]
PICKLES = ["pytorch_model.bin", "pytorch_model-*-of-*.bin", "*/pytorch_model.bin"]
IGNORED = ["onnx/*", "openvino/*", "*.onnx", "coreml/*", "flax*", "tf_*"]
HUB_ID = r"\w[\w.-]*/\w[\w.-]*"


def resolve(name: str | Path, revision: str | None = None, allow_pickle: bool = False) -> Path:
    """The folder of a model given as a path, a bundled name, a known short name, or a hub id `org/name`."""
    text, path = str(name), Path(name).expanduser()
    if not text.strip():
        raise EverybertError("the model's name is empty; give a folder, a bundled model or a hub id (org/name)")
    if recover(path).is_dir():
        if revision is not None:
            raise EverybertError(f"{text} is a folder, which has no revisions; leave the revision out")
        if (path / "model" / "config.json").is_file() and not is_model(path):
            raise EverybertError(f"{text} has no config.json; did you mean {path / 'model'}?")
        return path
    if path.is_file():
        raise EverybertError(f"{text} is a file; give the folder that holds it")
    if (folder := bundled(text)) is not None:
        return folder
    if isinstance(name, str) and (text in KNOWN or re.fullmatch(HUB_ID, text)):
        return _download(KNOWN.get(text, text), revision, allow_pickle)
    raise EverybertError(f"{text!r} is no folder, bundled model or known name; {_suggestion(text)}")


def bundled(name: str) -> Path | None:
    """The folder of a model that comes with the library, or None."""
    return BUNDLED / name if name in bundled_names() else None


def bundled_names() -> list[str]:
    """The models that come with the library."""
    return sorted(p.name for p in BUNDLED.iterdir() if (p / "config.json").is_file()) if BUNDLED.is_dir() else []


def _suggestion(text: str) -> str:
    """`did you mean …?` from folders nearby, bundled models and known names; else the kinds of names."""
    from everybert.model.config import PRESETS

    parent = Path(text).expanduser().parent
    nearby = {str(parent / p.name) for p in parent.iterdir() if p.is_dir()} if parent.is_dir() else set()
    names = {*nearby, *bundled_names(), *KNOWN, *KNOWN.values()} - {text}
    if text in PRESETS and text not in KNOWN:
        return "it is a preset, a shape without weights: pre-train it, or give a model that has weights"
    close = difflib.get_close_matches(text, sorted(names), n=3, cutoff=0.7)
    return f"did you mean {' or '.join(close)}?" if close else "give a folder, or a hub id as org/name"


def _download(repository: str, revision: str | None, allow_pickle: bool) -> Path:
    """Fetch a repository from the cache or the hub: no code, and pickles only if allowed."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise EverybertError(f"{repository} needs huggingface-hub; pip install it, or give a folder") from None
    patterns = DOWNLOADED + (PICKLES if allow_pickle else [])
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=IGNORED))
    except errors.GatedRepoError:
        why = "asks its users to accept its terms; accept them on its page, and log in with `hf auth login`"
    except errors.RevisionNotFoundError:
        why = "has no such revision; give a branch, tag or commit of it"
    except errors.RepositoryNotFoundError:
        why = f"is not on the hub, or is private (then log in with `hf auth login`); {_suggestion(repository)}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        why = "is not in the cache, and the hub is not reachable; connect, or give a folder"
    except (OSError, ValueError, errors.EntryNotFoundError) as error:
        why = f"could not be fetched ({one_line(error)}); try again"
    at = f" at revision {revision!r}" if revision else ""
    raise EverybertError(f"{repository}{at} {why}")
