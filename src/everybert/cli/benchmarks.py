"""`everybert glue`, `squad`, `blimp`: the field's own measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from everybert.cli.common import DEFAULT, Device, Dtype, Json, ModelName, examples, load, print_json, print_table
from everybert.cli.docs import field_docs
from everybert.errors import EverybertError

app = typer.Typer()
_SETTINGS = field_docs("everybert.training.tuning", "Settings")


@app.command(
    epilog=examples(
        "everybert glue glue_data --model everybert-small",
        "everybert glue glue_data --model ./my-bert --tasks SST-2,RTE --seeds 3 --mode lora",
    )
)
def glue(
    folder: Annotated[Path, typer.Argument(help="The folder that holds GLUE's tasks: SST-2, CoLA, MRPC …")],
    model: ModelName = DEFAULT,
    out: Annotated[Path, typer.Option(help="Models, scores and submission files; run again to go on.")] = Path("glue"),
    tasks: Annotated[
        str | None, typer.Option(help="Which, with commas: SST-2,RTE. All present when not given.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Train so many times: mean and 95 % interval.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    mode: Annotated[str | None, typer.Option(help=_SETTINGS["mode"])] = None,
    epochs: Annotated[int | None, typer.Option(help=_SETTINGS["epochs"])] = None,
    lr: Annotated[float | None, typer.Option(help=_SETTINGS["lr"])] = None,
    batch_size: Annotated[int | None, typer.Option(help=_SETTINGS["batch_size"])] = None,
    device: Device = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune on the GLUE tasks present; scores beside the published ones; files to submit.

    A model's folder may suggest settings for each task; --mode, --epochs, --lr or --batch-size stand in their place.
    """
    from everybert.evaluation.glue import glue as run
    from everybert.evaluation.glue import table

    given = {"mode": mode, "epochs": epochs, "lr": lr, "batch_size": batch_size, "device": device}
    settings = {name: value for name, value in given.items() if value is not None}
    chosen = [name.strip() for name in tasks.split(",")] if tasks else None
    results, skipped = run(folder, model, out, chosen, seeds=seeds, seed=seed, quiet=quiet, **settings)
    for why in skipped:
        typer.echo(f"left out: {why}", err=True)
    if not results:
        raise EverybertError(f"{folder} has no task with a train file; there is nothing to run")
    if as_json:
        print_json([asdict(result) for result in results])
        return
    rows = table(results)
    print_table(rows, right=tuple(range(1, len(rows[0]))))
    print("Ours are on the dev sets, the published ones on the hidden test sets: close, but not the same thing.")
    if seeds == 1:
        print("One run each: --seeds 3 or more would give intervals.")
    plain = {"model", "seeds", "seed", "window", "device"}
    if any(set(r.settings) - plain - set(settings) for r in results):
        print(f"With the settings that {model} suggests for each task: --json shows them.")
    if (out / "submission").is_dir():
        print(f"{out / 'submission'}: test predictions, to zip and submit")


@app.command(
    epilog=examples(
        "everybert squad dev-v1.1.json --model ./squad",
        "everybert squad dev-v2.0.json --model ./squad2 --out predictions.json",
        "everybert squad dev-v1.1.json --predictions predictions.json",
    )
)
def squad(
    data: Annotated[Path, typer.Argument(help="A SQuAD 1.1 or 2.0 file.")],
    predictions: Annotated[Path | None, typer.Option(help="Score these answers instead of a model's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the answers: the official predictions file.")] = None,
    model: ModelName = DEFAULT,
    as_json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Exact match and F1 as the official scripts have them, of a model or of a file of predictions."""
    from everybert.evaluation import squad as measure
    from everybert.files import write_json

    questions = measure.read_questions(data)
    if predictions is not None:
        answers = measure.read_predictions(predictions)
    else:
        with _bar("answering", len(questions)) as progress:
            answers, gaps = measure.answer_all(load(model, device, dtype), questions, progress)
        if out is not None:
            write_json(out, answers)
            write_json(out.with_name(f"{out.stem}-null-odds.json"), gaps)
    found = measure.score(questions, answers)
    if as_json:
        print_json(asdict(found))
        return
    rows = [["", "exact", "f1", "questions"], ["all", f"{found.exact:.2f}", f"{found.f1:.2f}", f"{found.total:,}"]]
    rows += [[n, f"{g['exact']:.2f}", f"{g['f1']:.2f}", f"{int(g['total']):,}"] for n, g in found.groups.items()]
    print_table(rows, right=(1, 2, 3))
    if found.missing:
        print(f"{found.missing:,} questions have no prediction and count as wrong")


@app.command(
    epilog=examples(
        "everybert blimp blimp/data --model everybert-small",
        "everybert blimp anaphor_number_agreement.jsonl --model ./my-bert --variant word --paradigms",
    )
)
def blimp(
    paths: Annotated[list[Path], typer.Argument(help="Folders or files of pairs: sentence_good, sentence_bad.")],
    variant: Annotated[
        Literal["token", "word"],
        typer.Option(help="Mask one token at a time, or with it the pieces of its word to the right."),
    ] = "token",
    limit: Annotated[int | None, typer.Option(min=1, help="Pairs of each paradigm; all when not given.")] = None,
    paradigms: Annotated[bool, typer.Option("--paradigms", help="Print every paradigm, not only phenomena.")] = False,
    model: ModelName = DEFAULT,
    as_json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """How often a model finds the good sentence of a pair more likely than the bad one."""
    from everybert.evaluation.blimp import blimp as run
    from everybert.evaluation.blimp import read_pairs

    pairs = read_pairs(paths, limit)
    with _bar("scoring", 2 * sum(len(p.good) for p in pairs)) as progress:
        found = run(load(model, device, dtype), pairs, variant, progress)
    if as_json:
        print_json(asdict(found) | {"variant": variant})
        return
    rows = [["phenomenon", "accuracy", "pairs"]]
    for part in found.parts:
        rows.append([part.name, f"{part.accuracy:.1%}", f"{part.pairs:,}"])
        if paradigms and len(part.parts) > 1:
            rows += [[f"  {p.name}", f"{p.accuracy:.1%}", f"{p.pairs:,}"] for p in part.parts]
    rows.append(["all (mean of paradigms)", f"{found.accuracy:.1%}", f"{found.pairs:,}"])
    print_table(rows, right=(1, 2))


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; yields what to tell it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task(what, total=total)
        yield lambda done: bar.update(shown, completed=done)
