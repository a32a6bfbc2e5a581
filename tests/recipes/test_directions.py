"""recipes/directions.py in miniature: four models, one table; run again, nothing is repeated."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import directions
import pytest
import tiny_model
import torch
from grammar import write_corpus

from everybert.inference.model import load
from everybert.training.recipe import Recipe
from everybert.training.tuning import FinetuneSettings

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
    line += ["--epochs", "30", "--lr", "1e-2"]
    directions.main([*line, "--seeds", "2", "--json"])
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(table) == ["left to right", "right to left", "both", "bidirectional"]
    for row in table.values():
        assert list(row) == ["fill (50)", "BLiMP", "words (30 epochs, 0.01)"]
        assert all(0 <= score["mean"] <= 1 for score in row.values())
        assert [score["runs"] for score in row.values()] == [1, 1, 2]
        assert row["words (30 epochs, 0.01)"]["mean"] > 0.9  # the noun tells the label, whichever side a model reads

    monkeypatch.setattr(directions, "fill_accuracy", None)  # measured already
    seeds = []
    monkeypatch.setattr(directions, "task_accuracy", lambda model, data, settings, seed: seeds.append(seed) or 0.5)
    directions.main([*line, "--seeds", "3"])
    out = capsys.readouterr().out
    assert "| both | " in out and out.count(" %") == 12 and out.count(" ± ") == 4
    assert seeds == [2] * 4, "a further seed is one more run for each model"
    with pytest.raises(SystemExit, match="NAME=TRAIN,DEV"):
        directions.main([*line, "--task", "wrong"])


@pytest.mark.parametrize("parts", [1, 2])
def test_all_weights_are_fine_tuned_in_a_copy(parts, tmp_path, monkeypatch):
    """Every matrix of every encoder moves; the models that other tasks start from do not."""
    tiny_model.save(tmp_path / "a", {"mlm": None}, seed=1)
    tiny_model.save(tmp_path / "b", {"mlm": None}, seed=2)
    models = [load(tmp_path / name, "cpu") for name in ("a", "b")]
    start = models[0] if parts == 1 else directions.Pair(*models)
    rows = [f"the {noun} sees a red dog .\t{label}" for noun, label in (("cat", "a"), ("food", "b"))] * 4
    (tmp_path / "task.tsv").write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    data = directions.labelled(models[0], tmp_path / "task.tsv", tmp_path / "task.tsv", most=6)
    assert len(data.train) == len(data.dev) == 6
    before = [copy.deepcopy(model.network.encoder.state_dict()) for model in models]
    trained = []
    monkeypatch.setattr(directions, "dev_accuracy", lambda network, data, device: trained.append(network) or 0.0)
    directions.task_accuracy(start, data, FinetuneSettings(epochs=2, lr=1e-2), seed=0)
    assert len(trained[0].encoders) == parts
    for encoder, model, was in zip(trained[0].encoders, models, before):
        for name, value in model.network.encoder.state_dict().items():
            assert torch.equal(value, was[name])
            if "position" not in name:  # no text is as long as the table
                assert not torch.equal(encoder.state_dict()[name], value), name
