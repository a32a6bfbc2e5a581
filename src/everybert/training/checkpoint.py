"""Checkpoints: everything that a run needs to resume bit for bit. Safetensors and JSON, in atomic folders.

    checkpoints/step-00001000/
        network.safetensors     fp32 weights, by the names of the network
        optimizer.safetensors   the buffers of the optimizer
        progress.json           step, plan, place in the data, time spent, best score

There is no generator state to save: examples, masks and dropout are drawn from (seed, step, pack). A checkpoint does
not depend on ranks either: sharded tensors are gathered, so any number of ranks, sharded or not, can resume from it.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.files import MANIFEST, atomic_folder, is_complete, read_json, remove_stale, verify_folder, write_json
from everybert.training.data import Place
from everybert.training.distributed import World, as_sharded, gather, row_range
from everybert.training.optim import Optimizer

VERSION = 1


@dataclass
class Progress:
    """How far a run is. JSON values only."""

    step: int = 0
    """Steps done."""
    total: int | None = None
    """Steps planned; None until a run with a time budget has measured its speed."""
    plans: int = 0
    """How often the number of steps was planned."""
    place: Place = field(default_factory=Place)
    """Where the data stands."""
    tokens: int = 0
    """Tokens seen, over all ranks."""
    seconds: float = 0.0
    """Time spent training."""
    best: float | None = None
    """The best held-out score (lower is better)."""
    best_step: int | None = None
    guard: tuple[float, ...] = (0.0, 0.0, 0.0)
    """The spike guard's running mean of the loss, skipped steps in a row, skipped steps in all, steps taken."""
    figures: dict[str, float] = field(default_factory=dict)
    """The last evaluation."""

    @property
    def finished(self) -> bool:
        """Whether every planned step is done."""
        return self.total is not None and self.step >= self.total


def save_checkpoint(
    folder: Path, network: nn.Module, optimizer: Optimizer, progress: Progress, keep: int, world: World | None = None
) -> Path:
    """Write checkpoints/step-N, then remove all but the last `keep` and the best.

    Every rank must call it. Rank 0 writes, and needs memory for the whole state.
    """
    world = world or World()
    path = step_folder(folder, progress.step)
    weights, buffers = (gather(state, world.first) for state in (network.state_dict(), optimizer.state()))
    with world.together():
        if world.first:
            with atomic_folder(path) as draft:
                save_file(weights, draft / "network.safetensors")
                save_file(buffers, draft / "optimizer.safetensors")
                write_json(draft / "progress.json", {"version": VERSION, **dataclasses.asdict(progress)})
            prune(folder, keep, progress.best_step)
    return path


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove checkpoints that are neither among the last `keep` nor the best."""
    found = checkpoints(folder)
    for step, path in found.items():
        if step not in (*list(found)[-keep:], best):
            (path / MANIFEST).unlink(missing_ok=True)  # a half-removed folder must not count as complete
            shutil.rmtree(path, ignore_errors=True)


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, complete or not, in order."""
    named = (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
    return dict(sorted((int(path.name.removeprefix("step-")), path) for path in named))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    return next((path for path in reversed(checkpoints(folder).values()) if is_complete(path)), None)


def find_checkpoint(folder: Path, world: World) -> Path | None:
    """The checkpoint to resume from, which rank 0 chooses and every rank must see."""
    if world.first and folder.exists():
        remove_stale(folder)
    found = latest(folder) if world.first else None
    step = int(world.agree(-1.0 if found is None else float(found.name.removeprefix("step-")))[0])
    if step < 0:
        return None
    path = step_folder(folder, step)
    world.see(path / MANIFEST)
    return path


def read_progress(path: Path) -> Progress:
    """The progress saved in a checkpoint."""
    found = read_json(path / "progress.json")
    if found.pop("version", None) != VERSION:
        raise EverybertError(f"{path} was written by another version of everybert; start a new run folder")
    return Progress(**found | {"place": Place(*found["place"]), "guard": tuple(found["guard"])})


def load_checkpoint(path: Path, network: nn.Module, optimizer: Optimizer, verify: bool = True) -> Progress:
    """Load the weights and buffers of a checkpoint, after verifying the hashes of its files."""
    if verify:
        verify_folder(path)
    progress = read_progress(path)
    try:
        own = network.state_dict()
        network.load_state_dict(read(path / "network.safetensors", own))
    except RuntimeError as error:
        raise EverybertError(f"{path} holds another network than the recipe's; start a new run folder") from error
    moments = {f"adam.{short}.{name}": value for name, value in own.items() for short in "mv"}
    optimizer.load(read(path / "optimizer.safetensors", moments))
    return progress


def read(path: Path, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file; of those that are sharded in `own`, only this rank's rows are read."""
    out = {}
    with safe_open(path, "pt") as saved:
        for name in saved.keys():  # noqa: SIM118  # not a mapping
            parameter = own.get(name)
            if parameter is None or not hasattr(parameter, "placements"):
                out[name] = saved.get_tensor(name)
                continue
            part = saved.get_slice(name)
            if tuple(part.get_shape()) != tuple(parameter.shape):
                raise RuntimeError(f"{name} has another shape")
            rows = row_range(parameter)
            mine = part[rows] if rows.start < rows.stop else torch.empty(0, *parameter.shape[1:])
            out[name] = as_sharded(parameter, mine.to(parameter.device))
    return out
