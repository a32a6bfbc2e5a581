"""GLUE (Wang et al. 2018): fine-tune and score on whichever of its tasks a folder holds, and write submission files.

Files are read in GLUE's own layouts and in those of common copies: tsv, csv, jsonl or parquet; dev or validation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from everybert.errors import EverybertError
from everybert.evaluation.evaluate import evaluate
from everybert.files import atomic_file, is_complete, read_json, write_json
from everybert.inference.model import Model, load
from everybert.store.hub import resolve
from everybert.store.huggingface import read_extras
from everybert.tasks import task_class
from everybert.tasks.dataset import label_name, read_rows
from everybert.training.finetune import finetune
from everybert.training.tuning import Settings

RTE = ("entailment", "not_entailment")
MNLI = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class GlueTask:
    """One of the nine tasks."""

    name: str
    metric: str
    published: tuple[float | None, ...]
    """The test scores below, in the order of ROWS."""
    labels: tuple[tuple[str, ...], ...] = (("0", "1"),)
    """The spellings of the labels in different copies, in GLUE's order. Submissions use the first."""
    task: str = "classify"


ROWS = ("BERT-tiny", "BERT-mini", "BERT-small", "BERT-medium", "BERT-base")
# Test-set scores. Tiny to medium: the README of github.com/google-research/bert (March 2020; Turc et al. 2019, the best
# of batch 8 – 128 and lr 3e-4 – 3e-5, 4 epochs). Base: Devlin et al. 2019, table 1 (WNLI was left out there). MRPC and
# QQP are F1, STS-B is Spearman, CoLA is Matthews.
TASKS = {
    task.name: task
    for task in (
        GlueTask("CoLA", "matthews", (0.0, 0.0, 27.8, 38.0, 52.1)),
        GlueTask("SST-2", "accuracy", (83.2, 85.9, 89.7, 89.6, 93.5), (("0", "1"), ("negative", "positive"))),
        GlueTask("MRPC", "f1", (81.1, 81.1, 83.4, 86.6, 88.9), (("0", "1"), ("not_equivalent", "equivalent"))),
        GlueTask("STS-B", "spearman", (73.6, 73.3, 77.0, 78.4, 85.8), (), "regress"),
        GlueTask("QQP", "f1", (62.2, 66.4, 68.1, 69.6, 71.2), (("0", "1"), ("not_duplicate", "duplicate"))),
        GlueTask("MNLI", "accuracy", (70.2, 74.8, 77.6, 80.0, 84.6), (MNLI, ("0", "1", "2"))),
        GlueTask("QNLI", "accuracy", (81.5, 84.1, 86.4, 87.7, 90.5), (RTE, ("0", "1"))),
        GlueTask("RTE", "accuracy", (57.2, 57.9, 61.8, 62.2, 66.4), (RTE, ("0", "1"))),
        GlueTask("WNLI", "accuracy", (62.3, 62.3, 62.3, 62.3, None), (("0", "1"), ("not_entailment", "entailment"))),
    )
}
LABEL_COLUMNS = ("label", "gold_label", "Quality", "\ufeffQuality", "is_duplicate")
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
    found = {known[_plain(p.name)]: p for p in sorted(folder.iterdir()) if p.is_dir() and _plain(p.name) in known}
    if not found and _plain(folder.name) in known:
        found = {known[_plain(folder.name)]: folder}
    if not found:
        raise EverybertError(f"{folder} holds none of GLUE's tasks, as folders named {', '.join(TASKS)}")
    return {name: found[name] for name in TASKS if name in found}


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


def label_order(task: GlueTask, train: Path) -> tuple[str, ...] | None:
    """The labels of a file in GLUE's order and in the spelling of this copy; None if they are other labels."""
    if not task.labels:
        return None
    rows = read_rows(train, ("text", "label"), skip_bad=True).rows
    column = next((name for name in LABEL_COLUMNS if name in rows[0]), None)
    if column is None:
        return None
    seen = {label_name(row.get(column)) or "" for row in rows[:2000]}
    return next((order for order in task.labels if seen <= set(order)), None)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def run_task(
    name: str,
    folder: Path,
    model: str | Path,
    out: Path,
    *,
    seeds: int = 1,
    seed: int = 0,
    window: int | None = None,
    quiet: bool = False,
    **settings: Any,
) -> GlueResult:
    """Fine-tune on one task, score on dev, and predict test if there is one. A finished run is not repeated.

    If no setting is given, those that the model's folder suggests for the task are used.
    """
    task = TASKS[name]
    if not set(settings) - {"device"}:
        settings = suggested(model, name) | settings
    settings = {"seeds": seeds, "seed": seed, "window": window, **settings}
    asked = {"model": str(model), **settings}
    record = out / f"{name}.json"
    if record.exists() and is_complete(out / name):
        before = GlueResult(**read_json(record))
        if before.settings == asked:
            return before
    train = find_file(folder, "train")
    dev = find_file(folder, "dev", "matched" if name == "MNLI" else "") or find_file(folder, "dev")
    if train is None or dev is None:
        raise EverybertError(f"{folder} has no {'train' if train is None else 'dev'} file; {name} is left out")
    order = label_order(task, train)
    options = {"metric": task.metric} | ({} if order is None else {"labels": order})
    settings |= {"skip_bad": True, "options": options, "quiet": quiet}
    tuned = finetune(model, task.task, train, dev, out / name, **settings)
    scores = {key: value.mean for key, value in tuned.scores.items()}
    best = load(out / name)
    if name == "MNLI" and (other := find_file(folder, "dev", "mismatched")):
        scores["mismatched_accuracy"] = evaluate(best, "classify", other, skip_bad=True).scores["accuracy"]
    write_submissions(best, task, folder, out, order)
    value = tuned.metric
    half = None if value.half is None else 100 * value.half
    seconds = round(sum(run.seconds for run in tuned.runs), 1)
    result = GlueResult(name, task.metric, 100 * value.mean, half, value.runs, scores, asked, seconds)
    write_json(record, asdict(result))
    return result


def suggested(model: str | Path, task: str) -> dict[str, Any]:
    """What a model's folder suggests for a task: everybert.json says {"glue": {"RTE": {"lr": 0.0004, "epochs": 8}}}."""
    found: dict[str, Any] = read_extras(resolve(model)).get("glue", {}).get(task, {})
    if unknown := set(found) - {f.name for f in fields(Settings)}:
        raise EverybertError(f"{model} suggests {sorted(unknown)[0]!r} for {task}, which is no setting; give --epochs")
    return dict(found)


def glue(
    folder: str | Path,
    model: str | Path,
    out: str | Path = "glue",
    tasks: Sequence[str] | None = None,
    **settings: Any,
) -> tuple[list[GlueResult], list[str]]:
    """Run the tasks present, or those named; returns the results and why tasks were left out. Run again to resume."""
    found = find_tasks(folder)
    known = {_plain(name): name for name in TASKS}
    wanted = [known.get(_plain(name), name) for name in tasks] if tasks else list(found)
    if unknown := [name for name in wanted if name not in found]:
        raise EverybertError(f"{folder} has no {unknown[0]}; it has {', '.join(found)}")
    results: list[GlueResult] = []
    skipped: list[str] = []
    for name in wanted:
        if find_file(found[name], "train") is None and not tasks:
            skipped.append(f"{name}: {found[name]} has no train file")
            continue
        results.append(run_task(name, found[name], model, Path(out), **settings))
    return results, skipped


def table(results: Sequence[GlueResult]) -> list[list[str]]:
    """Our dev scores beside the published test scores, and the mean over these tasks."""
    names = [r.task for r in results]
    rows = [["", *(f"{n} ({TASKS[n].metric})" for n in names), "mean"]]
    ours = [f"{r.score:.1f}" + ("" if r.half is None else f" ± {r.half:.1f}") for r in results]
    rows.append(["this model, dev", *ours, _mean([r.score for r in results])])
    for i, row in enumerate(ROWS):
        values = [TASKS[n].published[i] for n in names]
        rows.append([f"{row}, test", *("–" if v is None else f"{v:.1f}" for v in values), _mean(values)])
    return rows


def _mean(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{sum(known) / len(known):.1f}" if known and len(known) == len(values) else "–"


# ── submissions ──────────────────────────────────────────────────────────────────────────────────────────────


def write_submissions(
    model: Model, task: GlueTask, folder: Path, out: Path, order: Sequence[str] | None = None
) -> list[Path]:
    """Write the tsv files that gluebenchmark.com takes (index, prediction): one per test set; MNLI has three."""
    tests: Mapping[str, Path | None] = {task.name: find_file(folder, "test")}
    if task.name == "MNLI":
        tests = {
            "MNLI-m": find_file(folder, "test", "matched"),
            "MNLI-mm": find_file(folder, "test", "mismatched"),
            "AX": next(iter(sorted(folder.rglob("diagnostic*.tsv"))), None),
        }
    written = []
    for name, file in tests.items():
        if file is not None:
            path = out / "submission" / f"{name}.tsv"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [f"{i}\t{text}" for i, text in enumerate(predictions(model, task, file, order))]
            with atomic_file(path) as draft:
                draft.write_text("\n".join(["index\tprediction", *lines]) + "\n", encoding="utf-8")
            written.append(path)
    return written


def predictions(model: Model, task: GlueTask, file: Path, order: Sequence[str] | None = None) -> list[str]:
    """A test file's predictions as GLUE writes them: labels by its names, STS-B within 0 … 5."""
    rows = read_rows(file, ("text", "label")).rows
    pick = task_class(task.task).input_reader(rows[0], None, str(file))
    found = model.predict(task.task, [pick(row) for row in rows])
    if task.task == "regress":
        return [f"{min(max(value, 0.0), 5.0):.3f}" for value in found]
    theirs = dict(zip(order, task.labels[0])) if order else {}
    return [theirs.get(result.label, result.label) for result in found]
