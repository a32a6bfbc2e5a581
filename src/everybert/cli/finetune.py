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
    Long,
    ModelOptions,
    Name,
    OptionalCount,
    Use,
    bar,
    log_notes,
    pairs_of,
    table,
)
from everybert.cli.options import Fields, Output, command
from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.training.finetune import Tuned

app = typer.Typer()
TaskName = Literal["classify", "regress", "tag", "answer", "choose", "embed"]
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
    seed: Annotated[int, "The first seed."] = 0,
    grid: Annotated[bool, "Try the grid of the BERT paper: lr 5e-5, 3e-5, 2e-5; batch 16, 32; 2 – 4 epochs."] = False,
    quiet: Annotated[bool, "Show no progress."] = False,
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

    more: dict[str, Any] = {"device": model.device} if model.device else {}
    more |= {"lora": LoraConfig(**lora)} if lora else {}
    tuned = run(
        model.model,
        task,
        train,
        dev,
        out,
        seeds=seeds,
        seed=seed,
        grid=grid,
        quiet=quiet,
        options=task_options.given(),
        **data.reading(),
        **asdict(windows),
        **settings,
        **start,
        **more,
    )
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
    for row in tuned.grid:
        yield "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    metric, runs = tuned.task.metric, len(tuned.runs)
    yield from table(
        [
            [f"{'→' if k == metric else ' '} {k}", f"{v.mean:.4f}", "" if v.half is None else f"± {v.half:.4f}"]
            for k, v in tuned.scores.items()
        ],
        right=(1,),
    )
    if runs == 1:
        yield "one run: --seeds 3 or more would give an interval"
    else:
        best = f"{metric} {tuned.runs[0].metric:.4f}"
        yield f"mean ± 95 % interval of {runs} runs; the folder holds the best ({best})"
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
    columns: Annotated[
        list[str] | None,
        "The name of a column: text=body, pair=…, label=…; repeat. Guessed if not given.",
        {"metavar": "ROLE=NAME"},
    ] = None,
) -> Output:
    """Find problems in labelled data, with examples and remedies. Exit code 1 if there is an error.

    Examples:
        everybert doctor classify --data train.tsv --dev dev.tsv -m everybert-small
        everybert doctor tag --data train.conll --json
    """
    from everybert.evaluation.doctor import examine

    found = examine(task, data, dev, model, Data(columns).reading()["columns"], window)

    def lines() -> Iterator[str]:
        yield ", ".join(f"{name}: {rows:,} rows" for name, rows in found.rows.items())
        for name, counts in found.labels.items():
            shown, total = sorted(counts.items(), key=lambda item: -item[1]), sum(counts.values())
            yield f"\nlabels of {name}"
            yield from table([[f"  {k}", f"{n:,}", f"{n / total:.1%}", bar(n / total)] for k, n in shown[:20]], (1, 2))
            if len(shown) > 20:
                yield f"  … and {len(shown) - 20} more labels"
        for name, bars in found.lengths.items():
            yield f"\ntokens of {name} (window {found.window})"
            most = max((n for _, n in bars), default=1)
            yield from table([[f"  ≤ {size}", f"{n:,}", bar(n / most)] for size, n in bars], (0, 1))
        yield f"\n{found}"

    bad = any(finding.severity == "error" for finding in found.findings)
    return Output(found.state(), lines(), 1 if bad else 0)


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

    def lines() -> Iterator[str]:
        for note in found.notes:
            print(f"note: {note}", file=sys.stderr)
        yield f"{task} on {found.examples:,} examples"
        yield from table([[name, f"{value:.4f}"] for name, value in found.scores.items()], (1,))
        scores = ("precision", "recall", "f1")
        rows = [[r["label"], *(f"{r[k]:.4f}" for k in scores), f"{r['examples']:,}"] for r in found.each_label()]
        if rows:
            yield from ("", *table([["label", *scores, "examples"], *rows], range(1, 5)))

    return Output(shown, lines())


# ── benchmarks ───────────────────────────────────────────────────────────────────────────────────────────────


@command(app)
def glue(
    folder: Annotated[Path, "The folder of the GLUE tasks: SST-2, CoLA, MRPC …", {"metavar": "FOLDER"}],
    *,
    out: Annotated[Path, "The folder for models, scores and submission files; run again to resume."] = Path("glue"),
    tasks: Annotated[str | None, "Tasks, separated by commas: SST-2,RTE. If not given: all present."] = None,
    seeds: Annotated[Count, "Train this many times: mean and 95 % interval."] = 1,
    seed: Annotated[int, "The first seed."] = 0,
    quiet: Annotated[bool, "Show no progress."] = False,
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

    def lines() -> Iterator[str]:
        rows = score_table(results)
        yield from table(rows, range(1, len(rows[0])))
        yield "Our scores are on the dev sets, the published ones on the hidden test sets: comparable, not equal."
        if seeds == 1:
            yield "One run each: --seeds 3 or more would give intervals."
        plain = {"model", "seeds", "seed", "window", "device"}
        if any(set(r.settings) - plain - set(settings) for r in results):
            yield f"With the settings that {model.model} suggests for each task: --json prints them."
        if (out / "submission").is_dir():
            yield f"{out / 'submission'}: test predictions, to zip and submit"

    return Output([asdict(result) for result in results], lines())


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
    groups = {"all": {"exact": found.exact, "f1": found.f1, "total": found.total}, **found.groups}
    rows = [[name, f"{g['exact']:.2f}", f"{g['f1']:.2f}", f"{int(g['total']):,}"] for name, g in groups.items()]
    lines = table([["", "exact", "f1", "questions"], *rows], (1, 2, 3))
    lines += [f"{found.missing:,} questions have no prediction and count as wrong"] if found.missing else []
    return Output(asdict(found), lines)


@command(app)
def blimp(
    paths: Annotated[list[Path], "Folders or files of pairs: sentence_good, sentence_bad."],
    *,
    variant: Annotated[
        Literal["token", "word"], "Mask one token at a time, or with it the later pieces of its word."
    ] = "token",
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
    rows = [["phenomenon", "accuracy", "pairs"]]
    for part in found.parts:
        inner = part.parts if paradigms and len(part.parts) > 1 else ()
        named = [(part.name, part), *((f"  {one.name}", one) for one in inner)]
        rows += [[name, f"{one.accuracy:.1%}", f"{one.pairs:,}"] for name, one in named]
    rows.append(["all (mean of paradigms)", f"{found.accuracy:.1%}", f"{found.pairs:,}"])
    return Output(asdict(found) | {"variant": variant}, table(rows, (1, 2)))


@command(app)
def bench(
    model: Annotated[str, "A folder, a bundled model, or a hub id (org/name).", {"metavar": "MODEL"}] = DEFAULT,
    *,
    dtype: Annotated[
        str | None, "fp32, bf16, fp16, int8, or several: fp32,int8. If not given: fp32, or bf16 on a GPU."
    ] = None,
    lengths: Annotated[str | None, "Tokens per text: 16,128. If not given: 8 to 512."] = None,
    seconds: Annotated[float, "Measure for about this long.", {"min": 0.1}] = 20.0,
    against: Annotated[Literal["transformers"] | None, "Also measure this library, in turns."] = None,
    device: Annotated[Name, "cpu or cuda. If not given: a GPU where there is one."] = None,
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
    names = ["tokens_per_s", "texts_per_s", "p50_ms", "p90_ms", "p99_ms"]
    rows = [
        [str(cell["length"]), cell["way"], *("–" if cell[n] is None else f"{cell[n]:,.2f}" for n in names)]
        for cell in found["cells"]
    ]
    sizes_of = [f"{w['name']}: {w['weights_mb']:,.1f} MB, loaded in {w['load_seconds']:.2f} s" for w in found["ways"]]
    where = f"{model} on {found['device']}, {found['threads']} threads, torch {found['torch']}"
    titles = ["tokens", "variant", "tokens/s", "texts/s", "p50 ms", "p90 ms", "p99 ms"]
    lines = [where, *table([titles, *rows], (0, 2, 3, 4, 5, 6)), *sizes_of]
    return Output(found, lines, 130 if found["stopped"] else 0)
