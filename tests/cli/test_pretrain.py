"""`everybert pretrain` and `distil` as a user runs them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from grammar import write_corpus
from toy import TINY
from typer.testing import CliRunner

from everybert.cli.main import app


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli-pretrain")
    write_corpus(folder / "corpus", documents=60, heldout=8)
    (folder / "toy.toml").write_text(TINY)
    return folder


def everybert(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_ctrl_c_saves_says_how_to_resume_and_leaves_with_zero(place):
    command = [sys.executable, "-m", "everybert", "pretrain", "toy.toml", "--corpus", "corpus", "--out", "stopped"]
    command += ["--steps", "5000", "--set", "run.log_every=1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, cwd=place, env=env, stderr=subprocess.PIPE, text=True)
    log = place / "stopped" / "log.jsonl"
    for _ in range(1200):
        if log.exists() and log.read_text().count("\n") >= 3:
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 0, said
    assert "the run is saved: run the same command again to resume" in said
    saved = sorted((place / "stopped" / "checkpoints").iterdir())
    assert saved
    where = ["--corpus", place / "corpus", "--out", place / "stopped"]
    again = everybert("pretrain", place / "toy.toml", *where, "--steps", 5000, "--set", "schedule.peak=1.0")
    assert again.exit_code == 2
    assert "another schedule.peak" in again.stderr
    assert again.stderr.count("\n") == 1


def test_runs_to_the_end_and_prints_json(place):
    corpus, model = ["--corpus", place / "corpus"], place / "run" / "model"
    common = ["pretrain", place / "toy.toml", *corpus, "--out", place / "run", "--steps", 6, "--json"]
    first = everybert(*common)
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert found["finished"] and found["step"] == 6 and found["heldout_loss"] > 0
    assert "step 5/6" in first.stderr  # plain lines where there is no terminal
    second = everybert(*common)
    assert json.loads(second.stdout) == found
    assert "nothing to do" in second.stderr
    lesson = place / "lesson.toml"
    lesson.write_text(TINY.replace('kind = "pairs"', 'kind = "full"') + "[distil]\nce = 5.0\n")
    shape = ["--student", model, "--recipe", lesson, "--steps", 3]
    third = everybert("distil", "--teacher", model, *corpus, "--out", place / "small", *shape, "--json")
    assert third.exit_code == 0, third.output
    assert json.loads(third.stdout)["model"] == str(place / "small" / "model")


def test_mistakes_are_one_line(place):
    def said(*arguments):
        result = everybert(*arguments)
        assert result.exit_code == 2, result.output
        return result.stderr

    toy, corpus, out = place / "toy.toml", place / "corpus", place / "nothing"
    assert "name a recipe" in said("pretrain")
    assert "give --corpus" in said("pretrain", toy)
    assert "there is no recipe 'bert-bass'" in said("pretrain", "bert-bass", "--corpus", corpus, "--out", out)
    no_corpus = said("pretrain", toy, "--corpus", place, "--out", out)
    assert "is not a corpus folder" in no_corpus and "damaged" not in no_corpus
    assert "write it as TABLE.KEY=VALUE" in said("pretrain", toy, "--corpus", corpus, "--out", out, "--set", "peak")
    assert "did you mean peak" in said("pretrain", toy, "--corpus", corpus, "--out", out, "--set", "schedule.peek=1")
    assert "not both" in said("pretrain", toy, "--corpus", corpus, "--out", out, "--steps", 1, "--budget", "1m")
    assert not out.exists()


def test_lists_and_shows_recipes():
    listed = everybert("pretrain", "--list").output
    assert "bert-base" in listed and "small-20m" in listed
    assert "[schedule]" in everybert("pretrain", "tiny-cpu", "--show").output
