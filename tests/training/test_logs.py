"""Logs: each step once, plain lines without a terminal, and a full disk told in one line."""

import errno
import json
from functools import partial

import pytest
from rich.console import Console

from everybert.errors import EverybertError
from everybert.training import logs
from everybert.training.logs import Logs, forget_after, progress_line


def test_lines_after_the_last_checkpoint_are_forgotten(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in (5, 10, 15)) + '{"step": 2')
    forget_after(path, 10)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [5, 10]
    forget_after(tmp_path / "none.jsonl", 3)


def test_the_line_says_it_all():
    values = {"loss": 3.2144, "tokens_per_second": 1_250_000.0, "mfu": 0.41, "data_wait": 0.003, "skipped": 2}
    line = progress_line(1200, 10_000, values, 760)
    parts = "step 1,200/10,000|loss 3.214|1,250,000 tokens/s|MFU 41%|data wait 0.3%|skipped 2|ETA 0:12:40"
    assert line == parts.replace("|", "  ")
    assert progress_line(3, None, {}, None) == "step 3"


def test_plain_lines_without_a_terminal(capsys):
    with Logs(None) as log:
        log.show("one")
        log.show("two")  # too soon after the first
        log.show("three", every=0)
    assert capsys.readouterr().err.split() == ["one", "three"]
    with Logs(None, quiet=True) as log:
        log.show("four", every=0)
        log.print("five")
    assert capsys.readouterr().err == ""


def test_a_live_line_in_a_terminal(tmp_path):
    with (tmp_path / "screen").open("w") as screen, Logs(None) as log:
        log.console = Console(file=screen, force_terminal=True, width=60)
        log.show("loss 3.2")
        assert log.live is not None
        log.print("a line that stays")
    assert "a line that stays" in (tmp_path / "screen").read_text()
    assert log.live is None


def test_a_full_disk_is_one_line(tmp_path):
    class Full:
        name = "log.jsonl"

        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    with Logs(tmp_path) as log:
        log.file.close()
        log.file = Full()
        with pytest.raises(EverybertError, match=r"disk is full: log.jsonl.*checkpoint is intact; free"):
            log.write(1, {"loss": 1.0})


@pytest.mark.parametrize("terminal", (True, False))
def test_a_progress_bar_is_for_terminals(capsys, monkeypatch, terminal):
    monkeypatch.setattr(logs, "Console", partial(Console, force_terminal=terminal, width=60))
    with logs.progress_bar("texts", 10) as update:
        update(5)
        update(20, total=20)
    seen = capsys.readouterr()
    assert seen.out == "" and ("texts" in seen.err) == terminal
