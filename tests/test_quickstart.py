"""The quickstart in seconds: every step leaves its result, a second run repeats none, nothing foreign is touched."""

import io
import json
import re

import pytest
from refusals import refuses
from rich.console import Console

from everybert import data
from everybert import quickstart as module
from everybert.quickstart import quickstart


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
    for name in ("world.txt", "train.tsv", "recipe.toml", "report.md", "report.json", "sentiment/README.md"):
        assert (out / name).is_file(), name
    for name in ("tokenizer", "corpus", "untrained", "pretrained/model", "sentiment", "untrained-sentiment"):
        assert (out / name).is_dir(), name
    assert json.loads((out / "report.json").read_text()) == story
    assert {name: [*parts] for name, parts in story["scores"].items()} == {n: ["dev", "test"] for n in module.MODELS}
    assert len(story["masked"]) == 10 and len(story["predictions"]) == 3


def test_the_screen_shows_the_story_and_the_commands(told):
    out, _, screen = told
    for words in ("Tokenizer", "The capital of France is [MASK]", "from random weights", "everybert finetune"):
        assert words in screen
    assert "http://127.0.0.1:8000" in screen and "everybert serve --model" in screen, "the playground's address"
    assert f"{out}/recipe.toml" in screen.replace("\n", "") and "[/bold]" not in screen


def test_the_commands_it_prints_exist():
    from everybert.cli.main import COMMANDS

    names = re.findall(r"^    everybert (\w+)", data.read("report.md"), re.MULTILINE)
    assert len(names) >= 8 and set(names) <= set(COMMANDS)


def test_a_second_run_repeats_no_training(told, monkeypatch):
    out, before, _ = told
    for name in ("train_tokenizer", "finetune"):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("it was done"))
    story, _ = run(out)
    assert {**story, "seconds": 0} == {**before, "seconds": 0}


def test_a_stopped_run_says_so(tmp_path, monkeypatch):
    from everybert.training.pretrain import Result

    monkeypatch.setattr(module, "pretrain", lambda *a, **k: Result(tmp_path, False, 3, {}))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "story")


@pytest.mark.slow
def test_the_model_fills_sentences_that_it_has_never_read(tmp_path):
    """Nine, nine and ten with three seeds; a floor of eight leaves room for the arithmetic of another machine."""
    screen = Console(file=io.StringIO(), width=120)
    story = quickstart(tmp_path / "story", console=screen)
    right = sum(one["after"] == one["answer"].lower() for one in story["masked"])
    assert right >= 8, story["masked"]
    assert f"{right} of 10" in screen.file.getvalue()
    assert story["scores"]["sentiment"]["test"] > story["scores"]["untrained-sentiment"]["test"] + 0.1


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    refuses("holds something else", run, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
