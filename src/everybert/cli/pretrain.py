"""`everybert pretrain`, `everybert distil` and `everybert extend`: a model from a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everybert.cli.common import Device, Json, examples, print_json
from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.training.pretrain import Result

app = typer.Typer()

Corpus = Annotated[Path, typer.Option(help="Corpus folder, made by `everybert corpus build`.")]
Out = Annotated[Path, typer.Option(help="Run folder: logs, checkpoints, model. Give it again to resume.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps, instead of the recipe's.")]
Budget = Annotated[str | None, typer.Option(help="Time, such as 20m or 24h, instead of the recipe's steps.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Another value for a line of the recipe; may be repeated."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


@app.command(
    epilog=examples(
        "everybert pretrain tiny-cpu --corpus corpus --out run",
        "everybert pretrain my.toml --corpus corpus --out run --set run.workers=8 --budget 2h",
        "torchrun --standalone --nproc_per_node=8 --max-restarts=3 -m everybert pretrain bert-base "
        "--corpus corpus --out run",
    )
)
def pretrain(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name or its .toml file.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Corpus folder, made by `everybert corpus build`.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder: logs, checkpoints, model.")] = None,
    init: Annotated[str | None, typer.Option(help="A model to go on from: a folder or a bundled name.")] = None,
    steps: Steps = None,
    budget: Budget = None,
    set_: Set = None,
    list_: Annotated[bool, typer.Option("--list", help="List the recipes that come with everybert.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the recipe's file and stop.")] = False,
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Pre-train a model. Run the same command again to resume; Ctrl-C and SIGTERM save first.

    Several GPUs or hosts: start it with torchrun; --set run.parallel=sharded shares out weights and optimizer too.
    """
    from everybert.training import recipe as recipes

    if list_:
        for name in recipes.names():
            print(f"{name:18} {recipes.summary(name)}")
        return
    if recipe is None:
        raise EverybertError(f"name a recipe: a .toml file, or one of {', '.join(recipes.names())}")
    if show:
        print(recipes.text(recipe), end="")
        return
    if corpus is None or out is None:
        raise EverybertError("give --corpus, the folder of `everybert corpus build`, and --out, the folder to write")
    from everybert.training.pretrain import pretrain as run

    changes = overrides(set_, steps, budget) | ({"model__init": init} if init else {})
    finish(run(recipe, corpus, out, device=device, quiet=quiet, **changes), as_json)


@app.command(
    epilog=examples(
        "everybert distil --teacher bert-base --student distilbert-base-uncased --corpus corpus --out run",
        "everybert distil --teacher bert-base --student bert-mini --corpus corpus --out run "
        "--set distil.cosine=0 --set distil.relation=1",
    )
)
def distil(
    teacher: Annotated[Path, typer.Option(help="The model folder to learn from.")],
    corpus: Corpus,
    out: Out,
    student: Annotated[str | None, typer.Option(help="A preset, a model folder's shape, or a .toml file.")] = None,
    recipe: Annotated[str, typer.Option(help="A recipe's name or its .toml file.")] = "distilbert",
    steps: Steps = None,
    budget: Budget = None,
    set_: Set = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a small model to do what a larger one does. Run the same command again to resume."""
    from everybert.training.distil import distil as run

    changes = overrides(set_, steps, budget)
    finish(run(teacher, corpus, out, student=student, recipe=recipe, device=device, quiet=quiet, **changes), as_json)


@app.command(epilog=examples("everybert extend --model bert-base --words terms.txt --out bert-medical"))
def extend(
    model: Annotated[Path, typer.Option(help="The model folder whose vocabulary to widen.")],
    words: Annotated[Path, typer.Option(help="A file with one word a line.")],
    out: Annotated[Path, typer.Option(help="The model folder to write.")],
) -> None:
    """Add words to a model's vocabulary, each starting as the mean of its pieces; then build a corpus and go on."""
    from everybert.text.readers import lines
    from everybert.training.convert import extend_folder

    count = extend_folder(model, [line for _, line in lines(words)], out)
    print(f"{count} words added: build a corpus with --tokenizer {out}, then pretrain with --init {out}")


def overrides(lines: list[str] | None, steps: int | None, budget: str | None) -> dict[str, Any]:
    """`--set table.key=value` and the two short forms, as the recipe's reader takes them."""
    import tomllib

    out: dict[str, Any] = {}
    for line in lines or []:
        key, equals, value = line.partition("=")
        if not equals:
            raise EverybertError(f"--set {line}: write it as TABLE.KEY=VALUE, for example schedule.peak=1e-3")
        try:
            read = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            read = value.strip()  # a bare word is a string
        out[key.strip().replace(".", "__")] = read
    if steps is not None and budget is not None:
        raise EverybertError("give --steps or --budget, not both")
    return out | ({"steps": steps} if steps else {}) | ({"budget": budget} if budget else {})


def finish(result: Result, as_json: bool) -> None:
    """Say how it ended."""
    if as_json:
        print_json(
            {
                "finished": result.finished,
                "step": result.step,
                "model": str(result.model) if result.finished else None,
                **result.figures,
            }
        )
