"""`everybert.finetune`: labelled data in, a task model out, with its scores on held-out data.

Data → base model → one run per seed (training/tuning.py) → the best of them → a folder. Several seeds give a mean and
its 95 % interval. Ctrl-C keeps what is finished, or the best epoch so far.
"""

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
from everybert.files import atomic_folder, check_folder, write_json
from everybert.store.adapters import is_adapter
from everybert.store.card import write_card
from everybert.store.hub import resolve
from everybert.store.huggingface import load_network, read_config, read_extras
from everybert.store.sentence_transformers import Pooling, encoder_folder, read_pooling
from everybert.tasks import task_class
from everybert.tasks.dataset import Examples, Source, split_sets
from everybert.tasks.metrics import Interval, interval
from everybert.tasks.task import Task
from everybert.text.tokenizer import Tokenizer
from everybert.text.windows import WindowConfig
from everybert.training.distributed import refuse_ranks
from everybert.training.tuning import HEAD_ALONE, Data, FinetuneSettings, Run, tune

GRID: dict[str, Sequence[Any]] = {"lr": (5e-5, 3e-5, 2e-5), "batch_size": (16, 32), "epochs": (2, 3, 4)}
"""The BERT paper's grid (Devlin et al. 2019, A.3)."""
HELD_OUT = 0.1
"""The share of the training examples that is held out if no dev set is given."""
LEAST_TRAINED = 30_000
"""Few examples are repeated, in up to 30 epochs, until training has read this many (docs/guides/labels.md)."""
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
    settings: FinetuneSettings
    notes: tuple[str, ...] = ()
    """What was guessed, skipped or cut."""
    grid: tuple[dict[str, Any], ...] = ()
    """If a grid was searched: each setting with its score, best first."""
    finished: bool = True
    """False if it was interrupted: `runs` are those finished before, or the only one, with its best epoch so far."""

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
        from everybert.inference.model import load  # not for training: for its result (CONTRIBUTING.md names this)

        if "_model" not in self.__dict__:
            object.__setattr__(self, "_model", load(str(self.folder)))
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
    overwrite: bool = False,
    allow_pickle: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Tuned:
    """Fine-tune a model on a task.

    `model` is a folder, a bundled name or a hub id; `task` one of classify, regress, tag, answer, choose, embed, rank;
    `train` and `dev` files, DataFrames or lists of tuples; `out` the folder to write. `settings` are the fields of
    `FinetuneSettings` (mode, epochs, lr, batch_size …), `options` those of the task (labels, class_weights, metric,
    calibrate, multi, scheme …). `columns` names the columns (text, pair, label …). A folder that holds a model is
    replaced with `overwrite` only. `allow_pickle` reads .bin weights (see `load`). Settings that are not given are
    those that the model's folder suggests (everybert.json, finetune).
    """
    # Refuse what cannot work before any data is read.
    known = {f.name for f in fields(FinetuneSettings)}
    axes = GRID if grid is True else dict(grid or {})
    if unknown := {*settings, *axes} - known:
        raise EverybertError(f"finetune has no setting {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}")
    if wrong := [name for name, values in axes.items() if name in settings or not len(values)]:
        raise EverybertError(f"the grid has the values of {wrong[0]}, one or more; give {wrong[0]} nowhere else")
    if seeds < 1:
        raise EverybertError(f"seeds must be at least 1, not {seeds}")
    settings |= {"start": str(settings["start"])} if settings.get("start") is not None else {}
    FinetuneSettings(**settings)
    task_class(task)
    model_folder = resolve(model, allow_pickle=allow_pickle)
    folder = encoder_folder(model_folder)
    refuse_ranks("fine-tuning")
    if out is not None:
        if not overwrite and any(Path(out).glob("*config.json")):
            raise EverybertError(f"{out} holds a model: choose another folder, or give overwrite=True to replace it")
        check_folder(out)
    if is_adapter(folder):
        raise EverybertError(f"{folder} is an adapter; fine-tune from the model it was trained on, or merge it first")
    config = read_config(folder)[0]
    if not config.layers:
        raise EverybertError(f"{folder} is a StaticEmbedding, which has no layers; fine-tune an encoder")
    if (window or 0) > config.max_positions:
        raise EverybertError(f"a window of {window} tokens is longer than the {config.max_positions} the model reads")

    # The data, and the settings that follow from it.
    tokenizer = Tokenizer.load(folder)
    pooling = Pooling()
    if "pooling" in inspect.signature(task_class(task).fit).parameters and "pooling" not in (options or {}):
        pooling = pooling_of(model_folder, allow_pickle)
        options, window = {**(options or {}), "pooling": pooling.modes[0]}, window or pooling.size
    data = prepare_data(task, folder, tokenizer, train, dev, columns, skip_bad, (window, overlap, long), options, seed)
    bad = dict.fromkeys((*data.train_examples.bad, *data.dev_examples.bad))
    chosen, remarks = choose_settings(data, settings)
    if any(pooling.prompts.values()):
        remarks.append(f"the prompts ({', '.join(pooling.prompts)}) are kept, but not put before the texts of training")
    data = replace(data, notes=(*data.notes, *remarks), allow_pickle=allow_pickle, pooling=pooling)
    for note in (*data.notes, *(f"skipped: {row}" for row in bad)):
        log.info(note)

    # Every point of the grid (without a grid there is one, {}), then more seeds of the best point.
    points = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]
    runs, finished = run_all(data, [(replace(chosen, **point), seed) for point in points], quiet)
    ranked = sorted(zip(points, runs), key=lambda pair: -pair[1].metric)
    table = tuple({**point, data.task.metric: run.metric} for point, run in ranked) if axes else ()
    chosen = replace(chosen, **ranked[0][0])
    runs = [ranked[0][1]]
    if finished:
        runs, finished = run_all(data, [(chosen, seed + number) for number in range(1, seeds)], quiet, runs)
    runs.sort(key=lambda run: -run.metric)

    # The best run, the notes on it, and the folder.
    best = runs[0]
    assert best.network is not None
    best.task = best.task.finish(best.network)
    notes = list(data.notes)
    if not finished:
        done, total = sum(run.finished for _, run in ranked) + len(runs) - 1, len(points) + seeds - 1
        message = f"interrupted after {done} of {total} runs: the best {'of them' if done else 'epoch so far'} is kept"
        notes.append(f"{message}; to have all, run the same again and overwrite it")
        log.warning(notes[-1])
    confusion = best.task.confusion(best.network, data.dev)
    if confusion is not None and (confusion.sum(0) > 0).sum() == 1 < (confusion.sum(1) > 0).sum():
        label = best.task.labels[int(confusion.sum(0).argmax())]
        notes.append(f"every dev text is judged {label!r}: too little was learnt; try more epochs or more rows")
        log.warning(notes[-1])
    scores = {name: interval([r.scores[name] for r in runs if name in r.scores]) for name in best.scores}
    tuned = Tuned(None, scores, runs, best.task, chosen, tuple(notes), table, finished)
    if out is None:
        return tuned
    with atomic_folder(out) as draft:
        save(tuned, data, draft, confusion)
    return replace(tuned, folder=Path(out))


def choose_settings(data: Data, chosen: Mapping[str, Any]) -> tuple[FinetuneSettings, list[str]]:
    """The chosen settings, completed from the model's folder and the amount of data; and notes to print."""
    suggested = read_extras(data.folder).get("finetune") or {}
    if not isinstance(suggested, dict) or set(suggested) - {f.name for f in fields(FinetuneSettings)}:
        raise EverybertError(f"{data.folder / 'everybert.json'}: finetune must hold settings, not {suggested}")
    ignored = {"new_pooler"} if chosen.get("start") else set()  # an adapter to continue from has its pooler
    taken = {k: v for k, v in suggested.items() if k not in chosen.keys() | ignored}
    notes = [f"the model's folder suggests {', '.join(f'{k} {v}' for k, v in taken.items())}"] if taken else []
    settings = FinetuneSettings(**{**taken, **chosen})
    if settings.epochs is None and settings.mode not in HEAD_ALONE:
        settings = replace(settings, epochs=min(max(3, LEAST_TRAINED // len(data.train_examples)), 30))
    return settings, notes


def pooling_of(folder: Path, allow_pickle: bool) -> Pooling:
    """The pooling of an embedder that is trained further; an error if training would not keep all of its files."""
    pooling = read_pooling(folder, read_config(encoder_folder(folder))[0].hidden_size, allow_pickle)
    dropped = (pooling.prompt(None), pooling.layers, pooling.modules, pooling.truncate, not pooling.include_prompt)
    if any(dropped) or pooling.vectors != "embed" or pooling.modes not in (("mean",), ("cls",)):
        raise EverybertError(f"{folder} has prompts or modules that training would not keep; name pooling to drop them")
    return replace(pooling, lowercase=False, files={})


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
        making["window"] = reads = WindowConfig.for_model(config.max_positions, *window)
        if window[1] is not None and (reads.long == "cut" or reads.overlap > reads.size // 2):
            raise EverybertError(f"windows of {reads.size} tokens overlap by at most half, texts that are cut by none")
    train, dev = split_sets(train, dev)
    examples = kind.read(train, columns, skip_bad, **reading)
    notes = list(examples.notes)
    if dev is None:
        if "labels" in kind.saved:  # those of all rows: some labels may be held out only
            making["labels"] = kind.from_examples(examples, config, **making).labels
        examples, held = hold_out(examples, seed, kind.grouped)
        notes.append(f"no dev set was given: {len(held)} of the training examples are held out to score on")
    task = kind.from_examples(examples, config, **making)
    if dev is not None:
        held = kind.read(dev, columns, skip_bad, **reading | task.read_options())
        notes += held.notes
    features = [task.features(tokenizer, config, part) for part in (examples, held)]
    for part, encoded in zip((examples, held), features):
        if cut := sum(encoded.cut):
            notes.append(f"{part.where}: {cut} tokens lie beyond the window and were cut")
    most = features[0].most_windows
    if many := int((np.diff(features[0].first_E1) > most).sum()):
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


def hold_out(examples: Examples, seed: int, grouped: bool = False) -> tuple[Examples, Examples]:
    """Hold out a tenth of the examples (`grouped`: of their first texts), at least one, drawn by the seed."""
    groups: dict[Any, list[int]] = {}
    for i, example in enumerate(examples.inputs):
        groups.setdefault(example[0] if grouped else i, []).append(i)
    order, members = permutation(make_key(seed, 1 << 20), len(groups)), list(groups.values())
    count = max(1, round(len(groups) * HELD_OUT))
    if count >= len(groups):
        raise EverybertError(f"{examples.where} has too few rows to hold some out; give a dev set")
    kept, held = (sorted(i for g in part for i in members[g]) for part in (order[count:], order[:count]))
    return examples.take(kept), examples.take(held)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def run_once(data: Data, settings: FinetuneSettings, seed: int, quiet: bool = False) -> Run:
    """One run from the base model. A head for the same labels is kept; otherwise the seed initialises a new one."""
    torch.manual_seed(seed)
    task = data.task
    heads = {task.head: task.outputs} if task.head else {}
    loaded = load_network(data.folder, heads=heads, dtype=torch.float32, verify=False, allow_pickle=data.allow_pickle)
    if task.labels and task.head and loaded.labels is not None and list(task.labels) != loaded.labels:
        loaded.network.add_head(task.head, task.outputs)  # the same number of labels, but different ones
    torch.manual_seed(seed)
    return tune(data, loaded.network, settings, seed, "pooler" in loaded.report.missing, quiet)


def run_all(
    data: Data, tries: Sequence[tuple[FinetuneSettings, int]], quiet: bool, before: Sequence[Run] = ()
) -> tuple[list[Run], bool]:
    """A run for each (settings, seed), and whether all are finished: an interruption ends them.

    A run that is not finished counts only if there is no other. Only the best (of equal ones, the first) keeps its
    network, and the mode, which may hold it.
    """
    runs = list(before)
    for settings, seed in tries:
        try:
            run = run_once(data, settings, seed, quiet)
        except KeyboardInterrupt:  # before its first step, or after its last
            if not runs:
                raise
            return runs, False
        runs += [run] if run.finished or not runs else []
        best = max(runs, key=lambda run: run.metric)
        for other in runs:
            if other is not best:
                other.network = other.mode = None
        if not run.finished:
            return runs, False
    return runs, True


def save(tuned: Tuned, data: Data, folder: Path, confusion: np.ndarray | None) -> None:
    """Write the best run: a model folder, or an adapter's; finetune.json and the card say how it was made."""
    best, task = tuned.runs[0], tuned.task
    assert best.network is not None and best.mode is not None
    best.mode.save(best.network, data, task, folder)
    facts = {
        "task": task.name,
        "metric": task.metric,
        "base": str(data.folder),
        "train": Path(data.train_examples.where).name,
        "dev": Path(data.dev_examples.where).name,
        "settings": asdict(tuned.settings) | {"epochs": tuned.settings.rounds},
        "lr": best.lr,
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
    write_json(folder / "finetune.json", facts)
    write_card(folder, facts, confusion, task.labels)
