"""A run killed anywhere goes on bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    command = [sys.executable, HERE / "driver.py", corpus, out]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert result.returncode == 0, result.stderr
    return out, json.loads(result.stdout.splitlines()[-1])


def same(a: Path, b: Path) -> None:
    for name in ("network", "optimizer"):
        one, two = (load_file(p / "checkpoints" / "step-00000040" / f"{name}.safetensors") for p in (a, b))
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert torch.equal(value, two[key]), f"{name} {key} differs"


def steps_logged(out: Path) -> list[int]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "lr" in line]


def test_killed_after_17_steps(runs):
    out, found = runs
    assert found["straight"] == 0
    assert found["seventeen"] == [-signal.SIGKILL, 0]
    same(out / "straight", out / "seventeen")
    assert steps_logged(out / "seventeen") == list(range(1, 41))


def test_killed_at_random_moments(runs):
    out, found = runs
    kills, codes = found["random"]
    assert kills == 20
    assert set(codes) == {0}
    for i in range(len(codes)):
        same(out / "straight", out / f"random-{i}")
        assert steps_logged(out / f"random-{i}") == list(range(5, 41, 5))


def test_killed_inside_saves(runs):
    out, found = runs
    codes, last = found["writes"]
    assert codes.count(-signal.SIGKILL) >= 6  # some end before their n-th change
    assert last == 0
    same(out / "straight", out / "writes")


def test_sigterm_saves_and_leaves_with_zero(runs):
    out, found = runs
    assert found["term"] == [0, 0]
    same(out / "straight", out / "term")
