"""Options from signatures and dataclass fields, and the help of every command."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from commandline import every
from commandline import run as everybert
from typer.testing import CliRunner

from everybert.cli.main import COMMANDS
from everybert.cli.options import EXAMPLES, Fields, Output, command, read_fields


@dataclass(frozen=True)
class Base:
    """Size."""

    width: int = 3
    """How wide."""


@dataclass(frozen=True)
class Size(Base):
    """Size."""

    tall: bool = False
    """Whether tall."""


SETTINGS = Fields("epochs mode=way new_pooler", "Training", "everybert.training.tuning:FinetuneSettings")
app = typer.Typer()


@command(app)
def first(
    texts: Annotated[list[str], "Some texts."],
    *,
    kind: Annotated[Literal["a", "b"], "The kind."] = "a",
    path: Path | None = None,
    sign: bool | None = None,
    set_: Annotated[list[str] | None, {"metavar": "K=V"}] = None,
    size: Size,
    settings: Annotated[dict[str, Any], SETTINGS],
) -> Output:
    """Do it."""
    data = [texts, kind, path and str(path), sign, set_, size.width, size.tall, settings]
    return Output(data, ["text"], code=3)


@command(app)
def second() -> None:
    """Nothing."""


def run(*words):
    return CliRunner().invoke(app, ["first", *words])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x", "y"], [["x", "y"], "a", None, None, None, 3, False, {}]),
        (["x", "--kind", "b", "--path", "p", "--no-sign"], [["x"], "b", "p", False, None, 3, False, {}]),
        (["x", "--set", "a=1", "--set", "b=2"], [["x"], "a", None, None, ["a=1", "b=2"], 3, False, {}]),
        (["x", "--tall", "--width", "0"], [["x"], "a", None, None, None, 0, True, {}]),
        (["x", "--way", "lora", "--new-pooler"], [["x"], *["a", None, None, None, 3, False]]),
    ],
)
def test_values_reach_the_function(words, expected):
    done = run(*words, "--json")
    assert done.exit_code == 3
    if "--way" in words:
        expected.append({"mode": "lora", "new_pooler": True})
    assert json.loads(done.stdout) == expected


def test_the_output_is_text_or_json():
    assert run("x").stdout == "text\n"
    assert run("x", "--kind", "c").exit_code == run().exit_code == 2


def test_help_has_the_docs_of_parameters_and_fields():
    text = run("--help").stdout
    for line in (
        "Some texts.",
        "--kind a|b",
        "The kind.  [default: a]",
        "--set K=V",
        "--sign / --no-sign",
        "Size:",
        "How wide. [default: 3]",
        "Whether tall.",
        "Training:",
        "--way TEXT",
    ):
        assert line in text
    assert "--lr" not in text and "bool" not in text
    assert read_fields("everybert.training.tuning", "FinetuneSettings")["batch_size"][1] == 32


@pytest.mark.parametrize("name", every())
def test_help_is_complete_and_fits_80_columns(name):
    text = everybert(*name.split(), "--help", env={"COLUMNS": "80"}).stdout
    assert max(map(len, text.splitlines())) <= 80, text
    assert not re.search(r" <\w| bool", text), "a type of Python"
    shown = "".join(f"  {line}\n" for line in EXAMPLES[name].splitlines())
    assert text.endswith(f"Examples:\n{shown}") and f"everybert {name}" in shown
    rows = [line for line in text.splitlines() if line.startswith("  -")]
    assert all(row.count("  ") > 1 or len(row) > 24 for row in rows), "an option without help"


def test_every_example_belongs_to_a_command():
    assert set(EXAMPLES) == {"everybert", *every()}


def test_without_a_command_six_things_are_shown():
    shown = everybert()
    assert shown.stdout == EXAMPLES["everybert"]
    lines = [line.split("  ")[1] for line in shown.stdout.splitlines() if line.startswith("  everybert ")]
    assert len(lines) == 6 and all(line.split()[1] in COMMANDS for line in lines)


@pytest.mark.parametrize(("words", "expected"), [("everybert fi", "finetune"), ("everybert fill --t", "--top")])
def test_shells_complete_commands_and_options(words, expected):
    shell = {"_EVERYBERT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    shown = everybert(prog_name="everybert", env=shell)
    assert expected in shown.stdout.split()
