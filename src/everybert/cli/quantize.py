"""`everybert quantize`: a model at a byte a parameter."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everybert.cli.common import examples, print_json, print_table

if TYPE_CHECKING:
    from everybert.inference.quantise import Agreement

app = typer.Typer()

TEXTS = 32


@app.command(
    epilog=examples(
        "everybert quantize ./my-model ./my-model-int8",
        'everybert embed "A dog barks." --model ./my-model-int8 --dtype int8',
    )
)
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a bundled model, or a hub id (org/name).")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Store a model as int8, a scale for each row: a quarter of fp32's size. Reports how far its answers move.

    everybert loads the folder in any dtype; `--dtype int8` computes in int8 too, on the CPU. For transformers,
    `everybert export hf` writes it back in fp32.
    """
    from rich.console import Console

    from everybert.data import documents
    from everybert.inference.quantise import quantise
    from everybert.text.sentences import split_sentences

    sentences = [split_sentences(text)[0] for text in documents(TEXTS)]
    console = Console(stderr=True)
    with console.status(f"{model} …") as status:
        found = quantise(model, out, sentences, lambda step: status.update(f"{step} {model} …"))
    if as_json:
        print_json(asdict(found))
        return
    size = found.bytes_after / found.bytes_before
    print(f"{found.out}: {found.parameters:,} parameters")
    print(f"{found.bytes_before / 1e6:.1f} MB → {found.bytes_after / 1e6:.1f} MB of weights ({size:.0%})")
    print(f"beside the original, on {TEXTS} sentences:")
    rows = [_row("int8 weights, computed in fp32", found.stored)]
    rows += [_row("int8 weights, computed in int8", found.computed)] if found.computed is not None else []
    print_table([["", "cosine, mean", "least", "same word for a blank"], *rows], right=(1, 2, 3))


def _row(name: str, found: Agreement) -> list[str]:
    words = "–" if found.same_words is None else f"{found.same_words:.0%}"
    return [name, f"{found.cosine_mean:.4f}", f"{found.cosine_min:.4f}", words]
