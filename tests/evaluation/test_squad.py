"""SQuAD: predictions in the official form, scores as the official scripts have them (worked by hand here)."""

import json

import pytest
import tiny_model

import everybert
from everybert.evaluation import squad
from everybert.text.readers import read_squad

CONTEXT = "The Amazon is in South America. It is a river of 6,400 km."


def write(path, questions):
    qas = [
        {"id": i, "question": q, "answers": [{"text": a, "answer_start": CONTEXT.find(a)} for a in answers]}
        for i, q, answers in questions
    ]
    path.write_text(
        json.dumps({"version": "x", "data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": qas}]}]})
    )
    return path


def test_official_scores_of_1_1(tmp_path):
    data = write(
        tmp_path / "d.json",
        [("1", "where?", ["South America", "America"]), ("2", "what?", ["a river"]), ("3", "x?", ["river"])],
    )
    questions = read_squad(data)
    found = squad.score(questions, {"1": "in South America", "2": "River!"})
    # 1: {in, south, america} against {south, america}: F1 4/5; 2: articles, case, marks do not count; 3: missing
    assert (found.exact, found.f1) == (pytest.approx(100 / 3), pytest.approx(100 * (0.8 + 1.0) / 3))
    assert (found.total, found.missing, found.groups) == (3, 1, {})


def test_official_scores_of_2_0(tmp_path):
    data = write(tmp_path / "d.json", [("1", "where?", ["South America"]), ("2", "who?", []), ("3", "when?", [])])
    found = squad.score(read_squad(data), {"1": "South America", "2": "", "3": "6,400"})
    assert (found.exact, found.f1) == (pytest.approx(200 / 3), pytest.approx(200 / 3))
    assert found.groups == {
        "has answer": {"exact": 100.0, "f1": 100.0, "total": 1},
        "no answer": {"exact": 50.0, "f1": 50.0, "total": 2},
    }


def test_a_model_answers_every_question(tmp_path):
    model = everybert.load(tiny_model.save(tmp_path / "m", {"answer": None}))
    questions = read_squad(write(tmp_path / "d.json", [("1", "where?", ["South America"]), ("2", "who?", ["It"])]))
    done = []
    answers = squad.answer_all(model, questions, done.append)
    assert done == [1, 2]
    assert answers == {q["id"]: model.answer(q["question"], q["context"])[0].text for q in questions}
