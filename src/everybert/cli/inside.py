"""`everybert explain`, `attention`, `neighbours`, `probe heads`, `probe layers`: look inside a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everybert.cli.common import DEFAULT, Device, Json, ModelName, examples, load, print_json
from everybert.errors import EverybertError

if TYPE_CHECKING:
    import numpy as np

    from everybert.inside.probes import HeadProbe, Relation
    from everybert.inside.steps import Part
    from everybert.inside.trace import Trace

app = typer.Typer()
probe = typer.Typer(help="What heads know of syntax, and where in the stack a task's information lives.")
app.add_typer(probe, name="probe")

Text = Annotated[str, typer.Argument(help="A text, in quotes.")]
Pair = Annotated[str | None, typer.Option(help="A second text.")]
WIDE = 10
"""Columns of a matrix that a terminal shows."""
ROWS = 12
"""Tokens whose numbers are shown."""


@app.command(
    epilog=examples(
        'everybert explain "The dog [MASK] in the garden."',
        'everybert explain "I love my pet Python" --layer 2 --head 4 --json',
    )
)
def explain(
    text: Text,
    pair: Pair = None,
    layer: Annotated[int, typer.Option(help="The layer shown in detail.", min=0)] = 0,
    head: Annotated[int, typer.Option(help="The head shown in detail.", min=0)] = 0,
    model: ModelName = DEFAULT,
    as_json: Json = False,
    device: Device = None,
) -> None:
    """Every step of the forward pass, from text to prediction: the equation, in words, and the numbers."""
    from everybert.inside.steps import needed, part_value, story

    loaded = load(model, device)
    trace = loaded.trace(text, pair, keep=needed(layer))
    steps = story(trace, layer, head)
    if as_json:
        found: list[dict[str, Any]] = []
        for step in steps:
            parts = [{"name": p.name, "label": p.label, "shape": part_value(trace, p).shape} for p in step.parts]
            found.append({**asdict(step), "parts": parts})
        top = trace.vocabulary(loaded.tokenizer) if "mlm.probabilities" in trace else None
        print_json({"tokens": trace.tokens, "ids": trace.ids, "gap": trace.gap, "steps": found, "vocabulary": top})
        return
    console = _console()
    group = ""
    for number, step in enumerate(steps, 1):
        if step.group != group:
            group = step.group
            console.rule(f"[bold]{group}", align="left", style="dim")
        console.print(f"\n[bold]{number}. {step.title}[/]   [italic]{_plain(step.equation)}[/]")
        console.print(step.words, style="dim")
        for part in step.parts:
            console.print(_part(trace, part, part_value(trace, part), loaded.tokenizer))
        if not step.parts:
            console.print("   " + _plain("  ".join(f"{t} {i}" for t, i in zip(trace.tokens, trace.ids))))
    console.print(
        f"\nThis pass keeps every number; it differs from the fast path by {trace.gap:.1e} at most.", style="dim"
    )


def _part(trace: Trace, part: Part, value: np.ndarray, tokenizer: Any) -> Any:
    """An array as a table."""
    title = f"{part.label}  ({' × '.join(map(str, value.shape))})  {part.name}"
    table = _table(title)
    if part.kind == "vocabulary":
        table.add_column("at")
        table.add_column("the most probable pieces")
        for token, row in list(zip(trace.tokens, trace.vocabulary(tokenizer)))[:ROWS]:
            table.add_row(_plain(token), _plain("   ".join(f"{name} {p:.3f}" for name, p in row)))
        return table
    names = trace.tokens if len(value) == len(trace.tokens) else [trace.tokens[0]] * len(value)
    matrix = part.kind == "matrix" and len(value) <= WIDE
    shown = value.shape[1] if matrix else min(5, value.shape[1])
    table.add_column("")
    for j in range(shown):
        table.add_column(_plain(trace.tokens[j]) if matrix else str(j), justify="right")
    if not matrix:
        table.add_column("…  mean", justify="right")
        table.add_column("deviation", justify="right")
    for name, row in list(zip(names, value))[:ROWS]:
        numbers = [f"{x:.3f}" for x in row[:shown]]
        table.add_row(_plain(name), *numbers, *([] if matrix else [f"{row.mean():.3f}", f"{row.std():.3f}"]))
    if len(value) > ROWS:
        table.add_row(f"… {len(value) - ROWS} more")
    return table


@app.command(
    epilog=examples(
        'everybert attention "She said that she was right." --out attention.html',
        'everybert attention "The cat sleeps." --pair "Where is the cat?" --out pair.html --model ./my-model',
    )
)
def attention(
    text: Text,
    out: Annotated[Path, typer.Option(help="The page to write: one file that asks for nothing else.")],
    pair: Pair = None,
    model: ModelName = DEFAULT,
    device: Device = None,
) -> None:
    """Write a page with all of a text's attention: every head small, one large, as lines or as a matrix."""
    from everybert.files import atomic_file

    found = load(model, device).attention(text, pair)
    page = found.html("Attention: " + (text if len(text) <= 60 else text[:59] + "…"))
    with atomic_file(out) as draft:
        draft.write_text(page, encoding="utf-8")
    layers, heads, n, _ = found.weights.shape
    print(f"{out}: {n} tokens, {layers} layers of {heads} heads, {len(page) / 1e6:.1f} MB")


@app.command(
    epilog=examples(
        'everybert neighbours python "I love my pet Python" "I love coding in Python"',
        'everybert neighbours bank "the bank of the river" "money in the bank" --top 3 --json',
    )
)
def neighbours(
    word: Annotated[str, typer.Argument(help="The word that is compared.")],
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="Texts that hold it, each in quotes.")],
    top: Annotated[int, typer.Option(help="Words shown for each.", min=1)] = 5,
    model: ModelName = DEFAULT,
    as_json: Json = False,
    device: Device = None,
) -> None:
    """One word in several texts: its vectors layer by layer, and the words they come to lie near."""
    found = load(model, device).neighbours(word, texts, top)
    if as_json:
        print_json({**asdict(found), "similarity": found.similarity.tolist()})
        return
    table = _table()
    table.add_column("level")
    if len(found.occurrences) > 1:
        table.add_column("cosine 1–2", justify="right")
    for number, place in enumerate(found.occurrences, 1):
        text = found.texts[place.text]
        table.add_column(f"{number}. {_plain(text[max(0, place.start - 20) : place.end + 20])}")
    for level, similarity, near in zip(found.levels, found.similarity, found.nearest):
        first = [f"{similarity[0, 1]:.3f}"] if len(found.occurrences) > 1 else []
        table.add_row(level, *first, *(_plain(", ".join(n.word for n in words)) for words in near))
    _console().print(table)


@probe.command(
    epilog=examples(
        "everybert probe heads en_ewt-ud-dev.conllu --model ./my-model",
        "everybert probe heads en_ewt-ud-dev.conllu --relation obj --picture obj.png",
    )
)
def heads(
    file: Annotated[Path, typer.Argument(help="A treebank in CoNLL-U.")],
    relation: Annotated[str | None, typer.Option(help="Show this relation over layers × heads.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it to a .png, .svg or .pdf.")] = None,
    least: Annotated[int, typer.Option(help="Relations with at least so many words.", min=1)] = 50,
    sentences: Annotated[int | None, typer.Option(help="Read so many sentences; all by default.", min=1)] = None,
    model: ModelName = DEFAULT,
    as_json: Json = False,
    device: Device = None,
) -> None:
    """How often a head's strongest link joins a word and its syntactic head, by relation; against fixed offsets."""
    from itertools import islice

    from everybert.inside.probes import probe_heads
    from everybert.text.readers import read_conllu

    loaded = load(model, device)
    trees = list(islice(read_conllu(file), sentences))
    with _progress("sentences", len(trees), hidden=as_json) as tell:
        found = probe_heads(loaded.network, loaded.tokenizer, trees, tell)
    chosen = None
    if relation is not None or picture is not None:
        name = relation or "obj"
        if name not in found.relations:
            raise EverybertError(f"{file} has no relation {name!r}; it has {', '.join(found.relations)}")
        chosen = found.relations[name]
        if picture is not None:
            from everybert.inside.probes import draw_heads

            draw_heads(chosen, picture)
    if as_json:
        counts = {"sentences": found.sentences, "words": found.words, "skipped": found.skipped}
        grid = {"relation": chosen.name, "right": chosen.right.tolist()} if chosen is not None else None
        print_json({**counts, "relations": found.rows(least), "chosen": grid})
        return
    _console().print(_heads_table(found, least))
    if chosen is not None:
        _console().print(_heads_grid(chosen))
    if picture is not None:
        print(f"{picture} written")


def _heads_table(found: HeadProbe, least: int) -> Any:
    from everybert.inside.probes import SENTENCES

    late = f", {found.skipped} longer than the window left out" if found.skipped else ""
    table = _table(f"{found.sentences:,} sentences, {found.words:,} words{late}")
    for name in ("relation", "words", "best head", "looks", "right", "baseline", "BERT-base", ""):
        table.add_column(name, justify="right" if name in ("words", "right", "baseline", "BERT-base") else "left")
    for row in found.rows(least):
        name = str(row["relation"])
        table.add_row(
            name,
            f"{row['count']:,}",
            f"{row['layer']}-{row['head']}",
            str(row["direction"]),
            f"[bold]{100 * row['accuracy']:.1f}[/]",  # type: ignore[operator]
            f"{100 * row['baseline']:.1f} ({row['offset']:+d})",  # type: ignore[operator]
            f"{row['published']}" if row["published"] else "",
            SENTENCES.get(name, ""),
        )
    table.caption = (
        "layer-head, both counted from 0; % right; baseline: the best fixed offset; BERT-base on the Penn Treebank as "
        "published (Clark et al. 2019). The best head is chosen on the words it is scored on, as there."
    )
    return table


def _heads_grid(relation: Relation) -> Any:
    """Layers × heads in shades."""
    from rich.text import Text as Rich

    table = _table(f"{relation.name}: % right, each head in its better direction")
    table.add_column("layer", justify="right")
    right_LA = relation.right.max(0)
    for head in range(right_LA.shape[1]):
        table.add_column(str(head), justify="right")
    for layer, row in enumerate(right_LA):
        cells = []
        for share in row:
            shade = int(255 - 200 * share)
            style = f"{'white' if share > 0.55 else 'black'} on rgb({shade},{shade},255)"
            cells.append(Rich(f"{100 * share:3.0f}", style=style))
        table.add_row(str(layer), *cells)
    return table


@probe.command(
    epilog=examples(
        "everybert probe layers tag --train en_ewt-ud-train.conllu --dev en_ewt-ud-dev.conllu",
        "everybert probe layers classify --train train.tsv --dev dev.tsv --picture layers.png",
    )
)
def layers(
    task: Annotated[str, typer.Argument(help="classify (a label a text) or tag (a label a word).")],
    train: Annotated[Path, typer.Option(help="Examples that the probes are fitted on.")],
    dev: Annotated[Path, typer.Option(help="Examples that they are judged on.")],
    column: Annotated[str | None, typer.Option(help="The label's column; in CoNLL-U upos by default.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw accuracy over layers.")] = None,
    most: Annotated[int, typer.Option(help="Words or texts that are read of each file.", min=1)] = 20_000,
    model: ModelName = DEFAULT,
    as_json: Json = False,
    device: Device = None,
) -> None:
    """Fit one linear probe a layer on the frozen model: where in the stack a task's information lives."""
    from everybert.inside.probes import probe_layers
    from everybert.tasks import TASKS

    if task not in ("classify", "tag"):
        raise EverybertError(f"layers are probed for classify or tag, not {task!r}")
    chosen = {"label": column} if column else None
    data = [TASKS[task].read(path, chosen) for path in (train, dev)]
    if any(not isinstance(x, str) for examples in data for x in examples.inputs[:1]) and task == "classify":
        raise EverybertError("layers are probed on single texts, not on pairs; give a file with one text a row")
    loaded = load(model, device)
    with _progress("texts", sum(len(d.inputs) for d in data), hidden=as_json, adding=True) as tell:
        first, second = ((d.inputs, d.targets) for d in data)
        found = probe_layers(loaded.network, loaded.tokenizer, first, second, most, tell)
    if picture is not None:
        from everybert.inside.probes import draw_layers

        draw_layers(found, picture)
    if as_json:
        print_json({**asdict(found), "best": found.best})
        return
    table = _table(f"linear probes on {found.train:,}, judged on {found.dev:,}; {len(found.labels)} labels")
    for name in ("layer", "accuracy", ""):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("commonest label", f"{100 * found.majority:.1f}", _bar(found.majority))
    for layer, score in enumerate(found.scores):
        mark = " best" if layer == found.best else ""
        table.add_row("embeddings" if layer == 0 else str(layer), f"{100 * score:.1f}", _bar(score) + mark)
    _console().print(table)
    if picture is not None:
        print(f"{picture} written")


# ── what they print with ─────────────────────────────────────────────────────────────────────────────────────


def _bar(share: float, width: int = 40) -> str:
    return "█" * round(share * width)


def _plain(text: str) -> str:
    """Text that rich must not read as markup."""
    from rich.markup import escape

    return escape(text)


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)


def _table(title: str | None = None) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    return Table(title=title, box=SIMPLE, title_justify="left", title_style="", caption_justify="left", padding=(0, 1))


@contextmanager
def _progress(what: str, total: int, hidden: bool, adding: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; what it is told is how many are done, or (adding) how many more."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.update(task, advance=n) if adding else bar.update(task, completed=n)
