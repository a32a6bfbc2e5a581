"""Dev scores of everybert-small, of its fp32 version and of its student: one file per run, and a table."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from small_sets import entailment, glue_set, squad, treebank

from everybert.corpus.build import build_corpus
from everybert.evaluation.glue import TASKS as GLUE
from everybert.evaluation.glue import label_order
from everybert.model.lora import LoraConfig
from everybert.tasks import Classify
from everybert.tasks.metrics import Interval, interval
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import Tuned, finetune, prepare_data, run_once
from everybert.training.pretrain import pretrain
from everybert.training.tuning import FinetuneSettings, Run

RANK = 8
"""Default rank of the adapters (--set rank=…); alpha is twice the rank."""
MODELS = {"int8": "int8", "fp32": "fp32", "student": "distilled"}
"""Folder of each model below W."""
MODES = ("full", "lora")
MEASURED = ("SST-2", "CoLA", "MRPC", "RTE", "STS-B", "UPOS", "SQuAD")
EPOCHS = {"SST-2": 3, "RTE": 8, "RTE+nli": 4, "UPOS": 4, "SQuAD": 4, "SQuAD+cloze": 4}
INTERMEDIATE = {"cloze": ("answer", 1), "similarity": ("embed", 1), "nli": ("classify", 2)}
"""Task and epochs of intermediate training. A name SET+KIND means: first trained on KIND, then fine-tuned on SET
(`intermediate_model`). SET+own means: first pre-trained on the texts of the training set (`own_text`)."""
STOPPED = "interrupted: the current run is discarded; run the same command again to continue"


def scores(args: argparse.Namespace) -> None:
    """Dev scores of the int8 model or of others (--models), full and lora. W/scores has one file per run.

    Several processes can share the work, each with other sets (--only). Other settings (--set) are tried in addition
    to the default ones, and the best count, as in the grid search of the BERT paper.
    """
    end, kept = time.monotonic() + 60 * args.minutes, args.work / "scores"
    kept.mkdir(exist_ok=True)
    for label in args.models.split(","):
        folder = args.work / MODELS[label]
        tokenizer = Tokenizer.load(folder)
        for name in args.only.split(",") if args.only else MEASURED:
            for mode in args.modes.split(",") if not name.endswith("+own") else ("full",):
                data = None
                for seed in range(args.first_seed, args.first_seed + args.seeds):
                    if score_file(args, label, name, mode, seed).exists() or time.monotonic() > end:
                        continue
                    settings = {"epochs": EPOCHS.get(name, 6)} | parse_settings(args.set)
                    settings |= {"epochs": 1} if args.tiny else {}
                    kind = name.partition("+")[2]
                    before = intermediate_model(kind, folder, mode, args, name) if kind else None
                    if before and mode == "lora":
                        settings = start_from(settings, before)
                    base = before if before and mode != "lora" else folder
                    data = data or open_set(name.partition("+")[0], base, tokenizer, args.tasks)
                    run = run_once(data, FinetuneSettings(mode=mode, **settings), seed, quiet=True)
                    save_score(args, label, name, mode, seed, run)
    print(f"\n| model | set | {' | '.join(MODES)} |\n|---|---|---|---|")
    for (label, name), cells in table(kept).items():
        print(f"| {label} | {name} | {' | '.join(cells)} |")


def score_file(args: argparse.Namespace, label: str, name: str, mode: str, seed: int) -> Path:
    """The file with the score of a run."""
    path: Path = args.work / "scores" / f"{label} {name} {mode}{settings_suffix(args)} {seed}.json"
    return path


def save_score(args: argparse.Namespace, label: str, name: str, mode: str, seed: int, run: Run) -> None:
    """Write the score of a finished run, atomically."""
    if not run.finished:
        raise SystemExit(STOPPED)
    found = {"score": 100 * run.metric, "metric": run.task.metric, "seconds": round(run.seconds, 1)}
    out = score_file(args, label, name, mode, seed)
    out.parent.mkdir(exist_ok=True)
    draft = out.with_suffix(".part")
    draft.write_text(json.dumps(found), "utf-8")
    draft.replace(out)
    print(out.stem, found, flush=True)


def settings_suffix(args: argparse.Namespace) -> str:
    """The settings of --set as part of a file name."""
    return f"@{','.join(args.set)}" if args.set else ""


def parse_settings(given: list[str]) -> dict[str, Any]:
    """["lr=1e-3", "new_pooler=true", "rank=12"] as settings."""
    try:
        settings = {name: json.loads(value) for name, _, value in (one.partition("=") for one in given if one)}
    except ValueError:
        raise SystemExit(f"--set takes NAME=VALUE, such as lr=1e-3, not {', '.join(given)}") from None
    rank = settings.pop("rank", RANK)
    return settings | {"lora": LoraConfig(rank=rank, alpha=2.0 * rank)}


def start_from(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Settings for continuing from an adapter, which has the rank that it has."""
    return {name: value for name, value in settings.items() if name != "lora"} | {"start": str(folder)}


def open_set(name: str, folder: Path, tokenizer: Tokenizer, tasks: Path) -> Any:
    """Train and dev data of a set, prepared for training runs."""
    if name == "UPOS":
        columns, options = {"label": "upos"}, {"metric": "accuracy"}
        return prepare_data("tag", folder, tokenizer, *treebank(tasks), columns=columns, options=options)
    if name == "SQuAD":
        return prepare_data("answer", folder, tokenizer, *squad(tasks))
    task, (train, dev) = GLUE[name], glue_set(name)(tasks)
    options = {"metric": task.metric}
    if order := label_order(task, train):
        options["labels"] = order  # type: ignore[assignment]
    return prepare_data(task.task, folder, tokenizer, train, dev, skip_bad=True, options=options)


def intermediate(args: argparse.Namespace) -> None:
    """Run all intermediate training, so that processes that share the later steps do not repeat it."""
    for kind in args.only.split(",") if args.only else INTERMEDIATE:
        for mode in args.modes.split(","):
            for label in args.models.split(","):
                if mode == "full" or label == "int8":
                    print(intermediate_model(kind, args.work / MODELS[label], mode, args), flush=True)


def intermediate_model(kind: str, folder: Path, mode: str, args: argparse.Namespace, name: str = "") -> Path:
    """The model or adapter in W/intermediate: trained on W/cloze.jsonl, W/similarity.jsonl, or SICK and SNLI."""
    if kind == "own" and mode == "full":
        return own_text(name.partition("+")[0], folder, args)
    if kind not in INTERMEDIATE:
        raise SystemExit(f"unknown intermediate training {kind!r}; known: {', '.join(INTERMEDIATE)}")
    (task, epochs), lora = INTERMEDIATE[kind], parse_settings(args.set)["lora"]
    out = args.work / "intermediate" / f"{folder.name}-{kind}-{mode}{lora.rank if mode == 'lora' else ''}"
    if not out.exists():
        out.parent.mkdir(exist_ok=True)
        data = entailment(args.tasks) if kind == "nli" else (args.work / f"{kind}.jsonl", None)
        epochs *= 2 if mode == "lora" else 1  # an adapter learns more slowly
        settings: dict[str, Any] = {"epochs": 1 if args.tiny else epochs, "batch_size": 64, "quiet": True}
        require_finished(finetune(folder, task, *data, out, mode=mode, lora=lora, **settings))
    return out


def own_text(name: str, folder: Path, args: argparse.Namespace) -> Path:
    """The model after masked language modelling on the training texts of a set (own-text.toml)."""
    work = args.work / "intermediate" / f"{folder.name}-own-{name}"
    if not (work / "run" / "model").exists():
        work.mkdir(parents=True, exist_ok=True)
        inputs = Classify.read(glue_set(name)(args.tasks)[0], None, True).inputs
        texts = {text: None for x in inputs for text in ((x,) if isinstance(x, str) else x)}
        (work / "texts.txt").write_text("\n\n".join(texts) + "\n", "utf-8")
        build_corpus(work / "texts.txt", folder, work / "corpus", fresh=True)
        overrides = {"steps": 3, "batch__tokens": 1024, "batch__pack": 1024, "run__workers": 0} if args.tiny else {}
        recipe = Path(__file__).parent / "own-text.toml"
        if not pretrain(recipe, work / "corpus", work / "run", model__init=str(folder), **overrides).finished:
            raise SystemExit(STOPPED)
    return Path(work / "run" / "model")


def require_finished(tuned: Tuned) -> Tuned:
    """Return the result if all runs finished. Otherwise remove its folder and exit."""
    if not all(run.finished for run in tuned.runs):
        shutil.rmtree(tuned.folder, ignore_errors=True)
        raise SystemExit(STOPPED)
    return tuned


Runs = dict[str, list[float]]
"""{settings as --set gives them: scores, one per seed}."""


def kept_runs(folder: Path) -> dict[tuple[str, str], dict[str, Runs]]:
    """{(model, set): {full or lora: runs}}."""
    runs: dict[tuple[str, str], dict[str, Runs]] = {}
    for path in sorted(folder.glob("*.json")):
        label, name, mode, _ = path.stem.split()
        kind, _, given = mode.partition("@")
        settings = runs.setdefault((label, name), {}).setdefault(kind, {})
        settings.setdefault(given, []).append(json.loads(path.read_text("utf-8"))["score"])
    return runs


def best(runs: Runs) -> tuple[str, Interval]:
    """The best settings among those with the most runs."""
    found = {given: interval(values) for given, values in runs.items()}
    return max(found.items(), key=lambda item: (item[1].runs, item[1].mean))


def table(folder: Path) -> dict[tuple[str, str], list[str]]:
    """{(model, set): cells of full and lora}."""
    return {key: [cell(modes.get(kind, {})) for kind in MODES] for key, modes in kept_runs(folder).items()}


def cell(runs: Runs) -> str:
    """The mean over the seeds of the best settings, and these settings."""
    if not runs:
        return "–"
    given, found = best(runs)
    return f"{found}" + (f", {given.replace(',', ', ')}" if given else "")


def suggestions(folder: Path) -> dict[str, dict[str, Any]]:
    """The best settings of full fine-tuning of the int8 model, which `everybert glue` uses."""
    found = {}
    for (label, name), modes in kept_runs(folder).items():
        if label == "int8" and name in GLUE and "full" in modes:
            settings = parse_settings(best(modes["full"])[0].split(","))
            found[name] = {"epochs": EPOCHS.get(name, 6)} | {k: v for k, v in settings.items() if k != "lora"}
    return found
