"""GLUE (Wang et al. 2018): fine-tune and score on whichever of its tasks a folder holds.

Files are read in GLUE's own layouts and in those of common copies: tsv, csv, jsonl or parquet; dev or validation.
For the files that gluebenchmark.com takes, see contrib/glue_submission.py.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from everybert.errors import EverybertError
from everybert.evaluation.evaluate import evaluate
from everybert.files import is_complete, read_json, write_json
from everybert.store.hub import resolve
from everybert.store.huggingface import read_extras
from everybert.tasks.dataset import read_classes
from everybert.training.finetune import finetune
from everybert.training.tuning import FinetuneSettings


@dataclass(frozen=True)
class GlueTask:
    """One of the nine tasks."""

    name: str
    metric: str
    published: list[float | None]
    """The scores of PUBLISHED's models on the test set."""
    labels: list[list[str]]
    """The spellings of the labels in different copies, in GLUE's order. Submissions use the first."""
    task: str = "classify"


PUBLISHED = read_json(Path(__file__).with_name("glue.json"))
TASKS = {task["name"]: GlueTask(**task) for task in PUBLISHED["tasks"]}
SPLITS = {"train": ("train",), "dev": ("dev", "validation", "valid", "val"), "test": ("test",)}


@dataclass
class GlueResult:
    """The result of a task."""

    task: str
    metric: str
    score: float
    """On dev, in per cent: the mean over the seeds."""
    half: float | None
    """Half of its 95 % interval; None for one run."""
    runs: int
    scores: dict[str, float] = field(default_factory=dict)
    """All scores of the task, means over the seeds (mismatched_accuracy is MNLI's second dev set)."""
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


def find_tasks(folder: str | Path) -> dict[str, Path]:
    """The GLUE tasks of a folder and where each is; a task's own folder will do too."""
    folder = Path(folder)
    if not folder.is_dir():
        raise EverybertError(f"{folder} is not a folder; give the one that holds GLUE's tasks (SST-2, CoLA …)")
    known = {_plain(name): name for name in TASKS} | {"stsbenchmark": "STS-B", "cola11": "CoLA", "qnliv2": "QNLI"}
    folders = [folder, *(p for p in sorted(folder.iterdir()) if p.is_dir())]
    tasks = {known[_plain(p.name)]: p for p in folders if _plain(p.name) in known}
    if not tasks:
        raise EverybertError(f"{folder} holds none of GLUE's tasks, as folders named {', '.join(TASKS)}")
    return {name: tasks[name] for name in TASKS if name in tasks}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_file(folder: Path, split: str, kind: str = "") -> Path | None:
    """A task's file of a split; `kind` is matched or mismatched in MNLI."""
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".tsv", ".csv", ".jsonl", ".json", ".parquet"))
    for name in SPLITS[split]:
        wanted = re.compile(rf"(?:.*[-_])?{name}{f'[-_]?{kind}' if kind else ''}(?:[-_]\d.*)?")
        for file in files:
            if wanted.fullmatch(file.stem.lower()):
                return file
    return None


def label_order(task: GlueTask, train: Path) -> list[str] | None:
    """The labels of a file in GLUE's order and in the spelling of this copy; None if they are other labels."""
    if not task.labels:
        return None
    labels = set(read_classes(train, skip_bad=True).targets[:2000])
    return next((order for order in task.labels if labels <= set(order)), None)


def task_data(name: str, folder: Path) -> tuple[Path, Path, dict[str, Any]]:
    """The train and dev files of a task in its folder, and its options: GLUE's metric and order of the labels."""
    train = find_file(folder, "train")
    dev = find_file(folder, "dev", "matched" if name == "MNLI" else "") or find_file(folder, "dev")
    if train is None or dev is None:
        raise EverybertError(f"{folder} has no {'train' if train is None else 'dev'} file; {name} is left out")
    order = label_order(TASKS[name], train)
    return train, dev, {"metric": TASKS[name].metric} | ({} if order is None else {"labels": order})


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def run_task(
    name: str, folder: Path, model: str | Path, out: Path, *, quiet: bool = False, **settings: Any
) -> GlueResult:
    """Fine-tune on one task and score on dev. A finished run is not repeated.

    If no setting is given, those that the model's folder suggests for the task are used.
    """
    task = TASKS[name]
    runs = {"seeds": 1, "seed": 0, "window": None}
    if not set(settings) - {"device", "allow_pickle", *runs}:
        settings = suggested(model, name) | settings
    settings = runs | settings
    wanted = {"model": str(model), **settings}
    record = out / f"{name}.json"
    if record.exists() and is_complete(out / name):
        before = GlueResult(**read_json(record))
        if before.settings == wanted:
            return before
    train, dev, options = task_data(name, folder)
    settings |= {"skip_bad": True, "options": options, "quiet": quiet}
    fixed: dict[str, Any] = {"mode": "full", "new_pooler": False, "overwrite": True}
    tuned = finetune(model, task.task, train, dev, out / name, **fixed | settings)
    if not tuned.finished:  # no score, and no further task
        raise KeyboardInterrupt
    scores = {key: value.mean for key, value in tuned.scores.items()}
    if name == "MNLI" and (other := find_file(folder, "dev", "mismatched")):
        pickle = settings.get("allow_pickle", False)
        more = evaluate("classify", str(out / name), other, skip_bad=True, allow_pickle=pickle)
        scores["mismatched_accuracy"] = more.scores["accuracy"]
    value = tuned.metric
    half = None if value.half is None else 100 * value.half
    seconds = round(sum(run.seconds for run in tuned.runs), 1)
    result = GlueResult(name, task.metric, 100 * value.mean, half, value.runs, scores, wanted, seconds)
    write_json(record, asdict(result))
    return result


def suggested(model: str | Path, task: str) -> dict[str, Any]:
    """What a model's folder suggests for a task: everybert.json says {"glue": {"RTE": {"lr": 0.0004, "epochs": 8}}}."""
    settings: dict[str, Any] = read_extras(resolve(model)).get("glue", {}).get(task, {})
    if unknown := set(settings) - {f.name for f in fields(FinetuneSettings)}:
        raise EverybertError(f"{model} suggests {sorted(unknown)[0]!r} for {task}, which is no setting; give epochs")
    return dict(settings)


def glue(
    folder: str | Path, model: str | Path, out: str | Path = "glue", tasks: Sequence[str] | None = None, **settings: Any
) -> tuple[list[GlueResult], list[str]]:
    """Run the tasks present, or those named; returns the results and why tasks were left out. Run again to resume."""
    present = find_tasks(folder)
    known = {_plain(name): name for name in TASKS}
    wanted = [known.get(_plain(name), name) for name in tasks] if tasks else list(present)
    if unknown := [name for name in wanted if name not in present]:
        raise EverybertError(f"{folder} has no {unknown[0]}; it has {', '.join(present)}")
    results: list[GlueResult] = []
    skipped: list[str] = []
    for name in wanted:
        if find_file(present[name], "train") is None and not tasks:
            skipped.append(f"{name}: {present[name]} has no train file")
            continue
        results.append(run_task(name, present[name], model, Path(out), **settings))
    return results, skipped


def table(results: Sequence[GlueResult]) -> list[dict[str, str]]:
    """Our dev scores beside the published test scores, and the mean over these tasks."""
    names = [result.task for result in results]
    rows: dict[str, list[Any]] = {"this model, dev": [result.score for result in results]}
    rows |= {f"{m}, test": [TASKS[name].published[i] for name in names] for i, m in enumerate(PUBLISHED["models"])}
    titles = ["", *(f"{name} ({TASKS[name].metric})" for name in names), "mean"]
    shown = []
    for title, values in rows.items():
        mean = None if None in values else sum(values) / len(values)
        cells = ["–" if value is None else f"{value:.1f}" for value in (*values, mean)]
        shown.append(dict(zip(titles, [title, *cells])))
    for title, result in zip(titles[1:], results):
        shown[0][title] += "" if result.half is None else f" ± {result.half:.1f}"
    return shown
