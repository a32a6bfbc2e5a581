"""recipes/directions.py in miniature: four models, one table; run again, nothing is repeated."""

from __future__ import annotations

import json
from pathlib import Path

import directions
import pytest
from grammar import write_corpus

from everybert.training.recipe import Recipe

ROOT = Path(__file__).parents[2]
SIZES = {"layers": 1, "hidden_size": 16, "heads": 2, "intermediate_size": 32, "max_positions": 32}
BATCH = {"length": 32, "tokens": 512, "pack": 512}


def test_tiny_is_the_recipe_in_miniature():
    whole, tiny = (Recipe.load(ROOT / "recipes" / "directions.toml", **changes) for changes in ({}, directions.TINY))
    assert tiny.steps < whole.steps and tiny.config.hidden_size < whole.config.hidden_size
    assert tiny.longest == tiny.config.max_positions and tiny.examples.kind == whole.examples.kind


def test_four_models_in_one_table(tmp_path, capsys, monkeypatch):
    corpus = write_corpus(tmp_path / "c", documents=40, heldout=10)
    pairs = [{"sentence_good": "the dog watches a boat .", "sentence_bad": "boat a watches dog the ."}] * 3
    (tmp_path / "blimp").mkdir()
    (tmp_path / "blimp" / "order.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    rows = [f"the old {word} watches a boat .\t{label}" for label, word in (("a", "dog"), ("b", "judge"))] * 6
    (tmp_path / "task.tsv").write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    changes = {f"model.{k}": v for k, v in SIZES.items()} | {f"batch.{k}": v for k, v in BATCH.items()}
    changes |= {"steps": 6, "run.evaluate_every": 0, "run.evaluate_packs": 1, "run.tensorboard": "false"}
    options = [x for key, value in changes.items() for x in ("--set", f"{key}={value}")]
    task = f"words={tmp_path / 'task.tsv'},{tmp_path / 'task.tsv'}"
    line = ["--corpus", str(corpus), "--work", str(tmp_path / "w"), "--device", "cpu", "--positions", "50"]
    line += ["--linear-steps", "3", "--blimp", str(tmp_path / "blimp"), "--task", task, *options]
    directions.main([*line, "--json"])
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(table) == ["left to right", "right to left", "both", "bidirectional"]
    for row in table.values():
        assert list(row) == ["fill (50)", "BLiMP", "words"] and all(0 <= value <= 1 for value in row.values())
        assert row["words"] > 0.9  # the noun tells the label, whichever side a model reads
    monkeypatch.setattr(directions, "fill_accuracy", None)  # measured already
    directions.main(line)
    out = capsys.readouterr().out
    assert "| both | " in out and out.count(" %") == 12
    with pytest.raises(SystemExit, match="NAME=TRAIN,DEV"):
        directions.main([*line, "--task", "wrong"])
