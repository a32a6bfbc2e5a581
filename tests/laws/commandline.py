"""The command line in this process, and all of its commands."""

from __future__ import annotations

from functools import cache
from typing import Any

import typer
from typer.testing import CliRunner, Result

from everybert.cli.main import COMMANDS, app


def run(*words: object, code: int = 0, **more: Any) -> Result:
    """The result of a command that ends with this code."""
    found = CliRunner().invoke(app, [str(word) for word in words], **more)
    assert found.exit_code == code, (words, found.output, found.exception)
    return found


def mistake(*words: object, **more: Any) -> str:
    """The error of a command: one line, nothing on stdout, and exit code 2."""
    found = run(*words, code=2, **more)
    lines = [line for line in found.stderr.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1 and lines[0].startswith("error: ") and not found.stdout, found.output
    return lines[0]


@cache
def every() -> dict[str, Any]:
    """Commands by name; of a group, its parts."""
    group: Any = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name in COMMANDS:
        one = group.resolve_command(typer.Context(group, info_name="everybert"), [name])[1]
        parts = getattr(one, "commands", None)
        found |= {f"{name} {part}": inner for part, inner in parts.items()} if parts else {name: one}
    return found
