"""`everybert finetune`, `doctor`, `evaluate`, `glue`, `squad`, `blimp`: train and measure."""

import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import everybert
from everybert.cli.common import Count, Long, ModelOptions, OptionalCount, Quiet, Use, pairs_of, report
from everybert.cli.options import Fields, Output, command
from everybert.errors import EverybertError
from everybert.files import write_json
from everybert.training.logs import progress_bar

app = typer.Typer()
TaskName = Literal["classify", "regress", "tag", "answer", "choose", "embed", "rank"]
SETTINGS = "everybert.training.tuning:FinetuneSettings"
ADAPTERS = "Adapters (--mode lora)"
Columns = Annotated[list[str] | None, {"metavar": "ROLE=NAME"}]
Seed = Annotated[int, "The first seed."]
Training = Annotated[dict[str, Any], Fields("", "Training", SETTINGS, "lora start device log_every")]
GlueTraining = Annotated[dict[str, Any], Fields("mode epochs lr batch_size", "Training", SETTINGS)]
Start = Annotated[dict[str, Any], Fields("start", ADAPTERS, SETTINGS)]
Lora = Annotated[dict[str, Any], Fields("rank alpha dropout=lora_dropout", ADAPTERS, "everybert.model.lora:LoraConfig")]


@dataclass(frozen=True)
class DataOptions:
    """Data."""

    columns: Annotated[Columns, "A column: text=body, pair=…, label=…; repeat. Guessed if not given."] = None
    skip_bad: Annotated[bool, "Leave out rows that cannot be used, and list them."] = False

    def reading(self) -> dict[str, Any]:
        """The options as the library takes them."""
        named = dict(pairs_of(self.columns, "--columns", "ROLE=NAME, for example text=body"))
        return {"columns": named or None, "skip_bad": self.skip_bad}


@dataclass(frozen=True)
class TaskSettings:
    """Task."""

    metric: Annotated[str | None, "The score that selects the best epoch."] = None
    class_weights: Annotated[str | None, "balanced, or one number per label: 1,2.5 (classify)."] = None
    labels: Annotated[str | None, "The labels in order: a,b,c (classify, tag)."] = None
    multi: Annotated[bool, "Several labels per text, written a|b (classify)."] = False
    calibrate: Annotated[bool, "Fit a temperature on the dev data (classify)."] = False
    longest: Annotated[int | None, "Tokens of the longest answer (answer)."] = None
    pooling: Annotated[str | None, "mean or cls (embed)."] = None

    def given(self) -> dict[str, Any]:
        """The options that were given, as the task takes them."""
        options: dict[str, Any] = {k: v for k, v in asdict(self).items() if v is not None and v is not False}
        if self.labels:
            options["labels"] = self.labels.split(",")
        return options


@command(app)
def finetune(
    task: Annotated[TaskName, "What to learn: labels, numbers, tags, answers, choices, vectors, or relevance."],
    *,
    train: Annotated[Path, "Training data: csv, tsv, jsonl, parquet, CoNLL, SQuAD …"],
    out: Annotated[Path, "The model folder to write."],
    dev: Annotated[Path | None, "Data to score on. If not given: a tenth of --train."] = None,
    seeds: Annotated[Count, "Train this many times: mean and 95 % interval. The best is kept."] = 1,
    seed: Seed = 0,
    window: Annotated[OptionalCount, "Tokens per window. If not given: as many as the model reads."] = None,
    overlap: Annotated[int | None, "Tokens that neighbouring windows share."] = None,
    long: Annotated[Long, "Read long texts in windows, or cut them."] = "window",
    grid: Annotated[bool, "Try the grid of the BERT paper: lr 5e-5, 3e-5, 2e-5; batch 16, 32; 2 – 4 epochs."] = False,
    overwrite: Annotated[bool, "Replace the model that --out holds."] = False,
    quiet: Quiet = False,
    model: ModelOptions,
    data: DataOptions,
    settings: Training,
    task_options: TaskSettings,
    lora: Lora,
    start: Start,
) -> Output:
    """Fine-tune a model on labelled data. Ctrl-C keeps the best epoch so far."""
    if not quiet:  # columns that were guessed, rows that were left out
        logging.basicConfig(format="note: %(message)s", force=True)
        logging.getLogger("everybert").setLevel(logging.INFO)
    from everybert.model.lora import LoraConfig

    if lora and settings.get("mode") != "lora":
        raise EverybertError("--rank, --alpha and --lora-dropout are settings of an adapter: use --mode lora")
    settings |= start | ({"lora": LoraConfig(**lora)} if lora else {})
    settings |= data.reading() | {"options": task_options.given(), "window": window, "overlap": overlap, "long": long}
    settings |= {"device": model.device, "allow_pickle": model.allow_pickle, "quiet": quiet, "overwrite": overwrite}
    tuned = everybert.finetune(model.model, task, train, dev, out, seeds=seeds, seed=seed, grid=grid, **settings)
    result = {
        "folder": str(tuned.folder),
        "metric": tuned.task.metric,
        "scores": {k: {"mean": v.mean, "half": v.half, "runs": v.runs} for k, v in tuned.scores.items()},
        "seeds": [{"seed": r.seed, "epoch": r.epoch, "scores": r.scores} for r in tuned.runs],
        "grid": list(tuned.grid),
        "finished": tuned.finished,
    }
    return Output(result, code=0 if tuned.finished else 130)


@command(app)
def doctor(
    task: Annotated[TaskName, "The task that the data is for."],
    *,
    data: Annotated[Path, "The training data.", {"also": "--train"}],
    dev: Annotated[Path | None, "The dev data, to search for leaks."] = None,
    model: Annotated[str | None, "The model whose tokenizer and window measure lengths."] = None,
    reading: Annotated[DataOptions, Fields("columns", "Data")],
) -> Output:
    """Find problems in labelled data, with examples and remedies. Exit code 1 if there is an error."""
    diagnosis = everybert.doctor(task, data, dev, model, reading.reading()["columns"])
    shown = {name: getattr(diagnosis, name) for name in ("rows", "labels", "lengths")}
    bad = any(finding.severity == "error" for finding in diagnosis.findings)
    return Output(asdict(diagnosis), [*report(shown), "", str(diagnosis)], 1 if bad else 0)


@command(app)
def evaluate(
    task: Annotated[TaskName, "The task of the model."],
    *,
    data: Annotated[Path, "Labelled data."],
    reading: DataOptions,
    use: Use,
) -> Output:
    """Score a fine-tuned model on labelled data."""
    evaluation = everybert.evaluate(task, use.load(), data, **reading.reading())
    matrix = None if evaluation.confusion is None else evaluation.confusion.tolist()
    shown = {"task": task, "examples": evaluation.examples, **evaluation.scores}
    for note in evaluation.notes:
        print(f"note: {note}", file=sys.stderr)
    text = report({**shown, "each label": evaluation.each_label()})
    return Output({**shown, "labels": evaluation.labels, "confusion": matrix}, text)


# ── benchmarks ───────────────────────────────────────────────────────────────────────────────────────────────


@command(app)
def glue(
    folder: Annotated[Path, "The folder of the GLUE tasks: SST-2, CoLA, MRPC …", {"metavar": "FOLDER"}],
    *,
    out: Annotated[Path, "The folder for models and scores; run again to resume."] = Path("glue"),
    tasks: Annotated[str | None, "Tasks, separated by commas: SST-2,RTE. If not given: all present."] = None,
    seeds: Annotated[Count, "Train this many times: mean and 95 % interval."] = 1,
    seed: Seed = 0,
    quiet: Quiet = False,
    settings: GlueTraining,
    model: ModelOptions,
) -> Output:
    """Fine-tune on the GLUE tasks in a folder, and print the scores beside the published ones.

    The folder of a model may suggest settings for each task. Options of training replace all of them.
    """
    from everybert.evaluation import glue as measure

    settings |= {name: value for name in ("device", "allow_pickle") if (value := getattr(model, name))}
    chosen = [name.strip() for name in tasks.split(",")] if tasks else None
    results, skipped = measure.glue(folder, model.model, out, chosen, seeds=seeds, seed=seed, quiet=quiet, **settings)
    for why in skipped:
        print(f"left out: {why}", file=sys.stderr)
    if not results:
        raise EverybertError(f"{folder} has no task with a train file; there is nothing to run")

    lines = list(report(measure.table(results)))
    lines.append("Our scores are on the dev sets, the published ones on the hidden test sets: comparable, not equal.")
    return Output([asdict(result) for result in results], lines)


@command(app)
def squad(
    data: Annotated[Path, "A SQuAD 1.1 or 2.0 file."],
    *,
    predictions: Annotated[Path | None, "Score these answers instead of those of a model."] = None,
    out: Annotated[Path | None, "Write the answers: the official predictions file."] = None,
    use: Use,
) -> Output:
    """Exact match and F1 as the official scripts compute them, of a model or of a file of predictions."""
    from everybert.evaluation import squad as measure
    from everybert.text.readers import read_squad

    questions = read_squad(data)
    if predictions is not None:
        if out is not None or use != Use():
            raise EverybertError("--predictions are scored as they are: leave out --out, --model and its options")
        answers = measure.read_predictions(predictions)
    else:
        with progress_bar("answering", len(questions)) as tell:
            answers = measure.answer_all(use.load(), questions, tell)
        if out is not None:
            write_json(out, answers)
    return Output(asdict(measure.score(questions, answers)))


@command(app)
def blimp(
    paths: Annotated[list[Path], "Folders or files of pairs: sentence_good, sentence_bad."],
    *,
    limit: Annotated[OptionalCount, "Pairs per paradigm. If not given: all."] = None,
    use: Use,
) -> Output:
    """How often a model finds the grammatical sentence of a pair more likely, by phenomenon; --json has paradigms."""
    from everybert.evaluation import blimp as measure

    pairs = measure.read_pairs(paths, limit)
    with progress_bar("scoring", 2 * sum(map(len, pairs.values()))) as tell:
        outcome = measure.blimp(use.load(), pairs, tell)
    scores = [{"": part.name, "accuracy": part.accuracy, "pairs": part.pairs} for part in (*outcome.parts, outcome)]
    return Output(asdict(outcome), report(scores))
