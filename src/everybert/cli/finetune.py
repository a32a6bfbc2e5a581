"""`everybert finetune`, `everybert evaluate`, `everybert doctor`: a task model from labelled data, and its scores."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from everybert.cli.common import DEFAULT, Device, Dtype, Json, ModelName, examples, print_json, print_table
from everybert.cli.docs import field_docs
from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.training.finetune import Tuned

app = typer.Typer()

TaskName = Annotated[
    Literal["classify", "regress", "tag", "answer", "choose", "embed"],
    typer.Argument(help="What to learn: labels, numbers, tags, answers, choices, or vectors."),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(metavar="ROLE=NAME", help="A column's name: text=body, pair=…, label=…; guessed when not given."),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out rows that cannot be used, and list them.")]
_SETTINGS = field_docs("everybert.training.tuning", "Settings")
_LORA = field_docs("everybert.model.lora", "LoraConfig")
TRAINING, DATA, TASK, LORA = "Training", "Data", "Of some tasks", "Adapters (--mode lora)"


def _setting(name: str, *flags: str, panel: str = TRAINING) -> Any:
    return typer.Option(*flags, help=_SETTINGS[name], rich_help_panel=panel)


def _option(text: str, *flags: str, panel: str = TASK) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel=panel)


@app.command(
    epilog=examples(
        "everybert finetune classify --model everybert-small --train train.tsv --dev dev.tsv --out sentiment",
        "everybert finetune tag --train train.conll --dev dev.conll --out ner --seeds 3",
        "everybert finetune tag --train en-train.conllu --columns label=upos --out tagger",
        "everybert finetune answer --train train-v2.0.json --dev dev-v2.0.json --out squad --mode lora",
        "everybert finetune classify --train train.csv --columns text=body --columns label=topic --out topics --grid",
    )
)
def finetune(
    task: TaskName,
    train: Annotated[Path, typer.Option(help="Training data: csv, tsv, jsonl, parquet, CoNLL, SQuAD …")],
    out: Annotated[Path, typer.Option(help="The model folder to write.")],
    model: ModelName = DEFAULT,
    dev: Annotated[Path | None, typer.Option(help="Data to score on; a tenth of --train when not given.")] = None,
    mode: Annotated[str | None, _setting("mode")] = None,
    epochs: Annotated[int | None, _setting("epochs")] = None,
    lr: Annotated[float | None, _setting("lr")] = None,
    batch_size: Annotated[int | None, _setting("batch_size")] = None,
    seeds: Annotated[int, typer.Option(help="Train so many times: mean and 95 % interval. The best is kept.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    grid: Annotated[
        bool, typer.Option("--grid", help="Try the BERT paper's grid: lr 5e-5, 3e-5, 2e-5; batch 16, 32; 2 – 4 epochs.")
    ] = False,
    accumulate: Annotated[int | None, _setting("accumulate")] = None,
    warmup: Annotated[float | None, _setting("warmup")] = None,
    weight_decay: Annotated[float | None, _setting("weight_decay")] = None,
    clip: Annotated[float | None, _setting("clip")] = None,
    layer_decay: Annotated[float | None, _setting("layer_decay")] = None,
    reinit: Annotated[int | None, _setting("reinit")] = None,
    new_pooler: Annotated[bool, _setting("new_pooler", "--new-pooler")] = False,
    patience: Annotated[int | None, _setting("patience")] = None,
    evaluations: Annotated[int | None, _setting("evaluations")] = None,
    teacher: Annotated[str | None, _setting("teacher")] = None,
    features: Annotated[str | None, _setting("features")] = None,
    pool: Annotated[str | None, _setting("pool")] = None,
    dtype: Annotated[str | None, _setting("dtype")] = None,
    compile: Annotated[bool, _setting("compile", "--compile")] = False,
    columns: Columns = None,
    skip_bad: SkipBad = False,
    window: Annotated[int | None, _option("Tokens of a window; the model's when not given.", panel=DATA)] = None,
    overlap: Annotated[int | None, _option("Tokens that windows of a long text share.", panel=DATA)] = None,
    long: Annotated[Literal["window", "cut"], _option("Long texts: read in windows, or cut.", panel=DATA)] = "window",
    metric: Annotated[str | None, _option("The score that chooses the best epoch.")] = None,
    class_weights: Annotated[
        str | None, _option("balanced, or a number for each label: 1,2.5 (classify, tag).")
    ] = None,
    labels: Annotated[str | None, _option("The labels in their order: a,b,c (classify, tag).")] = None,
    multi: Annotated[bool, _option("Several labels a text, written a|b (classify).", "--multi")] = False,
    calibrate: Annotated[bool, _option("Fit a temperature on the dev data (classify).", "--calibrate")] = False,
    scheme: Annotated[str | None, _option("BIO or BIOES (tag).")] = None,
    decode: Annotated[str | None, _option("constrained or greedy (tag).")] = None,
    pieces: Annotated[str | None, _option("Pieces that learn a word's label: first or all (tag).")] = None,
    longest: Annotated[int | None, _option("Tokens of the longest answer (answer).")] = None,
    pooling: Annotated[str | None, _option("mean or cls (embed).")] = None,
    rank: Annotated[int | None, typer.Option(help=_LORA["rank"], rich_help_panel=LORA)] = None,
    alpha: Annotated[float | None, typer.Option(help=_LORA["alpha"], rich_help_panel=LORA)] = None,
    start: Annotated[str | None, typer.Option(help=_SETTINGS["start"], rich_help_panel=LORA)] = None,
    lora_dropout: Annotated[float | None, typer.Option(help=_LORA["dropout"], rich_help_panel=LORA)] = None,
    device: Device = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on labelled data. Ctrl-C keeps the best epoch so far."""
    _notes(quiet)
    from everybert.model.lora import LoraConfig
    from everybert.training.finetune import finetune as run

    settings = _given(
        mode=mode,
        epochs=epochs,
        lr=lr,
        batch_size=batch_size,
        accumulate=accumulate,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        layer_decay=layer_decay,
        reinit=reinit,
        new_pooler=new_pooler or None,
        patience=patience,
        evaluations=evaluations,
        teacher=teacher,
        features=features,
        pool=pool,
        start=start,
        dtype=dtype,
        device=device,
        compile=compile or None,
    )
    lora = _given(rank=rank, alpha=alpha, dropout=lora_dropout)
    options = _given(
        metric=metric,
        class_weights=_weights(class_weights),
        labels=labels.split(",") if labels else None,
        multi=multi or None,
        calibrate=calibrate or None,
        scheme=scheme,
        decode=decode,
        pieces=pieces,
        longest=longest,
        pooling=pooling,
    )
    tuned = run(
        model,
        task,
        train,
        dev,
        out,
        seeds=seeds,
        seed=seed,
        columns=parse_columns(columns),
        skip_bad=skip_bad,
        window=window,
        overlap=overlap,
        long=long,
        grid=grid,
        options=options,
        quiet=quiet,
        **settings,
        **({"lora": LoraConfig(**lora)} if lora else {}),
    )
    _show(tuned, as_json)
    if not all(run.finished for run in tuned.runs):
        raise typer.Exit(130)


@app.command(
    epilog=examples(
        "everybert evaluate classify --model ./sentiment --data test.tsv",
        "everybert evaluate answer --model ./squad --data dev-v1.1.json --json",
    )
)
def evaluate(
    task: TaskName,
    data: Annotated[Path, typer.Option(help="Labelled data.")],
    model: ModelName = DEFAULT,
    columns: Columns = None,
    skip_bad: SkipBad = False,
    as_json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Score a fine-tuned model on labelled data."""
    from everybert.cli.common import load
    from everybert.evaluation.evaluate import evaluate as run

    found = run(load(model, device, dtype), task, data, columns=parse_columns(columns), skip_bad=skip_bad)
    if as_json:
        matrix = None if found.confusion is None else found.confusion.tolist()
        print_json(
            {"task": task, "examples": found.examples, **found.scores, "labels": found.labels, "confusion": matrix}
        )
        return
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    print(f"{task} on {found.examples:,} examples")
    print_table([[name, f"{value:.4f}"] for name, value in found.scores.items()], right=(1,))
    rows = found.each_label()
    if rows:
        print()
        print_table(
            [
                ["label", "precision", "recall", "f1", "examples"],
                *(
                    [r["label"], *(f"{r[k]:.4f}" for k in ("precision", "recall", "f1")), f"{r['examples']:,}"]
                    for r in rows
                ),
            ],
            right=(1, 2, 3, 4),
        )


@app.command(
    epilog=examples(
        "everybert doctor classify --data train.tsv --dev dev.tsv --model everybert-small",
        "everybert doctor tag --data train.conll --json",
    )
)
def doctor(
    task: TaskName,
    data: Annotated[Path, typer.Option("--data", "--train", help="The training data.")],
    dev: Annotated[Path | None, typer.Option(help="The dev data, to look for leaks.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Whose tokenizer and window to measure lengths by.")
    ] = None,
    columns: Columns = None,
    window: Annotated[int | None, typer.Option(help="Tokens of a window; the model's when not given.")] = None,
    as_json: Json = False,
) -> None:
    """What is wrong with labelled data, with examples and what to do. Exit code 1 where there is an error."""
    from everybert.evaluation.doctor import examine

    found = examine(task, data, dev, model, parse_columns(columns), window)
    if as_json:
        print_json(found.state())
    else:
        print(", ".join(f"{name}: {rows:,} rows" for name, rows in found.rows.items()))
        for name, counts in found.labels.items():
            print(f"\nlabels of {name}")
            shown = sorted(counts.items(), key=lambda item: -item[1])
            total = sum(counts.values())
            print_table(
                [[f"  {k}", f"{n:,}", f"{n / total:.1%}", "█" * round(30 * n / total)] for k, n in shown[:20]],
                right=(1, 2),
            )
            if len(shown) > 20:
                print(f"  … and {len(shown) - 20} more labels")
        for name, bars in found.lengths.items():
            print(f"\ntokens of {name} (window {found.window})")
            most = max((n for _, n in bars), default=1)
            print_table([[f"  ≤ {size}", f"{n:,}", "█" * round(30 * n / most)] for size, n in bars], right=(0, 1))
        print(f"\n{found}")
    if any(finding.severity == "error" for finding in found.findings):
        raise typer.Exit(1)


# ── shared ───────────────────────────────────────────────────────────────────────────────────────────────────


def parse_columns(pairs: list[str] | None) -> dict[str, str] | None:
    """{"text": "body"} of text=body."""
    found = {}
    for pair in pairs or []:
        role, equals, name = pair.partition("=")
        if not (role and equals and name):
            raise EverybertError(f"--columns {pair}: write it as ROLE=NAME, for example text=body")
        found[role] = name
    return found or None


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _weights(text: str | None) -> str | list[float] | None:
    if text is None or text == "balanced":
        return text
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise EverybertError(f"--class-weights {text}: write balanced, or a number for each label: 1,2.5") from None


def _notes(quiet: bool) -> None:
    """Show what was guessed and left out, which the library logs."""
    if not quiet:
        log = logging.getLogger("everybert")
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("note: %(message)s"))
        log.handlers[:] = [handler]
        log.setLevel(logging.INFO)


def _show(tuned: Tuned, as_json: bool) -> None:
    """The scores, with what they are worth."""
    best = tuned.runs[0]
    if as_json:
        print_json(
            {
                "folder": str(tuned.folder),
                "metric": tuned.task.metric,
                "scores": {k: {"mean": v.mean, "half": v.half, "runs": v.runs} for k, v in tuned.scores.items()},
                "seeds": [{"seed": r.seed, "epoch": r.epoch, "scores": r.scores} for r in tuned.runs],
                "grid": list(tuned.grid),
                "finished": all(r.finished for r in tuned.runs),
            }
        )
        return
    for row in tuned.grid:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    runs = len(tuned.runs)
    rows = [
        [f"{'→' if k == tuned.task.metric else ' '} {k}", f"{v.mean:.4f}", _half(v.half)]
        for k, v in tuned.scores.items()
    ]
    print_table(rows, right=(1,))
    if runs == 1:
        print("one run: --seeds 3 or more would give an interval")
    else:
        print(f"mean ± 95 % interval of {runs} runs; the folder holds the best ({tuned.task.metric} {best.metric:.4f})")
    if not all(run.finished for run in tuned.runs):
        print("interrupted: the best epoch so far was kept")
    print(f"{tuned.folder}: the model; its README.md says how it was made")


def _half(half: float | None) -> str:
    return "" if half is None else f"± {half:.4f}"
