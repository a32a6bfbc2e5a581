"""A sweep: the grid is checked before anything runs, is resumed where it was killed, and ends in one table."""

import csv
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from commandline import mistake, run
from grammar import write_corpus
from refusals import refuses
from toy import TINY

from everybert.cli.common import report
from everybert.evaluation import sweep as module
from everybert.evaluation.sweep import Cell, grid, plot, read_then, read_values, sweep, table

RATES = {"mask.rate": [0.15, 0.4]}
FAST = {"device": "cpu", "quiet": True}
ROWS = [(f"the {noun}", label) for noun, label in (("dog", "animal"), ("farmer", "person"), ("cat", "animal"))] * 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    torch.set_num_threads(1)
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(TINY.replace("steps = 40", "steps = 6"))
    return path


def labelled(folder: Path) -> str:
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in [("text", "label"), *ROWS]))
    return f"kinds={folder}/train.tsv,{folder}/dev.tsv"


def test_a_grid_ends_in_one_table_and_is_not_run_again(recipe, corpus, tmp_path, monkeypatch):
    out, then = tmp_path / "out", labelled(tmp_path)
    common = {"seeds": 2, "then": [then], "epochs": 1, **FAST}
    cells, finished = sweep(recipe, corpus, out, RATES, **common)
    assert finished and [cell.settings for cell in cells] == [{"mask.rate": 0.15}, {"mask.rate": 0.4}]
    for cell in cells:
        found = cell.intervals()
        assert set(found) == {"loss", "accuracy", "pair_accuracy", "kinds accuracy"}
        assert all(value.runs == 2 and value.half is not None for value in found.values())
        assert [recipe.seed for recipe in cell.recipes] == [3, 4]  # the recipe's, and the next
        assert (out / cell.name / "seed-4" / "model" / "config.json").exists()
    rows = list(csv.DictReader((out / "sweep.csv").open()))
    assert [row["mask.rate"] for row in rows] == ["0.15", "0.4"]
    assert float(rows[0]["loss"]) == pytest.approx(cells[0].intervals()["loss"].mean)
    assert table(cells)[1]["loss"].startswith(f"{cells[1].intervals()['loss'].mean:.4g} ± ")

    def refuse(*args, **settings):
        raise AssertionError("fine-tuned again")

    monkeypatch.setattr(module, "finetune", refuse)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("model/*")}
    again, finished = sweep(recipe, corpus, out, {"mask.rate": [0.4]}, **common)  # a part of the grid will do too
    assert finished and again[0].scores == cells[1].scores
    assert {p: p.stat().st_mtime_ns for p in out.rglob("model/*")} == before
    with pytest.raises(AssertionError, match="again"):  # other settings are another score
        sweep(recipe, corpus, out, RATES, **common | {"epochs": 2})


def test_a_killed_grid_continues(recipe, corpus, tmp_path):
    straight, _ = sweep(recipe, corpus, tmp_path / "straight", RATES, **FAST)
    pid = os.fork()
    if pid == 0:
        real, count = module.pretrain, []

        def deadly(*args, **settings):
            count.append(args)
            if len(count) == 2:
                from everybert.training import checkpoint

                checkpoint.prune = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # after the first checkpoint
            return real(*args, **settings)

        module.pretrain = deadly
        try:
            sweep(recipe, corpus, tmp_path / "out", RATES, overrides={"run__save_every": 2}, **FAST)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    done = (tmp_path / "out" / "mask.rate=0.15" / "seed-3" / "scores.json").stat().st_mtime_ns
    assert not (tmp_path / "out" / "sweep.csv").exists()
    cells, finished = sweep(recipe, corpus, tmp_path / "out", RATES, overrides={"run__save_every": 2}, **FAST)
    assert finished and [cell.scores for cell in cells] == [cell.scores for cell in straight]
    assert (tmp_path / "out" / "mask.rate=0.15" / "seed-3" / "scores.json").stat().st_mtime_ns == done


def test_an_interrupted_run_ends_the_sweep(recipe, corpus, tmp_path, monkeypatch):
    real = module.pretrain

    def stopped(recipe, *args, **settings):
        result = real(recipe, *args, **settings)
        return result if recipe.mask.rate == 0.15 else type(result)(result.folder, False, 1, {})

    monkeypatch.setattr(module, "pretrain", stopped)
    cells, finished = sweep(recipe, corpus, tmp_path / "out", RATES, **FAST)
    assert not finished and len(table(cells)) == 1  # what is finished is shown


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        ({"mask.rat": [0.1]}, "mask.rat=0.1.*did you mean rate"),
        ({"masks.rate": [0.1]}, "did you mean mask"),
        ({"mask.rate": [0.15, 1.5]}, "mask.rate=1.5"),
        ({"mask.rate": ["high"]}, "must be a number"),
        ({"mask.mask_share/mask.random_share": [(1.0,)]}, "one value per key"),
        ({"batch.length": [32, 128]}, "more than the model's 64 positions"),
        ({"mask.rate": [0.15, 0.15]}, "give each value"),
        ({"seed": [1, 2]}, "for seeds there is seeds"),
        ({}, "name a setting to vary, such as mask.rate"),
    ],
)
def test_a_wrong_grid_is_refused_before_anything_runs(recipe, corpus, tmp_path, vary, words):
    refuses(words, sweep, recipe, corpus, tmp_path / "out", vary, **FAST)
    assert not (tmp_path / "out").exists()


def test_labelled_sets(tmp_path):
    glue = tmp_path / "SST-2"
    glue.mkdir()
    for name in ("train", "dev"):
        (glue / f"{name}.tsv").write_text("sentence\tlabel\ngood\t1\nbad\t0\n")
    (found,) = read_then(str(glue))
    assert found[:3] == ("SST-2", "classify", glue / "train.tsv") and found.options["labels"] == ["0", "1"]
    train = glue / "train.tsv"
    shutil.copytree(glue, tmp_path / "MRPC")
    assert [one.name for one in read_then(f"{glue},{tmp_path / 'MRPC'}")] == ["SST-2", "MRPC"]
    assert read_then(f"names:tag={train},{train}")[0][:2] == ("names", "tag")
    for text, words in ((f"x={train}", "NAME=TRAIN,DEV"), ("x:sing=a,b", "sing"), ("nowhere", "not a folder")):
        refuses(words, read_then, text)


def test_rows_of_the_papers_can_be_written(recipe):
    shares = "mask.mask_share/mask.random_share"
    cells = grid(recipe, {shares: read_values(shares, "1/0,0.8/0.2,0.8/0.1")}, 1, {})
    assert [(c.recipes[0].mask.mask_share, c.recipes[0].mask.random_share) for c in cells] == [
        (1.0, 0.0),
        (0.8, 0.2),
        (0.8, 0.1),
    ]
    static = grid(recipe, {"mask.static_duplicates": read_values("mask.static_duplicates", "1,none")}, 1, {})
    assert [c.recipes[0].mask.static_duplicates for c in static] == [1, None]
    kinds = grid(recipe, {"examples.kind": read_values("examples.kind", "pairs,order,full")}, 1, {})
    assert [c.recipes[0].examples.kind for c in kinds] == ["pairs", "order", "full"]
    assert read_values("mask.rate", "0.15,[0.3, 0.1]") == [0.15, [0.3, 0.1]]
    assert len(grid(recipe, {"mask.rate": [0.15, 0.4], "examples.kind": ["pairs", "full"]}, 3, {})) == 4


def test_replaced_tokens_against_masked_tokens(recipe, corpus, tmp_path):
    """A table of the recipe can be switched on and off; a model that predicts no tokens has other scores."""
    common = {"overrides": {"examples__kind": "full", "model__family": "electra"}, "epochs": 1, **FAST}
    vary = {"rtd/steps": read_values("rtd/steps", "{}/3,none/4")}
    cells, _ = sweep(recipe, corpus, tmp_path / "out", vary, then=[labelled(tmp_path)], **common)
    detected = {"detection_accuracy", "detection_precision", "detection_recall"}
    assert set(cells[0].intervals()) == {*detected, "kinds accuracy"}
    assert set(cells[1].intervals()) == {"loss", "accuracy", "kinds accuracy"}
    assert cells[0].recipes[0].rtd.weight == 50 and cells[1].recipes[0].rtd is None
    first = list(report(table(cells)))[1]
    assert first.split()[:2] == ["{}", "3"] and "–" in first


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    cells = [Cell({"mask.rate": rate}, scores=[{"loss": 1.0 + rate}, {"loss": 1.2}]) for rate in (0.15, 0.4)]
    plot(cells, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_command(recipe, corpus, tmp_path):
    words = ["sweep", recipe, "--corpus", corpus, "--out", tmp_path / "out", "--vary", "mask.static_duplicates=1,none"]
    words += ["--device", "cpu", "--quiet", "--steps", "2"]
    found = json.loads(run(*words, "--json").stdout)
    assert found["finished"]
    assert [cell["settings"]["mask.static_duplicates"] for cell in found["cells"]] == [1, None]
    assert set(found["cells"][0]["scores"]["loss"]) == {"mean", "half", "runs"}
    text = run(*words).stdout.splitlines()
    assert text[0].split() == ["mask.static", "duplicates", "runs", "loss", "accuracy", "pair", "accuracy"]
    assert len(text) == 3


def test_a_key_that_is_varied_twice_is_refused(recipe, corpus, tmp_path):
    twice = ("--vary", "mask.rate=0.1", "--vary", "mask.rate=0.2")
    asked = ("sweep", recipe, "--corpus", corpus, "--out", tmp_path / "o")
    assert "--vary names mask.rate twice" in mistake(*asked, *twice)
    assert "--batch-size is for fine-tuning" in mistake(*asked, *twice[:2], "--batch-size", 8)
    assert not (tmp_path / "o").exists()
