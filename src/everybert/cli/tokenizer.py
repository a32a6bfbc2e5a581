"""`everybert tokenizer`: train a vocabulary on text, and see how well it fits."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(help="Train a tokenizer.", no_args_is_help=True)

_EXAMPLES = """Examples:

  everybert tokenizer train texts.txt --kind wordpiece --size 30000 --out tokenizer

  everybert tokenizer train corpus/ more.jsonl.gz --kind bpe --size 50000 --cased --out tokenizer --json
"""


@app.callback()
def main() -> None:
    """Train a tokenizer."""


@app.command(epilog=_EXAMPLES)
def train(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files or folders: txt, jsonl, csv, tsv, parquet, also .gz .xz .zst .bz2; - is stdin."),
    ],
    out: Annotated[Path, typer.Option(help="Tokenizer folder to make.")],
    kind: Annotated[
        Literal["wordpiece", "bpe", "unigram"],
        typer.Option(help="WordPiece (BERT), byte-level BPE (RoBERTa) or Unigram (ALBERT)."),
    ] = "wordpiece",
    size: Annotated[int, typer.Option(min=8, help="Tokens in the vocabulary, special ones included.")] = 30_000,
    cased: Annotated[
        bool, typer.Option("--cased/--uncased", help="Keep capitals and accents, or fold them away.")
    ] = False,
    min_frequency: Annotated[int, typer.Option(min=1, help="Leave out pieces seen less often.")] = 2,
    max_length: Annotated[int, typer.Option(min=1, help="Length other libraries truncate to.")] = 512,
    column: Annotated[str | None, typer.Option(help="The records' text column; guessed when not given.")] = None,
    errors: Annotated[
        Literal["strict", "replace"], typer.Option(help="Bytes that are not UTF-8: stop, or replace them.")
    ] = "strict",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Train on text, in one pass and the same every time; about one line in a hundred is held out to measure on."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from everybert.files import atomic_folder
    from everybert.text.readers import ReadReport, expand, read_documents
    from everybert.text.train_tokenizer import train_tokenizer

    paths = expand(files)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[read]}")
    seen = ReadReport()
    with (
        atomic_folder(out) as folder,  # opened first: a folder that may not be replaced is better refused now
        Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar,
    ):
        task = bar.add_task("reading", total=_plain_size(paths), read="")

        def show(stage: str, done: int) -> None:
            bar.update(task, description=stage, read=f"{done / 1e6:,.1f}M characters")
            if stage == "counting words":
                bar.update(task, completed=done)
            else:
                bar.update(task, total=None)

        texts = read_documents(paths, column=column, errors=errors, report=seen)
        tokenizer, report = train_tokenizer(texts, kind, size, not cased, min_frequency, show)
        tokenizer.save(folder, max_length)
    if seen.replaced:
        typer.echo(f"{seen.replaced:,} bytes that are not UTF-8 were replaced", err=True)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
        return
    rounded = f" ({report.model_size:,} rows in a model)" if report.model_size != report.size else ""
    where = "held-out text" if report.held_out else "the training text, too short to hold any out"
    typer.echo(f"{out}: {report.kind}, {report.size:,} tokens{rounded}, {'cased' if cased else 'uncased'}")
    typer.echo(f"trained on {report.texts:,} texts, {report.characters:,} characters, {report.words:,} different words")
    typer.echo(
        f"on {report.measured_characters:,} characters of {where}: coverage {report.coverage:.4%}, "
        f"unknown rate {report.unknown_rate:.4%}, {report.characters_per_token:.2f} characters per token, "
        f"{report.tokens_per_word:.2f} tokens per word"
    )


def _plain_size(paths: list[Path]) -> int | None:
    """Bytes to read, where they tell how far along a reader is: in plain files, not in compressed ones."""
    compressed = {".gz", ".xz", ".zst", ".bz2", ".parquet"}
    if any(path.suffix in compressed or not path.is_file() for path in paths):
        return None
    return sum(path.stat().st_size for path in paths)
