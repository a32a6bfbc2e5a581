"""Groups: losses, batches, scores and weights of short runs; and folders that older code wrote."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from golden_models import LONG
from golden_tools import DATA, GROUPS, Entries, group, json_of, tiny, watched, weights, written
from safetensors.numpy import load_file, save_file

import everybert

# ── pre-training ─────────────────────────────────────────────────────────────────────────────────────────────

RECIPE = """
seed = 3
steps = 30
[model]
layers = 2
hidden_size = 16
heads = 2
intermediate_size = 32
max_positions = 32
[examples]
kind = "pairs"
[batch]
tokens = 256
pack = 128
length = 32
[schedule]
peak = 5e-3
warmup = 4
[run]
log_every = 1
evaluate_every = 15
save_every = 1000
keep = 1
evaluate_packs = 2
tensorboard = false
workers = 0
"""
RUNS = {
    "pairs": [],
    "pairs, 2 workers": ["run.workers=2"],
    "order": ["examples.kind=order", "mask.replacement=unigram"],
    "full, words": ["examples.kind=full", "mask.strategy=word"],
    "document, spans, 2 workers": ["examples.kind=document", "mask.strategy=span", "run.workers=2"],
    "spans, boundary": ["examples.kind=full", "mask.strategy=span", "mask.boundary=true"],
    "pmi": ["examples.kind=full", "mask.strategy=pmi", "mask.rate=[0.3, 0.15]"],
    "static": ["mask.static_duplicates=2", "schedule.kind=cosine", "schedule.floor=0.1"],
    "muon": ["examples.kind=full", "optimizer.kind=muon", "schedule.kind=wsd", "run.checkpointing=true"],
    "phases": [
        "phase=[{share=0.5, length=16, tokens=[128, 256]}, {share=0.5, length=32, rate=0.3}]",
    ],
    "modern": [
        *("model.preset=modernbert-base", "model.windows=[4, 4]", "examples.kind=full"),
    ],
    "albert": ["model.family=albert", "model.layer_groups=1", "model.embedding_size=8", "examples.kind=order"],
}


def pretrain(out: Path, *changes: str, corpus: Path = DATA / "corpus", stop_at: int = 0, more: tuple = ()) -> Any:
    """A run by the command line: losses, batches, scores and weights."""
    recipe = out.parent / "recipe.toml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(RECIPE)
    sets = [part for change in changes for part in ("--set", change)]
    name = more if more else ("pretrain", recipe)
    with watched(stop_at) as batches:
        said = json_of(*name, "--corpus", corpus, "--out", out, "--device", "cpu", "--quiet", *sets)
    if "error" in said:
        return said
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    found = {"said": said, "log": log, "batches": batches.plain(), "files": written(out)}
    return found | ({"weights": weights(out / "model")} if said["finished"] else {})


def _runs(tmp: Path, names: tuple[str, ...]) -> Entries:
    return {name: lambda name=name: pretrain(tmp / name.replace(" ", "") / "run", *RUNS[name]) for name in names}


@group
def pretraining(tmp: Path) -> Entries:
    """Short runs; a stopped one goes on to the very weights of one that was not."""
    return _runs(tmp, ("pairs", "pairs, 2 workers", "full, words", "spans, boundary", "pmi")) | {
        "stopped": lambda: pretrain(tmp / "stopped" / "run", stop_at=25),
        "resumed": lambda: pretrain(tmp / "stopped" / "run"),
    }


@group
def pretraining_kinds(tmp: Path) -> Entries:
    """More kinds of them, one from a trained folder, and one under a teacher."""
    start, recipe = tiny(tmp, "bert-mlm"), tmp / "recipe.toml"
    teacher = ("distil", "--teacher", start, "--student", recipe, "--recipe", recipe)
    lessons = ("distil.hidden=1", "distil.relation=1", "distil.relation_heads=2")
    return _runs(tmp, tuple(name for name in RUNS if name not in GROUPS["pretraining"](tmp))) | {
        "from a folder": lambda: pretrain(tmp / "init", more=("pretrain", recipe, "--init", start)),
        "distil": lambda: pretrain(tmp / "distil", *lessons, more=teacher),
    }


# ── fine-tuning ──────────────────────────────────────────────────────────────────────────────────────────────

LINES = [line for line in (DATA / "text.txt").read_text().splitlines() if line][:120]
ANIMALS = {"dog", "cat", "horse", "fox", "bird", "goat", "duck", "bear", "wolf", "frog"}
PLACES = {"garden", "river", "hill", "market", "forest", "harbour"}


def _tagged(line: str) -> tuple[list[str], list[str]]:
    words = line.replace(".", " .").split()
    kinds = [(ANIMALS, "B-ANIMAL"), (PLACES, "B-PLACE")]
    return words, [next((tag for names, tag in kinds if w.rstrip("s") in names), "O") for w in words]


def _asked(line: str, lead: str = "") -> tuple[str, str, dict[str, list[Any]]]:
    place = next((p for p in sorted(PLACES) if p in line), None)
    golds = {"text": [place], "answer_start": [len(lead) + line.index(place)]} if place else {"text": []}
    return "Where?", lead + line, golds


def _choice(i: int, line: str) -> tuple[str, list[str], int]:
    words, right = line.split(), i % 2
    endings = [" ".join(words[3:]), f"{words[-1]} red"]
    return " ".join(words[:3]), endings[::-1] if right else endings, right


EXAMPLES: dict[str, list[Any]] = {
    "classify": [(line, "many" if line.split()[0] in ("These", "Those", "Many") else "one") for line in LINES],
    "regress": [(line, float(len(line.split()))) for line in LINES],
    "tag": [_tagged(line) for line in LINES],
    "answer": [_asked(line) for line in LINES],
    "choose": [_choice(i, line) for i, line in enumerate(LINES)],
    "embed": list(zip(LINES[::2], LINES[1::2])),
}
MODES = ("full", "top:1", "frozen", "lora")
SETTINGS = {"epochs": 10, "batch_size": 8, "lr": 5e-3, "log_every": 1, "device": "cpu", "quiet": True}
USES: dict[str, Callable[[Any], Any]] = {
    "classify": lambda m: m.classify(LINES[:4]),
    "regress": lambda m: m.regress(LINES[:4]),
    "tag": lambda m: m.tag(LINES[:4]),
    "answer": lambda m: m.answer(["Where?"] * 4, LINES[:4]),
    "choose": lambda m: m.choose(*EXAMPLES["choose"][0][:2]),
    "embed": lambda m: m.embed(LINES[:4]),
}


def finetune(tmp: Path, task: str, name: str, train: list[Any] | None = None, **settings: Any) -> Any:
    """A run of 30 steps by Python: losses, batches, scores, files, and what the written folder predicts."""
    rows = EXAMPLES[task] if train is None else train
    base, out = tiny(tmp, settings.pop("base", "bert-mlm")), tmp / "tuned" / name.replace(" ", "-").replace(":", "")
    with watched() as batches:
        tuned = everybert.finetune(base, task, rows[:24], rows[24:34], out, **(SETTINGS | settings))
    run = tuned.runs[0]
    again = everybert.load(out, device="cpu")
    return {
        "history": tuned.history,
        "scores": {k: [v.mean, v.half, v.runs] for k, v in tuned.scores.items()},
        "run": [run.epoch, run.lr, run.trained, run.finished, run.seed],
        "notes": tuned.notes,
        "batches": batches.plain(),
        "files": written(out),
        "said": json.loads((out / "everybert.json").read_text()),
        "predictions": USES[task](again),
    }


def _modes(tmp: Path, names: list[tuple[str, str]]) -> Entries:
    return {f"{t} {m}": lambda t=t, m=m: finetune(tmp, t, f"{t} {m}", mode=m) for t, m in names}


@group
def finetuning(tmp: Path) -> Entries:
    """Every task in one mode, and one task in every mode."""
    return _modes(tmp, [*((task, "full") for task in EXAMPLES), *(("classify", mode) for mode in MODES[1:])])


@group
def finetuning_modes(tmp: Path) -> Entries:
    """The other tasks in the other modes."""
    return _modes(tmp, [(task, mode) for task in list(EXAMPLES)[1:] for mode in MODES[1:]])


@group
def finetuning_options(tmp: Path) -> Entries:
    """What else fine-tuning can be told."""
    long = [(f"{LONG} {text}", label) for text, label in EXAMPLES["classify"]]
    multi = [(text, f"{label}|long" if len(text) > 40 else label) for text, label in EXAMPLES["classify"]]
    pairs = [(a, b, label) for (a, label), b in zip(EXAMPLES["classify"], LINES[5:])]
    scored = [(a, b, i % 5 / 4) for i, (a, b) in enumerate(EXAMPLES["embed"])]
    long_tags = [(LONG.split() + words, ["O"] * len(LONG.split()) + tags) for words, tags in EXAMPLES["tag"]]
    long_answers = [_asked(line, f"{LONG} ") for line in LINES]
    whole = {"epochs": 2}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "calibrate": ("classify", {"options": {"calibrate": True, "class_weights": "balanced", "metric": "f1_macro"}}),
        "multi": ("classify", {"train": multi, "options": {"multi": True}}),
        "pairs": ("classify", {"train": pairs, "layer_decay": 0.8, "reinit": 1, "accumulate": 2}),
        "patience": ("classify", {"patience": 1, "evaluations": 2, "new_pooler": True, "warmup": 0.5}),
        "seeds": ("classify", {"seeds": 2, "seed": 5, **whole}),
        "grid": ("classify", {"grid": {"lr": (1e-2, 1e-3), "batch_size": (4, 8)}, **whole}),
        "long": ("classify", {"train": long, **whole}),
        "long window": ("classify", {"train": long, "window": 24, "overlap": 4, **whole}),
        "long cut": ("classify", {"train": long, "long": "cut", **whole}),
        "sum of four": ("classify", {"mode": "frozen", "features": "sum", "pool": "cls"}),
        "unknown option": ("classify", {"options": {"colour": "red"}}),
        "tag long": ("tag", {"train": long_tags, **whole}),
        "tag cut": ("tag", {"train": long_tags, "long": "cut", **whole}),
        "answer long": ("answer", {"train": long_answers, **whole}),
        "answer cut": ("answer", {"train": long_answers, "long": "cut", **whole}),
        "embed scored": ("embed", {"train": scored, "options": {"pooling": "cls"}}),
        "roberta": ("classify", {"base": "roberta-mlm", "mode": "lora", **whole}),
        "distilbert": ("tag", {"base": "distilbert-mlm", **whole}),
        "albert": ("answer", {"base": "albert-mlm", **whole}),
        "longformer": ("answer", {"base": "longformer-mlm", **whole}),
        "modernbert": ("choose", {"base": "modernbert-mlm", **whole}),
        "megatron": ("regress", {"base": "megatron-bert-mlm", **whole}),
    }
    found: Entries = {
        name: lambda name=name, task=task, more=more: finetune(tmp, task, name, **more)
        for name, (task, more) in cases.items()
    }
    found["started"] = lambda: _started(tmp)
    found["never finite"] = lambda: _never_finite(tmp)
    return found


def _started(tmp: Path) -> Any:
    """An adapter that goes on from another."""
    finetune(tmp, "classify", "first", mode="lora", epochs=1)
    return finetune(tmp, "classify", "second", mode="lora", epochs=1, start=tmp / "tuned" / "first")


def _never_finite(tmp: Path) -> Any:
    """A model whose every loss is not a number: what the guard tells fine-tuners."""
    folder = shutil.copytree(tiny(tmp, "bert-mlm"), tmp / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.bias"] = tensors["bert.embeddings.LayerNorm.bias"] * np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return everybert.finetune(folder, "classify", EXAMPLES["classify"][:24], EXAMPLES["classify"][24:34], **SETTINGS)


# ── folders that were written when the outputs were recorded ─────────────────────────────────────────────────

OLD = {"classify": "full", "tag": "lora", "regress": "frozen", "embed": "full"}
"""Task → the mode in which data/old/TASK was fine-tuned, from data/old/base."""


def write_old() -> None:
    """Write data/old: models of several kinds, and a run that was stopped. Paths are relative: none is written down."""
    shutil.rmtree(DATA / "old", ignore_errors=True)
    (DATA / "old").mkdir()
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(DATA / "old"):
        shutil.copytree(tiny(Path(scratch), "bert-mlm"), "base")
        for task, mode in OLD.items():
            rows, settings = EXAMPLES[task], SETTINGS | {"epochs": 20, "lr": 2e-2, "mode": mode}
            everybert.finetune("base", task, rows[:24], rows[24:34], task, **settings)
        everybert.load("base", device="cpu").save("int8", int8=True)
        pretrain(Path("run"), corpus=Path("../corpus"), stop_at=25)


@group
def old(tmp: Path) -> Entries:
    """They load, and predict what they did; the run goes on to the weights of one that was never stopped."""
    place = shutil.copytree(DATA / "old", tmp / "old")
    base = everybert.load(place / "base", device="cpu")
    found: Entries = {
        task: lambda task=task: USES[task](everybert.load(place / task, device="cpu"))
        for task, mode in OLD.items()
        if mode != "lora"
    }
    return found | {
        "tag": lambda: base.tag(LINES[:4], adapter=base.add_adapter(place / "tag")),
        "int8": lambda: everybert.load(place / "int8", device="cpu").embed(LINES[:4]),
        "int8 computed": lambda: everybert.load(place / "int8", device="cpu", dtype="int8").embed(LINES[:4]),
        "run": lambda: pretrain(place / "run"),
        "corpus": lambda: json_of("corpus", "info", DATA / "corpus", "--check"),
    }
