"""`everybert.finetune`: labelled data in, a task model out, with its scores on held-out data.

Several seeds give a mean and its 95 % interval; the folder holds the best of them. Ctrl-C keeps the best so far.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everybert.corpus.masking import make_key, permutation
from everybert.errors import EverybertError
from everybert.files import atomic_folder, write_json
from everybert.model.features import FeatureHead
from everybert.model.heads import Network
from everybert.store.adapters import is_adapter, load_feature_head, save_adapter, save_feature_head
from everybert.store.card import command_line, write_card
from everybert.store.hub import resolve
from everybert.store.huggingface import Loaded, load_network, read_config, save_network
from everybert.tasks.classify import Classify
from everybert.tasks.embed import Embed, write_sentence_transformers
from everybert.tasks.features import Features, Reading
from everybert.tasks.folder import MODULES as TASKS
from everybert.tasks.folder import task_of
from everybert.tasks.metrics import Interval, interval
from everybert.tasks.records import Examples, Source
from everybert.tasks.regress import Regress
from everybert.tasks.task import Task
from everybert.tasks.taught import teach
from everybert.text.tokenizer import Tokenizer
from everybert.training.distributed import World
from everybert.training.tuning import ADAPTER, Kept, Run, Settings, plain_head, tune

GRID: dict[str, Sequence[Any]] = {"lr": (5e-5, 3e-5, 2e-5), "batch_size": (16, 32), "epochs": (2, 3, 4)}
"""The BERT paper's grid (Devlin et al. 2019, A.3)."""
HELD_OUT = 0.1
"""The share of the training examples that is held out where no dev set is given."""
PROBLEMS = {"regress": "regression", "classify": "single_label_classification"}
log = logging.getLogger("everybert")


@dataclass(frozen=True)
class Tuned:
    """A fine-tuned model and how well it does. What a Model can do (classify, tag …) it can do too."""

    folder: Path | None
    """Where it was written; None where no folder was asked for."""
    scores: dict[str, Interval]
    """On the held-out data: mean over the seeds and its interval."""
    runs: list[Run]
    """Every seed's run; the first is the best, which the folder holds."""
    task: Task
    settings: Settings
    notes: tuple[str, ...] = ()
    """What was guessed, left out or cut."""
    grid: tuple[dict[str, Any], ...] = ()
    """Where a grid was searched: each setting with its score, best first."""

    @property
    def metric(self) -> Interval:
        """The task's own score."""
        return self.scores[self.task.metric]

    @property
    def history(self) -> list[dict[str, Any]]:
        """What the best run logged: losses by step, scores by epoch."""
        return self.runs[0].history

    def __str__(self) -> str:
        return f"{self.task.name}: {self.task.metric} {self.metric}"

    def __getattr__(self, name: str) -> Any:
        """A Model's own attributes, from the folder, loaded when first asked for."""
        if name.startswith("_") or self.__dict__.get("folder") is None:
            raise AttributeError(name)
        import everybert

        if "_model" not in self.__dict__:
            object.__setattr__(self, "_model", everybert.load(str(self.folder)))
        return getattr(self._model, name)


def finetune(
    model: str | Path,
    task: str,
    train: Source,
    dev: Source | None = None,
    out: str | Path | None = None,
    *,
    seeds: int = 1,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    window: int | None = None,
    overlap: int | None = None,
    long: str = "window",
    grid: bool | Mapping[str, Sequence[Any]] = False,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Tuned:
    """Fine-tune a model on a task.

    `model` is a folder, a bundled name or a hub id; `task` one of classify, regress, tag, answer, choose, embed;
    `train` and `dev` files, DataFrames or lists of tuples; `out` the folder to write. `settings` are those of
    `Settings` (mode, epochs, lr, batch_size …), `options` those of the task's `begin` (labels, class_weights, metric,
    calibrate …, and what its `read` takes: multi, scheme). `columns` names the columns (text, pair, label …).
    """
    if task not in TASKS:
        raise EverybertError(f"the tasks are {', '.join(TASKS)}; there is no {task!r}")
    known = {f.name for f in fields(Settings)}
    if unknown := set(settings) - known:
        raise EverybertError(f"finetune has no setting {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}")
    if seeds < 1:
        raise EverybertError(f"seeds must be at least 1, not {seeds}")
    settings |= {name: str(settings[name]) for name in ("teacher", "start") if settings.get(name) is not None}
    chosen = Settings(**settings)
    folder = resolve(model)
    if is_adapter(folder):
        raise EverybertError(f"{folder} is an adapter; fine-tune from the model it was trained on, or merge it first")
    tokenizer = Tokenizer.load(folder)
    data = prepare_data(task, folder, tokenizer, train, dev, columns, skip_bad, (window, overlap, long), options, seed)
    world = World.join()
    world.same("training set, dev set or options", data.digest)
    for note in (*data.notes, *(f"left out: {row}" for row in data.bad)) if world.first else ():
        log.info(note)

    tried: list[dict[str, Any]] = []
    runs: list[Run] = []
    if grid:
        axes = GRID if grid is True else dict(grid)
        if unknown := set(axes) - known:
            raise EverybertError(f"the grid names {sorted(unknown)[0]!r}, which is no setting")
        chosen, runs, tried = _search(data, chosen, axes, seed, quiet)
    for number in range(len(runs), seeds):
        if runs and not runs[-1].finished:
            break
        runs.append(run_once(data, chosen, seed + number, quiet))
    runs.sort(key=lambda r: -r.metric)
    best = runs[0]
    best.task = best.task.fold(best.network) if isinstance(best.task, Regress) else best.task
    scores = {name: interval([r.scores[name] for r in runs if name in r.scores]) for name in best.scores}
    notes = list(data.notes)
    if not all(r.finished for r in runs):
        notes.append("interrupted: the best epoch so far was kept")
    tuned = Tuned(None, scores, runs, best.task, chosen, tuple(notes), tuple(tried))
    if out is None:
        return tuned
    given = {"columns": columns, "window": window, "overlap": overlap, "grid": grid, "skip_bad": skip_bad, **settings}
    given |= {"seeds": seeds, "seed": seed, "long": long, **(options or {})}
    default = {"seeds": 1, "seed": 0, "long": "window"}
    changed = {k: v for k, v in given.items() if v not in (None, False, {}) and v != default.get(k)}
    with world.together():
        if world.first:
            with atomic_folder(out) as written:
                save(tuned, data, written, command_line(task, model, train, dev, out, changed))
    return replace(tuned, folder=Path(out))


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Data:
    """What the runs share: the base model's folder, the task, and features of both sets."""

    folder: Path
    tokenizer: Tokenizer
    task: Task
    train: Features
    dev: Features
    dev_examples: Examples
    train_examples: Examples
    train_size: int
    train_name: str
    notes: tuple[str, ...]
    bad: tuple[str, ...] = ()
    """Rows of both sets that were left out under skip_bad."""
    kept: Kept = field(default_factory=dict)
    """Mode frozen: what the head reads, computed by the first run."""
    taught: dict[str, Features] = field(default_factory=dict)
    """By teacher: the training set with what it says, computed by the first run."""

    @property
    def digest(self) -> str:
        """A few numbers that ranks must have in common before they train together."""
        sizes = (self.train_size, len(self.dev_examples), len(self.train), len(self.dev))
        return f"{self.task.name} {self.task.outputs} {self.tokenizer.digest} {sizes}"


def prepare_data(
    name: str,
    folder: Path,
    tokenizer: Tokenizer,
    train: Source,
    dev: Source | None,
    columns: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    reach: tuple[int | None, int | None, str] = (None, None, "window"),
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Data:
    """Read both sets, settle the task on the training set, tokenize."""
    module, config = TASKS[name], read_config(folder)[0]
    reading_options = {k: v for k, v in (options or {}).items() if k in ("multi", "scheme")}
    task_options = {k: v for k, v in (options or {}).items() if k not in reading_options}
    if reach != (None, None, "window"):
        task_options["reading"] = Reading.of(config, *reach)
    examples = module.read(train, columns, skip_bad, **reading_options)
    notes = list(examples.notes)
    if dev is None:
        examples, held = split(examples, seed)
        notes.append(f"no dev set was given: {len(held)} of the training examples are held out to score on")
    try:
        task: Task = module.begin(examples, config, **task_options)
    except TypeError as error:
        raise EverybertError(f"{name}: {str(error).split(') ')[-1]}; see the task's options") from None
    if dev is not None:
        if name == "tag" and task.scheme != "plain":  # type: ignore[attr-defined]
            reading_options["scheme"] = task.scheme  # type: ignore[attr-defined]
        if name == "classify":
            reading_options["multi"] = task.multi  # type: ignore[attr-defined]
        held = module.read(dev, columns, skip_bad, **reading_options)
        notes += held.notes
    features = [task.features(tokenizer, config, part) for part in (examples, held)]
    for part, made in zip((examples, held), features):
        if made.cut_E is not None:
            notes.append(f"{part.where}: {int(made.cut_E.sum())} tokens lie beyond the window and were cut")
    many = int((np.diff(features[0].first_E1) > features[0].most).sum()) if features[0].most is not None else 0
    if many:
        notes.append(
            f"{examples.where}: {many} texts have more than {features[0].most} windows: training reads so many "
            "of each, spread evenly; scores and predictions read all"
        )
    told, bad = tuple(dict.fromkeys(notes)), tuple(dict.fromkeys((*examples.bad, *held.bad)))
    size, where = len(examples), examples.where
    return Data(folder, tokenizer, task, features[0], features[1], held, examples, size, where, told, bad)


def split(examples: Examples, seed: int) -> tuple[Examples, Examples]:
    """Hold out a tenth, at least one, drawn by the seed."""
    order = permutation(make_key(seed, 1 << 20), len(examples))
    count = max(1, round(len(examples) * HELD_OUT))
    if count >= len(examples):
        raise EverybertError(f"{examples.where} has too few rows to hold some out; give a dev set")
    parts = []
    for which in (sorted(order[count:]), sorted(order[:count])):
        inputs, targets = [examples.inputs[i] for i in which], [examples.targets[i] for i in which]
        parts.append(replace(examples, inputs=inputs, targets=targets))
    return parts[0], parts[1]


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def load_base(data: Data, seed: int) -> tuple[Network, Loaded]:
    """The base model with the task's head; a new head is drawn by the seed. A head for the same labels is kept."""
    torch.manual_seed(seed)
    task = data.task
    heads = {task.head: task.outputs} if task.head else {}
    loaded = load_network(data.folder, heads=heads, dtype=torch.float32, verify=False)
    labels = getattr(task, "labels", None)
    if task.head and labels is not None and loaded.labels is not None and list(labels) != loaded.labels:
        loaded.network.add_head(task.head, task.outputs)  # as many labels, but others
    return loaded.network, loaded


def run_once(data: Data, settings: Settings, seed: int, quiet: bool = False) -> Run:
    """One run from the base model."""
    network, loaded = load_base(data, seed)
    fresh = "pooler" in loaded.report.missing
    train = data.train if settings.teacher is None else listen(data, settings.teacher, settings.device)
    torch.manual_seed(seed)
    return tune(network, data.task, train, data.dev, data.dev_examples, settings, seed, fresh, quiet, data.kept)


def listen(data: Data, teacher: str, device: str | None = None) -> Features:
    """The training set with what a teacher says of it, who must know the same labels; it reads the texts in its way."""
    if teacher not in data.taught:
        task, folder = data.task, resolve(teacher)
        if not isinstance(task, Classify | Regress):
            raise EverybertError(f"{task.name} does not learn from a teacher; classify and regress do")
        if is_adapter(folder):
            raise EverybertError(f"{folder} is an adapter; merge it into its model, which can then teach")
        loaded = load_network(folder, heads={task.head: task.outputs}, dtype=torch.float32)
        try:
            theirs = task_of(task.name, loaded.network, loaded.labels, loaded.problem_type, loaded.extras)
        except EverybertError as error:
            raise EverybertError(f"{folder} cannot teach {task.name}: {error}") from None
        fits = theirs.outputs == task.outputs and same_kind(theirs, task)
        if fits and "feature_head" in loaded.extras:  # it was trained on frozen features
            load_feature_head(loaded.network, task.head, folder, loaded.extras["feature_head"])
        elif not fits or task.head in " ".join(loaded.report.missing):
            known = ", ".join(loaded.labels or ()) or "none"
            raise EverybertError(f"{folder} must be fine-tuned for the same labels to teach them; it knows {known}")
        loaded.network.to(World.join().device(device))
        read = task.features(Tokenizer.load(folder), loaded.network.config, data.train_examples)
        units = (task.scale, task.shift) if isinstance(task, Regress) else (1.0, 0.0)
        data.taught[teacher] = teach(data.train, read, loaded.network, task.head, *units)
    return data.taught[teacher]


def same_kind(theirs: Task, mine: Task) -> bool:
    """Whether two tasks have the same labels in the same order, or are both regressions."""
    if isinstance(mine, Classify):
        return isinstance(theirs, Classify) and (theirs.labels, theirs.multi) == (mine.labels, mine.multi)
    return isinstance(theirs, Regress)


def _search(
    data: Data, settings: Settings, axes: Mapping[str, Sequence[Any]], seed: int, quiet: bool
) -> tuple[Settings, list[Run], list[dict[str, Any]]]:
    """Every combination once; the best one's run is the first seed's."""
    tried: list[tuple[float, dict[str, Any]]] = []
    best: Run | None = None
    best_settings = settings
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values))
        run = run_once(data, replace(settings, **point), seed, quiet)
        tried.append((run.metric, point))
        if best is None or run.metric > best.metric:
            best, best_settings = run, replace(settings, **point)
        if not run.finished:
            break
    assert best is not None
    rows = [{**point, data.task.metric: score} for score, point in sorted(tried, key=lambda t: -t[0])]
    return best_settings, [best], rows


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────


def save(tuned: Tuned, data: Data, folder: Path, command: str = "") -> None:
    """Write the best run: a model folder, or an adapter's; finetune.json and the card say how it was made."""
    best, task = tuned.runs[0], tuned.task
    network, head = best.network, task.head
    extras: dict[str, Any] = {"task": task.state()}
    if best.adapters is not None:
        save_adapter(best.adapters, ADAPTER, folder, base=str(data.folder), extras=extras)
    else:
        if head is not None and not plain_head(network, head):
            feature_head = network.heads.pop(head)
            assert isinstance(feature_head, FeatureHead)
            extras["feature_head"] = {"name": head, **save_feature_head(feature_head, folder)}
        labels = getattr(task, "labels", None)
        problem = PROBLEMS.get(task.name)
        if getattr(task, "multi", False):
            problem = "multi_label_classification"
        save_network(
            network,
            folder,
            tokenizer=data.tokenizer,
            labels=list(labels) if labels and head and head in network.heads else None,
            problem_type=problem,
            extras=extras,
            raw_config=read_config(data.folder)[1],
        )
        if "feature_head" in extras and head is not None:
            network.heads[head] = feature_head
        if isinstance(task, Embed):
            write_sentence_transformers(folder, task, network.config)
    facts = describe(tuned, data, command)
    write_json(folder / "finetune.json", facts)
    if isinstance(task, Classify) and not task.multi:
        write_card(folder, facts, task.confusion(network, data.dev), task.labels)
    else:
        write_card(folder, facts)


def describe(tuned: Tuned, data: Data, command: str = "") -> dict[str, Any]:
    """How a folder was made, as JSON: settings, data, scores of every seed, the best run's history."""
    settings = {f.name: getattr(tuned.settings, f.name) for f in fields(Settings)}
    settings["epochs"] = tuned.settings.rounds
    settings["lora"] = {f.name: getattr(tuned.settings.lora, f.name) for f in fields(tuned.settings.lora)}
    return {
        "task": tuned.task.name,
        "metric": tuned.task.metric,
        "base": str(data.folder),
        "train": Path(data.train_name).name,
        "dev": Path(data.dev_examples.where).name,
        "command": command,
        "settings": settings,
        "lr": tuned.runs[0].lr,
        "train_examples": data.train_size,
        "dev_examples": len(data.dev_examples),
        "scores": {k: {"mean": v.mean, "half": v.half, "runs": v.runs} for k, v in tuned.scores.items()},
        "seeds": [
            {"seed": r.seed, "epoch": r.epoch, "scores": r.scores, "seconds": round(r.seconds, 1)} for r in tuned.runs
        ],
        "grid": list(tuned.grid),
        "notes": list(tuned.notes),
        "history": tuned.history,
    }
