"""Model cards: the hub's metadata parses, scores come with what they are worth, no path of the machine leaks."""

import builtins

import numpy as np
import pytest
import tiny_model

import everybert
from everybert.model.lora import LoraConfig
from everybert.store.card import base_name, command_line, draw_confusion, write_card

yaml = pytest.importorskip("yaml")
ROWS = [("the film was good", "pos"), ("the food was bad", "neg"), ("a great song", "pos"), ("an awful day", "neg")] * 5
FACTS = {
    "task": "classify",
    "metric": "accuracy",
    "base": "/home/me/models/my-bert",
    "train": "train.tsv",
    "dev": 'dev "1".tsv',
    "command": "everybert finetune classify --train train.tsv",
    "settings": {"mode": "top:2", "epochs": 3, "lora": {"rank": 4}, "device": None},
    "lr": 3e-5,
    "train_examples": 67349,
    "dev_examples": 872,
    "scores": {"accuracy": {"mean": 0.912, "half": 0.004, "runs": 3}, "ece": {"mean": 0.03, "half": 0.01, "runs": 3}},
    "seeds": [{"seed": i, "epoch": 2, "scores": {"accuracy": 0.91}, "seconds": 1.5} for i in range(3)],
    "notes": ["text read from 'sentence'"],
}


def card(folder, facts=FACTS, *args):
    write_card(folder, facts, *args)
    text = (folder / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_metadata_is_what_the_hub_reads(tmp_path):
    meta, body = card(tmp_path)
    assert meta["pipeline_tag"] == "text-classification" and meta["library_name"] == "transformers"
    (result,) = meta["model-index"][0]["results"]
    assert result["dataset"]["name"] == 'dev "1".tsv'
    assert result["metrics"][0]["type"] == "accuracy" and result["metrics"][0]["value"] == 0.912
    assert "± 0.0040" in body and "67,349 examples" in body and "last 2 layers" in body
    assert "my-bert" in body and "/home/me" not in body
    assert "| lr | 3e-05 |" in body and "device" not in body and "torch" in body
    assert "everybert finetune classify" in body


def test_one_run_is_said_to_be_one(tmp_path):
    facts = FACTS | {"scores": {"accuracy": {"mean": 0.9, "half": None, "runs": 1}}, "seeds": FACTS["seeds"][:1]}
    meta, body = card(tmp_path, facts)
    assert "This is one run" in body and "one run" in meta["model-index"][0]["results"][0]["metrics"][0]["name"]


def test_a_confusion_matrix_is_drawn_and_its_worst_cells_named(tmp_path):
    counts = np.array([[5, 2], [0, 9]])
    _, body = card(tmp_path, FACTS, counts, ["no", "yes"])
    assert (tmp_path / "confusion.png").read_bytes()[:4] == b"\x89PNG"
    assert "(confusion.png)" in body and "no taken for yes (2)" in body


def test_without_matplotlib_it_is_a_table(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    counts = np.array([[5, 2], [0, 9]])
    assert not draw_confusion(counts, ["a|b", "c"], tmp_path / "x.png")
    _, body = card(tmp_path, FACTS, counts, ["a|b", "c"])
    assert "| **a\\|b** | 5 | 2 |" in body and "confusion.png" not in body


def test_names_of_bases():
    assert base_name("/cache/models--google-bert--bert-base-uncased/snapshots/abc") == "google-bert/bert-base-uncased"
    assert base_name("/x/y/my-bert") == "my-bert" and base_name("everybert-small") == "everybert-small"


def test_commands_can_be_run_again():
    line = command_line(
        "tag",
        "b",
        "a b.conll",
        None,
        "out",
        {"columns": {"label": "upos"}, "grid": True, "labels": ["a", "b"], "lr": 1e-4},
    )
    assert line == (
        "everybert finetune tag --model b --train 'a b.conll' --out out "
        "--columns label=upos --grid --labels a,b --lr 0.0001"
    )
    assert "--rank 2 --alpha 8.0" in command_line("tag", "b", "t", "d", "o", {"lora": LoraConfig(2, 8.0)})
    assert command_line("tag", "b", [("a", "b")], None, "o", {}).startswith("everybert.finetune('b', 'tag'")


def test_a_fine_tuned_folder_has_its_card(tmp_path):
    base = tiny_model.save(tmp_path / "base")
    everybert.finetune(base, "classify", ROWS, ROWS, tmp_path / "out", epochs=1, quiet=True, seeds=2, device="cpu")
    text = (tmp_path / "out" / "README.md").read_text()
    assert text.count("\n| 0 |") == 1 and text.count("\n| 1 |") == 1 and "confusion.png" in text
    assert everybert.load(tmp_path / "out").classify("the film")[0].label in ("pos", "neg")
