"""Two ranks under torchrun do what one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank import main as train_alone
from safetensors.torch import load_file

from everybert.training.distributed import World, _groups

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone"]
    command = [*torchrun, HERE / "rank.py", corpus, out / "two"]
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert result.returncode == 0, result.stderr
    train_alone(str(corpus), str(out / "one"))
    return out / "one", out / "two"


def test_gradients_agree(runs):
    one, two = (load_file(run / "gradient.safetensors") for run in runs)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.allclose(value, two[name], rtol=0, atol=1e-6), name


def test_the_runs_agree(runs):
    one, two = (load_file(run / "checkpoints" / "step-00000006" / "network.safetensors") for run in runs)
    for name, value in one.items():
        assert torch.allclose(value, two[name], atol=1e-3), name  # Adam's first steps divide by small numbers
    logs = [[json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] for run in runs]
    for a, b in zip(*logs):
        if "loss" in a:
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
            assert a["tokens"] == b["tokens"]


def test_alone_nothing_is_summed():
    world = World()
    x = torch.ones(3, requires_grad=True)
    world.sum_gradients([x])
    assert x.grad is None and world.first and world.agree(3.0) == 3.0


def test_groups_keep_the_order():
    tensors = [torch.zeros(n) for n in (5, 1 << 26, 3, 4)]
    groups = _groups(tensors)
    assert [len(g) for g in groups] == [1, 1, 2]
    assert [id(t) for g in groups for t in g] == [id(t) for t in tensors]
