"""Dev scores of everybert-small, of what it was before int8, and of its student: one file a run, and a table."""

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
from everybert.training.tuning import Run, Settings

RANK = 8
"""Of the adapters, unless --set rank=… says otherwise; alpha is twice as much."""
TRUNKS = {"int8": "trunk", "fp32": "whole", "student": "taught"}
MODES = ("full", "lora")
MEASURED = ("SST-2", "CoLA", "MRPC", "RTE", "STS-B", "UPOS", "SQuAD")
EPOCHS = {"SST-2": 3, "RTE": 8, "RTE+nli": 4, "UPOS": 4, "SQuAD": 4, "SQuAD+cloze": 4}
FIRST = {"cloze": ("answer", 1), "likeness": ("embed", 1), "nli": ("classify", 2)}
"""Task and epochs of a first step: SET+FIRST is fine-tuned on other labels before, in the same way (`first_step`).
SET+own learns the masked words of its training texts before (`own_text`)."""
STOPPED = "stopped: the run under way does not count; the same command goes on from here"


def scores(args: argparse.Namespace) -> None:
    """Dev scores of the int8 trunk, or of others (--trunks), full and lora; W/scores keeps each run.

    Several processes may share the work, each with sets of its own (--only). Other settings than the library's own
    (--set) are tried beside them; the best count, as in the BERT paper's grid.
    """
    end, kept = time.monotonic() + 60 * args.minutes, args.work / "scores"
    kept.mkdir(exist_ok=True)
    for label in args.trunks.split(","):
        folder = args.work / TRUNKS[label]
        tokenizer = Tokenizer.load(folder)
        for name in args.only.split(",") if args.only else MEASURED:
            for mode in args.modes.split(",") if not name.endswith("+own") else ("full",):
                data = None
                for seed in range(args.first_seed, args.first_seed + args.seeds):
                    if file_of(args, label, name, mode, seed).exists() or time.monotonic() > end:
                        continue
                    given = {"epochs": EPOCHS.get(name, 6)} | chosen(args.set) | ({"epochs": 1} if args.tiny else {})
                    before = first_step(name.partition("+")[2], folder, mode, args, name) if "+" in name else None
                    if before and mode == "lora":
                        given["start"] = str(before)
                    base = before if before and mode != "lora" else folder
                    data = data or open_set(name.partition("+")[0], base, tokenizer, args.tasks)
                    keep(args, label, name, mode, seed, run_once(data, Settings(mode=mode, **given), seed, quiet=True))
    print(f"\n| trunk | set | {' | '.join(MODES)} |\n|---|---|---|---|")
    for (label, name), cells in table(kept).items():
        print(f"| {label} | {name} | {' | '.join(cells)} |")


def file_of(args: argparse.Namespace, label: str, name: str, mode: str, seed: int) -> Path:
    """Where a run's score is kept."""
    path: Path = args.work / "scores" / f"{label} {name} {mode}{tail(args)} {seed}.json"
    return path


def keep(args: argparse.Namespace, label: str, name: str, mode: str, seed: int, run: Run) -> None:
    """Write a run's score, whole or not at all, whenever the run is stopped."""
    if not run.finished:
        raise SystemExit(STOPPED)
    found = {"score": 100 * run.metric, "metric": run.task.metric, "seconds": round(run.seconds, 1)}
    one = file_of(args, label, name, mode, seed)
    one.parent.mkdir(exist_ok=True)
    draft = one.with_suffix(".part")
    draft.write_text(json.dumps(found), "utf-8")
    draft.replace(one)
    print(one.stem, found, flush=True)


def tail(args: argparse.Namespace) -> str:
    """The settings that were given, as part of a name."""
    return f"@{','.join(args.set)}" if args.set else ""


def chosen(given: list[str]) -> dict[str, Any]:
    """["lr=1e-3", "new_pooler=true", "rank=12"] as settings."""
    try:
        settings = {name: json.loads(value) for name, _, value in (one.partition("=") for one in given if one)}
    except ValueError:
        raise SystemExit(f"--set takes NAME=VALUE, such as lr=1e-3, not {', '.join(given)}") from None
    rank = settings.pop("rank", RANK)
    return settings | {"lora": LoraConfig(rank=rank, alpha=2.0 * rank)}


def open_set(name: str, folder: Path, tokenizer: Tokenizer, tasks: Path) -> Any:
    """Train and dev of a measured set, ready for runs."""
    if name == "UPOS":
        named, options = {"label": "upos"}, {"metric": "accuracy"}
        return prepare_data("tag", folder, tokenizer, *treebank(tasks), columns=named, options=options)
    if name == "SQuAD":
        return prepare_data("answer", folder, tokenizer, *squad(tasks))
    task, (train, dev) = GLUE[name], glue_set(name)(tasks)
    options = {"metric": task.metric}
    if order := label_order(task, train):
        options["labels"] = order  # type: ignore[assignment]
    return prepare_data(task.task, folder, tokenizer, train, dev, skip_bad=True, options=options)


def first(args: argparse.Namespace) -> None:
    """Every first step, so that processes which share what follows do not do it twice."""
    for kind in args.only.split(",") if args.only else FIRST:
        for mode in args.modes.split(","):
            for label in args.trunks.split(","):
                if mode == "full" or label == "int8":
                    print(first_step(kind, args.work / TRUNKS[label], mode, args), flush=True)


def first_step(kind: str, folder: Path, mode: str, args: argparse.Namespace, name: str = "") -> Path:
    """W/first: a model or adapter after labels that are many: W/cloze.jsonl, W/likeness.jsonl, or SICK and SNLI."""
    if kind == "own" and mode == "full":
        return own_text(name.partition("+")[0], folder, args)
    if kind not in FIRST:
        raise SystemExit(f"there is no first step {kind!r}; there are {', '.join(FIRST)}")
    (task, epochs), lora = FIRST[kind], chosen(args.set)["lora"]
    out = args.work / "first" / f"{folder.name}-{kind}-{mode}{lora.rank if mode == 'lora' else ''}"
    if not out.exists():
        out.parent.mkdir(exist_ok=True)
        data = entailment(args.tasks) if kind == "nli" else (args.work / f"{kind}.jsonl", None)
        epochs *= 2 if mode == "lora" else 1  # an adapter learns more slowly
        settings: dict[str, Any] = {"epochs": 1 if args.tiny else epochs, "batch_size": 64, "quiet": True}
        whole(finetune(folder, task, *data, out, mode=mode, lora=lora, **settings))
    return out


def own_text(name: str, folder: Path, args: argparse.Namespace) -> Path:
    """The model after the masked words of a set's training texts (own-text.toml beside this file)."""
    work = args.work / "first" / f"{folder.name}-own-{name}"
    if not (work / "run" / "model").exists():
        work.mkdir(parents=True, exist_ok=True)
        inputs = Classify.read(glue_set(name)(args.tasks)[0], None, True).inputs
        texts = {text: None for x in inputs for text in ((x,) if isinstance(x, str) else x)}
        (work / "texts.txt").write_text("\n\n".join(texts) + "\n", "utf-8")
        build_corpus(work / "texts.txt", folder, work / "corpus", fresh=True)
        more = {"steps": 3, "batch__tokens": 1024, "batch__pack": 1024, "run__workers": 0} if args.tiny else {}
        recipe = Path(__file__).parent / "own-text.toml"
        if not pretrain(recipe, work / "corpus", work / "run", model__init=str(folder), **more).finished:
            raise SystemExit(STOPPED)
    return Path(work / "run" / "model")


def whole(tuned: Tuned) -> Tuned:
    """What was trained to its end; of a run that was stopped nothing is kept, as if it had not been begun."""
    if not all(run.finished for run in tuned.runs):
        shutil.rmtree(tuned.folder, ignore_errors=True)
        raise SystemExit(STOPPED)
    return tuned


Runs = dict[str, list[float]]
"""Scores of the seeds by the settings they had, as --set wrote them."""


def kept_runs(folder: Path) -> dict[tuple[str, str], dict[str, Runs]]:
    """{(trunk, set): {full or lora: runs}}."""
    runs: dict[tuple[str, str], dict[str, Runs]] = {}
    for path in sorted(folder.glob("*.json")):
        label, name, mode, _ = path.stem.split()
        kind, _, given = mode.partition("@")
        settings = runs.setdefault((label, name), {}).setdefault(kind, {})
        settings.setdefault(given, []).append(json.loads(path.read_text("utf-8"))["score"])
    return runs


def best(runs: Runs) -> tuple[str, Interval]:
    """The best of the settings with the most runs."""
    found = {given: interval(values) for given, values in runs.items()}
    return max(found.items(), key=lambda item: (item[1].runs, item[1].mean))


def table(folder: Path) -> dict[tuple[str, str], list[str]]:
    """{(trunk, set): cells of full and lora}."""
    return {key: [cell(modes.get(kind, {})) for kind in MODES] for key, modes in kept_runs(folder).items()}


def cell(runs: Runs) -> str:
    """The mean over the seeds of the best settings, and which these are."""
    if not runs:
        return "–"
    given, found = best(runs)
    return f"{found}" + (f", {given.replace(',', ', ')}" if given else "")


def suggestions(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings that were best for full fine-tuning of the shipped trunk, for `everybert glue`."""
    found = {}
    for (label, name), modes in kept_runs(folder).items():
        if label == "int8" and name in GLUE and "full" in modes:
            settings = chosen(best(modes["full"])[0].split(","))
            found[name] = {"epochs": EPOCHS.get(name, 6)} | {k: v for k, v in settings.items() if k != "lora"}
    return found
