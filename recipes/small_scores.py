"""Dev scores of everybert-small, of what it was before int8, and of its student: one file a run, and a table."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from small_sets import entailment, glue_set, squad, treebank

from everybert.evaluation.glue import TASKS as GLUE
from everybert.evaluation.glue import label_order
from everybert.model.adapters import LoraConfig
from everybert.tasks.metrics import Interval, interval
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import Tuned, finetune, prepare_data, run_once
from everybert.training.tuning import Settings

LORA = LoraConfig(rank=8, alpha=16.0)
TRUNKS = {"int8": "trunk", "fp32": "whole", "student": "taught"}
MODES = ("full", "lora")
MEASURED = ("SST-2", "CoLA", "MRPC", "RTE", "STS-B", "UPOS", "SQuAD")
EPOCHS = {"SST-2": 3, "RTE": 8, "RTE+nli": 4, "UPOS": 4, "SQuAD": 4, "SQuAD+cloze": 4}
FIRST = {"cloze": 1, "nli": 2}
"""Epochs of a first step: SET+FIRST is fine-tuned in full on other labels before (`first_step`)."""
STOPPED = "stopped: the run under way does not count; the same command goes on from here"


def scores(args: argparse.Namespace) -> None:
    """Dev scores of the int8 trunk, or of others (--trunks), full and lora; W/scores keeps each run.

    Several processes may share the work, each with sets of its own (--only). Other settings than the library's own
    (--set) are tried beside them; the best count, as in the BERT paper's grid.
    """
    end, kept = time.monotonic() + 60 * args.minutes, args.work / "scores"
    kept.mkdir(exist_ok=True)
    tail = f"@{','.join(args.set)}" if args.set else ""
    for label in args.trunks.split(","):
        folder = args.work / TRUNKS[label]
        tokenizer = Tokenizer.load(folder)
        for name in args.only.split(",") if args.only else MEASURED:
            data = None
            for mode in args.modes.split(","):
                for seed in range(args.first_seed, args.first_seed + args.seeds):
                    one = kept / f"{label} {name} {mode}{tail} {seed}.json"
                    if one.exists() or time.monotonic() > end:
                        continue
                    data = data or open_set(name, folder, tokenizer, args)
                    given = {"epochs": EPOCHS.get(name, 6)} | chosen(args.set) | ({"epochs": 1} if args.tiny else {})
                    run = run_once(data, Settings(mode=mode, lora=LORA, **given), seed, quiet=True)
                    if not run.finished:
                        raise SystemExit(STOPPED)
                    found = {"score": 100 * run.metric, "metric": run.task.metric, "seconds": round(run.seconds, 1)}
                    draft = one.with_suffix(".part")  # whole or absent, whenever the run is stopped
                    draft.write_text(json.dumps(found), "utf-8")
                    draft.replace(one)
                    print(one.stem, found, flush=True)
    print(f"\n| trunk | set | {' | '.join(MODES)} |\n|---|---|---|---|")
    for (label, name), cells in table(kept).items():
        print(f"| {label} | {name} | {' | '.join(cells)} |")


def chosen(given: list[str]) -> dict[str, Any]:
    """["lr=1e-3", "new_pooler=true"] as settings."""
    try:
        return {name: json.loads(value) for name, _, value in (one.partition("=") for one in given)}
    except ValueError:
        raise SystemExit(f"--set takes NAME=VALUE, such as lr=1e-3, not {', '.join(given)}") from None


def open_set(name: str, folder: Path, tokenizer: Tokenizer, args: argparse.Namespace) -> Any:
    """Train and dev of a measured set, ready for runs."""
    name, _, first = name.partition("+")
    if first and first not in FIRST:
        raise SystemExit(f"there is no first step {first!r}; there are {', '.join(FIRST)}")
    folder, tasks = first_step(first, folder, args) if first else folder, args.tasks
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


def first_step(first: str, folder: Path, args: argparse.Namespace) -> Path:
    """The model after labels that are many: questions cut from text (W/cloze.jsonl), or entailment of SICK and SNLI."""
    out = args.work / "first" / f"{folder.name}-{first}"
    if not out.exists():
        out.parent.mkdir(exist_ok=True)
        settings: dict[str, Any] = {"epochs": 1 if args.tiny else FIRST[first], "batch_size": 64, "quiet": True}
        if first == "cloze":
            whole(finetune(folder, "answer", args.work / "cloze.jsonl", None, out, **settings))
        else:
            whole(finetune(folder, "classify", *entailment(args.tasks), out, **settings))
    return out


def whole(tuned: Tuned) -> Tuned:
    """What was trained to its end; of a run that was stopped nothing is kept, as if it had not been begun."""
    if not all(run.finished for run in tuned.runs):
        shutil.rmtree(tuned.folder, ignore_errors=True)
        raise SystemExit(STOPPED)
    return tuned


def table(folder: Path) -> dict[tuple[str, str], list[str]]:
    """{(trunk, set): cells of full and lora}: means over the seeds, with the best settings of those run most often."""
    runs: dict[tuple[str, str], dict[str, dict[str, list[float]]]] = {}
    for path in sorted(folder.glob("*.json")):
        label, name, mode, _ = path.stem.split()
        kind, _, given = mode.partition("@")
        settings = runs.setdefault((label, name), {}).setdefault(kind, {})
        settings.setdefault(given, []).append(json.loads(path.read_text("utf-8"))["score"])
    return {key: [cell(modes.get(kind, {})) for kind in MODES] for key, modes in runs.items()}


def cell(settings: dict[str, list[float]]) -> str:
    """The best of the settings with the most runs."""
    if not settings:
        return "–"
    found: dict[str, Interval] = {given: interval(values) for given, values in settings.items()}
    given, best = max(found.items(), key=lambda item: (item[1].runs, item[1].mean))
    return f"{best}" + (f", {given.replace(',', ', ')}" if given else "")
