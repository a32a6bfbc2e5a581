"""The `everybert` command. The module of a command is imported when the command is called, so that help is fast."""

import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer

from everybert import __version__
from everybert.cli.options import EXAMPLES, TABLE, Command, Group
from everybert.errors import EverybertError

COMMANDS = {name: (*entry, panel) for panel, entries in TABLE.items() for name, entry in entries.items()}
"""Command → the module of everybert.cli that has it, its line in the help, its heading."""
UsageError: Any = typer.BadParameter.__base__


class Commands(Group):
    """Lists commands without importing them. Errors that users can fix are one line, with exit code 2."""

    def __init__(self, **options: Any) -> None:
        lines = {name: Command(name, help=line, rich_help_panel=panel) for name, (_, line, panel) in COMMANDS.items()}
        super().__init__(**options | {"commands": lines})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself, imported now."""
        name, _, rest = super().resolve_command(ctx, args)
        group: Any = typer.main.get_command(import_module(f"everybert.cli.{COMMANDS[str(name)][0]}").app)
        return name, group.commands[name], rest

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command, print its errors and end with its exit code."""
        warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)
        with one_line_errors():
            sys.exit(super().main(*args, **options | {"standalone_mode": False}))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print what users can fix as one line, with exit code 2. Anything else is a bug and has a traceback."""
    try:
        yield
        return
    except EverybertError as error:
        line = str(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            raise
        line = f"{error.filename}: {error.strerror}; check the path, its permissions and the space on the disk"
    except UsageError as error:
        if "NoArgs" in type(error).__name__:
            error.show()  # the help
            sys.exit(error.exit_code)
        said = " ".join(error.format_message().split()).rstrip(".")
        line = f"{said}; see {error.ctx.command_path if error.ctx else 'everybert'} --help"
    print(f"error: {' '.join(line.splitlines())}", file=sys.stderr)
    sys.exit(2)


app = typer.Typer(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """The whole BERT family: use a model, look inside it, make one from text."""
    if version:
        print(f"everybert {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(EXAMPLES["everybert"], end="")


def run() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):  # characters that the terminal cannot show are escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="everybert")
