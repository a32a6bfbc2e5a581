"""Model cards: the hub's metadata parses, scores come with what they are worth, no path of the machine leaks."""

import numpy as np
import pytest
import tiny_model

import everybert
from everybert.store.card import base_name, write_card

yaml = pytest.importorskip("yaml")
ROWS = [("the film was good", "pos"), ("the food was bad", "neg"), ("a great song", "pos"), ("an awful day", "neg")] * 5
FACTS = {
    "task": "classify",
    "metric": "accuracy",
    "base": "/home/me/models/my-bert",
    "train": "train.tsv",
    "dev": 'dev "1".tsv',
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
    assert "lora" not in body


def test_one_run_is_said_to_be_one(tmp_path):
    facts = FACTS | {"scores": {"accuracy": {"mean": 0.9, "half": None, "runs": 1}}, "seeds": FACTS["seeds"][:1]}
    meta, body = card(tmp_path, facts)
    assert "(one run)" in body and "one run" in meta["model-index"][0]["results"][0]["metrics"][0]["name"]


def test_a_confusion_matrix_is_a_table(tmp_path):
    _, body = card(tmp_path, FACTS, np.array([[5, 2], [0, 9]]), ["a|b", "c"])
    assert "| **a\\|b** | 5 | 2 |" in body
    assert "Confusion" not in card(tmp_path, FACTS, np.eye(20), [str(i) for i in range(20)])[1]


@pytest.mark.parametrize(("mode", "library"), [("lora", "peft"), ("frozen", "everybert"), ("full", "transformers")])
def test_the_library_is_the_one_that_loads_the_whole_model(tmp_path, mode, library):
    assert card(tmp_path, FACTS | {"settings": {"mode": mode}})[0]["library_name"] == library


def test_names_of_bases():
    assert base_name("/cache/models--google-bert--bert-base-uncased/snapshots/abc") == "google-bert/bert-base-uncased"
    assert base_name("/x/y/my-bert") == "my-bert" and base_name("everybert-small") == "everybert-small"


def test_a_fine_tuned_folder_has_its_card(tmp_path):
    base = tiny_model.save(tmp_path / "base")
    everybert.finetune(base, "classify", ROWS, ROWS, tmp_path / "out", epochs=1, quiet=True, seeds=2, device="cpu")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "Confusion matrix" in text and "mean of 2 runs" in text
    assert everybert.load(tmp_path / "out").classify("the film")[0].label in ("pos", "neg")
