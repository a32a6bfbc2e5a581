"""`everybert bench`: what is measured is there, in budget, and survives interruption. Nothing here asserts a speed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_model import save
from typer.testing import CliRunner

from everybert.cli import bench as command
from everybert.cli.main import app
from everybert.errors import EverybertError
from everybert.evaluation import bench as module
from everybert.evaluation.bench import Bench, Cell, bench, draw

CELLS = [Cell("fp32", n, [1000.0 * n], [0.001 * n, 0.0015 * n, 0.002 * n], batch=4).summary() for n in (8, 16, 32)] + [
    Cell("int8", n, [2000.0 * n], [0.0008 * n], batch=4).summary() for n in (8, 16)
]
WAYS = [{"name": name, "load_seconds": 0.1, "weights_mb": 1.5} for name in ("fp32", "int8")]
FOUND = Bench("model", "cpu", 2, "2.13", 1.0, WAYS, CELLS, 300.0, False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("bench") / "model")


def test_every_cell_is_measured_within_the_budget(folder):
    shares: list[float] = []
    start = time.perf_counter()
    found = bench(folder, dtypes=["fp32", "bfloat16"], device="cpu", seconds=1.0, progress=shares.append)
    assert time.perf_counter() - start < 60  # a second, and the turn that it ended in, on the slowest machine
    assert [w["name"] for w in found.ways] == ["fp32", "bf16"]
    assert found.ways[0]["weights_mb"] == pytest.approx(2 * found.ways[1]["weights_mb"], rel=0.01)
    assert {c["length"] for c in found.cells} == {8, 16, 32, 64}  # the model's window
    first = found.cells[0]
    assert first["tokens_per_s"] > 0 and first["texts_per_s"] == pytest.approx(first["tokens_per_s"] / 8)
    assert 0 < first["p50_ms"] <= first["p90_ms"] <= first["p99_ms"]
    assert found.peak_rss_mb is None or found.peak_rss_mb > 50
    assert not found.stopped and shares == sorted(shares) and shares[-1] <= 1


def test_the_work_done_is_what_is_counted():
    texts = [[1] * 4 for _ in range(100)]
    seen: list[int] = []

    def run(ids):
        seen.append(len(ids))
        time.sleep(0.001)

    cell = Cell("fp32", 4, waits=[0.001])
    module._batches(cell, run, texts, 0.05, module.torch.device("cpu"))
    assert seen[0] >= 50 and max(seen) == cell.batch <= 100
    assert max(cell.rates) <= cell.batch * 4 / 0.001
    assert np.median(cell.rates) == cell.summary()["tokens_per_s"]


def test_interruption_keeps_what_there_is(folder, monkeypatch):
    turns = []

    def interrupted(cell, *_):
        turns.append(cell.length)
        if len(turns) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_batches", interrupted)
    done = CliRunner().invoke(app, ["bench", str(folder), "--device", "cpu", "--seconds", "30"])
    assert done.exit_code == 130 and "interrupted" in done.stdout
    assert turns == [8, 16, 32]


def test_against_transformers_is_interleaved(folder, monkeypatch):
    order = []
    monkeypatch.setattr(module, "_batches", lambda cell, *_: order.append((cell.way, cell.length)))
    found = bench(folder, device="cpu", lengths=[8, 16], against="transformers", seconds=0.5)
    assert [w["name"] for w in found.ways] == ["fp32", "transformers fp32"]
    assert order[:4] == [("fp32", 8), ("transformers fp32", 8), ("fp32", 16), ("transformers fp32", 16)]


def test_the_table_and_the_picture(tmp_path, capsys):
    command._show(FOUND)
    shown = capsys.readouterr().out
    assert "8,000" in shown and "12.00" in shown and "0.50" in shown and "1.00" in shown
    assert "peak memory of the process: 300 MB" in shown
    draw(FOUND, tmp_path / "speed.png")
    from matplotlib.image import imread

    pixels = imread(tmp_path / "speed.png")
    assert pixels.shape[0] > 400 and len(np.unique(pixels.reshape(-1, 4), axis=0)) > 50


def test_the_command(folder, tmp_path):
    words = ["bench", str(folder), "--device", "cpu", "--seconds", "0.3", "--lengths", "8,64"]
    done = CliRunner().invoke(app, [*words, "--json", "--plot", str(tmp_path / "a.png")])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {"model", "ways", "cells", "peak_rss_mb", "threads"} <= set(found) and (tmp_path / "a.png").is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtypes": ["fp12"]}, "no dtype 'fp12'"),
        ({"lengths": [8, 100]}, "reads 1 to 64 tokens"),
        ({"lengths": [0]}, "reads 1 to 64 tokens"),
        ({"against": "tensorflow"}, "against transformers"),
    ],
)
def test_errors(folder, options, said):
    with pytest.raises(EverybertError, match=said):
        bench(folder, device="cpu", **options)


def test_a_picture_without_matplotlib_says_what_to_install(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["bench", str(folder), "--plot", str(tmp_path / "a.png")])
    assert done.exit_code == 2 and "pip install 'everybert[viz]'" in done.stderr
    monkeypatch.undo()
    lost = CliRunner().invoke(app, ["bench", str(folder), "--plot", str(tmp_path / "no" / "a.png")])
    assert lost.exit_code == 2 and "there is no folder" in lost.stderr
    bad = CliRunner().invoke(app, ["bench", str(folder), "--lengths", "8,many"])
    assert bad.exit_code == 2 and "whole numbers" in bad.stderr
