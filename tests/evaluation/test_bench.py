"""`everybert bench`: every cell is measured, an interruption keeps them. Nothing here asserts a speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers
from tiny_model import save
from typer.testing import CliRunner

from everybert.cli.main import app
from everybert.errors import EverybertError
from everybert.evaluation import bench as module
from everybert.evaluation.bench import bench

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("bench") / "model")


def test_every_cell_is_measured_and_drawn(folder, tmp_path):
    import plot_bench

    shares: list[float] = []
    found = bench(folder, ["fp32", "bfloat16"], device="cpu", seconds=0.5, progress=shares.append)
    assert [w["name"] for w in found["ways"]] == ["fp32", "bf16"]
    assert found["ways"][0]["weights_mb"] == pytest.approx(2 * found["ways"][1]["weights_mb"], rel=0.01)
    assert {c["length"] for c in found["cells"]} == {8, 16, 32, 64}  # the model's window
    for cell in found["cells"]:
        assert cell["texts_per_s"] == pytest.approx(cell["tokens_per_s"] / cell["length"])
        assert 0 < cell["p50_ms"] <= cell["p90_ms"] <= cell["p99_ms"]
    assert not found["stopped"] and shares == sorted(shares) and shares[-1] <= 1
    plot_bench.draw(found, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_transformers_takes_turns_and_an_interruption_keeps_what_there_is(folder, monkeypatch):
    turns = []

    def interrupted(run, ids, cuda):
        turns.append(len(ids[0]))
        if len(turns) == 11:
            raise KeyboardInterrupt
        return 30.0

    monkeypatch.setattr(module, "_timed", interrupted)
    monkeypatch.setattr(module, "ROUNDS", 10**9)
    words = ["bench", folder, "--device", "cpu", "--lengths", "8,16", "--against", "transformers", "--json"]
    done = CliRunner().invoke(app, list(map(str, words)))
    found = json.loads(done.stdout)
    assert done.exit_code == 130 and found["stopped"]
    assert turns == [8] * 6 + [16] * 5
    assert [c["way"] for c in found["cells"]] == ["fp32", "transformers fp32"] * 2
    assert found["cells"][3]["tokens_per_s"] is None


def test_the_command_prints_a_table(folder):
    done = CliRunner().invoke(app, ["bench", str(folder), "--device", "cpu", "--seconds", "0.1", "--lengths", "8"])
    assert done.exit_code == 0 and "tokens per s" in done.stdout and "fp32" in done.stdout
    bad = CliRunner().invoke(app, ["bench", str(folder), "--lengths", "8,many"])
    assert bad.exit_code == 2 and "whole numbers" in bad.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtypes": ["fp12"]}, "no dtype 'fp12'"),
        ({"lengths": [8, 100]}, "reads 1 to 64 tokens"),
        ({"lengths": [0]}, "reads 1 to 64 tokens"),
        ({"against": "tensorflow"}, "against transformers"),
    ],
)
def test_errors(folder, options, message):
    with pytest.raises(EverybertError, match=message):
        bench(folder, device="cpu", **options)


def test_transformers_missing_or_unable_to_read_the_folder_is_one_line(folder, monkeypatch):
    def error():
        words = ["bench", folder, "--device", "cpu", "--against", "transformers"]
        done = CliRunner().invoke(app, list(map(str, words)))
        assert done.exit_code == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
        return done.stderr

    def refuse(*args, **kwargs):
        raise OSError("no weights\nmore")

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", refuse)
    assert "transformers cannot read" in error()
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in error()
