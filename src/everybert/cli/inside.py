"""`everybert explain`, `attention`, `neighbours`, `probe heads`, `probe coref`: look inside a model."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from everybert.cli.common import Count, LectureOptions, ModelOptions, OptionalCount, refuse_files, report, shorten
from everybert.cli.options import Group, Output, command
from everybert.errors import EverybertError
from everybert.files import write_text
from everybert.text.readers import read_conllu
from everybert.training.logs import progress_bar

app = typer.Typer()
probe = typer.Typer(cls=Group, help="Probe heads for syntax and coreference.", no_args_is_help=True)
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
    layer: Annotated[int, "The layer to show in detail, from 0.", {"min": 0}] = 0,
    head: Annotated[int, "The head to show in detail, from 0.", {"min": 0}] = 0,
    use: LectureOptions,
) -> Output:
    """Every step of the forward pass, from text to prediction. Layers and heads are printed counted from 1."""
    from everybert.inside.trace import explain_steps, needed, part_value

    model = use.load()
    trace = model.trace(refuse_files([text])[0], pair, keep=needed(layer))
    steps = explain_steps(trace, layer, head)
    shapes = [[{"name": p.name, "label": p.label, "shape": part_value(trace, p).shape} for p in s.parts] for s in steps]
    described = [{**asdict(step), "parts": parts} for step, parts in zip(steps, shapes)]

    def lines() -> Iterator[str]:
        for number, step in enumerate(steps, 1):
            if number == 1 or step.group != steps[number - 2].group:
                yield f"\n── {step.group} ──"
            yield from (f"\n{number}. {step.title}   {step.equation}", step.words)
            for part in step.parts:
                value = part_value(trace, part)
                yield f"{part.label}  ({' × '.join(map(str, value.shape))})  {part.name}"
                yield from report(_rows(trace, part, value, model.tokenizer))
            if not step.parts:
                yield "  ".join(f"{t} {i}" for t, i in zip(trace.tokens, trace.ids))
        yield f"\nThis pass keeps every number; it differs from the fast path by {trace.gap:.1e} at most."

    top = trace.vocabulary(model.tokenizer) if "mlm.probabilities" in trace.values else None
    data = {"tokens": trace.tokens, "ids": trace.ids, "gap": trace.gap, "steps": described, "vocabulary": top}
    return Output(data, lines())


def _rows(trace: Any, part: Any, value: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The first rows of an array."""
    if part.kind == "vocabulary":
        for token, row in zip(trace.tokens[:ROWS], trace.vocabulary(tokenizer)):
            yield {"at": token, "most probable pieces": dict(row)}
        return
    names = trace.tokens if len(value) == len(trace.tokens) else [trace.tokens[0]] * len(value)
    matrix = part.kind == "matrix" and len(value) <= WIDE
    titles = [f"{i} {token}" for i, token in enumerate(trace.tokens)] if matrix else list("01234")
    for name, row in list(zip(names, value))[:ROWS]:
        spread = {} if matrix else {"… mean": float(row.mean()), "deviation": float(row.std())}
        yield {"": name, **dict(zip(titles, row.tolist())), **spread}


@command(app)
def attention(
    text: Annotated[str, "A text, in quotes."],
    *,
    out: Annotated[Path, "The page to write: one HTML file that loads nothing else."],
    pair: Annotated[str | None, "A second text."] = None,
    use: LectureOptions,
) -> None:
    """Write a page with all attention weights of a text: every head, as lines or as a matrix, counted from 1."""
    if out.suffix not in (".html", ".htm"):
        raise EverybertError(f"{out} is not the name of a page; give --out F.html")
    result = use.load().attention(refuse_files([text])[0], pair)
    page = result.html("Attention: " + shorten(text))
    write_text(out, page)
    layers, heads, n, _ = result.weights.shape
    print(f"{out}: {n} tokens, {layers} layers of {heads} heads, {len(page) / 1e6:.1f} MB")


@command(app)
def neighbours(
    word: Annotated[str, "The word."],
    texts: Annotated[list[str], "Texts that contain it, each in quotes."],
    *,
    top: Annotated[Count, "Nearest words per layer."] = 5,
    use: ModelOptions,
) -> Output:
    """Compare one word in several texts: its vectors layer by layer, and the words nearest to them."""
    result = use.load().neighbours(word, refuse_files(texts), top)
    rows = []
    for level, similarity, near in zip(result.levels, result.similarity, result.nearest):
        words = {f"nearest {i}": [n.word for n in words] for i, words in enumerate(near, 1)}
        rows.append({"level": level, "cosine 1–2": float(similarity[0, 1]) if len(near) > 1 else None, **words})
    return Output({**asdict(result), "similarity": result.similarity.tolist()}, report(rows))


def treebank(file: Path, most: int | None = None) -> Iterator[list[dict[str, str]]]:
    """The sentences of a file, with a progress bar."""
    trees = list(islice(read_conllu(file), most))
    with progress_bar("sentences", len(trees)) as tell:
        for number, tree in enumerate(trees, 1):
            yield tree
            tell(number)


@command(probe)
def heads(
    file: Annotated[Path, "A treebank in CoNLL-U."],
    *,
    relation: Annotated[str | None, "Also print this relation for every head."] = None,
    least: Annotated[Count, "Leave out relations with fewer words."] = 50,
    sentences: Annotated[OptionalCount, "Read this many sentences. If not given: all."] = None,
    use: ModelOptions,
) -> Output:
    """How often the strongest link of a head joins a word and its syntactic head, by relation.

    Layers and heads are printed counted from 1, in JSON from 0. baseline: the best fixed offset. published: BERT-base
    on the Penn Treebank (Clark et al. 2019). The best head is selected on the words that score it.
    """
    from everybert.inside.probes import probe_heads

    model = use.load()
    result = probe_heads(model.network, model.tokenizer, treebank(file, sentences))
    if relation and relation not in result.relations:
        raise EverybertError(f"{file} has no relation {relation!r}; it has {', '.join(result.relations)}")
    rows = [{k: v for k, v in vars(r).items() if k != "right"} for r in result.relations.values() if r.count >= least]
    if not rows:
        raise EverybertError(f"no relation of {file} has {least} words: lower --least, or read more sentences")
    data = {name: getattr(result, name) for name in ("sentences", "words", "skipped")} | {"relations": rows}
    shown = data | {"relations": [{**row, "layer": row["layer"] + 1, "head": row["head"] + 1} for row in rows]}
    chosen = {"relation": relation, "right": result.relations[relation].right.tolist()} if relation else None
    if relation:
        grid = result.relations[relation].right.max(0).tolist()
        shown["chosen (layer by head, the better direction)"] = [dict(enumerate(row, 1)) for row in grid]
    return Output(data | {"chosen": chosen}, report(shown))


@command(probe)
def coref(file: Annotated[Path, "CoNLL-U with coreference, such as UD English GUM."], *, use: ModelOptions) -> Output:
    """How often a head links a mention to an antecedent, against the nearest mention, and the same head word.

    Layers and heads are printed counted from 1, in JSON from 0. published: BERT-base on CoNLL-2012 (Clark et al. 2019).
    The best head is selected on the mentions that score it.
    """
    from everybert.inside.probes import probe_coref

    model = use.load()
    result = probe_coref(model.network, model.tokenizer, treebank(file))
    shown = {**result, "layer": result["layer"] + 1, "head": result["head"] + 1}
    shown["right (layer by head)"] = [dict(enumerate(row, 1)) for row in shown.pop("right")]
    return Output(result, report(shown))
