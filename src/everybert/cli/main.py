"""The `everybert` command. A command's module is imported when the command is called, so that help is quick."""

from __future__ import annotations

import io
import sys
import warnings
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from everybert import __version__
from everybert.errors import EverybertError

USE, LOOK, BUILD, MEASURE = "Use a model", "Look inside", "Make one", "Measure one"
COMMANDS = {
    "quickstart": ("everybert.cli.quickstart", "The whole story in miniature, in a minute or two.", USE),
    "fill": ("everybert.cli.use", "Guess the words behind [MASK].", USE),
    "embed": ("everybert.cli.use", "Turn texts into vectors.", USE),
    "tokens": ("everybert.cli.use", "Show a text's tokens and their vectors.", USE),
    "next": ("everybert.cli.use", "How likely one sentence follows another.", USE),
    "classify": ("everybert.cli.tasks", "Label texts or pairs, or a file of them.", USE),
    "regress": ("everybert.cli.tasks", "Predict a number for texts or pairs.", USE),
    "tag": ("everybert.cli.tasks", "Find names, places, parts of speech.", USE),
    "answer": ("everybert.cli.tasks", "Answer questions from a text.", USE),
    "choose": ("everybert.cli.tasks", "Choose the ending that fits best.", USE),
    "serve": ("everybert.cli.serve", "Serve models over HTTP.", USE),
    "info": ("everybert.cli.info", "A model's size, part by part; the family side by side.", USE),
    "export": ("everybert.cli.export", "A model for other runtimes: ONNX, or a folder of transformers.", USE),
    "explain": ("everybert.cli.inside", "Every step of the forward pass, with its numbers.", LOOK),
    "attention": ("everybert.cli.inside", "A page with all of a text's attention.", LOOK),
    "neighbours": ("everybert.cli.inside", "One word in several texts, layer by layer.", LOOK),
    "probe": ("everybert.cli.inside", "What heads know of syntax; where a task's information lives.", LOOK),
    "tokenizer": ("everybert.cli.tokenizer", "Train a tokenizer, and look at one.", BUILD),
    "corpus": ("everybert.cli.corpus", "Build a pre-training corpus from text, and look at one.", BUILD),
    "plan": ("everybert.cli.plan", "What a recipe would need: memory, days, network, cost.", BUILD),
    "pretrain": ("everybert.cli.pretrain", "Pre-train a model by a recipe; run again to resume.", BUILD),
    "distil": ("everybert.cli.pretrain", "Train a small model to do what a larger one does.", BUILD),
    "extend": ("everybert.cli.pretrain", "Add words to a model's vocabulary.", BUILD),
    "finetune": ("everybert.cli.finetune", "Fine-tune a model on labelled data.", BUILD),
    "doctor": ("everybert.cli.finetune", "What is wrong with labelled data, before training on it.", BUILD),
    "quantize": ("everybert.cli.quantize", "Store a model at a byte a parameter.", BUILD),
    "push": ("everybert.cli.push", "Send a model's folder to the Hugging Face hub.", BUILD),
    "evaluate": ("everybert.cli.finetune", "Score a fine-tuned model on labelled data.", MEASURE),
    "bench": ("everybert.cli.bench", "How fast a model is on this machine.", MEASURE),
    "glue": ("everybert.cli.benchmarks", "Fine-tune and score on the GLUE tasks of a folder.", MEASURE),
    "squad": ("everybert.cli.benchmarks", "SQuAD's official scores, of a model or of predictions.", MEASURE),
    "blimp": ("everybert.cli.benchmarks", "Which of two sentences a model finds more likely.", MEASURE),
}
"""Name → the module whose `app` has the command (or is the group of that name), its line of help, its panel."""


class Commands(TyperGroup):
    """Lists commands without importing them, and turns a user's errors into one line and exit code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What help shows of a command."""
        if cmd_name not in COMMANDS:
            return None
        _, line, panel = COMMANDS[cmd_name]
        return TyperCommand(cmd_name, help=line, rich_help_panel=panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself, imported now."""
        name = args[0]
        if name not in COMMANDS:
            close = get_close_matches(name, COMMANDS, n=2)
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {' or '.join(close)}?" if close else ""))
        around = typer.Typer(add_completion=False)
        around.add_typer(import_module(COMMANDS[name][0]).app, name=name)
        group: Any = typer.main.get_command(around).commands[name]  # type: ignore[attr-defined]
        return name, group.commands.get(name, group), args[1:]

    def invoke(self, ctx: Any) -> Any:
        """Run; errors that the user can fix are one line, an interruption is quiet."""
        warnings.showwarning = _note
        try:
            return super().invoke(ctx)
        except EverybertError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)


def _note(message: Any, *_: Any, **__: Any) -> None:
    """A warning as one line."""
    print(f"note: {message}", file=sys.stderr)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def _version(asked: bool) -> None:
    if asked:
        print(f"everybert {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The whole BERT family: use a model, look inside it, make one from text."""


def run() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):  # text that the terminal cannot show is escaped, never a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="everybert")
