"""What recording is made of: values as JSON, tiny models, the command line in this process, batches by their hashes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import runpy
import shutil
import signal
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent
DATA = HERE / "data"
TIMES = {"seconds", "tokens_per_second", "data_wait", "mfu"}
"""Keys of logs and reports that no two runs have in common."""
Entries = dict[str, Callable[[], Any]]
GROUPS: dict[str, Callable[[Path], Entries]] = {}


def group(function: Callable[[Path], Entries]) -> Callable[[Path], Entries]:
    """Add a group under the function's name."""
    GROUPS[function.__name__] = function
    return function


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────


def plain(value: Any) -> Any:
    """Anything as JSON values; what measures time is left out, and arrays of many numbers are reduced."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain({f.name: getattr(value, f.name) for f in fields(value)})
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items() if k not in TIMES}
    if isinstance(value, list | tuple) and value and not _numbers(value):
        return [plain(v) for v in value]
    if isinstance(value, list | tuple):
        value = np.asarray(value) if len(value) else []
    if isinstance(value, np.ndarray):
        if value.size <= 12 and value.ndim == 1:
            return value.tolist()
        if value.dtype.kind in "iub":
            return {
                "shape": list(value.shape),
                "digest": hashlib.sha256(value.astype("<i8").tobytes()).hexdigest()[:16],
            }
        flat = value.ravel().astype(np.float64)
        picked = flat[:: max(1, len(flat) // 6)][:6]
        at = {"shape": list(value.shape), "picked": picked.tolist(), "sum": float(flat.sum())}
        return {**at, "norm": float(np.sqrt((flat * flat).sum()))}
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Path) else value


def _numbers(value: Any) -> bool:
    """Whether a list is a (nested) array of numbers, as long as it need be to be worth reducing."""
    try:
        array = np.asarray(value)
    except ValueError:
        return False
    return array.dtype.kind in "if" and array.size > 12


def sha256(path: Path) -> str:
    """Of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def written(folder: Path) -> list[str]:
    """The files below a folder."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def weights(folder: Path) -> dict[str, Any]:
    """A folder's weights: the file bit for bit, and (for other processors) a few numbers of its tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    both = np.concatenate([tensors[k].ravel() for k in sorted(tensors)])
    return {"sha256": sha256(file), "tensors": list(tensors), "values": both}


# ── tiny models, drawn from shapes ───────────────────────────────────────────────────────────────────────────

SPECS = json.loads((DATA / "tiny.json").read_text())
"""Models of every family as `transformers` has them: configuration, and the names and shapes of their tensors."""


def tiny(scratch: Path, name: str) -> Path:
    """A folder of such a model. Weights depend on the names alone, and on no library's generator of normals."""
    folder, spec = scratch / "tiny" / name, SPECS[name]
    if folder.exists():
        return folder
    shutil.copytree(DATA / "tokenizers" / spec["tokenizer"], folder)
    (folder / "manifest.json").unlink()
    (folder / "config.json").write_text(json.dumps(spec["config"]))
    tensors = {}
    for key, shape in spec["tensors"].items():
        draw = np.random.RandomState(zlib.crc32(f"{name} {key}".encode())).random_sample(shape).astype(np.float32)
        scale = "norm" in key.lower() and key.endswith("weight")
        tensors[key] = 1 + 0.4 * (draw - 0.5) if scale else draw - 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ── the command line, and the encoder's batches ──────────────────────────────────────────────────────────────


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def command(*arguments: object) -> Done:
    """`python -m everybert …` in this process (a fresh one takes seconds)."""
    out, err, before = io.StringIO(), io.StringIO(), (sys.argv, warnings.showwarning, dict(os.environ))
    sys.argv = ["everybert", *map(str, arguments)]
    os.environ |= {"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module("everybert", run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:  # a fault of the library, which a process would end with
        code = 1
        err.write(f"Traceback: {error!r}\n")
    finally:
        sys.argv, warnings.showwarning, environment = before
        os.environ.clear()
        os.environ |= environment
    return Done(code, out.getvalue(), err.getvalue())


def json_of(*arguments: object) -> Any:
    """What a command prints as JSON."""
    done = command(*arguments, "--json")
    if done.code not in (0, 1):
        return {"code": done.code, "error": done.err}
    return json.loads(done.out.splitlines()[-1])


class Batches:
    """Hashes of what the encoder is given: one a batch in training, one for all others together."""

    def __init__(self, stop_at: int = 0) -> None:
        self.training: list[str] = []
        self.others, self.count, self.stop_at = hashlib.sha256(), 0, stop_at

    def __call__(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if type(module).__name__ != "Encoder":
            return
        batch = next(x for x in given if hasattr(x, "tokens_T"))
        found = hashlib.sha256(repr(tuple(batch.lengths)).encode())
        for part in (batch.tokens_T, batch.positions_T, batch.segments_T):
            found.update(b"none" if part is None else part.to(torch.int64).numpy().tobytes())
        if module.training:
            self.training.append(found.hexdigest()[:10])
            if len(self.training) == self.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.others.update(found.digest())
            self.count += 1

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {"training": self.training, "others": self.others.hexdigest()[:10], "count": self.count}


@contextlib.contextmanager
def watched(stop_at: int = 0) -> Iterator[Batches]:
    """Hash the encoder's batches meanwhile; at the `stop_at`-th of training, ask the process to end (SIGTERM)."""
    seen = Batches(stop_at)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(seen)
    try:
        yield seen
    finally:
        hook.remove()
