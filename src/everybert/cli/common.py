"""What the commands share: options, texts in, results out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.inference.model import Model

ModelName = Annotated[str, typer.Option("--model", "-m", help="A folder, a bundled model, or a hub id (org/name).")]
Texts = Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="One or more texts, each in quotes.")]
File = Annotated[Path | None, typer.Option("--file", "-f", help="Read one text a line from a file; - is stdin.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON: a list, one entry a text.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; a GPU is taken where there is one.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16, float16, or int8 (faster on a CPU); by default the model's own.")
]

DEFAULT = "everybert-small"


def examples(*lines: str) -> str:
    """A command's examples, for the end of its help."""
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)


def load(name: str, device: str | None = None, dtype: str | None = None) -> Model:
    """The model of that name, loaded."""
    from everybert.inference.model import load as load_model

    return load_model(name, device=device, dtype=dtype)


def read_texts(texts: list[str] | None, file: Path | None) -> list[str]:
    """The texts given on the command line, or the lines of a file."""
    if texts and file is not None:
        raise EverybertError("give texts or --file, not both")
    if texts:
        return texts
    if file is None:
        raise EverybertError("there is no text; give one in quotes, or --file F (- for standard input)")
    from everybert.text.readers import lines

    found = [line for _, line in lines(file)]
    if not found:
        raise EverybertError(f"{file} has no lines; give a file with one text a line")
    return found


def print_table(rows: list[list[str]], right: tuple[int, ...] = ()) -> None:
    """Rows in aligned columns; those numbered in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [f"{cell:>{w}}" if i in right else f"{cell:{w}}" for i, (cell, w) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())


def print_json(value: Any) -> None:
    """One JSON document on one line."""
    print(json.dumps(value, ensure_ascii=False))
