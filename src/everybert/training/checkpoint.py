"""Checkpoints: everything that a run needs to resume bit for bit. Safetensors and JSON, in atomic folders.

    checkpoints/step-00001000/
        network.safetensors     fp32 weights, by the names of the network
        optimizer.safetensors   the buffers of the optimizer
        progress.json           step, plan, place in the data, time spent

There is no generator state to save: examples, masks and dropout are drawn from (seed, step, pack). A checkpoint does
not depend on the number of ranks either.
"""

import dataclasses
import logging
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from everybert.errors import EverybertError
from everybert.files import MANIFEST, atomic_folder, read_json, remove_stale, verify_folder, write_json
from everybert.training.data import Place
from everybert.training.distributed import World
from everybert.training.optim import Optimizer

VERSION = 1
log = logging.getLogger("everybert")


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
    """The position in the data."""
    tokens: int = 0
    """Tokens seen, over all ranks."""
    seconds: float = 0.0
    """Time spent training."""
    guard: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
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
    """Write checkpoints/step-N, then remove all but the last `keep`. Every rank must call it; rank 0 writes."""
    world = world or World()
    path = folder / f"step-{progress.step:08d}"
    with world.together():
        if world.first:
            with atomic_folder(path) as draft:
                weights = {name: value.detach() for name, value in network.named_parameters()}  # shared ones once
                for name, state in (("network", weights), ("optimizer", optimizer.state())):
                    save_file({key: value.contiguous() for key, value in state.items()}, draft / f"{name}.safetensors")
                write_json(draft / "progress.json", {"version": VERSION, **dataclasses.asdict(progress)})
            prune(folder, keep)
    return path


def prune(folder: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints."""
    for path in list(checkpoints(folder).values())[:-keep]:
        (path / MANIFEST).unlink(missing_ok=True)  # a half-removed folder must not count as complete
        shutil.rmtree(path, ignore_errors=True)


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, complete or not, in order."""
    named = (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
    return dict(sorted((int(path.name.removeprefix("step-")), path) for path in named))


def latest(folder: Path) -> Path | None:
    """The newest intact checkpoint. Damaged ones are named, and refused if there is no other."""
    problems = []
    for path in reversed(checkpoints(folder).values()):
        if (path / MANIFEST).exists():  # else it is half removed
            try:
                verify_folder(path)
                return path
            except EverybertError as error:
                problems.append(error)
                log.warning("%s: the checkpoint before is used", error)
    if problems:
        raise problems[0]
    return None


def find_checkpoint(folder: Path, world: World) -> Path | None:
    """The checkpoint to resume from, which rank 0 chooses and every rank must see."""
    newest = None
    with world.together():
        if world.first and folder.exists():
            remove_stale(folder)
            newest = latest(folder)
    name = world.gather(newest and newest.name)[0]
    if name is None:
        return None
    path = folder / name
    with world.together():
        if not (path / MANIFEST).exists():
            raise EverybertError(f"{path}, which rank 0 has, is not there: all hosts must share the folder")
    return path


def read_progress(path: Path) -> Progress:
    """The progress saved in a checkpoint."""
    saved = read_json(path / "progress.json")
    if saved.pop("version", None) != VERSION:
        raise EverybertError(f"{path} was written by another version of everybert; start a new run folder")
    saved |= {"place": Place(*saved["place"]), "guard": tuple(saved["guard"])}
    return Progress(**{key: value for key, value in saved.items() if not key.startswith("best")})  # of older runs


def load_checkpoint(path: Path, network: nn.Module, optimizer: Optimizer) -> Progress:
    """Load the weights and buffers of a checkpoint that `find_checkpoint` gave."""
    progress = read_progress(path)
    weights = load_file(path / "network.safetensors")
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    if {name: value.shape for name, value in weights.items()} != shapes:
        raise EverybertError(f"{path} holds another network than the recipe's; start a new run folder")
    network.load_state_dict(weights, strict=False)
    optimizer.load(load_file(path / "optimizer.safetensors"))
    return progress
