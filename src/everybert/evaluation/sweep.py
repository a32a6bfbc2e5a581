"""A sweep: one recipe pre-trained with every combination of some settings, several seeds each, in one table.

    out/mask.rate=0.4/seed-0/         a run folder of `everybert pretrain`
    out/mask.rate=0.4/seed-0/scores.json   what the table needs of it
    out/sweep.csv, out/sweep.png      the table, and a plot if matplotlib is installed

Cells are compared on the same text: held-out documents as running text, 15 % of it masked, whatever the cell trained
on. They can also be fine-tuned on labelled sets. Run again to resume; finished runs are not repeated.
"""

import csv
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from everybert.corpus.shards import Corpus
from everybert.errors import EverybertError
from everybert.evaluation.glue import TASKS, find_tasks, task_data
from everybert.files import atomic_file, read_json, write_json
from everybert.inference.model import load
from everybert.tasks import task_class
from everybert.tasks.metrics import Interval, interval
from everybert.training.distributed import refuse_ranks
from everybert.training.evaluate import score_corpus
from everybert.training.finetune import finetune
from everybert.training.pretrain import check_config, pretrain
from everybert.training.recipe import Recipe, read_value

RECORD = "scores.json"


class LabelledSet(NamedTuple):
    """A labelled set on which every run is fine-tuned."""

    name: str
    task: str
    train: Path
    dev: Path
    options: dict[str, Any]


@dataclass
class Cell:
    """One combination of settings and its runs."""

    settings: dict[str, Any]
    """Key of the recipe → value; None leaves an optional key out."""
    recipes: list[Recipe] = field(default_factory=list)
    """One per seed."""
    scores: list[dict[str, float]] = field(default_factory=list)
    """Of each finished run: loss, accuracy, pair_accuracy, and the score on each labelled set."""

    @property
    def name(self) -> str:
        """The name of its folder, which does not depend on the other cells."""
        return re.sub(r"[^\w.=+-]+", "_", ",".join(f"{key}={value}" for key, value in self.settings.items()))

    def intervals(self) -> dict[str, Interval]:
        """Each score: the mean over the runs and its 95 % interval."""
        names = dict.fromkeys(name for run in self.scores for name in run)
        return {name: interval([run[name] for run in self.scores if name in run]) for name in names}


def sweep(
    recipe: str | Path,
    corpus: str | Path,
    out: str | Path,
    vary: Mapping[str, Sequence[Any]],
    *,
    seeds: int = 1,
    then: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    device: str | None = None,
    quiet: bool = False,
    **settings: Any,
) -> tuple[list[Cell], bool]:
    """Run or resume a grid. Returns its cells, and whether all runs are finished.

    `vary` has the values of each key: {"mask.rate": [0.15, 0.4]}. Keys that change together are joined by a slash, and
    have tuples: {"mask.mask_share/mask.random_share": [(1.0, 0.0), (0.8, 0.1)]}. `then` names labelled sets: folders
    of GLUE tasks, or NAME=TRAIN,DEV, or NAME:TASK=TRAIN,DEV. `settings` are those of fine-tuning, `overrides` those of
    `Recipe.load`.
    """
    refuse_ranks("a sweep")
    sets = [labelled for text in then for labelled in read_then(text)]
    if len({one.name for one in sets}) < len(sets):
        raise EverybertError("two labelled sets have the same name: write NAME=TRAIN,DEV")
    Corpus.open(corpus, "heldout")
    cells = grid(recipe, vary, seeds, overrides or {})
    how = {"device": device, "quiet": quiet}
    runs = ((cell, number) for number in range(seeds) for cell in cells)
    finished = all(run_one(cell, number, corpus, Path(out), sets, settings, how) for cell, number in runs)
    write_table(cells, Path(out))
    return cells, finished


# ── what to run ──────────────────────────────────────────────────────────────────────────────────────────────


def grid(recipe: str | Path, vary: Mapping[str, Sequence[Any]], seeds: int, overrides: Mapping[str, Any]) -> list[Cell]:
    """All combinations as recipes. A key or value that a recipe does not have is refused here, before anything runs."""
    if not vary:
        raise EverybertError("name a setting to vary, such as mask.rate")
    axes = []
    for key, values in vary.items():
        keys = key.split("/")
        rows = [value if len(keys) > 1 else (value,) for value in values]
        if "seed" in keys or not rows or any(len(row) != len(keys) for row in rows):
            raise EverybertError(f"vary {key}: give one value per key, as in a/b=1/2,3/4; for seeds there is seeds")
        axes.append([dict(zip(keys, row)) for row in rows])
    cells = []
    for parts in itertools.product(*axes):
        cell = Cell({key: value for part in parts for key, value in part.items()})
        changes = {**overrides, **{key.replace(".", "__"): value for key, value in cell.settings.items()}}
        first = Recipe.load(recipe, **changes)
        if first.distil is not None:
            raise EverybertError("a sweep pre-trains: use a recipe without a [distil] table")
        if first.model.init is None:
            check_config(first, first.config)
        cell.recipes = [Recipe.load(recipe, **changes | {"seed": first.seed + number}) for number in range(seeds)]
        cells.append(cell)
    if len({cell.name for cell in cells}) < len(cells):
        raise EverybertError("two combinations are equal: give each value once")
    return cells


def read_values(key: str, text: str) -> list[Any]:
    """The values of a key on the command line, separated by commas; of keys joined by slashes, tuples."""
    parts = re.split(r",(?![^\[]*\])", text)  # not within a list
    if "/" not in key:
        return [read_value(part) for part in parts]
    return [tuple(read_value(value) for value in part.split("/")) for part in parts]


def read_then(text: str) -> list[LabelledSet]:
    """NAME=TRAIN,DEV or NAME:TASK=TRAIN,DEV; or folders of one or more GLUE tasks, separated by commas."""
    name, equals, files = text.partition("=")
    if not equals:
        every = [task_folder for folder in text.split(",") for task_folder in find_tasks(folder).items()]
        return [LabelledSet(glue_task, TASKS[glue_task].task, *task_data(glue_task, path)) for glue_task, path in every]
    name, _, task = name.partition(":")
    train, _, dev = (Path(file) for file in files.partition(","))
    task_class(task or "classify")
    for file in (train, dev):
        if not file.is_file():
            raise EverybertError(f"then {text}: {file} is not a file; write NAME=TRAIN,DEV, or a GLUE task's folder")
    return [LabelledSet(name, task or "classify", train, dev, {})]


def run_one(
    cell: Cell, number: int, corpus: str | Path, out: Path, sets: list[LabelledSet], settings: dict[str, Any], how: Any
) -> bool:
    """Run what is missing of one seed of a cell, and add its scores; False if it was interrupted."""
    recipe = cell.recipes[number]
    folder = out / cell.name / f"seed-{recipe.seed}"
    result = pretrain(recipe, corpus, folder, **how)  # checks a finished run, and returns
    if not result.finished:
        return False
    known = read_json(folder / RECORD) if (folder / RECORD).exists() else {}
    if "heldout" not in known and recipe.rtd is None:  # else the model predicts no tokens
        scored = score_corpus(load(str(result.model), device=how["device"]), corpus, "full", recipe.longest)
        known["heldout"] = {"loss": scored["heldout_loss"], "accuracy": scored["accuracy"]}
        write_json(folder / RECORD, known)
    figures = {k: v for k, v in result.figures.items() if k == "pair_accuracy" or k.startswith("detection_")}
    scores = known.get("heldout", {}) | figures
    for labelled in sets:
        request = {"task": labelled.task, "train": str(labelled.train), "dev": str(labelled.dev), **settings}
        if known.get(labelled.name, {}).get("asked") != request:
            tuning = {"seed": recipe.seed, "options": labelled.options, "skip_bad": True, **how, **settings}
            tuned = finetune(result.model, labelled.task, labelled.train, labelled.dev, **tuning)
            if not tuned.finished:
                return False
            known[labelled.name] = {"asked": request, "metric": tuned.task.metric, "score": tuned.metric.mean}
            write_json(folder / RECORD, known)
        scores[f"{labelled.name} {known[labelled.name]['metric']}"] = known[labelled.name]["score"]
    cell.scores.append(scores)
    return True


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────


def table(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row per cell with finished runs: its settings, then mean ± half of the 95 % interval of each score."""
    return [
        {**{k: str(v) if v == {} else v for k, v in cell.settings.items()}, "runs": len(cell.scores)}
        | {k: f"{v.mean:.4g}" + (f" ± {v.half:.2g}" if v.half is not None else "") for k, v in cell.intervals().items()}
        for cell in cells
        if cell.scores
    ]


def write_table(cells: Sequence[Cell], out: Path) -> None:
    """Write sweep.csv, and sweep.png if matplotlib is installed."""
    done = [cell for cell in cells if cell.scores]
    rows: list[dict[str, Any]] = [{**cell.settings, "runs": len(cell.scores)} for cell in done]
    for row, cell in zip(rows, done):
        for name, value in cell.intervals().items():
            row |= {name: value.mean, f"{name} ±": value.half}
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_file(out / "sweep.csv") as draft, draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    plot(done, out / "sweep.png")


def plot(cells: Sequence[Cell], path: Path) -> None:
    """One panel per score: a point per cell with its interval. Nothing without matplotlib (extra viz)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    intervals = [cell.intervals() for cell in cells]
    names = list(dict.fromkeys(name for scores in intervals for name in scores))
    labels = ["\n".join(f"{key.rpartition('.')[2]} {value}" for key, value in c.settings.items()) for c in cells]
    figure = Figure(figsize=(max(4.0, 0.9 * len(cells)), 2.6 * len(names)), layout="constrained")
    for axes, name in zip(figure.subplots(len(names), squeeze=False)[:, 0], names):
        points = [scores.get(name, Interval(math.nan, None, 0)) for scores in intervals]
        axes.errorbar(range(len(cells)), [p.mean for p in points], [p.half or 0.0 for p in points], fmt="o", capsize=4)
        axes.set_title(name)
        axes.set_xticks(range(len(cells)), labels)
    with atomic_file(path) as draft:
        figure.savefig(draft, format="png", dpi=150)
