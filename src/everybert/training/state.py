"""Checkpoints: all that a run needs to go on as if it had never stopped. Safetensors and JSON, in atomic folders.

    checkpoints/step-00001000/
        network.safetensors     fp32 weights, by the network's own names
        optimizer.safetensors   the optimizer's buffers
        progress.json           step, plan, place in the data, time spent, best so far

There is no generator state to keep: examples, masks and dropout are drawn from (seed, step, pack).
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from everybert.errors import EverybertError
from everybert.store.folder import atomic_folder, check, is_complete, read_json, write_json
from everybert.training.data import Place
from everybert.training.optim import Optimizer

VERSION = 1


@dataclass
class Progress:
    """How far a run has come. JSON values only."""

    step: int = 0
    """Steps done."""
    total: int | None = None
    """Steps planned; None until a run limited by time has measured its speed."""
    plans: int = 0
    """How often the number of steps was planned."""
    place: Place = field(default_factory=Place)
    """Where the data stands."""
    tokens: int = 0
    """Tokens seen, over all ranks."""
    seconds: float = 0.0
    """Time spent training."""
    best: float | None = None
    """The best held-out score so far (lower is better)."""
    best_step: int | None = None
    guard: tuple[float, ...] = (0.0, 0.0, 0.0)
    """The spike guard's running mean of the loss, skipped steps in a row, skipped steps in all."""
    figures: dict[str, float] = field(default_factory=dict)
    """The last evaluation."""

    @property
    def finished(self) -> bool:
        """Whether every planned step is done."""
        return self.total is not None and self.step >= self.total


def save_checkpoint(folder: Path, network: nn.Module, optimizer: Optimizer, progress: Progress, keep: int) -> Path:
    """Write checkpoints/step-N, then remove all but the last `keep` and the best."""
    path = folder / f"step-{progress.step:08d}"
    with atomic_folder(path) as draft:
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in network.state_dict().items()}, draft / "network.safetensors"
        )
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in optimizer.state().items()}, draft / "optimizer.safetensors"
        )
        write_json(draft / "progress.json", {"version": VERSION, **dataclasses.asdict(progress)})
    prune(folder, keep, progress.best_step)
    return path


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove checkpoints that are neither among the last `keep` nor the best."""
    found = checkpoints(folder)
    for step, path in found.items():
        if step not in (*list(found)[-keep:], best):
            (path / "manifest.json").unlink(missing_ok=True)  # a half-removed folder must not pass for complete
            shutil.rmtree(path, ignore_errors=True)


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, complete or not, in order."""
    named = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.glob("step-*"))
    return dict(sorted((int(name[1]), path) for name, path in named if name))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    return next((path for path in reversed(checkpoints(folder).values()) if is_complete(path)), None)


def read_progress(path: Path) -> Progress:
    """How far a checkpoint's run had come."""
    found = read_json(path / "progress.json")
    if found.pop("version", None) != VERSION:
        raise EverybertError(f"{path} was written by another version of everybert; start a new run folder")
    return Progress(**found | {"place": Place(*found["place"]), "guard": tuple(found["guard"])})


def load_checkpoint(path: Path, network: nn.Module, optimizer: Optimizer) -> Progress:
    """Put a checkpoint's weights and buffers back, after checking its files against their hashes."""
    check(path)
    progress = read_progress(path)
    try:
        network.load_state_dict(load_file(path / "network.safetensors"))
    except RuntimeError as error:
        raise EverybertError(f"{path} holds another network than the recipe's; start a new run folder") from error
    optimizer.load(load_file(path / "optimizer.safetensors"))
    return progress
