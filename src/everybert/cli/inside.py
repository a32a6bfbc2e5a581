"""`everybert explain`, `attention`, `neighbours`, `probe heads`, `probe layers`: look inside a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everybert.cli.common import Count, ModelOptions, OptionalCount, grouped, histogram, report, shorten
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
    from everybert.inside.steps import needed, part_value, story

    model = use.load()
    trace = model.trace(text, pair, keep=needed(layer))
    steps = story(trace, layer, head)
    found: list[dict[str, Any]] = []
    for step in steps:
        parts = [{"name": p.name, "label": p.label, "shape": part_value(trace, p).shape} for p in step.parts]
        found.append({**asdict(step), "parts": parts})

    def lines() -> Iterator[str]:
        group = ""
        for number, step in enumerate(steps, 1):
            if step.group != group:
                group = step.group
                yield f"\n── {group} ──"
            yield f"\n{number}. {step.title}   {step.equation}"
            yield step.words
            yield from grouped(_part(trace, part, part_value(trace, part), model.tokenizer) for part in step.parts)
            if not step.parts:
                yield "   " + "  ".join(f"{t} {i}" for t, i in zip(trace.tokens, trace.ids))
        yield f"\nThis pass keeps every number; it differs from the fast path by {trace.gap:.1e} at most."

    top = trace.vocabulary(model.tokenizer) if "mlm.probabilities" in trace else None
    data = {"tokens": trace.tokens, "ids": trace.ids, "gap": trace.gap, "steps": found, "vocabulary": top}
    return Output(data, lines())


def _part(trace: Trace, part: Part, value: np.ndarray, tokenizer: Any) -> tuple[str, list[dict[str, Any]]]:
    """A title and the first rows of an array."""
    title = f"{part.label}  ({' × '.join(map(str, value.shape))})  {part.name}"
    if part.kind == "vocabulary":
        pieces = zip(trace.tokens[:ROWS], trace.vocabulary(tokenizer))
        return title, [{"at": token, "most probable pieces": dict(row)} for token, row in pieces]
    names = trace.tokens if len(value) == len(trace.tokens) else [trace.tokens[0]] * len(value)
    matrix = part.kind == "matrix" and len(value) <= WIDE
    titles = [f"{i} {token}" for i, token in enumerate(trace.tokens)] if matrix else list("01234")
    rows: list[dict[str, Any]] = []
    for name, row in list(zip(names, value))[:ROWS]:
        spread = {} if matrix else {"… mean": float(row.mean()), "deviation": float(row.std())}
        rows.append({"": name, **dict(zip(titles, row.tolist())), **spread})
    return title, rows


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
    found = use.load().neighbours(word, texts, top)
    places = [(found.texts[one.text], one.start, one.end) for one in found.occurrences]
    shown = [f"{i}. {text[max(0, start - 20) : end + 20]}" for i, (text, start, end) in enumerate(places, 1)]
    rows = []
    for level, similarity, near in zip(found.levels, found.similarity, found.nearest):
        first = {"cosine 1–2": float(similarity[0, 1])} if len(places) > 1 else {}
        words = {title: ", ".join(n.word for n in words) for title, words in zip(shown, near)}
        rows.append({"level": level, **first, **words})
    return Output({**asdict(found), "similarity": found.similarity.tolist()}, report(rows))


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

    counts = {"sentences": found.sentences, "words": found.words, "skipped": found.skipped}
    grid = {"relation": chosen.name, "right": chosen.right.tolist()} if chosen is not None else None
    relations: list[dict[str, Any]] = found.rows(least)
    lines = [*report(counts), "", *report({**row, "example": SENTENCES.get(row["relation"], "")} for row in relations)]
    lines += [
        "",
        "Layers and heads are counted from 0. baseline: the best fixed offset. published: BERT-base on the Penn",
    ]
    lines += ["Treebank (Clark et al. 2019). The best head is selected on the words that score it."]
    if chosen is not None:
        lines += ["", f"{chosen.name}: share right, each head in its better direction (row: layer, column: head)"]
        lines += report(
            {str(i): dict(zip(map(str, range(len(row))), row)) for i, row in enumerate(chosen.right.max(0).tolist())}
        )
    lines += [f"{picture} written"] if picture is not None else []
    return Output({**counts, "relations": relations, "chosen": grid}, lines)


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
    scores = {"commonest label": found.majority, "embeddings": found.scores[0]}
    scores |= {f"layer {i}": score for i, score in enumerate(found.scores) if i}
    title = f"linear probes fitted on {found.train:,}, scored on {found.dev:,}; {len(found.labels)} labels; best: "
    lines = [*histogram(f"{title}{found.best}", scores, len(scores)), *([f"{picture} written"] if picture else [])]
    return Output({**asdict(found), "best": found.best}, lines)
