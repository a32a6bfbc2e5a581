"""`everybert explain`, `attention`, `neighbours`, `probe heads`, `probe layers`: look inside a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everybert.cli.common import Count, ModelOptions, OptionalCount, bar, rich_table, shorten, table
from everybert.cli.options import Group, Output, command
from everybert.errors import EverybertError

if TYPE_CHECKING:
    import numpy as np

    from everybert.inside.steps import Part
    from everybert.inside.trace import Trace

app = typer.Typer()
probe = typer.Typer(cls=Group, help="Probe heads for syntax, and layers for a task.", no_args_is_help=True)
app.add_typer(probe, name="probe")
WIDE = 10
"""Most columns of a matrix that is printed."""
ROWS = 12
"""Tokens whose numbers are printed."""


@command(app)
def explain(
    text: Annotated[str, "A text, in quotes."],
    *,
    pair: Annotated[str | None, "A second text."] = None,
    layer: Annotated[int, "The layer to show in detail.", {"min": 0}] = 0,
    head: Annotated[int, "The head to show in detail.", {"min": 0}] = 0,
    use: ModelOptions,
) -> Output:
    """Every step of the forward pass, from text to prediction: the equation, a description, and the numbers.

    Examples:
        everybert explain "The dog [MASK] in the garden."
        everybert explain "I love my pet Python" --layer 2 --head 4 --json
    """
    from rich.markup import escape
    from rich.rule import Rule

    from everybert.inside.steps import needed, part_value, story

    model = use.load()
    trace = model.trace(text, pair, keep=needed(layer))
    steps = story(trace, layer, head)
    found: list[dict[str, Any]] = []
    for step in steps:
        parts = [{"name": p.name, "label": p.label, "shape": part_value(trace, p).shape} for p in step.parts]
        found.append({**asdict(step), "parts": parts})

    def lines() -> Iterator[Any]:
        from rich.text import Text

        group = ""
        for number, step in enumerate(steps, 1):
            if step.group != group:
                group = step.group
                yield Rule(f"[bold]{group}", align="left", style="dim")
            yield Text.from_markup(f"\n[bold]{number}. {step.title}[/]   [italic]{escape(step.equation)}[/]")
            yield Text(step.words, style="dim")
            yield from (_part(trace, part, part_value(trace, part), model.tokenizer) for part in step.parts)
            if not step.parts:
                yield "   " + "  ".join(f"{t} {i}" for t, i in zip(trace.tokens, trace.ids))
        yield f"\nThis pass keeps every number; it differs from the fast path by {trace.gap:.1e} at most."

    top = trace.vocabulary(model.tokenizer) if "mlm.probabilities" in trace else None
    data = {"tokens": trace.tokens, "ids": trace.ids, "gap": trace.gap, "steps": found, "vocabulary": top}
    return Output(data, lines())


def _part(trace: Trace, part: Part, value: np.ndarray, tokenizer: Any) -> Any:
    """An array as a table."""
    from rich.markup import escape

    title = f"{part.label}  ({' × '.join(map(str, value.shape))})  {part.name}"
    if part.kind == "vocabulary":
        made = rich_table(title, ("at", "most probable pieces"), left=("at", "most probable pieces"))
        for token, row in list(zip(trace.tokens, trace.vocabulary(tokenizer)))[:ROWS]:
            made.add_row(escape(token), escape("   ".join(f"{name} {p:.3f}" for name, p in row)))
        return made
    names = trace.tokens if len(value) == len(trace.tokens) else [trace.tokens[0]] * len(value)
    matrix = part.kind == "matrix" and len(value) <= WIDE
    shown = value.shape[1] if matrix else min(5, value.shape[1])
    titles = [escape(token) for token in trace.tokens[:shown]] if matrix else [str(j) for j in range(shown)]
    made = rich_table(title, ("", *titles, *(() if matrix else ("…  mean", "deviation"))))
    for name, row in list(zip(names, value))[:ROWS]:
        numbers = [f"{x:.3f}" for x in (row[:shown] if matrix else (*row[:shown], row.mean(), row.std()))]
        made.add_row(escape(name), *numbers)
    if len(value) > ROWS:
        made.add_row(f"… {len(value) - ROWS} more")
    return made


@command(app)
def attention(
    text: Annotated[str, "A text, in quotes."],
    *,
    out: Annotated[Path, "The page to write: one HTML file that loads nothing else."],
    pair: Annotated[str | None, "A second text."] = None,
    use: ModelOptions,
) -> None:
    """Write a page with all attention weights of a text: every head, as lines or as a matrix.

    Examples:
        everybert attention "She said that she was right." --out attention.html
        everybert attention "The cat sleeps." --pair "Where is it?" --out pair.html
    """
    from everybert.files import write_text

    found = use.load().attention(text, pair)
    page = found.html("Attention: " + shorten(text))
    write_text(out, page)
    layers, heads, n, _ = found.weights.shape
    print(f"{out}: {n} tokens, {layers} layers of {heads} heads, {len(page) / 1e6:.1f} MB")


@command(app)
def neighbours(
    word: Annotated[str, "The word."],
    texts: Annotated[list[str], "Texts that contain it, each in quotes."],
    *,
    top: Annotated[Count, "Nearest words per layer."] = 5,
    use: ModelOptions,
) -> Output:
    """Compare one word in several texts: its vectors layer by layer, and the words nearest to them.

    Examples:
        everybert neighbours python "I love my pet Python" "I love coding in Python"
        everybert neighbours bank "the bank of the river" "money in the bank" --top 3
    """
    from rich.markup import escape

    found = use.load().neighbours(word, texts, top)
    places = [(found.texts[one.text], one.start, one.end) for one in found.occurrences]
    shown = [f"{i}. {escape(text[max(0, start - 20) : end + 20])}" for i, (text, start, end) in enumerate(places, 1)]
    both = ["cosine 1–2"] if len(places) > 1 else []
    made = rich_table(None, ["level", *both, *shown], left=["level", *shown])
    for level, similarity, near in zip(found.levels, found.similarity, found.nearest):
        first = [f"{similarity[0, 1]:.3f}"] if both else []
        made.add_row(level, *first, *(escape(", ".join(n.word for n in words)) for words in near))
    return Output({**asdict(found), "similarity": found.similarity.tolist()}, [made])


@command(probe)
def heads(
    file: Annotated[Path, "A treebank in CoNLL-U."],
    *,
    relation: Annotated[str | None, "Also print this relation for every head."] = None,
    picture: Annotated[Path | None, "Draw it to a .png, .svg or .pdf file."] = None,
    least: Annotated[Count, "Leave out relations with fewer words."] = 50,
    sentences: Annotated[OptionalCount, "Read this many sentences. If not given: all."] = None,
    use: ModelOptions,
) -> Output:
    """How often the strongest link of a head joins a word and its syntactic head, by relation; with a baseline.

    Examples:
        everybert probe heads en_ewt-ud-dev.conllu --model ./my-model
        everybert probe heads en_ewt-ud-dev.conllu --relation obj --picture obj.png
    """
    from itertools import islice

    from everybert.inside.probes import SENTENCES, probe_heads
    from everybert.text.readers import read_conllu
    from everybert.training.logs import progress_bar

    model = use.load()
    trees = list(islice(read_conllu(file), sentences))
    with progress_bar("sentences", len(trees)) as tell:
        found = probe_heads(model.network, model.tokenizer, trees, tell)
    name = relation or ("obj" if picture is not None else "")
    if name and name not in found.relations:
        raise EverybertError(f"{file} has no relation {name!r}; it has {', '.join(found.relations)}")
    chosen = found.relations[name] if name else None
    if picture is not None:
        from everybert.inside.probes import draw_heads

        draw_heads(found.relations[name], picture)

    def lines() -> Iterator[Any]:
        late = f", {found.skipped} longer than the window left out" if found.skipped else ""
        yield f"{found.sentences:,} sentences, {found.words:,} words{late}\n"
        rows = [["relation", "words", "best head", "looks", "right", "baseline", "BERT-base", ""]]
        shown: list[dict[str, Any]] = found.rows(least)
        for row in shown:
            scores = f"{100 * row['accuracy']:.1f}", f"{100 * row['baseline']:.1f} ({row['offset']:+d})"
            place = f"{row['count']:,}", f"{row['layer']}-{row['head']}", str(row["direction"])
            known = str(row["published"] or ""), SENTENCES.get(str(row["relation"]), "")
            rows.append([str(row["relation"]), *place, *scores, *known])
        yield from table(rows, (1, 4, 5, 6))
        yield (
            "\nlayer-head, both counted from 0; % right; baseline: the best fixed offset; BERT-base on the Penn "
            "Treebank as published (Clark et al. 2019).\nThe best head is selected on the words that score it."
        )
        if chosen is not None:
            yield f"\n{chosen.name}: % right, each head in its better direction (row: layer, column: head)"
            right_LA = 100 * chosen.right.max(0)
            numbered = [[str(layer), *(f"{share:.0f}" for share in row)] for layer, row in enumerate(right_LA)]
            yield from table([["", *map(str, range(right_LA.shape[1]))], *numbered], range(right_LA.shape[1] + 1))
        yield from [f"{picture} written"] if picture is not None else []

    counts = {"sentences": found.sentences, "words": found.words, "skipped": found.skipped}
    grid = {"relation": chosen.name, "right": chosen.right.tolist()} if chosen is not None else None
    return Output({**counts, "relations": found.rows(least), "chosen": grid}, lines())


@command(probe)
def layers(
    task: Annotated[str, "classify (labels of texts) or tag (labels of words).", {"metavar": "TASK"}],
    *,
    train: Annotated[Path, "Examples to fit the probes on."],
    dev: Annotated[Path, "Examples to score them on."],
    column: Annotated[str | None, "The label column. In CoNLL-U: upos if not given."] = None,
    picture: Annotated[Path | None, "Draw accuracy by layer to a .png, .svg or .pdf file."] = None,
    most: Annotated[Count, "Words or texts to read of each file."] = 20_000,
    use: ModelOptions,
) -> Output:
    """Fit one linear probe per layer of the frozen model: where the information for a task is.

    Examples:
        everybert probe layers tag --train train.conllu --dev dev.conllu
        everybert probe layers classify --train train.tsv --dev dev.tsv
    """
    from everybert.inside.probes import probe_layers
    from everybert.tasks import TASKS
    from everybert.training.logs import progress_bar

    if task not in ("classify", "tag"):
        raise EverybertError(f"layers are probed for classify or tag, not {task!r}")
    data = [TASKS[task].read(path, {"label": column} if column else None) for path in (train, dev)]
    if task == "classify" and any(not isinstance(x, str) for examples in data for x in examples.inputs[:1]):
        raise EverybertError("layers are probed on single texts, not on pairs; give a file with one text a row")
    model = use.load()
    done = 0
    with progress_bar("texts", sum(len(d.inputs) for d in data)) as tell:

        def more(count: int) -> None:
            nonlocal done
            done += count
            tell(done)

        first, second = ((d.inputs, d.targets) for d in data)
        found = probe_layers(model.network, model.tokenizer, first, second, most, more)
    if picture is not None:
        from everybert.inside.probes import draw_layers

        draw_layers(found, picture)
    rows = [["layer", "accuracy", ""], ["commonest label", f"{100 * found.majority:.1f}", bar(found.majority)]]
    for layer, score in enumerate(found.scores):
        mark = " best" if layer == found.best else ""
        rows.append([str(layer) if layer else "embeddings", f"{100 * score:.1f}", bar(score) + mark])
    title = f"linear probes fitted on {found.train:,}, scored on {found.dev:,}; {len(found.labels)} labels"
    lines = [title, *table(rows, (1,)), *([f"{picture} written"] if picture is not None else [])]
    return Output({**asdict(found), "best": found.best}, lines)
