"""The README's tour runs, its commands and files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import everybert
from everybert.cli.main import COMMANDS
from everybert.inference.model import Model
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.text.train_tokenizer import train_tokenizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """With a random model in the place of those that would be fetched."""
    tokenizer, _ = train_tokenizer(["I love my pet Python because it was tired."] * 200, size=90)
    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=tokenizer.size, hidden_size=16, layers=2, heads=2, intermediate_size=32)
    model = Model(Network(config, {"mlm": None, "nsp": None}), tokenizer)
    monkeypatch.setattr(everybert, "load", lambda name: model, raising=False)
    monkeypatch.chdir(tmp_path)
    tour = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    exec(compile(tour, "README.md", "exec"), {})
    assert len(tour.strip().splitlines()) <= 20
    assert "(2, 2," in capsys.readouterr().out
    assert (tmp_path / "my-embedder" / "config.json").is_file()


def test_commands_and_files_that_it_names_exist():
    for name in re.findall(r"^everybert (\w+)", README, re.MULTILINE):
        assert name in COMMANDS
    for path in re.findall(r"\]\(([^)#]+)\)", README):
        assert path.startswith("http") or (ROOT / path).exists(), path
    for script in re.findall(r"`(\w+\.py)`", README):
        assert (ROOT / "benchmarks" / script).is_file(), script
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text("utf-8")
