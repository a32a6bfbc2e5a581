"""`everybert.finetune`: labelled data in, a task model out, with its scores on held-out data.

Data → base model → one run per seed (training/tuning.py) → the best of them → a folder. Several seeds give a mean and
its 95 % interval. Ctrl-C keeps the best epoch so far.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everybert.corpus.masking import make_key, permutation
from everybert.errors import EverybertError
from everybert.files import atomic_folder, write_json
from everybert.model.heads import Network
from everybert.store.adapters import is_adapter, load_feature_head
from everybert.store.card import command_line, write_card
from everybert.store.hub import resolve
from everybert.store.huggingface import Loaded, load_network, read_config
from everybert.tasks import load_task, task_class
from everybert.tasks.dataset import Examples, Source
from everybert.tasks.metrics import Interval, interval
from everybert.tasks.task import Features, Task, WindowConfig
from everybert.text.tokenizer import Tokenizer
from everybert.training.distributed import World
from everybert.training.tuning import Data, Run, Settings, tune

GRID: dict[str, Sequence[Any]] = {"lr": (5e-5, 3e-5, 2e-5), "batch_size": (16, 32), "epochs": (2, 3, 4)}
"""The BERT paper's grid (Devlin et al. 2019, A.3)."""
HELD_OUT = 0.1
"""The share of the training examples that is held out if no dev set is given."""
log = logging.getLogger("everybert")


@dataclass(frozen=True)
class Tuned:
    """A fine-tuned model and its scores. The methods of a Model (classify, tag …) work on it too."""

    folder: Path | None
    """Where it was written; None if no folder was asked for."""
    scores: dict[str, Interval]
    """On the held-out data: mean over the seeds and its interval."""
    runs: list[Run]
    """Every seed's run; the first is the best, which the folder holds. Only that one has its network."""
    task: Task
    settings: Settings
    notes: tuple[str, ...] = ()
    """What was guessed, skipped or cut."""
    grid: tuple[dict[str, Any], ...] = ()
    """If a grid was searched: each setting with its score, best first."""

    @property
    def metric(self) -> Interval:
        """The task's own score."""
        return self.scores[self.task.metric]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The log of the best run: losses by step, scores by epoch."""
        return self.runs[0].history

    def __str__(self) -> str:
        return f"{self.task.name}: {self.task.metric} {self.metric}"

    def __getattr__(self, name: str) -> Any:
        """A Model's own attributes, from the folder, which is loaded on first use."""
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
    `train` and `dev` files, DataFrames or lists of tuples; `out` the folder to write. `settings` are the fields of
    `Settings` (mode, epochs, lr, batch_size …), `options` those of the task (labels, class_weights, metric, calibrate,
    multi, scheme …). `columns` names the columns (text, pair, label …).
    """
    known = {f.name for f in fields(Settings)}
    if unknown := set(settings) - known:
        raise EverybertError(f"finetune has no setting {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}")
    if seeds < 1:
        raise EverybertError(f"seeds must be at least 1, not {seeds}")
    settings |= {name: str(settings[name]) for name in ("teacher", "start") if settings.get(name) is not None}
    chosen = Settings(**settings)
    axes = GRID if grid is True else dict(grid or {})
    if unknown := set(axes) - known:
        raise EverybertError(f"the grid names {sorted(unknown)[0]!r}, which is no setting")

    task_class(task)
    folder = resolve(model)
    if is_adapter(folder):
        raise EverybertError(f"{folder} is an adapter; fine-tune from the model it was trained on, or merge it first")
    tokenizer = Tokenizer.load(folder)
    data = prepare_data(task, folder, tokenizer, train, dev, columns, skip_bad, (window, overlap, long), options, seed)
    world = World.join()
    sizes = (len(data.train_examples), len(data.dev_examples), len(data.train), len(data.dev))
    world.same("training set, dev set or options", f"{task} {data.task.outputs} {tokenizer.digest} {sizes}")
    bad = dict.fromkeys((*data.train_examples.bad, *data.dev_examples.bad))
    for note in (*data.notes, *(f"skipped: {row}" for row in bad)) if world.first else ():
        log.info(note)

    runs: list[Run] = []
    tried: list[dict[str, Any]] = []
    if axes:
        chosen, best, tried = search_grid(data, chosen, axes, seed, quiet)
        runs = [best]
    for number in range(len(runs), seeds):
        if runs and not runs[-1].finished:
            break
        runs.append(run_once(data, chosen, seed + number, quiet))
        release(runs)
    runs.sort(key=lambda run: -run.metric)
    best = runs[0]
    assert best.network is not None
    best.task = best.task.finish(best.network)
    notes = list(data.notes)
    if not all(run.finished for run in runs):
        notes.append("interrupted: the best epoch so far was kept")
    scores = {name: interval([r.scores[name] for r in runs if name in r.scores]) for name in best.scores}
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


def prepare_data(
    name: str,
    folder: Path,
    tokenizer: Tokenizer,
    train: Source,
    dev: Source | None,
    columns: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    window: tuple[int | None, int | None, str] = (None, None, "window"),
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Data:
    """Read both sets, make the task from the training set, tokenize."""
    kind, config = task_class(name), read_config(folder)[0]
    reading, making = split_options(kind, options or {})
    if window != (None, None, "window"):
        making["window"] = WindowConfig.for_model(config, *window)
    examples = kind.read(train, columns, skip_bad, **reading)
    notes = list(examples.notes)
    if dev is None:
        examples, held = split(examples, seed)
        notes.append(f"no dev set was given: {len(held)} of the training examples are held out to score on")
    task = kind.from_examples(examples, config, **making)
    if dev is not None:
        held = kind.read(dev, columns, skip_bad, **reading | task.read_options())
        notes += held.notes
    features = [task.features(tokenizer, config, part) for part in (examples, held)]
    for part, made in zip((examples, held), features):
        if cut := sum(made.cut):
            notes.append(f"{part.where}: {cut} tokens lie beyond the window and were cut")
    most = features[0].most
    many = 0 if most is None else int((np.diff(features[0].first_E1) > most).sum())
    if many:
        notes.append(
            f"{examples.where}: {many} texts have more than {most} windows: training reads that many of each, "
            "evenly spread; scores and predictions read all"
        )
    return Data(folder, tokenizer, task, features[0], features[1], examples, held, tuple(dict.fromkeys(notes)))


def split_options(kind: type[Task], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the task's `read`, and those of its `from_examples`; others are refused."""
    reading = set(inspect.signature(kind.read).parameters) - {"source", "columns", "skip_bad"}
    making = {"metric", *inspect.signature(kind.fit).parameters} - {"examples"}
    if unknown := set(options) - reading - making:
        known = ", ".join(sorted(reading | making))
        raise EverybertError(f"{kind.name} has no option {sorted(unknown)[0]!r}; it has {known}")
    return tuple({k: v for k, v in options.items() if k in names} for names in (reading, making))  # type: ignore[return-value]


def split(examples: Examples, seed: int) -> tuple[Examples, Examples]:
    """Hold out a tenth, at least one, drawn by the seed."""
    order = permutation(make_key(seed, 1 << 20), len(examples))
    count = max(1, round(len(examples) * HELD_OUT))
    if count >= len(examples):
        raise EverybertError(f"{examples.where} has too few rows to hold some out; give a dev set")
    return examples.take(sorted(order[count:])), examples.take(sorted(order[:count]))


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def load_base(data: Data, seed: int) -> tuple[Network, Loaded]:
    """The base model with the task's head; a new head is drawn by the seed. A head for the same labels is kept."""
    torch.manual_seed(seed)
    task = data.task
    heads = {task.head: task.outputs} if task.head else {}
    loaded = load_network(data.folder, heads=heads, dtype=torch.float32, verify=False)
    if task.labels and task.head and loaded.labels is not None and list(task.labels) != loaded.labels:
        loaded.network.add_head(task.head, task.outputs)  # the same number of labels, but different ones
    return loaded.network, loaded


def run_once(data: Data, settings: Settings, seed: int, quiet: bool = False) -> Run:
    """One run from the base model."""
    network, loaded = load_base(data, seed)
    fresh = "pooler" in loaded.report.missing
    if settings.teacher is not None:
        data = replace(data, train=teach(data, settings.teacher, settings.device))
    torch.manual_seed(seed)
    return tune(data, network, settings, seed, fresh, quiet)


def release(runs: Sequence[Run]) -> None:
    """Free the networks of all runs except the best (of equal runs, the first)."""
    best = max(runs, key=lambda run: run.metric)
    for run in runs:
        run.network = run.network if run is best else None


def teach(data: Data, teacher: str, device: str | None = None) -> Features:
    """The training set with the predictions of a teacher for the same labels, which has its own tokenizer."""
    if teacher in data.taught:
        return data.taught[teacher]
    task, folder = data.task, resolve(teacher)
    task.learns_from(task)  # refuses tasks that do not learn from teachers
    if is_adapter(folder):
        raise EverybertError(f"{folder} is an adapter; merge it into its model, which can then teach")
    loaded = load_network(folder, heads={str(task.head): task.outputs}, dtype=torch.float32)
    try:
        theirs = load_task(task.name, loaded.network, loaded.labels, loaded.problem_type, loaded.extras)
    except EverybertError as error:
        raise EverybertError(f"{folder} cannot teach {task.name}: {error}") from None
    fits = theirs.outputs == task.outputs and task.learns_from(theirs)
    if fits and "feature_head" in loaded.extras:  # trained on frozen features
        load_feature_head(loaded.network, str(task.head), folder, loaded.extras["feature_head"])
    elif not fits or str(task.head) in " ".join(loaded.report.missing):
        known = ", ".join(loaded.labels or ()) or "none"
        raise EverybertError(f"{folder} must be fine-tuned for the same labels to teach them; it knows {known}")
    loaded.network.to(World.join().device(device))
    read = task.features(Tokenizer.load(folder), loaded.network.config, data.train_examples)
    logits_EC = read.combine(task.run(loaded.network, read)).astype(np.float32)
    data.taught[teacher] = data.train.with_targets(teacher_E=logits_EC)
    return data.taught[teacher]


def search_grid(
    data: Data, settings: Settings, axes: Mapping[str, Sequence[Any]], seed: int, quiet: bool
) -> tuple[Settings, Run, list[dict[str, Any]]]:
    """Train every combination once; returns the best settings, their run, and all settings with scores, best first."""
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
    return best_settings, best, rows


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────


def save(tuned: Tuned, data: Data, folder: Path, command: str = "") -> None:
    """Write the best run: a model folder, or an adapter's; finetune.json and the card say how it was made."""
    best, task = tuned.runs[0], tuned.task
    assert best.network is not None
    best.mode.save(best.network, data, task, folder)
    facts = describe(tuned, data, command)
    write_json(folder / "finetune.json", facts)
    write_card(folder, facts, task.confusion(best.network, data.dev), task.labels)


def describe(tuned: Tuned, data: Data, command: str = "") -> dict[str, Any]:
    """How a folder was made, as JSON: settings, data, scores of every seed, the best run's history."""
    return {
        "task": tuned.task.name,
        "metric": tuned.task.metric,
        "base": str(data.folder),
        "train": Path(data.train_examples.where).name,
        "dev": Path(data.dev_examples.where).name,
        "command": command,
        "settings": asdict(tuned.settings) | {"epochs": tuned.settings.rounds},
        "lr": tuned.runs[0].lr,
        "train_examples": len(data.train_examples),
        "dev_examples": len(data.dev_examples),
        "scores": {k: {"mean": v.mean, "half": v.half, "runs": v.runs} for k, v in tuned.scores.items()},
        "seeds": [
            {"seed": r.seed, "epoch": r.epoch, "scores": r.scores, "seconds": round(r.seconds, 1)} for r in tuned.runs
        ],
        "grid": list(tuned.grid),
        "notes": list(tuned.notes),
        "history": tuned.history,
    }
