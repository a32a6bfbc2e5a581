"""SQuAD's scores: exact match and F1 as the official 1.1 and 2.0 scripts have them, and the no-answer threshold."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, without the words a, an, the, with single spaces."""
    text = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact(guess: str, gold: str) -> float:
    """1 where the normalised texts are equal."""
    return float(normalise(guess) == normalise(gold))


def f1(guess: str, gold: str) -> float:
    """Harmonic mean of precision and recall over the normalised words; 0 where either has none (1.1)."""
    a, b = normalise(guess).split(), normalise(gold).split()
    same = (Counter(a) & Counter(b)).total()
    return 2 * same / (len(a) + len(b)) if same else 0.0


def best_over(guess: str, golds: Sequence[str], no_answer: bool = False) -> tuple[float, float]:
    """(exact, f1), each the best over the true answers.

    With `no_answer` (2.0), true answers that say nothing are left out; where none is left there is no answer, and
    two answers without words agree.
    """
    if not no_answer:
        return max((exact(guess, g) for g in golds), default=0.0), max((f1(guess, g) for g in golds), default=0.0)
    real = [g for g in golds if normalise(g)] or [""]
    empty = not normalise(guess)
    same = [float(empty) if not normalise(g) else f1(guess, g) for g in real]
    return max(exact(guess, g) for g in real), max(same)


@dataclass(frozen=True)
class Threshold:
    """The no-answer threshold that scores best, and the score it gives (in 0 … 1)."""

    value: float
    score: float


def best_threshold(
    scores: Sequence[float], gaps: Sequence[float], answerable: Sequence[bool], guessed: Sequence[bool]
) -> Threshold:
    """SQuAD 2.0's own sweep: answer only where the gap (no-answer score − best span's score) is at most the threshold.

    `scores` are the questions' scores when answered, `guessed` whether that answer says anything. Where never to
    answer is best, the threshold lies below every gap (the script says 0, as its gaps are probabilities).
    """
    total = best = float(sum(not a for a in answerable))  # never answer: right where there is none
    value = min(gaps, default=0.0) - 1.0
    for i in sorted(range(len(gaps)), key=gaps.__getitem__):
        total += scores[i] if answerable[i] else -float(guessed[i])
        if total > best:
            best, value = total, gaps[i]
    return Threshold(value, best / max(len(gaps), 1))
