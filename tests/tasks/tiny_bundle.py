"""A tiny encoder with an adapter of each kind, and the folder that holds them all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import tiny_model

import everybert
from everybert.files import atomic_folder

MOODS = [
    ("the film was good", "pos"),
    ("the food was bad", "neg"),
    ("a great song", "pos"),
    ("an awful day", "neg"),
] * 5
PAIRS = [((a, b), label) for (a, _), (b, label) in zip(MOODS, MOODS[1:] + MOODS[:1])]
TAGS = [(["john", "lives", "in", "paris"], ["B-PER", "O", "O", "B-LOC"])] * 8
TASKS = {"sentiment": ["classify"], "entailment": ["classify pair"], "ner": ["tag"], "similarity": ["embed"], "odd": []}


def parts(out: Path) -> Path:
    """The encoder, and an adapter of each kind trained on it, each in a folder of `out`."""
    base = tiny_model.save(out / "encoder", {"mlm": None, "nsp": None})
    settings = {"epochs": 1, "batch_size": 8, "lr": 1e-2, "quiet": True, "device": "cpu", "mode": "lora"}
    texts = [(a, b) for (a, b), _ in PAIRS]
    rows = [(a, b, {"pos": "yes", "neg": "no"}[label]) for (a, b), label in PAIRS]
    everybert.finetune(base, "classify", MOODS, MOODS, out / "sentiment", **settings)
    everybert.finetune(base, "classify", rows, rows, out / "entailment", **settings)
    everybert.finetune(base, "tag", TAGS, TAGS, out / "ner", **settings)
    everybert.finetune(base, "embed", texts, texts, out / "similarity", **settings)
    shutil.copytree(out / "sentiment", out / "odd")
    return out


def box(parts: Path, out: Path) -> Path:
    """All of them in one folder."""
    with atomic_folder(out) as draft:
        for file in (parts / "encoder").iterdir():
            if file.name != "manifest.json":
                shutil.copy(file, draft / file.name)
        (draft / "everybert.json").write_text(json.dumps({"version": 1, "adapters": TASKS}))
        for name in TASKS:
            shutil.copytree(parts / name, draft / "adapters" / name)
    return out
