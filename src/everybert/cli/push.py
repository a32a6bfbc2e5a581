"""`everybert push`: a model's folder to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everybert.cli.common import examples, print_json, print_table

app = typer.Typer()


@app.command(
    epilog=examples("everybert push reviews my-org/reviews --dry-run", "everybert push reviews me/reviews --private")
)
def push(
    folder: Annotated[Path, typer.Argument(help="A model's folder, as everybert wrote it, with a README.md.")],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Where it goes; made where there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Send a model to the Hugging Face hub in one commit. The token is that of `hf auth login`, or HF_TOKEN.

    Only files on the folder's list and its card are sent; they are shown first.
    """
    from everybert.store import hub

    upload = hub.prepare_push(folder)
    if not as_json:
        print_table([[name, f"{size:,}"] for name, size in upload.files.items()], right=(1,))
        for name in upload.left_out:
            print(f"left out: {name} (everybert did not write it)")
        print(f"{len(upload.files)} files, {upload.size:,} bytes", flush=True)
    address = None if dry_run else hub.push(upload, repository, private)
    if as_json:
        about = {"repository": repository, "files": upload.files, "left_out": list(upload.left_out)}
        print_json({**about, "pushed": not dry_run, "address": address})
    else:
        print("nothing was sent (--dry-run)" if dry_run else f"pushed to {address}")
