"""`everybert export` on the command line."""

import json
from pathlib import Path

import pytest
from tiny_model import save
from typer.testing import CliRunner

from everybert.cli.main import app


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("export") / "model", {"classify": 2}, labels=["bad", "good"])


def everybert(*words: object):
    return CliRunner().invoke(app, list(map(str, words)))


def test_a_graph_is_compared_with_the_model(classifier, tmp_path):
    done = everybert("export", "onnx", classifier, tmp_path / "onnx", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["task"] == "classify" and found["outputs"] == ["logits"] and found["difference"] < 1e-4
    assert {"onnx", "config.json", "everybert.json"} <= {p.name for p in (tmp_path / "onnx").iterdir()}


def test_a_folder_for_transformers(classifier, tmp_path):
    done = everybert("export", "hf", classifier, tmp_path / "hf")
    assert "BertForSequenceClassification" in done.stdout
    again = everybert("export", "hf", classifier, tmp_path / "hf")
    assert again.exit_code == 2 and again.stderr.startswith("error: ") and "exists already" in again.stderr


def test_errors_are_one_line(classifier, tmp_path):
    headless = everybert("export", "onnx", classifier, tmp_path / "a", "--task", "tag")
    assert headless.exit_code == 2 and "no tag head" in headless.stderr and headless.stderr.count("\n") == 1
    assert not (tmp_path / "a").exists()
