"""The adapters of everybert-small: what each is trained on, its runs, and the best of them."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from cloze import cloze_questions, write_cloze
from small_scores import chosen, first_step, keep, tail, whole
from small_sets import entailment, entities, glue_set, questions, squad, treebank, two_facts

from everybert.evaluation.evaluate import evaluate
from everybert.files import MANIFEST
from everybert.inference.model import load
from everybert.text.readers import read_documents
from everybert.text.sentences import split_sentences
from everybert.training.finetune import finetune


@dataclass(frozen=True)
class Job:
    """One adapter: what it is trained on, and which task takes it by itself."""

    task: str
    default: list[str]
    data: Callable[[Path], tuple[Any, Any]]
    options: dict[str, Any]
    epochs: int
    measured: str | None = None
    """The set of the table of scores that its runs belong to."""
    warm: str | None = None
    """Trained on these cheap labels first (`first_step`)."""


JOBS = {
    "sentiment": Job("classify", ["classify"], glue_set("SST-2"), {}, 3, "SST-2"),
    "entailment": Job("classify", ["classify pair"], entailment, {}, 4),
    "paraphrase": Job("classify", [], glue_set("MRPC"), {"metric": "f1"}, 6, "MRPC"),
    "acceptability": Job("classify", [], glue_set("CoLA"), {"metric": "matthews"}, 6, "CoLA"),
    "ner": Job("tag", ["tag"], entities, {}, 4),
    "pos": Job("tag", [], treebank, {"metric": "accuracy"}, 4, "UPOS"),
    "qa": Job("answer", ["answer"], squad, {}, 4, "SQuAD+cloze", warm="cloze"),
    "similarity": Job("embed", ["embed"], glue_set("STS-B"), {}, 4, warm="likeness"),
}
COLUMNS = {"pos": {"label": "upos"}}
CHEAP = {"cloze": 120_000, "likeness": 60_000, "short": 400}
"""How many labels are made from text: questions, likenesses of sentences, and questions about single sentences."""
FACTS, QUESTIONS, LONGEST = 2000, 1200, 700
"""What polishes the qa adapter: made-up sentences, and questions of SQuAD about texts of at most so many characters."""
SHARE = 0.5
"""How far the polished adapter goes from what it was: all the way, it has forgotten some of SQuAD."""
NAMED = {"sentiment": {"0": "negative", "1": "positive"}, "acceptability": {"0": "unacceptable", "1": "acceptable"}}
NAMED["paraphrase"] = {"0": "different", "1": "paraphrase"}
"""GLUE's numbers in words."""


def read_job(name: str, tasks: Path) -> tuple[Any, Any]:
    """Both sets of an adapter; labels that are numbers in words."""
    train, dev = JOBS[name].data(tasks)
    if name not in NAMED:
        return train, dev
    from everybert.tasks import Classify

    out = []
    for source in (train, dev):
        found = Classify.read(source, None, True)
        texts = [x if isinstance(x, tuple | list) else (x,) for x in found.inputs]
        out.append([(*x, NAMED[name][str(y)]) for x, y in zip(texts, found.targets)])
    return out[0], out[1]


# ── runs, and the best of them ───────────────────────────────────────────────────────────────────────────────


def adapters(args: argparse.Namespace) -> None:
    """Each adapter of the box, a folder for each seed and setting: W/adapters/NAME@SETTINGS SEED."""
    end = time.monotonic() + 60 * args.minutes
    for name, job in JOBS.items():
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            out = args.work / "adapters" / f"{name}{tail(args)} {seed}"
            if out.exists() or time.monotonic() > end or (args.only and name not in args.only.split(",")):
                continue
            settings = {"epochs": job.epochs} | chosen(args.set) | ({"epochs": 1} if args.tiny else {})
            if job.warm:
                settings["start"] = str(first_step(job.warm, args.work / "trunk", "lora", args))
            train, dev = read_job(name, args.tasks)
            if isinstance(train, list) and args.tiny:
                train, dev = train[:64], dev[:32]
            out.parent.mkdir(exist_ok=True)
            tuned = finetune(
                args.work / "trunk", job.task, train, dev, out, seed=seed, options=job.options, skip_bad=True,
                columns=COLUMNS.get(name), mode="lora", quiet=True, **settings,
            )  # fmt: skip
            print(f"{out.name}: {whole(tuned)}", flush=True)
            if job.measured:
                keep(args, "int8", job.measured, "lora", seed, tuned.runs[0])


@dataclass(frozen=True)
class Best:
    """The adapter to ship: of the settings with the most runs the best, and of its seeds the best."""

    folder: Path
    scores: list[float]
    """Of the setting's seeds."""
    metric: str
    settings: str
    polished: float | None = None
    """The score of what W/polished has to be shipped in its place."""


def pick(work: Path) -> dict[str, Best]:
    """The adapters that are there, in the order of JOBS."""
    found: dict[str, dict[str, list[tuple[float, Path]]]] = {}
    metrics = {}
    for report in sorted((work / "adapters").glob("*/finetune.json")):
        name, _, settings = report.parent.name.rpartition(" ")[0].partition("@")
        said = json.loads(report.read_text("utf-8"))
        metrics[name] = said["metric"]
        scores = [(one["scores"][said["metric"]], report.parent) for one in said["seeds"]]
        found.setdefault(name, {}).setdefault(settings, []).extend(scores)
    best = {}
    for name in [name for name in JOBS if name in found]:
        given, runs = max(found[name].items(), key=lambda item: (len(item[1]), sum(score for score, _ in item[1])))
        scores, folder, note = [score for score, _ in runs], max(runs)[1], work / "polished" / f"{name}.json"
        said = json.loads(note.read_text("utf-8")) if note.exists() else {}
        after = said["score"] if said.get("of") == folder.name else None  # of an adapter that is no longer the best
        best[name] = Best(folder, scores, metrics[name], given, after)
    return best


def polish(args: argparse.Namespace) -> None:
    """W/polished/qa: the best qa adapter after short texts, where it took too much, or the wrong half's answer.

    Two epochs of made-up sentences, questions about single sentences and some of SQuAD, so that it forgets nothing.
    """
    with (args.work / "short.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    few = [row for row in questions(squad(args.tasks)[0]) if len(row["context"]) < LONGEST]
    rows += two_facts(64 if args.tiny else FACTS) + random.Random(0).sample(few, min(QUESTIONS, len(few)))
    mixed, best = args.work / "polish.jsonl", pick(args.work)["qa"]
    mixed.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    settings = chosen(best.settings.split(",")) | {"epochs": 2, "batch_size": 16, "lr": 3e-4} | chosen(args.set)
    settings["lora"] = chosen(best.settings.split(","))["lora"]
    out = args.work / "polished" / "qa"
    out.parent.mkdir(exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)  # of a polishing that was stopped, or of an adapter before
    tuned = finetune(
        args.work / "trunk", "answer", mixed, None, out, mode="lora", start=str(best.folder), quiet=True, **settings
    )
    whole(tuned)
    between(best.folder, out, SHARE)
    model = load(args.work / "trunk")
    found = evaluate(model, "answer", squad(args.tasks)[1], adapter=model.add_adapter(out, "qa"))
    said = {"of": best.folder.name, "score": found.scores[best.metric]}
    (args.work / "polished" / "qa.json").write_text(json.dumps(said), "utf-8")
    print(f"qa after polishing: {best.metric} {100 * said['score']:.2f}", flush=True)


def between(before: Path, after: Path, share: float) -> None:
    """Weights between an adapter's and its own after more training: most of what both know (Wortsman et al. 2022)."""
    from safetensors.torch import load_file, save_file

    file = "adapter_model.safetensors"
    old, new = load_file(before / file), load_file(after / file)
    mixed = {name: torch.lerp(old[name].float(), new[name].float(), share).contiguous() for name in new}
    save_file(mixed, after / file, {"format": "pt"})
    (after / MANIFEST).unlink(missing_ok=True)  # of the file as it was


# ── labels that text gives for nothing ───────────────────────────────────────────────────────────────────────


def labels(args: argparse.Namespace) -> None:
    """W/cloze.jsonl, likeness.jsonl and short.jsonl: they need no trunk; another process can make them meanwhile."""
    for kind, count in CHEAP.items():
        made = args.work / f"{kind}.jsonl"
        if made.exists():
            continue
        documents, count = read_documents(args.text), min(200, count) if args.tiny else count
        draft = made.with_suffix(".part")
        if kind == "cloze":
            write_cloze(documents, draft, count)
        elif kind == "short":
            made_up = cloze_questions(documents, each=1, kept=1.0, alone=1.0)
            short = islice((c for c in made_up if " and " in c.context and len(c.context) < 260), count)
            draft.write_text("".join(json.dumps(c.row(i)) + "\n" for i, c in enumerate(short)), "utf-8")
        else:
            write_likeness(documents, args.teacher, draft, count)
        draft.replace(made)


def write_likeness(documents: Iterator[str], teacher: Path, out: Path, count: int) -> None:
    """Pairs of sentences, near neighbours and strangers, with the cosine that the teacher gives them."""
    chance = random.Random(0)
    sentences: list[str] = []
    for document in documents:
        sentences += [s for s in split_sentences(document.replace("\n", " "))[:12] if 20 < len(s) < 300]
        if len(sentences) > count:
            break
    vectors = load(teacher).embed(sentences, normalize=True)
    with out.open("w", encoding="utf-8") as file:
        for i in islice(range(len(sentences) - 1), count):
            j = i + 1 if chance.random() < 0.5 else chance.randrange(len(sentences))
            row = {"sentence1": sentences[i], "sentence2": sentences[j], "score": float(vectors[i] @ vectors[j])}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
