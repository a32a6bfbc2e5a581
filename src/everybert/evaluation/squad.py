"""SQuAD 1.1 and 2.0: a model's answers to a file of questions, and the official scores of answers.

Predictions are the official {"id": "answer"} JSON. Scores are in per cent, as the official scripts print them; a
question without a prediction counts as wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everybert.errors import EverybertError
from everybert.files import read_json
from everybert.inference.model import Model
from everybert.tasks.answer import best_over


@dataclass(frozen=True)
class SquadScores:
    """Exact match and F1, in per cent, over all questions and over those with and without an answer."""

    exact: float
    f1: float
    total: int
    groups: dict[str, dict[str, float]]
    """2.0: "has answer" and "no answer", each with exact, f1 and total."""
    missing: int = 0
    """Questions that have no prediction."""


def read_predictions(path: str | Path) -> dict[str, str]:
    """Official predictions: a JSON object from a question's id to its answer."""
    answers = read_json(path)
    if not all(isinstance(value, str) for value in answers.values()):
        raise EverybertError(f'{path} is not a file of predictions; it should be {{"question id": "answer", …}}')
    return answers


def answer_all(
    model: Model, questions: Sequence[Mapping[str, Any]], progress: Callable[[int], None] = lambda done: None
) -> dict[str, str]:
    """The best answer to each question, by its id. `progress` is called with the number done."""
    answers: dict[str, str] = {}
    predictions = model.predict("answer", [(q["question"], q["context"]) for q in questions])
    for question, (best, *_) in zip(questions, predictions):
        answers[question["id"]] = best.text
        progress(len(answers))
    return answers


def score(questions: Sequence[Mapping[str, Any]], answers: Mapping[str, str]) -> SquadScores:
    """The official scores of answers by their questions' ids."""
    golds = [[a["text"] for a in q["answers"]] for q in questions]
    newer = any(not gold for gold in golds)
    guesses = [answers.get(q["id"]) for q in questions]
    right = [(0.0, 0.0) if guess is None else best_over(guess, gold, newer) for guess, gold in zip(guesses, golds)]
    percent, has = 100 * np.array(right), np.array([bool(gold) for gold in golds])

    def mean(chosen: np.ndarray) -> dict[str, Any]:
        exact, f1 = percent[chosen].mean(0).tolist()
        return {"exact": exact, "f1": f1, "total": int(chosen.sum())}

    groups = {n: mean(chosen) for n, chosen in (("has answer", has), ("no answer", ~has)) if newer and chosen.any()}
    return SquadScores(**mean(has | ~has), groups=groups, missing=sum(guess is None for guess in guesses))
