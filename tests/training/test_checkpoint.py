"""Checkpoints: what is written is read back bit for bit, the newest intact one is found, others are refused."""

import json

import pytest
import torch
from torch import nn

from everybert.errors import EverybertError
from everybert.files import MANIFEST
from everybert.training.checkpoint import (
    Progress,
    checkpoints,
    find_checkpoint,
    latest,
    load_checkpoint,
    read_progress,
    save_checkpoint,
)
from everybert.training.data import Place
from everybert.training.distributed import World
from everybert.training.optim import Optimizer, OptimizerConfig


def make(width=4, steps=2):
    """A small network and its optimizer after some steps."""
    torch.manual_seed(0)
    network = nn.Linear(width, width)
    optimizer = Optimizer(network, OptimizerConfig())
    for _ in range(steps):
        network(torch.ones(1, width)).square().sum().backward()
        optimizer.step(0.1)
    return network, optimizer


def test_weights_buffers_and_progress_come_back(tmp_path):
    network, optimizer = make()
    progress = Progress(step=2, total=9, place=Place(1, 2, 3), tokens=64, guard=(0.5, 1.0, 2.0), figures={"loss": 0.25})
    path = save_checkpoint(tmp_path, network, optimizer, progress, keep=3)
    assert path.name == "step-00000002" and read_progress(path) == progress
    other, its_optimizer = make(steps=1)
    assert load_checkpoint(path, other, its_optimizer) == progress
    for ours, theirs in ((network.state_dict(), other.state_dict()), (optimizer.state(), its_optimizer.state())):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_only_the_last_ones_are_kept(tmp_path):
    network, optimizer = make()
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, network, optimizer, Progress(step=step), keep=2)
    assert list(checkpoints(tmp_path)) == [2, 10]
    assert latest(tmp_path).name == "step-00000010"
    (tmp_path / "step-00000010" / MANIFEST).unlink()  # half removed
    assert find_checkpoint(tmp_path, World()).name == "step-00000002"
    assert find_checkpoint(tmp_path / "none", World()) is None


def test_what_belongs_to_another_run_or_version_is_refused(tmp_path):
    network, optimizer = make()
    path = save_checkpoint(tmp_path, network, optimizer, Progress(step=1), keep=1)
    with pytest.raises(EverybertError, match="another network than the recipe's; start a new run folder"):
        load_checkpoint(path, *make(width=8))
    file = path / "progress.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 99}))
    with pytest.raises(EverybertError, match="another version of everybert"):
        read_progress(path)
