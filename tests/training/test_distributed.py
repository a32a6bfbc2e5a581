"""2 and 4 ranks do what one does, and any number of them resumes what others saved."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock  # torch brings it
from ranks import BASE, ELASTIC, REST, SIZES, STOP
from safetensors.torch import load_file
from toy import TINY

from everybert.errors import EverybertError
from everybert.training.checkpoint import read_progress
from everybert.training.distributed import World

HERE = Path(__file__).parent
MANY = SIZES[1:]
CLOSE = 2e-6
"""Weights of runs on other numbers of ranks, which add in another order, after four steps (measured: 1.2e-7)."""


def command(*words, seconds=500):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, timeout=seconds)
    assert result.returncode == 0, result.stderr[-20000:]
    return result.stdout


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """Every run of ranks.py, made once though several of pytest's workers may ask for them."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    out.mkdir(exist_ok=True)
    with FileLock(out / "lock", timeout=550):
        said = out / "found.json"
        if not said.exists():
            said.write_text(command(HERE / "ranks.py", corpus, out).splitlines()[-1])
    return out, json.loads(said.read_text())


def saved(folder, name="network"):
    return load_file(folder / "checkpoints" / f"step-{BASE['steps']:08d}" / f"{name}.safetensors")


def assert_same(a, b):
    for name in ("network", "optimizer"):
        one, two = saved(a, name), saved(b, name)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[k], two[k]) for k in one)


def assert_close(a, b, atol=CLOSE):
    one, two = saved(a), saved(b)
    assert one.keys() == two.keys()
    for k in one:
        assert torch.allclose(one[k], two[k], rtol=0, atol=atol), k


def packs(run):
    return sorted(tuple(pack) for rank in run["ranks"] for pack in rank["packs"])


def test_every_run_ends_as_it_should(runs):
    refused = {"another-recipe", "full-disk", "tuned"}
    for name, run in runs[1].items():
        assert set(run["codes"]) == {2 if name in refused else 0}, name


@pytest.mark.parametrize("size", MANY)
def test_ranks_learn_what_one_learns(runs, size):
    out, found = runs
    assert_close(out / f"{size}", out / "1")
    assert packs(found[f"{size}"]) == packs(found["1"])
    alone, norms = found["1"]["ranks"][0]["norms"], [rank["norms"] for rank in found[f"{size}"]["ranks"]]
    assert all(rank == norms[0] for rank in norms)  # clipping agrees among the ranks
    assert norms[0] == pytest.approx(alone, rel=1e-6)
    logs = [[json.loads(line) for line in (out / m / "log.jsonl").read_text().splitlines()] for m in ("1", f"{size}")]
    for a, b in zip(*logs, strict=True):
        assert a.get("loss") == pytest.approx(b.get("loss"), abs=1e-5)
        assert a.get("heldout_loss") == pytest.approx(b.get("heldout_loss"), abs=1e-5)
        assert a.get("tokens") == b.get("tokens")


@pytest.mark.parametrize("size", MANY)
def test_models_agree(runs, size):
    one, many = (load_file(runs[0] / m / "model" / "model.safetensors") for m in ("1", f"{size}"))
    assert one.keys() == many.keys()
    assert all(torch.allclose(one[k], many[k], rtol=0, atol=CLOSE) for k in one)


@pytest.mark.parametrize("size", SIZES)
def test_a_resumed_run_ends_bit_for_bit(runs, size):
    assert_same(runs[0] / f"{size}", runs[0] / f"{size}>{size}")


@pytest.mark.parametrize(("first", "then"), ELASTIC)
def test_any_ranks_go_on_where_others_stopped(runs, first, then):
    assert_goes_on(*runs, first, then)


@pytest.mark.slow
def test_all_other_pairs_and_many_repetitions(corpus, tmp_path):
    found = json.loads(command(HERE / "ranks.py", corpus, tmp_path, "rest", seconds=550).splitlines()[-1])
    for first, then in REST:
        assert_goes_on(tmp_path, found, first, then)
    for size in SIZES:
        for again in range(3):
            assert_same(tmp_path / f"{size}", tmp_path / f"{size}-again-{again}")


def assert_goes_on(out, found, first, then):
    before, after = packs(found[f"{first}-half"]), packs(found[f"{first}>{then}"])
    assert {step for step, _, _ in before} == set(range(STOP + 1))
    assert before + after == packs(found["1"])  # the same examples in the same order, none twice
    assert_close(out / f"{first}>{then}", out / "1")


def test_ranks_without_packs(runs):
    out, found = runs
    assert_close(out / "few-4", out / "few-1")
    assert packs(found["few-4"]) == packs(found["few-1"])
    each = [len({step for step, _, _ in rank["packs"]}) for rank in found["few-4"]["ranks"]]
    assert max(each) < BASE["steps"]  # no rank has packs in every step


def test_recomputed_activations_change_nothing(runs):
    assert_same(runs[0] / "recompute-2", runs[0] / "2")


def test_half_precision_is_used(runs):
    assert_close(runs[0] / "bf16-2", runs[0] / "bf16-1", 1e-3)
    norms = [runs[1][name]["ranks"][0]["norms"][0] for name in ("bf16-2", "2")]
    assert norms[0] != pytest.approx(norms[1], rel=1e-5) and norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_muon_on_ranks_that_hold_whole_matrices(runs):
    assert_close(runs[0] / "muon-2", runs[0] / "muon-1", 1e-5)


def test_two_networks_on_ranks(runs):
    assert_close(runs[0] / "rtd-2", runs[0] / "rtd-1")
    assert packs(runs[1]["rtd-2"]) == packs(runs[1]["rtd-1"])
    assert any("generator" in name for name in saved(runs[0] / "rtd-2"))


def test_ranks_without_pairs_leave_their_head_alone(runs):
    assert_close(runs[0] / "phases-2", runs[0] / "phases-1")
    one, two = (saved(runs[0] / f"phases-{size}", "optimizer") for size in (1, 2))
    for name, steps in (("heads.nsp.output.weight", 2), ("heads.mlm.dense.weight", 4)):
        assert one[f"adam.step.{name}"] == two[f"adam.step.{name}"] == steps


def test_sharded_training_is_refused(tiny):
    with pytest.raises(EverybertError, match="sharded training was removed"):
        tiny(run__parallel="sharded")


@pytest.mark.parametrize(
    ("name", "words"),
    (
        ("another-recipe", "rank 1 has another recipe"),
        ("full-disk", "the disk is full"),
        ("tuned", "without torchrun"),
    ),
)
def test_ranks_fail_together(runs, name, words):
    for rank in runs[1][name]["ranks"]:
        assert words in rank["refused"]


def test_a_killed_rank_is_started_again(runs, corpus, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2"]
    command(*torchrun, HERE / "rank.py", corpus, tmp_path)
    assert_same(tmp_path, runs[0] / "2")


def test_alone_nothing_is_summed():
    world = World()
    x = torch.ones(3, requires_grad=True)
    world.sum_gradients([x])
    assert x.grad is None and world.first and world.gather(3.0) == [3.0]
    with pytest.raises(EverybertError, match="no"), world.together():
        raise EverybertError("no")


@pytest.mark.slow
def test_the_command_saves_when_asked_to_stop(corpus, tmp_path):
    """SIGTERM to torchrun: all ranks save, and the first says so."""
    recipe, out = tmp_path / "tiny.toml", tmp_path / "run"
    recipe.write_text(TINY.replace("log_every = 5", "log_every = 1").replace("steps = 40", "steps = 4000"))
    words = ["pretrain", str(recipe), "--corpus", str(corpus), "--out", str(out), "--device", "cpu"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "everybert"]
    with subprocess.Popen(
        [sys.executable, *torchrun, *words, "--quiet", "--json"], stdout=subprocess.PIPE, text=True
    ) as run:
        try:
            deadline = time.monotonic() + 200
            while not (out / "log.jsonl").exists() or '"step": 5' not in (out / "log.jsonl").read_text():
                assert time.monotonic() < deadline and run.poll() is None
                time.sleep(0.05)
            run.send_signal(signal.SIGTERM)
            said, _ = run.communicate(timeout=100)
        finally:
            run.kill()
    (line,) = said.splitlines()  # of two ranks, one speaks
    found = json.loads(line)
    assert not found["finished"] and 5 <= found["step"] < 4000
    path = out / "checkpoints" / f"step-{found['step']:08d}"
    assert (path / "manifest.json").exists()
    assert read_progress(path).tokens > 0
