"""The `everybert` command. The module of a command is imported when the command is called, so that help is fast."""

from __future__ import annotations

import io
import sys
import warnings
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer

from everybert import __version__
from everybert.cli.options import Command, Group
from everybert.errors import EverybertError

USE, LOOK, BUILD, MEASURE = "Use a model", "Look inside a model", "Make a model", "Measure a model"
COMMANDS = {
    "quickstart": ("folders", "Make a small model from bundled text: all steps, in two minutes.", USE),
    "fill": ("use", "Predict the words behind [MASK].", USE),
    "embed": ("use", "Compute one vector per text.", USE),
    "tokens": ("use", "Print the tokens of a text and their vectors.", USE),
    "next": ("use", "Probability that one sentence follows another.", USE),
    "classify": ("use", "Predict labels of texts or pairs, or of a file.", USE),
    "regress": ("use", "Predict a number for texts or pairs.", USE),
    "tag": ("use", "Find names, places, parts of speech.", USE),
    "answer": ("use", "Answer questions from a text.", USE),
    "choose": ("use", "Choose the ending that fits best.", USE),
    "serve": ("folders", "Serve models over HTTP.", USE),
    "info": ("folders", "Parameters of a model by part; the BERT family side by side.", USE),
    "export": ("folders", "Export a model to ONNX, or to a transformers folder.", USE),
    "explain": ("inside", "Every step of the forward pass, with its numbers.", LOOK),
    "attention": ("inside", "Write a page with all attention weights of a text.", LOOK),
    "neighbours": ("inside", "Compare one word in several texts, layer by layer.", LOOK),
    "probe": ("inside", "Probe heads for syntax, and layers for a task.", LOOK),
    "tokenizer": ("pretrain", "Train a tokenizer.", BUILD),
    "corpus": ("pretrain", "Build a pre-training corpus from text, and describe one.", BUILD),
    "plan": ("pretrain", "Estimate memory, time, network and cost of a recipe.", BUILD),
    "pretrain": ("pretrain", "Pre-train a model with a recipe; run again to resume.", BUILD),
    "distil": ("pretrain", "Train a small model to imitate a larger one.", BUILD),
    "extend": ("pretrain", "Add words to the vocabulary of a model.", BUILD),
    "finetune": ("finetune", "Fine-tune a model on labelled data.", BUILD),
    "doctor": ("finetune", "Check labelled data before training.", BUILD),
    "quantize": ("folders", "Store a model in int8.", BUILD),
    "push": ("folders", "Upload a model folder to the Hugging Face hub.", BUILD),
    "evaluate": ("finetune", "Score a fine-tuned model on labelled data.", MEASURE),
    "bench": ("finetune", "Measure the speed of a model on this machine.", MEASURE),
    "glue": ("finetune", "Fine-tune and score on the GLUE tasks in a folder.", MEASURE),
    "squad": ("finetune", "SQuAD's official scores, of a model or of predictions.", MEASURE),
    "blimp": ("finetune", "How often a model prefers the grammatical sentence of a pair.", MEASURE),
}
"""Command → the module of everybert.cli that has it, its line in the help, its heading."""


class Commands(Group):
    """Lists commands without importing them. Errors that users can fix are one line, with exit code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What the help shows of a command."""
        if cmd_name not in COMMANDS:
            return None
        _, line, panel = COMMANDS[cmd_name]
        return Command(cmd_name, help=line, rich_help_panel=panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself, imported now."""
        name = args[0]
        if name not in COMMANDS:
            close = get_close_matches(name, COMMANDS, n=2)
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {' or '.join(close)}?" if close else ""))
        group: Any = typer.main.get_command(import_module(f"everybert.cli.{COMMANDS[name][0]}").app)
        return name, group.commands[name], args[1:]

    def invoke(self, ctx: Any) -> Any:
        """Run a command and print its errors."""
        warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)
        try:
            return super().invoke(ctx)
        except EverybertError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
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
    for stream in (sys.stdout, sys.stderr):  # characters that the terminal cannot show are escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="everybert")
