"""`everybert bench`: how fast a model is here."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everybert.cli.common import DEFAULT, Device, examples, print_json, print_table
from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.evaluation.bench import Bench

app = typer.Typer()


@app.command(
    epilog=examples(
        "everybert bench ./my-model",
        "everybert bench ./my-model --dtype fp32,int8 --plot speed.png",
        "everybert bench ./my-model --against transformers --lengths 16,128 --seconds 60 --json",
    )
)
def bench(
    model: Annotated[str, typer.Argument(help="A folder, a bundled model, or a hub id (org/name).")] = DEFAULT,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16, int8, with commas: fp32,int8. fp32, or bf16 on a GPU.")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens of a text, with commas; 8 to 512 by doubling.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure in all, loading aside.")] = 20.0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; as many as torch takes.")] = None,
    against: Annotated[str | None, typer.Option(help="transformers: measure it too, turn by turn.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this PNG.")] = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Throughput and latency by length, load time and memory of a model on this machine. Ctrl-C ends it early."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if plot is not None and find_spec("matplotlib") is None:
        raise EverybertError("--plot needs matplotlib: pip install 'everybert[viz]'")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise EverybertError(f"--plot: there is no folder {plot.parent}")
    dtypes = [part.strip() for part in dtype.split(",")] if dtype else None
    sizes = _whole(lengths)

    from everybert.evaluation.bench import bench as run
    from everybert.evaluation.bench import draw

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task("measuring", total=1.0)
        found = run(
            model,
            dtypes=dtypes,
            lengths=sizes,
            device=device,
            threads=threads,
            against=against,
            seconds=seconds,
            progress=lambda share: bar.update(shown, completed=share),
        )
    print_json(asdict(found)) if as_json else _show(found)
    if plot is not None:
        draw(found, plot)
        if not as_json:
            print(f"{plot} written")
    if found.stopped:
        raise typer.Exit(130)


def _whole(lengths: str | None) -> list[int] | None:
    try:
        return [int(part) for part in lengths.split(",")] if lengths else None
    except ValueError:
        raise EverybertError(f"--lengths takes whole numbers with commas between, not {lengths!r}") from None


def _show(found: Bench) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from everybert.evaluation.bench import place

    several = len(found.ways) > 1
    cuda = any(cell["cuda_mb"] for cell in found.cells)
    print(f"{found.model} on {place(found)}, torch {found.torch}")
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("tokens", *(["way"] if several else []), "tokens/s", "texts/s", "p50 ms", "p90 ms", "p99 ms"):
        table.add_column(title, justify="left" if title == "way" else "right", no_wrap=True)
    if several:
        table.add_column("×", justify="right", no_wrap=True)
    if cuda:
        table.add_column("CUDA MB", justify="right")
    base = {c["length"]: c["tokens_per_s"] for c in found.cells if c["way"] == found.ways[-1]["name"]}
    before = None
    for cell in found.cells:
        if several and before is not None and cell["length"] != before:
            table.add_section()
        row = [str(cell["length"]) if cell["length"] != before else ""]
        row += [cell["way"]] if several else []
        row += [_number(cell["tokens_per_s"], 0), _number(cell["texts_per_s"], 1)]
        row += [_number(cell[f"p{p}_ms"], 2) for p in (50, 90, 99)]
        if several:
            pair = cell["tokens_per_s"], base.get(cell["length"])
            row.append(f"{pair[0] / pair[1]:.2f}" if pair[0] and pair[1] else "–")
        row += [_number(cell["cuda_mb"], 0)] if cuda else []
        table.add_row(*row)
        before = cell["length"]
    Console(highlight=False).print(table)
    if several:
        print(f"×: throughput, as a multiple of {found.ways[-1]['name']}\n")
    rows = [[w["name"], f"{w['load_seconds']:.2f} s", f"{w['weights_mb']:,.1f} MB"] for w in found.ways]
    print_table([["", "load", "weights"], *rows], right=(1, 2))
    if found.peak_rss_mb is not None:
        print(f"peak memory of the process: {found.peak_rss_mb:,.0f} MB" + (" (all of the above)" if several else ""))
    runs = [cell["singles"] for cell in found.cells]
    print(f"measured for {found.seconds:.0f} s; single texts a length: {min(runs):,} to {max(runs):,}")
    if found.stopped:
        print("interrupted: this is what there was")
    for note in found.notes:
        print(note)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
