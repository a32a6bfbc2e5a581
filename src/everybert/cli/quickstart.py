"""`everybert quickstart`: the whole story in miniature, on bundled text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from everybert.cli.common import Json, examples

app = typer.Typer()


@app.command(epilog=examples("everybert quickstart", "everybert quickstart --out story"))
def quickstart(
    out: Annotated[Path, typer.Option(help="Where everything it makes goes; run again to go on.")] = Path("quickstart"),
    as_json: Json = False,
) -> None:
    """Train a tokenizer, pre-train a tiny BERT, fill blanks, fine-tune, score, classify: about a minute and a half."""
    # Threads that spin while they wait starve each other where cores are shared; to sleep costs nothing here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import json
    from dataclasses import asdict

    from rich.console import Console

    from everybert.quickstart import Stopped
    from everybert.quickstart import quickstart as run

    try:
        story = run(out, console=Console(stderr=as_json))
    except (Stopped, KeyboardInterrupt):
        typer.echo(f"stopped: run the same command again to go on from {out}", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(asdict(story)))
