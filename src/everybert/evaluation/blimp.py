"""Minimal pairs: does a model find the good sentence of each pair more likely than the bad one?

BLiMP (Warstadt et al. 2020) has 67 paradigms of 1,000 pairs, in 12 phenomena of grammar. Any file of pairs will do:
jsonl, csv or tsv with sentence_good and sentence_bad (UID and linguistics_term where they are there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from everybert.errors import EverybertError
from everybert.inference.model import Model, pseudo_likelihoods
from everybert.text.readers import RECORD_KINDS, read_records

GOOD = ("sentence_good", "good", "good_sentence", "acceptable")
BAD = ("sentence_bad", "bad", "bad_sentence", "unacceptable")
Variant = Literal["token", "word"]
CHUNK = 1024
"""Texts whose masked copies are held at once."""


@dataclass(frozen=True)
class Paradigm:
    """Pairs of one kind."""

    name: str
    phenomenon: str
    good: list[str] = field(default_factory=list, repr=False)
    bad: list[str] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Outcome:
    """How often the good sentence was the likelier one."""

    name: str
    pairs: int
    accuracy: float
    parts: tuple[Outcome, ...] = ()


def read_pairs(paths: Iterable[str | Path], limit: int | None = None) -> list[Paradigm]:
    """The pairs of files and folders, by paradigm; at most `limit` of each."""
    found: dict[str, Paradigm] = {}
    for file in _files(paths):
        for row in read_records(file):
            good, bad = (next((row[n] for n in names if isinstance(row.get(n), str)), None) for names in (GOOD, BAD))
            if good is None or bad is None:
                raise EverybertError(f"{file} needs sentence_good and sentence_bad; it has {', '.join(map(str, row))}")
            name = str(row.get("UID") or file.stem)
            paradigm = found.setdefault(name, Paradigm(name, str(row.get("linguistics_term") or name)))
            if limit is None or len(paradigm.good) < limit:
                paradigm.good.append(good)
                paradigm.bad.append(bad)
    return list(found.values())


def _files(paths: Iterable[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in RECORD_KINDS)
            if not inside:
                raise EverybertError(f"{path} has no files of pairs ({', '.join(RECORD_KINDS)})")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise EverybertError(f"there is no file or folder {path}")
    return files


def blimp(
    model: Model,
    paradigms: list[Paradigm],
    variant: Variant = "token",
    progress: Callable[[int], None] = lambda sentences: None,
) -> Outcome:
    """Score all pairs: overall (the mean of the paradigms), by phenomenon, by paradigm.

    A tie counts as wrong. `progress` is called with the number of sentences done.
    """
    if not paradigms:
        raise EverybertError("there are no pairs to score")
    sentences = [text for p in paradigms for text in (*p.good, *p.bad)]
    values = likelihoods(model, sentences, variant, progress)
    outcomes: dict[str, list[Outcome]] = {}
    at = 0
    for paradigm in paradigms:
        n = len(paradigm.good)
        good, bad = values[at : at + n], values[at + n : at + 2 * n]
        outcomes.setdefault(paradigm.phenomenon, []).append(Outcome(paradigm.name, n, float((good > bad).mean())))
        at += 2 * n
    phenomena = [_mean(name, parts) for name, parts in sorted(outcomes.items())]
    every = [part for parts in outcomes.values() for part in parts]
    return Outcome("all", sum(p.pairs for p in every), float(np.mean([p.accuracy for p in every])), tuple(phenomena))


def likelihoods(
    model: Model,
    texts: Sequence[str],
    variant: Variant = "token",
    progress: Callable[[int], None] = lambda texts: None,
) -> np.ndarray:
    """The pseudo-log-likelihood of each text, (texts,) float64. `progress` is called with the number done."""
    if variant not in ("token", "word"):
        raise EverybertError(f"pseudo-log-likelihoods mask by token or word, not {variant!r}")
    total: list[float] = []
    for start in range(0, len(texts), CHUNK):
        encodings = model.tokenizer.encode_batch(texts[start : start + CHUNK])
        found = pseudo_likelihoods(model.network, model.tokenizer, encodings, model.window, variant == "word")
        total += [float(values.sum()) for values in found]
        progress(len(total))
    return np.array(total)


def _mean(name: str, parts: list[Outcome]) -> Outcome:
    return Outcome(name, sum(p.pairs for p in parts), float(np.mean([p.accuracy for p in parts])), tuple(parts))
