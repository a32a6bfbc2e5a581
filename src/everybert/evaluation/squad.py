"""SQuAD 1.1 and 2.0: a model's answers to a file of questions, and the official scores of answers.

Predictions are the official {"id": "answer"} JSON. Scores are in per cent, as the official scripts print them; a
question without a prediction counts as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from everybert.errors import EverybertError
from everybert.files import read_json
from everybert.inference.model import Model
from everybert.tasks.answer import AnswerQuestions, best_over
from everybert.text.readers import read_squad


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


def read_questions(path: str | Path) -> list[dict[str, Any]]:
    """The questions of a SQuAD file."""
    questions = list(read_squad(path))
    if not questions:
        raise EverybertError(f"{path} has 0 questions; is it a SQuAD file?")
    return questions


def read_predictions(path: str | Path) -> dict[str, str]:
    """Official predictions: a JSON object from a question's id to its answer."""
    found = read_json(path)
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise EverybertError(f'{path} is not a file of predictions; it should be {{"question id": "answer", …}}')
    return found


def answer_all(
    model: Model, questions: Sequence[Mapping[str, Any]], progress: Callable[[int], None] = lambda done: None
) -> tuple[dict[str, str], dict[str, float]]:
    """By question id: the predictions, and the score of "no answer" minus the score of the best span."""
    answers: dict[str, str] = {}
    gaps: dict[str, float] = {}
    with model.using(model.adapter_for("answer")):
        task = cast(AnswerQuestions, model.task("answer"))
        for start in range(0, len(questions), task.chunk):
            part = questions[start : start + task.chunk]
            features = task.encode(model.tokenizer, model.config, [(q["question"], q["context"]) for q in part])
            for question, found in zip(part, task.candidates(task.run(model.network, features), features)):
                answers[question["id"]] = task.text(found, question["context"])
                gaps[question["id"]] = found.gap
            progress(start + len(part))
    return answers, gaps


def score(questions: Sequence[Mapping[str, Any]], answers: Mapping[str, str]) -> SquadScores:
    """The official scores of answers by their questions' ids."""
    golds = [[a["text"] for a in q["answers"]] for q in questions]
    newer = any(not gold for gold in golds)
    given = [answers.get(q["id"]) for q in questions]
    right = [(0.0, 0.0) if guess is None else best_over(guess, gold, newer) for guess, gold in zip(given, golds)]
    percent = 100 * np.array(right)
    has = np.array([bool(gold) for gold in golds])
    groups = {}
    for name, which in (("has answer", has), ("no answer", ~has)) if newer else ():
        if which.any():
            exact, f1 = percent[which].mean(0).tolist()
            groups[name] = {"exact": exact, "f1": f1, "total": int(which.sum())}
    exact, f1 = percent.mean(0).tolist()
    return SquadScores(exact, f1, len(questions), groups, sum(guess is None for guess in given))
