"""`everybert plan`: what a pre-training run would need."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everybert.cli.common import examples, print_json
from everybert.cli.pretrain import Budget, Set, Steps, overrides
from everybert.errors import EverybertError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer()
SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@app.command(
    epilog=examples(
        "everybert plan bert-base --words 3.3B",
        "everybert plan xlm-r --gpus 64 --tokens 300B --set batch.pack=32768",
        "everybert plan my.toml --gpu a100 --gpus 8 --price 1.8 --json",
    )
)
def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or its .toml file.")],
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs, eight to a machine.")] = 1,
    gpu: Annotated[str, typer.Option(help="Which: h200, h100, a100, l40s, l4 or 4090.")] = "h200",
    tokens: Annotated[str | None, typer.Option(help="Size of the corpus in tokens: 300B, 40M …")] = None,
    words: Annotated[str | None, typer.Option(help="Size of the corpus in words, at 1.3 tokens each.")] = None,
    sharded: Annotated[bool, typer.Option("--sharded", help="Cut the model over the GPUs: no copy on each.")] = False,
    price: Annotated[float, typer.Option(min=0, help="Dollars for a GPU and hour: an assumption.")] = 3.5,
    steps: Steps = None,
    budget: Budget = None,
    set_: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Memory by part, step time, network, storage, days and cost of a recipe. Nothing is run.

    Times follow what was measured on one H200 (docs/LOG.md); memory and network are counted, not measured.
    """
    from everybert.training.plan import TOKENS_PER_WORD, Machine
    from everybert.training.plan import plan as make
    from everybert.training.recipe import Recipe

    if tokens and words:
        raise EverybertError("give --tokens or --words, not both")
    size = read_size(tokens) if tokens else read_size(words) * TOKENS_PER_WORD if words else None
    found = make(Recipe.load(recipe, **overrides(set_, steps, budget)), Machine(gpu, gpus, sharded, price), size)
    print_json({"recipe": recipe, **found}) if as_json else show(recipe, found)


def read_size(text: str) -> float:
    """A number such as 300B, 3.3b, 40M or 1e9."""
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kmbgt]?)\s*", text.lower().replace(",", "").replace("_", ""))
    try:
        value = float(match[1]) * SIZES[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not value:
        raise EverybertError(f"{text!r} is not a size; write it as 300B, 40M or 3300000000")
    return value


def show(name: str, found: dict[str, Any]) -> None:
    """The plan as tables."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 120)  # a line too long is better than figures cut off
    cards = "" if found["gpus"] == 1 else "s"
    digits = 0 if found["gpu_hours"] >= 10 else 2
    hours = f"{found['gpu_hours']:,.{digits}f}"
    how = ", sharded" if found["sharded"] else ""
    console.print(
        f"{name} on {found['gpus']} {found['gpu'].upper()}{cards}{how}: {found['parameters'] / 1e6:.1f}M parameters, "
        f"{human(found['tokens'])} tokens seen"
    )
    console.print(
        f"{span(found['days'])}, {hours} GPU hours, "
        f"${found['dollars']:,.{digits}f} at ${found['price']:g} a GPU and hour (assumed)"
    )
    _phases(console, found)
    _memory(console, found)
    _network(console, found)
    _storage(console, found["storage"])
    for note in found["notes"]:
        console.print(f"note: {note}")


def _phases(console: Console, found: dict[str, Any]) -> None:
    titles = [
        "length",
        "steps",
        "tokens a step",
        "packs (a GPU)",
        "compute ms",
        "network ms",
        "tokens/s",
        "MFU",
        "time",
    ]
    rows = [
        [
            f"{p['length']}",
            f"{p['steps']:,}",
            f"{p['tokens']:,}",
            f"{p['packs']} ({p['a_gpu']})",
            f"{p['compute'] * 1e3:.1f}",
            f"{p['network'] * 1e3:.1f}",
            human(p["speed"]),
            f"{p['mfu']:.2f}",
            span(p["days"]),
        ]
        for p in found["phases"]
    ]
    _table(console, "Steps", titles, rows)


def _memory(console: Console, found: dict[str, Any]) -> None:
    kinds = list(found["memory"]) if found["gpus"] > 1 else ["data parallel"]
    titles = ["", *(f"{kind if found['gpus'] > 1 else 'one GPU'}, GB" for kind in kinds)]
    rows = [[part, *(f"{found['memory'][k][part] / 1e9:.2f}" for k in kinds)] for part in found["memory"][kinds[0]]]
    _table(console, f"Memory of a GPU, of {found['memory_of_gpu'] / 1e9:.0f} GB (counted)", titles, rows)


def _network(console: Console, found: dict[str, Any]) -> None:
    titles = ["GPUs", "slowest link", "copies: GB sent", "ms", "sharded: GB sent", "ms"]
    rows = []
    for row in found["network"]:
        cells = [f"{row['gpus']}", f"{row['link'] / 1e9:.0f} GB/s"]
        for kind in ("data parallel", "sharded"):
            cells += [f"{row[kind]['bytes'] / 1e9:.2f}", f"{row[kind]['seconds'] * 1e3:.1f}"]
        rows.append(cells)
    _table(console, "Sent by each GPU in a step (counted)", titles, rows)


def _storage(console: Console, storage: dict[str, float]) -> None:
    rows = []
    if "tokens" in storage:
        rows += [
            ["corpus", f"{human(storage['tokens'])} tokens, seen {storage['epochs']:.1f} times"],
            ["text, as files", size_of(storage["text"])],
            ["shards of token ids", size_of(storage["shards"])],
            ["building them", f"{storage['build_core_hours']:,.1f} core hours"],
        ]
    rows += [
        ["read in training", f"{size_of(storage['read'])}/s"],
        ["a checkpoint; all that are kept", f"{size_of(storage['checkpoint'])}; {size_of(storage['checkpoints'])}"],
        ["the model", size_of(storage["model"])],
    ]
    _table(console, "Storage", ["", ""], rows, right=False)


def _table(console: Console, title: str, titles: list[str], rows: list[list[str]], right: bool = True) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=any(titles), pad_edge=False)
    for i, name in enumerate(titles):
        table.add_column(name, justify="right" if right and (i or name) else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def human(number: float) -> str:
    """A count in three digits: 860k, 1.5M, 128B."""
    for name, unit in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.0f}"


def size_of(amount: float) -> str:
    """Bytes in three digits."""
    for name, unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= 0.9995 * unit:
            return f"{amount / unit:.3g} {name}"
    return f"{amount:.0f} B"


def span(days: float) -> str:
    """A length of time in the unit that reads best."""
    if days >= 3:
        return f"{days:,.1f} days"
    return f"{days * 24:.1f} hours" if days * 24 >= 1.5 else f"{days * 1440:.0f} minutes"
