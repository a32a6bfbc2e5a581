"""What `embed` and `classify` share over parquet files: options, the progress bar, what is said at the end."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from everybert.cli.common import print_json
from everybert.errors import EverybertError

EngineName = Annotated[
    Literal["local", "ray"], typer.Option(help="Where parquet files are worked on: here, or on a Ray cluster.")
]
Address = Annotated[str | None, typer.Option(help="The Ray cluster (auto finds it); else one of its own.")]
Workers = Annotated[int | None, typer.Option(help="How many work on parquet files at a time; as many as there can.")]
PartRows = Annotated[int, typer.Option(min=1, help="Rows in each parquet file of the output.")]


def parquet_files(given: list[str] | None, file: Path | None) -> list[Path]:
    """The parquet files that were named; none where texts or other files were."""
    files = [Path(name) for name in given or []] + ([file] if file is not None else [])
    return files if all(path.suffix.lower() == ".parquet" for path in files) else []


def only_parquet(engine: str, address: str | None, workers: int | None) -> None:
    """Refuse what other inputs have no use for."""
    if engine != "local" or address is not None or workers is not None:
        raise EverybertError(
            "--engine, --address and --workers are for parquet files: give FILE.parquet … and a folder as --out"
        )


def run_parts(task: str, model: str, files: list[Path], out: Path | None, as_json: bool, **how: Any) -> None:
    """Work through parquet files under a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from everybert.inference.parts import predict_parts

    if out is None:
        raise EverybertError(f"{files[0]} is a file: give a folder for the rows with their results, as --out rows-done")
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        number = bar.add_task(task, total=None)
        done = predict_parts(
            task,
            model,
            files,
            out,
            progress=lambda rows, total: bar.update(number, completed=rows, total=total),
            **how,
        )
    for line in done.bad:
        typer.echo(f"left out: {line}", err=True)
    if as_json:
        print_json({"out": str(out), **asdict(done)})
    elif done.stopped:
        typer.echo(f"stopped after {done.rows:,} rows: run the same command again to go on", err=True)
    elif done.before and done.rows == done.before:
        print(f"{out}: all {done.rows:,} rows were there already")
    else:
        print(f"{out}: {done.rows:,} rows" + (f", {done.before:,} of them from before" if done.before else ""))
    if done.stopped:
        raise typer.Exit(130)
