"""docs/SCALING.md shows what the command prints. Run as a script, this file rewrites the outputs."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everybert.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "SCALING.md"
COMMAND = re.compile(r"```sh\neverybert (plan [^\n]*)\n```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def output(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    return "\n".join(line for line in lines if line) + "\n"


def blocks() -> list[tuple[str, str]]:
    return COMMAND.findall(PAGE.read_text("utf-8"))


@pytest.mark.parametrize(("command", "shown"), blocks(), ids=[command for command, _ in blocks()])
def test_the_page_shows_what_the_command_prints(command: str, shown: str):
    assert shown == output(command)


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    text = COMMAND.sub(lambda m: f"```sh\neverybert {m[1]}\n```\n\n```text\n{output(m[1])}```\n", text)
    PAGE.write_text(text, encoding="utf-8")
