"""Minimal pairs: how often a model assigns the grammatical sentence of a pair the higher likelihood.

BLiMP (Warstadt et al. 2020) has 67 paradigms of 1,000 pairs, in 12 phenomena of grammar. Any jsonl, csv or tsv file
with the columns sentence_good and sentence_bad is read; UID and linguistics_term are optional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
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
    """The share of pairs whose good sentence has the higher likelihood."""

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
        if not path.exists():
            raise EverybertError(f"there is no file or folder {path}")
        below = sorted(p for p in path.rglob("*") if p.suffix.lower() in RECORD_KINDS)
        if path.is_dir() and not below:
            raise EverybertError(f"{path} has no files of pairs ({', '.join(RECORD_KINDS)})")
        files += below if path.is_dir() else [path]
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
    for paradigm in paradigms:
        n = len(paradigm.good)
        good, bad, values = values[:n], values[n : 2 * n], values[2 * n :]
        outcomes.setdefault(paradigm.phenomenon, []).append(Outcome(paradigm.name, n, float((good > bad).mean())))
    phenomena = tuple(_mean(name, parts) for name, parts in sorted(outcomes.items()))
    return replace(_mean("all", [part for parts in outcomes.values() for part in parts]), parts=phenomena)


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
