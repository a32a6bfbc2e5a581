"""`everybert corpus`: text to token shards, and what a corpus holds."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from everybert.cli.common import Device, ModelName, examples, load
from everybert.errors import EverybertError

app = typer.Typer(help="Build a pre-training corpus from text, and look at one.", no_args_is_help=True)


@app.command()
def build(
    tokenizer: Annotated[Path, typer.Option(help="Tokenizer folder or file, or a bundled model for its own.")],
    out: Annotated[Path, typer.Option(help="Corpus folder to make.")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Files or folders: txt, jsonl, json, csv, tsv, parquet; - is stdin."),
    ] = None,
    language: Annotated[
        list[str] | None, typer.Option(help="LANGUAGE=FILE, repeated: files or folders of one language.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; all cores when not given.")] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Where to tokenize: this machine's cores, or a Ray cluster.")
    ] = "local",
    address: Annotated[str | None, typer.Option(help="The Ray cluster (auto finds it); else one of its own.")] = None,
    heldout: Annotated[float, typer.Option(help="Share of documents kept from training.")] = 0.005,
    min_tokens: Annotated[int, typer.Option(help="Leave out documents with fewer tokens.")] = 1,
    column: Annotated[str | None, typer.Option(help="The records' text column; guessed when not given.")] = None,
    errors: Annotated[
        Literal["strict", "replace"], typer.Option(help="Bytes that are not UTF-8: stop, or replace and count.")
    ] = "strict",
    per_line: Annotated[bool, typer.Option("--per-line", help="Every line of a text file is a document.")] = False,
    wrapped: Annotated[bool, typer.Option("--wrapped", help="Lines are wrapped: a line end ends no sentence.")] = False,
    pmi: Annotated[bool, typer.Option("--pmi", help="Also mine collocations for PMI masking.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, replacing what is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Make token shards of documents. Run the same command again to continue after an interruption."""
    from everybert.corpus.build import build_corpus
    from everybert.store.hub import bundled

    try:
        summary = build_corpus(
            files,
            tokenizer if tokenizer.exists() else bundled(str(tokenizer)) or tokenizer,
            out,
            languages=_languages(language or []),
            workers=workers,
            heldout=heldout,
            min_tokens=min_tokens,
            column=column,
            errors=errors,
            per_line=per_line,
            wrapped=wrapped,
            pmi=pmi,
            fresh=fresh,
            progress=True,
            engine=engine,
            address=address,
        )
    except KeyboardInterrupt:
        typer.echo("stopped: finished shards are kept, run the same command again to continue", err=True)
        raise typer.Exit(130) from None
    _show(summary, as_json)


@app.command(
    epilog=examples(
        "everybert corpus cloze books/ --out cloze.jsonl --count 50000",
        "everybert finetune answer --model MODEL --train cloze.jsonl --out answerer",
    )
)
def cloze(
    files: Annotated[list[str], typer.Argument(help="Files or folders of text; documents as in build.")],
    out: Annotated[Path, typer.Option(help="The file of questions to write (JSON lines).")],
    count: Annotated[int, typer.Option(help="Stop at so many questions.", min=1)] = 100_000,
    seed: Annotated[int, typer.Option(help="Chooses what is asked.")] = 0,
) -> None:
    """Make questions of text: a name or number is taken out of a sentence and asked of those around it."""
    raise EverybertError(f"cloze questions are a recipe now: python recipes/cloze.py {' '.join(files)} --out {out}")


@app.command()
def info(
    corpus: Annotated[Path, typer.Argument(help="Corpus folder.")],
    check: Annotated[bool, typer.Option("--check", help="Compare every file with its hash.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Print what a corpus holds."""
    from everybert.corpus.build import summarise, verify

    if check:
        verify(corpus)
    _show(summarise(corpus), as_json)


@app.command(
    epilog=examples(
        "everybert corpus score corpus --model run/model",
        "everybert corpus score corpus --model run/model --examples pairs --length 128 --json",
    )
)
def score(
    corpus: Annotated[Path, typer.Argument(help="Corpus folder, made with the model's own tokenizer.")],
    model: ModelName,
    kind: Annotated[
        Literal["full", "document", "pairs", "order"],
        typer.Option("--examples", help="Running text, running text of one document, or pairs as BERT's or ALBERT's."),
    ] = "full",
    length: Annotated[int | None, typer.Option(help="Tokens an example; at most 512 unless given.", min=8)] = None,
    tokens: Annotated[int, typer.Option(help="Read so many tokens at most.", min=1)] = 1_000_000,
    split: Annotated[Literal["heldout", "train"], typer.Option(help="Which documents.")] = "heldout",
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Score a pre-trained model on documents kept from training: 15 % of the tokens are masked, always the same."""
    from everybert.training.evaluate import score_corpus

    bar = partial(track, description="masking", console=Console(stderr=True), transient=True)
    found = score_corpus(load(model, device), corpus, kind, length, tokens, split, bar)
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table("", "", title=f"{split} text, {kind}, at most {found['length']} tokens", show_header=False)
    table.add_row("masked tokens right", f"{found['accuracy']:.1%} of {found['masked']:,}")
    table.add_row("loss, perplexity", f"{found['heldout_loss']:.3f}, {found['perplexity']:.2f}")
    if "pair_accuracy" in found:
        table.add_row("pairs right", f"{found['pair_accuracy']:.1%}")
    Console().print(table)


def _languages(named: list[str]) -> dict[str, list[Path]]:
    languages: dict[str, list[Path]] = {}
    for text in named:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise EverybertError(f"--language {text}: write it as LANGUAGE=FILE, for example de=texts.txt")
        languages.setdefault(name, []).append(Path(file))
    return languages


def _show(summary, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary.to_dict(), ensure_ascii=False))
        return
    console = Console()
    counts = Table("", *summary.splits, "all", title=summary.path)
    for name in ("documents", "sentences", "tokens", "unknown", "short"):
        row = [*(split[name] for split in summary.splits.values()), summary.counts[name]]
        counts.add_row(name, *(f"{value:,}" for value in row))
    console.print(counts)
    left_out = ("duplicates", "replaced", "cut")
    console.print(f"unknown rate {summary.unknown_rate:.4%}; " + _listing({k: summary.counts[k] for k in left_out}))
    if summary.languages:
        console.print("documents by language: " + _listing(summary.languages))
    if summary.collocations is not None:
        console.print(f"{summary.collocations:,} collocations")
    if summary.kept_shards:
        console.print(f"{summary.seconds:.1f} s, {summary.kept_shards} shards kept from before")
    elif summary.seconds:
        console.print(f"{summary.seconds:.1f} s, {summary.counts['tokens'] / summary.seconds:,.0f} tokens/s")
    lengths = Table("tokens", "sentences", "", "documents", title="lengths")
    most = max(summary.sentence_lengths.values())
    for (bin_, sentences), documents in zip(summary.sentence_lengths.items(), summary.document_lengths.values()):
        lengths.add_row(bin_, f"{sentences:,}", "█" * round(30 * sentences / most), f"{documents:,}")
    console.print(lengths)


def _listing(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
