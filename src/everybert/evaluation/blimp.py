"""Minimal pairs: how often a model assigns the grammatical sentence of a pair the higher likelihood.

BLiMP (Warstadt et al. 2020) has 67 paradigms of 1,000 pairs, in 12 phenomena of grammar. Any jsonl, csv or tsv file
with the columns sentence_good and sentence_bad is read; UID and linguistics_term are optional.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from everybert.errors import EverybertError
from everybert.inference.model import Model
from everybert.inside.masked import pseudo_likelihoods
from everybert.text.readers import RECORD_KINDS, expand, kind, read_records

GOOD = ("sentence_good", "good", "good_sentence", "acceptable")
BAD = ("sentence_bad", "bad", "bad_sentence", "unacceptable")
CHUNK = 1024
"""Texts whose masked copies are held at once."""
Paradigms = dict[tuple[str, str], list[tuple[str, str]]]
"""(good, bad) sentences by phenomenon and paradigm."""


@dataclass(frozen=True)
class Outcome:
    """The share of pairs whose good sentence has the higher likelihood."""

    name: str
    pairs: int
    accuracy: float
    parts: tuple["Outcome", ...] = ()


def read_pairs(paths: Iterable[str | Path], limit: int | None = None) -> Paradigms:
    """The pairs of files and folders, by paradigm; at most `limit` of each."""
    paradigms: Paradigms = {}
    for file in (path for path in expand(paths) if kind(path) in RECORD_KINDS):
        for row in read_records(file):
            good, bad = (next((row[n] for n in names if isinstance(row.get(n), str)), None) for names in (GOOD, BAD))
            if good is None or bad is None:
                raise EverybertError(f"{file} needs sentence_good and sentence_bad; it has {', '.join(map(str, row))}")
            name = str(row.get("UID") or file.stem)
            pairs = paradigms.setdefault((str(row.get("linguistics_term") or name), name), [])
            if limit is None or len(pairs) < limit:
                pairs.append((good, bad))
    if not paradigms:
        raise EverybertError(f"there are no pairs: give files of the kinds {', '.join(RECORD_KINDS)}")
    return paradigms


def blimp(model: Model, paradigms: Paradigms, progress: Callable[[int], None] = lambda sentences: None) -> Outcome:
    """Score all pairs: overall (the mean of the paradigms), by phenomenon, by paradigm.

    A tie counts as wrong. `progress` is called with the number of sentences done.
    """
    sentences = [text for pairs in paradigms.values() for pair in pairs for text in pair]
    values = likelihoods(model, sentences, progress)
    outcomes: dict[str, list[Outcome]] = {}
    for (phenomenon, name), pairs in paradigms.items():
        scores, values = values[: 2 * len(pairs)], values[2 * len(pairs) :]
        right = scores[0::2] > scores[1::2]
        outcomes.setdefault(phenomenon, []).append(Outcome(name, len(pairs), float(right.mean())))
    phenomena = tuple(_mean(name, parts) for name, parts in sorted(outcomes.items()))
    return replace(_mean("all", [part for parts in outcomes.values() for part in parts]), parts=phenomena)


def likelihoods(model: Model, texts: Sequence[str], progress: Callable[[int], None] = lambda texts: None) -> np.ndarray:
    """The pseudo-log-likelihood of each text, (texts,) float64. `progress` is called with the number done."""
    total: list[float] = []
    for start in range(0, len(texts), CHUNK):
        encodings = model.tokenizer.encode_batch(texts[start : start + CHUNK])
        rows = pseudo_likelihoods(model.network, model.tokenizer, encodings, model.window)
        total += [float(values.sum()) for values in rows]
        progress(len(total))
    return np.array(total)


def _mean(name: str, parts: list[Outcome]) -> Outcome:
    return Outcome(name, sum(p.pairs for p in parts), float(np.mean([p.accuracy for p in parts])), tuple(parts))
