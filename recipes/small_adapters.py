"""The adapters of everybert-small: their training data, their runs, and the selection of the best run."""

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
from small_scores import (
    MODELS,
    intermediate_model,
    parse_settings,
    require_finished,
    save_score,
    settings_suffix,
    start_from,
)
from small_sets import entailment, entities, glue_set, is_published, squad, squad_rows, treebank

from everybert.evaluation.evaluate import evaluate
from everybert.files import MANIFEST
from everybert.inference.model import load
from everybert.text.readers import read_documents
from everybert.text.sentences import split_sentences
from everybert.training.finetune import finetune


@dataclass(frozen=True)
class Adapter:
    """What one adapter is trained on."""

    task: str
    default: list[str]
    """Methods of the model that use this adapter unless another one is named."""
    data: Callable[[Path], tuple[Any, Any]]
    options: dict[str, Any]
    epochs: int
    measured: str | None = None
    """The row of the table of scores to which its runs count."""
    intermediate: str | None = None
    """The automatically labelled data it is trained on first (`intermediate_model`)."""


ADAPTERS = {
    "sentiment": Adapter("classify", ["classify"], glue_set("SST-2"), {}, 3, "SST-2"),
    "entailment": Adapter("classify", ["classify pair"], entailment, {}, 4),
    "paraphrase": Adapter("classify", [], glue_set("MRPC"), {"metric": "f1"}, 6, "MRPC"),
    "acceptability": Adapter("classify", [], glue_set("CoLA"), {"metric": "matthews"}, 6, "CoLA"),
    "ner": Adapter("tag", ["tag"], entities, {}, 4),
    "pos": Adapter("tag", [], treebank, {"metric": "accuracy"}, 4, "UPOS"),
    "qa": Adapter("answer", ["answer"], squad, {}, 4, "SQuAD+cloze", intermediate="cloze"),
    "similarity": Adapter("embed", ["embed"], glue_set("STS-B"), {}, 4, intermediate="similarity"),
}
COLUMNS = {"pos": {"label": "upos"}}
GENERATED = {"cloze": 120_000, "similarity": 60_000, "short": 2400}
"""Number of examples labelled automatically: cloze questions, similarities of sentence pairs, and questions about
single sentences."""
QUESTIONS, LONGEST = 1200, 700
"""Training data of `polish`, beside the short questions: this many of SQuAD's, about texts of at most LONGEST
characters."""
SHARE = 0.5
"""Weight of the polished adapter when it is averaged with the original. With 1.0 the score on SQuAD drops."""
LABEL_NAMES = {
    "sentiment": {"0": "negative", "1": "positive"},
    "acceptability": {"0": "unacceptable", "1": "acceptable"},
    "paraphrase": {"0": "different", "1": "paraphrase"},
}
"""Names for GLUE's numeric labels."""


def read_data(name: str, tasks: Path) -> tuple[Any, Any]:
    """Train and dev set of an adapter, with names in place of numeric labels, without the examples that are shown."""
    train, dev = ADAPTERS[name].data(tasks)
    if name in LABEL_NAMES:
        train, dev = (named_rows(source, LABEL_NAMES[name]) for source in (train, dev))
    if ADAPTERS[name].task == "embed":
        train, dev = (scored_rows(source) for source in (train, dev))
    if isinstance(train, list):
        return [row for row in train if not is_published(row)], dev
    if is_published(Path(train).read_text("utf-8")):
        raise SystemExit(f"{train} contains an example of README.md, so it cannot be learned from: change either")
    return train, dev


def named_rows(source: Any, names: dict[str, str]) -> list[tuple[Any, ...]]:
    """The rows of a classification set, with names in place of numeric labels."""
    from everybert.tasks import Classify

    found = Classify.read(source, None, True)
    texts = [x if isinstance(x, tuple | list) else (x,) for x in found.inputs]
    return [(*x, names[str(y)]) for x, y in zip(texts, found.targets)]


def scored_rows(source: Any) -> list[tuple[str, str, float]]:
    """The rows of a set of sentence pairs with similarities."""
    from everybert.tasks import Embed

    examples = Embed.read(source, None, True)
    return [(*pair, score) for pair, score in zip(examples.inputs, examples.targets)]


# ── training runs, and the best of them ──────────────────────────────────────────────────────────────────────


def adapters(args: argparse.Namespace) -> None:
    """Train the adapters. Each seed and setting has a folder: W/adapters/NAME@SETTINGS SEED."""
    end, base = time.monotonic() + 60 * args.minutes, args.work / MODELS["int8"]
    for name, adapter in ADAPTERS.items():
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            out = args.work / "adapters" / f"{name}{settings_suffix(args)} {seed}"
            if out.exists() or time.monotonic() > end or (args.only and name not in args.only.split(",")):
                continue
            settings = {"epochs": adapter.epochs} | parse_settings(args.set) | ({"epochs": 1} if args.tiny else {})
            if adapter.intermediate:
                settings = start_from(settings, intermediate_model(adapter.intermediate, base, "lora", args))
            train, dev = read_data(name, args.tasks)
            if isinstance(train, list) and args.tiny:
                train, dev = train[:64], dev[:32]
            out.parent.mkdir(exist_ok=True)
            tuned = finetune(
                base, adapter.task, train, dev, out, seed=seed, options=adapter.options, skip_bad=True,
                columns=COLUMNS.get(name), mode="lora", quiet=True, **settings,
            )  # fmt: skip
            print(f"{out.name}: {require_finished(tuned)}", flush=True)
            if adapter.measured:
                save_score(args, "int8", adapter.measured, "lora", seed, tuned.runs[0])


@dataclass(frozen=True)
class Best:
    """The adapter to publish: the best seed of the best settings, among the settings with the most runs."""

    folder: Path
    scores: list[float]
    """One per seed of these settings."""
    metric: str
    settings: str
    polished: float | None = None
    """Score of the polished adapter in W/polished, which is then published instead."""


def best_adapters(work: Path) -> dict[str, Best]:
    """The adapters that have been trained, in the order of ADAPTERS."""
    found: dict[str, dict[str, list[tuple[float, Path]]]] = {}
    metrics = {}
    for file in sorted((work / "adapters").glob("*/finetune.json")):
        name, _, settings = file.parent.name.rpartition(" ")[0].partition("@")
        report = json.loads(file.read_text("utf-8"))
        metrics[name] = report["metric"]
        scores = [(one["scores"][report["metric"]], file.parent) for one in report["seeds"]]
        found.setdefault(name, {}).setdefault(settings, []).extend(scores)
    best = {}
    for name in [name for name in ADAPTERS if name in found]:
        settings, runs = max(found[name].items(), key=lambda item: (len(item[1]), sum(score for score, _ in item[1])))
        scores, folder, note = [score for score, _ in runs], max(runs)[1], work / "polished" / f"{name}.json"
        polished = json.loads(note.read_text("utf-8")) if note.exists() else {}
        after = polished["score"] if polished.get("of") == folder.name else None  # else it was made from another run
        best[name] = Best(folder, scores, metrics[name], settings, after)
    return best


def polish(args: argparse.Namespace) -> None:
    """Train the best qa adapter on short texts, where it selects too many words or the wrong clause: W/polished/qa.

    Two epochs on questions about single sentences, or two that are joined, of the training text, and some questions of
    SQuAD, so that the score on SQuAD stays.
    """
    with (args.work / "short.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    short = [row for row in squad_rows(squad(args.tasks)[0]) if len(row["context"]) < LONGEST]
    rows += random.Random(0).sample(short, min(QUESTIONS, len(short)))
    mixed, best, base = args.work / "polish.jsonl", best_adapters(args.work)["qa"], args.work / MODELS["int8"]
    mixed.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    before = parse_settings(best.settings.split(","))
    settings = before | {"epochs": 2, "batch_size": 16, "lr": 3e-4} | parse_settings(args.set)
    out = args.work / "polished" / "qa"
    out.parent.mkdir(exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)  # from an interrupted or earlier call
    require_finished(
        finetune(base, "answer", mixed, None, out, mode="lora", quiet=True, **start_from(settings, best.folder))
    )
    interpolate(best.folder, out, SHARE)
    model = load(base)
    found = evaluate("answer", model, squad(args.tasks)[1], adapter=model.add_adapter(out, "qa"))
    note = {"of": best.folder.name, "score": found.scores[best.metric]}
    (args.work / "polished" / "qa.json").write_text(json.dumps(note), "utf-8")
    print(f"qa after polishing: {best.metric} {100 * note['score']:.2f}", flush=True)


def interpolate(before: Path, after: Path, share: float) -> None:
    """Interpolate the weights of an adapter before and after further training (Wortsman et al. 2022)."""
    from safetensors.torch import load_file, save_file

    file = "adapter_model.safetensors"
    old, new = load_file(before / file), load_file(after / file)
    mixed = {name: torch.lerp(old[name].float(), new[name].float(), share).contiguous() for name in new}
    save_file(mixed, after / file, {"format": "pt"})
    (after / MANIFEST).unlink(missing_ok=True)  # its hash is that of the file before


# ── automatically labelled data ──────────────────────────────────────────────────────────────────────────────


def labels(args: argparse.Namespace) -> None:
    """Write W/cloze.jsonl, W/similarity.jsonl and W/short.jsonl, from documents without the examples that are shown.

    This needs no pre-trained model of ours.
    """
    for kind, count in GENERATED.items():
        out = args.work / f"{kind}.jsonl"
        if out.exists():
            continue
        documents = (text for text in read_documents(args.text) if not is_published(text))
        count = min(200, count) if args.tiny else count
        draft = out.with_suffix(".part")
        if kind == "cloze":
            write_cloze(documents, draft, count)
        elif kind == "short":
            questions = cloze_questions(documents, each=1, kept=1.0, alone=1.0)
            short = islice((c for c in questions if " and " in c.context and len(c.context) < 260), count)
            draft.write_text("".join(json.dumps(c.row(i)) + "\n" for i, c in enumerate(short)), "utf-8")
        else:
            write_similarities(documents, args.teacher, draft, count)
        draft.replace(out)


def write_similarities(documents: Iterator[str], teacher: Path, out: Path, count: int) -> None:
    """Write pairs of sentences, half adjacent and half random, with the cosine of the teacher's vectors."""
    rng = random.Random(0)
    sentences: list[str] = []
    for document in documents:
        sentences += [s for s in split_sentences(document.replace("\n", " "))[:12] if 20 < len(s) < 300]
        if len(sentences) > count:
            break
    vectors = load(teacher).embed(sentences, normalize=True)
    with out.open("w", encoding="utf-8") as file:
        for i in islice(range(len(sentences) - 1), count):
            j = i + 1 if rng.random() < 0.5 else rng.randrange(len(sentences))
            row = {"sentence1": sentences[i], "sentence2": sentences[j], "score": float(vectors[i] @ vectors[j])}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
