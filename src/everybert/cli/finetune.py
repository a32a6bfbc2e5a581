"""`everybert finetune`, `doctor`, `evaluate`, `bench`, `glue`, `squad`, `blimp`: train and measure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from everybert.cli.common import (
    DEFAULT,
    Count,
    Device,
    Long,
    ModelOptions,
    OptionalCount,
    Quiet,
    Seed,
    Source,
    Use,
    histogram,
    log_notes,
    pairs_of,
    report,
    table,
)
from everybert.cli.options import Fields, Output, command
from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.training.finetune import Tuned

app = typer.Typer()
TaskName = Literal["classify", "regress", "tag", "answer", "choose", "embed"]
Variant = Literal["token", "word"]
SETTINGS = "everybert.training.tuning:Settings"
ADAPTERS = "Adapters (--mode lora)"
Training = Annotated[dict[str, Any], Fields("", "Training", SETTINGS, "lora start device log_every")]
GlueTraining = Annotated[dict[str, Any], Fields("mode epochs lr batch_size", "Training", SETTINGS)]
Start = Annotated[dict[str, Any], Fields("start", ADAPTERS, SETTINGS)]
Lora = Annotated[dict[str, Any], Fields("rank alpha dropout=lora_dropout", ADAPTERS, "everybert.model.lora:LoraConfig")]


@dataclass(frozen=True)
class Data:
    """Data."""

    columns: Annotated[list[str] | None, {"metavar": "ROLE=NAME"}] = None
    """The name of a column: text=body, pair=…, label=…; repeat. Guessed if not given."""
    skip_bad: bool = False
    """Leave out rows that cannot be used, and list them."""

    def reading(self) -> dict[str, Any]:
        """The options as the library takes them."""
        named = dict(pairs_of(self.columns, "--columns", "ROLE=NAME, for example text=body"))
        return {"columns": named or None, "skip_bad": self.skip_bad}


@dataclass(frozen=True)
class Windows:
    """Long texts."""

    window: OptionalCount = None
    """Tokens per window. If not given: as many as the model reads."""
    overlap: int | None = None
    """Tokens that neighbouring windows share."""
    long: Long = "window"
    """Read long texts in windows, or cut them."""


@dataclass(frozen=True)
class TaskOptions:
    """Task."""

    metric: str | None = None
    """The score that selects the best epoch."""
    class_weights: str | None = None
    """balanced, or one number per label: 1,2.5 (classify, tag)."""
    labels: str | None = None
    """The labels in order: a,b,c (classify, tag)."""
    multi: bool = False
    """Several labels per text, written a|b (classify)."""
    calibrate: bool = False
    """Fit a temperature on the dev data (classify)."""
    scheme: str | None = None
    """BIO or BIOES (tag)."""
    decode: str | None = None
    """constrained or greedy (tag)."""
    pieces: str | None = None
    """Pieces of a word that learn its label: first or all (tag)."""
    longest: int | None = None
    """Tokens of the longest answer (answer)."""
    pooling: str | None = None
    """mean or cls (embed)."""

    def given(self) -> dict[str, Any]:
        """The options that were given, as the task takes them."""
        found: dict[str, Any] = {name: value for name, value in asdict(self).items() if value}
        if self.labels:
            found["labels"] = self.labels.split(",")
        if self.class_weights and self.class_weights != "balanced":
            try:
                found["class_weights"] = [float(part) for part in self.class_weights.split(",")]
            except ValueError:
                wrong = f"--class-weights {self.class_weights}: write balanced, or a number for each label: 1,2.5"
                raise EverybertError(wrong) from None
        return found


@command(app)
def finetune(
    task: Annotated[TaskName, "What to learn: labels, numbers, tags, answers, choices, or vectors."],
    *,
    train: Annotated[Path, "Training data: csv, tsv, jsonl, parquet, CoNLL, SQuAD …"],
    out: Annotated[Path, "The model folder to write."],
    dev: Annotated[Path | None, "Data to score on. If not given: a tenth of --train."] = None,
    seeds: Annotated[Count, "Train this many times: mean and 95 % interval. The best is kept."] = 1,
    seed: Seed = 0,
    grid: Annotated[bool, "Try the grid of the BERT paper: lr 5e-5, 3e-5, 2e-5; batch 16, 32; 2 – 4 epochs."] = False,
    quiet: Quiet = False,
    model: ModelOptions,
    data: Data,
    windows: Windows,
    settings: Training,
    task_options: TaskOptions,
    lora: Lora,
    start: Start,
) -> Output:
    """Fine-tune a model on labelled data. Ctrl-C keeps the best epoch so far.

    Examples:
        everybert finetune classify --train train.tsv --dev dev.tsv --out sentiment
        everybert finetune tag --train train.conll --out ner --seeds 3
        everybert finetune tag --train en.conllu --columns label=upos --out tagger
        everybert finetune answer --train train-v2.0.json --out squad --mode lora
        everybert finetune classify --train a.csv --columns text=body --out a --grid
    """
    log_notes(quiet)
    from everybert.model.lora import LoraConfig
    from everybert.training.finetune import finetune as run

    settings |= start | data.reading() | asdict(windows) | {"options": task_options.given(), "grid": grid}
    settings |= {"device": model.device} if model.device else {}
    settings |= {"lora": LoraConfig(**lora)} if lora else {}
    tuned = run(model.model, task, train, dev, out, seeds=seeds, seed=seed, quiet=quiet, **settings)
    data_out = {
        "folder": str(tuned.folder),
        "metric": tuned.task.metric,
        "scores": {k: {"mean": v.mean, "half": v.half, "runs": v.runs} for k, v in tuned.scores.items()},
        "seeds": [{"seed": r.seed, "epoch": r.epoch, "scores": r.scores} for r in tuned.runs],
        "grid": list(tuned.grid),
        "finished": all(r.finished for r in tuned.runs),
    }
    return Output(data_out, _tuned(tuned), 0 if data_out["finished"] else 130)


def _tuned(tuned: Tuned) -> Iterator[str]:
    """The scores and where the model is."""
    metric, runs = tuned.task.metric, len(tuned.runs)
    scores = {f"{'→' if k == metric else ' '} {k}": {"mean": v.mean, "±": v.half} for k, v in tuned.scores.items()}
    yield from (*report(tuned.grid), *report(scores))
    if runs == 1:
        yield "one run: --seeds 3 or more would give an interval"
    else:
        yield f"mean ± 95 % interval of {runs} runs; the folder holds the best ({metric} {tuned.runs[0].metric:.4f})"
    if not all(run.finished for run in tuned.runs):
        yield "interrupted: the best epoch so far was kept"
    yield f"{tuned.folder}: the model; its README.md says how it was made"


@command(app)
def doctor(
    task: Annotated[TaskName, "The task that the data is for."],
    *,
    data: Annotated[Path, "The training data.", {"also": "--train"}],
    dev: Annotated[Path | None, "The dev data, to search for leaks."] = None,
    model: Annotated[str | None, "The model whose tokenizer and window measure lengths."] = None,
    window: Annotated[OptionalCount, "Tokens per window. If not given: as many as the model reads."] = None,
    reading: Annotated[Data, Fields("columns", "Data")],
) -> Output:
    """Find problems in labelled data, with examples and remedies. Exit code 1 if there is an error.

    Examples:
        everybert doctor classify --data train.tsv --dev dev.tsv -m everybert-small
        everybert doctor tag --data train.conll --json
    """
    from everybert.evaluation.doctor import examine

    found = examine(task, data, dev, model, reading.reading()["columns"], window)

    lines = [", ".join(f"{name}: {rows:,} rows" for name, rows in found.rows.items())]
    for name, counts in found.labels.items():
        lines += histogram(f"labels of {name}", dict(sorted(counts.items(), key=lambda item: -item[1])))
    for name, bars in found.lengths.items():
        lines += histogram(f"tokens of {name} (window {found.window})", {f"≤ {size}": n for size, n in bars})
    bad = any(finding.severity == "error" for finding in found.findings)
    return Output(found.state(), [*lines, f"\n{found}"], 1 if bad else 0)


@command(app)
def evaluate(
    task: Annotated[TaskName, "The task of the model."],
    *,
    data: Annotated[Path, "Labelled data."],
    reading: Data,
    use: Use,
) -> Output:
    """Score a fine-tuned model on labelled data.

    Examples:
        everybert evaluate classify --model ./sentiment --data test.tsv
        everybert evaluate answer --model ./squad --data dev-v1.1.json --json
    """
    from everybert.evaluation.evaluate import evaluate as run

    found = run(use.load(), task, data, **reading.reading())
    matrix = None if found.confusion is None else found.confusion.tolist()
    shown = {"task": task, "examples": found.examples, **found.scores, "labels": found.labels, "confusion": matrix}

    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    lines = [f"{task} on {found.examples:,} examples", *report(found.scores)]
    return Output(shown, [*lines, *(["", *report(found.each_label())] if found.labels else [])])


# ── benchmarks ───────────────────────────────────────────────────────────────────────────────────────────────


@command(app)
def glue(
    folder: Annotated[Path, "The folder of the GLUE tasks: SST-2, CoLA, MRPC …", {"metavar": "FOLDER"}],
    *,
    out: Annotated[Path, "The folder for models, scores and submission files; run again to resume."] = Path("glue"),
    tasks: Annotated[str | None, "Tasks, separated by commas: SST-2,RTE. If not given: all present."] = None,
    seeds: Annotated[Count, "Train this many times: mean and 95 % interval."] = 1,
    seed: Seed = 0,
    quiet: Quiet = False,
    settings: GlueTraining,
    model: ModelOptions,
) -> Output:
    """Fine-tune on the GLUE tasks in a folder; print scores beside the published ones; write files to submit.

    The folder of a model may suggest settings for each task. Options of training replace all of them.

    Examples:
        everybert glue glue_data --model everybert-small
        everybert glue glue_data -m ./my-bert --tasks SST-2,RTE --seeds 3 --mode lora
    """
    from everybert.evaluation.glue import glue as run
    from everybert.evaluation.glue import table as score_table

    settings |= {"device": model.device} if model.device else {}
    chosen = [name.strip() for name in tasks.split(",")] if tasks else None
    results, skipped = run(folder, model.model, out, chosen, seeds=seeds, seed=seed, quiet=quiet, **settings)
    for why in skipped:
        print(f"left out: {why}", file=sys.stderr)
    if not results:
        raise EverybertError(f"{folder} has no task with a train file; there is nothing to run")

    rows = score_table(results)
    lines = table(rows, range(1, len(rows[0])))
    lines.append("Our scores are on the dev sets, the published ones on the hidden test sets: comparable, not equal.")
    if (out / "submission").is_dir():
        lines.append(f"{out / 'submission'}: test predictions, to zip and submit")
    return Output([asdict(result) for result in results], lines)


@command(app)
def squad(
    data: Annotated[Path, "A SQuAD 1.1 or 2.0 file."],
    *,
    predictions: Annotated[Path | None, "Score these answers instead of those of a model."] = None,
    out: Annotated[Path | None, "Write the answers: the official predictions file."] = None,
    use: Use,
) -> Output:
    """Exact match and F1 as the official scripts compute them, of a model or of a file of predictions.

    Examples:
        everybert squad dev-v1.1.json --model ./squad
        everybert squad dev-v2.0.json --model ./squad2 --out predictions.json
        everybert squad dev-v1.1.json --predictions predictions.json
    """
    from everybert.evaluation import squad as measure
    from everybert.files import write_json
    from everybert.training.logs import progress_bar

    questions = measure.read_questions(data)
    if predictions is not None:
        answers = measure.read_predictions(predictions)
    else:
        with progress_bar("answering", len(questions)) as tell:
            answers, gaps = measure.answer_all(use.load(), questions, tell)
        if out is not None:
            write_json(out, answers)
            write_json(out.with_name(f"{out.stem}-null-odds.json"), gaps)
    found = measure.score(questions, answers)
    return Output(asdict(found))


@command(app)
def blimp(
    paths: Annotated[list[Path], "Folders or files of pairs: sentence_good, sentence_bad."],
    *,
    variant: Annotated[Variant, "Mask one token at a time, or with it the later pieces of its word."] = "token",
    limit: Annotated[OptionalCount, "Pairs per paradigm. If not given: all."] = None,
    paradigms: Annotated[bool, "Print every paradigm, not only phenomena."] = False,
    use: Use,
) -> Output:
    """How often a model finds the grammatical sentence of a pair more likely than the other.

    Examples:
        everybert blimp blimp/data --model everybert-small
        everybert blimp anaphor_number_agreement.jsonl --variant word --paradigms
    """
    from everybert.evaluation.blimp import blimp as run
    from everybert.evaluation.blimp import read_pairs
    from everybert.training.logs import progress_bar

    pairs = read_pairs(paths, limit)
    with progress_bar("scoring", 2 * sum(len(p.good) for p in pairs)) as tell:
        found = run(use.load(), pairs, variant, tell)
    scores: dict[str, Any] = {}
    for part in found.parts:
        inner = part.parts if paradigms and len(part.parts) > 1 else ()
        scores |= {part.name: part} | {f"  {one.name}": one for one in inner}
    scores["all (mean of paradigms)"] = found
    lines = report({name: {"accuracy": one.accuracy, "pairs": one.pairs} for name, one in scores.items()})
    return Output(asdict(found) | {"variant": variant}, lines)


@command(app)
def bench(
    model: Source = DEFAULT,
    *,
    dtype: Annotated[
        str | None, "fp32, bf16, fp16, int8; several with commas. If not given: fp32, bf16 on a GPU."
    ] = None,
    lengths: Annotated[str | None, "Tokens per text: 16,128. If not given: 8 to 512."] = None,
    seconds: Annotated[float, "Measure for about this long.", {"min": 0.1}] = 20.0,
    against: Annotated[Literal["transformers"] | None, "Also measure this library, in turns."] = None,
    device: Device = None,
) -> Output:
    """Measure throughput and latency by length on this machine. Ctrl-C ends it early.

    Examples:
        everybert bench ./my-model --dtype fp32,int8
        everybert bench ./my-model --against transformers --lengths 16,128
    """
    from everybert.evaluation.bench import bench as run
    from everybert.training.logs import progress_bar

    try:
        sizes = [int(part) for part in lengths.split(",")] if lengths else None
    except ValueError:
        raise EverybertError(f"--lengths takes whole numbers with commas between, not {lengths!r}") from None
    with progress_bar("measuring", 1) as tell:
        found = run(model, dtype.split(",") if dtype else None, sizes, device, against, seconds, tell)
    return Output(found, code=130 if found["stopped"] else 0)
