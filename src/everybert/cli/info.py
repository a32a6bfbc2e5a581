"""`everybert info`: a model's size, part by part; the family side by side."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from everybert.cli.common import examples, print_json, print_table
from everybert.errors import EverybertError

app = typer.Typer()


@app.command(
    epilog=examples("everybert info bert-base-uncased", "everybert info ./my-model --json", "everybert info --compare")
)
def info(
    model: Annotated[str | None, typer.Argument(help="A preset's name, a folder, or a hub id (org/name).")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="The flavours side by side.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """A model's layers, heads and parameters by part, and what each task head would add. No weights are loaded."""
    from everybert.inference import describe
    from everybert.model.config import PRESETS
    from everybert.store.hub import resolve

    if compare == (model is not None):
        raise EverybertError("give a model, or --compare for the family side by side")
    if compare:
        rows = describe.compare()
        print_json(rows) if as_json else _show_comparison(rows)
        return
    assert model is not None
    if model in PRESETS:
        about = describe.describe_preset(model, PRESETS[model])
    else:
        about = describe.describe_folder(resolve(model))
    print_json(about) if as_json else _show(about)


def _show(about: dict[str, Any]) -> None:
    print(f"{about['name']} ({about['family']})")
    head_size = about["hidden"] // about["heads_per_layer"]
    print(
        f"{about['layers']} layers, hidden {about['hidden']}, {about['heads_per_layer']} heads of {head_size}, "
        f"feed-forward {about['feed_forward']}, {about['positions']} positions, vocabulary {about['vocabulary']:,}"
    )
    for key in ("objective", "weights", "tokenizer", "embedding", "adapters"):
        if key in about:
            value = about[key]
            print(f"{key}: {value if isinstance(value, str) else ', '.join(f'{k} {v}' for k, v in value.items())}")
    parts = [[part, f"{count:,}"] for part, count in about["parameters"].items()]
    print_table([["", "parameters"], *parts, ["total", f"{about['total']:,}"]], right=(1,))
    print("\nA head would add (2 labels where it has labels):")
    print_table([[head, f"{count:,}"] for head, count in about["heads_would_add"].items()], right=(1,))


def _show_comparison(rows: list[dict[str, Any]]) -> None:
    keys = ["name", "total", "layers", "hidden", "heads_per_layer", "positions", "objective"]
    titles = ["model", "parameters", "layers", "hidden", "heads", "positions", "objective"]
    cells = [[f"{row[key]:,}" if key == "total" else str(row[key]) for key in keys] for row in rows]
    print_table([titles, *cells], right=(1, 2, 3, 4, 5))
