"""The quickstart in seconds: every step leaves its result, a second run repeats none, nothing foreign is touched."""

import io
import json
import re

import pytest
from rich.console import Console

from everybert import quickstart as module
from everybert.errors import EverybertError
from everybert.quickstart import Stopped, draw_curves, quickstart, text_plot


def run(out):
    screen = Console(file=io.StringIO(), width=120)
    story = quickstart(out, steps=12, size=150, console=screen)
    return story, screen.file.getvalue()


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    out = tmp_path_factory.mktemp("q") / "story"
    return (out, *run(out))


def test_every_step_leaves_its_result(told):
    out, story, _ = told
    for name in (
        "world.txt",
        "train.tsv",
        "recipe.toml",
        "report.md",
        "report.json",
        "loss.png",
        "sentiment/README.md",
    ):
        assert (out / name).is_file(), name
    for name in ("tokenizer", "corpus", "untrained", "pretrained/model", "sentiment", "untrained-sentiment"):
        assert (out / name).is_dir(), name
    assert json.loads((out / "report.json").read_text())["scores"] == story.scores
    assert set(story.scores) == {f"{m} {p}" for m in ("sentiment", "untrained-sentiment") for p in ("dev", "test")}
    assert len(story.losses) == 2 and len(story.blanks) == 10 and len(story.predictions) == 3


def test_the_screen_shows_the_story_and_the_commands(told):
    out, _, screen = told
    for words in ("Tokenizer", "The capital of France is ____", "loss", "from random weights", "everybert finetune"):
        assert words in screen
    assert "http://127.0.0.1:8000" in screen and "everybert serve --model" in screen, "the playground's address"
    assert f"{out}/recipe.toml" in screen.replace("\n", "") and "[/bold]" not in screen


def test_the_commands_it_prints_exist():
    from everybert.cli.main import COMMANDS

    for command in module.COMMANDS:
        assert re.match(r"everybert (\w+)", command)[1] in COMMANDS


def test_a_second_run_repeats_no_training(told, monkeypatch):
    out, before, _ = told
    for name in ("train_tokenizer", "finetune"):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("it was done"))
    story, _ = run(out)
    assert story.scores == before.scores and story.blanks == before.blanks and story.losses == before.losses


def test_a_stopped_run_says_so(tmp_path, monkeypatch):
    from everybert.training.pretrain import Result

    monkeypatch.setattr(module, "pretrain", lambda *a, **k: Result(tmp_path, False, 3, {}))
    with pytest.raises(Stopped):
        run(tmp_path / "story")


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(EverybertError, match="holds something else"):
        run(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_plots(tmp_path):
    lines = text_plot([5.0, 3.0, 2.0, 1.0], "loss", "step 4", height=4).splitlines()
    assert len(lines) == 5 and "5.00" in lines[0] and "1.00" in lines[3] and lines[4].endswith("step 4")
    columns = list(zip(*(line[10:] for line in lines[:4])))
    heights = [sum(" ▁▂▃▄▅▆▇█".index(c) for c in column) for column in columns]
    assert heights == sorted(heights, reverse=True) and heights[0] == 32
    assert text_plot([], "loss") == "" and text_plot([2.0, 2.0], "loss")
    assert draw_curves({"a": [(0, 1.0), (1, 0.5)]}, tmp_path / "a.png", "loss")
    assert (tmp_path / "a.png").stat().st_size > 1000
