"""`everybert pretrain` and `distil` as a user runs them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from commandline import mistake
from commandline import run as everybert
from grammar import write_corpus
from toy import TINY


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli-pretrain")
    write_corpus(folder / "corpus", documents=60, heldout=8)
    (folder / "toy.toml").write_text(TINY)
    return folder


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
    again = mistake("pretrain", place / "toy.toml", *where, "--steps", 5000, "--set", "schedule.peak=1.0")
    assert "another schedule.peak" in again


def test_runs_to_the_end_and_prints_json(place):
    corpus, model = ["--corpus", place / "corpus"], place / "run" / "model"
    common = ["pretrain", place / "toy.toml", *corpus, "--out", place / "run", "--steps", 6, "--json"]
    first = everybert(*common)
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
    assert json.loads(third.stdout)["model"] == str(place / "small" / "model")


def test_lists_and_shows_recipes():
    listed = everybert("pretrain", "--list").output
    assert "bert-base" in listed and "small-20m" in listed
    assert "[schedule]" in everybert("pretrain", "tiny-cpu", "--show").output
    changed = everybert("pretrain", "tiny-cpu", "--show", "--set", "mask.rate=0.3", "--steps", 7).output
    assert changed.endswith("# instead: mask.rate = 0.3\n# instead: steps = 7\n")
