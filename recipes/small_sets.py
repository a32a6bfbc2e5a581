"""The labelled sets of everybert-small, as their makers publish them: (train, dev) of each, files or rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everybert.evaluation.glue import find_file, find_tasks
from everybert.text.readers import read_conll

ENTITIES = {"person": "PER", "location": "LOC", "corporation": "ORG", "group": "ORG"}
ENTITIES |= {"product": "MISC", "creative-work": "MISC", "PER": "PER", "LOC": "LOC", "ORG": "ORG", "MISC": "MISC"}
Rows = list[tuple[Any, ...]]


def glue_set(name: str) -> Callable[[Path], tuple[Any, Any]]:
    """Train and dev of a GLUE task."""

    def files(tasks: Path) -> tuple[Any, Any]:
        folder = find_tasks(tasks / "glue")[name]
        return find_file(folder, "train"), find_file(folder, "dev")

    return files


def entailment(tasks: Path) -> tuple[Rows, Rows]:
    """SICK and SNLI's dev and test sets, three ways; a tenth is held out."""
    rows: Rows = []
    for line in (tasks / "sick" / "SICK.txt").read_text("utf-8").splitlines()[1:]:
        _, a, b, _, label = line.split("\t")[:5]
        rows.append((a, b, label.lower()))
    for part in ("dev", "test"):
        texts = [
            (tasks / "snli_dev_test" / f"{k}.{part}").read_text("utf-8").splitlines() for k in ("s1", "s2", "labels")
        ]
        rows += [row for row in zip(*texts) if row[2] in ("entailment", "neutral", "contradiction")]
    return held_out(rows)


def entities(tasks: Path) -> tuple[Rows, Rows]:
    """Wikigold, WNUT-17 and the Broad Twitter Corpus under one set of names: PER, LOC, ORG, MISC."""
    folder = tasks / "ner"
    files = [folder / "wikigold" / "wikigold.conll.txt", folder / "wnut17" / "wnut17train.conll"]
    files += [folder / "wnut17" / "emerging.dev.conll", *sorted((folder / "btc").glob("*.conll"))]
    rows: Rows = []
    for file in files:
        for sentence in read_conll(file):
            words, tags = [columns[0] for columns in sentence], [columns[-1] for columns in sentence]
            rows.append((words, bio(tags)))
    return held_out(rows)


def bio(tags: list[str]) -> list[str]:
    """IOB1 or BIO tags of any of the sets as BIO tags of ours."""
    out, before = [], "O"
    for tag in tags:
        mark, _, kind = tag.partition("-")
        kind = ENTITIES.get(kind, "")
        if mark not in "BI" or not kind:
            out.append("O")
        else:
            out.append(f"{'I' if mark == 'I' and before == kind else 'B'}-{kind}")
        before = out[-1][2:]
    return out


def held_out(rows: Rows) -> tuple[Rows, Rows]:
    """Nine tenths and one tenth, drawn once."""
    random.Random(0).shuffle(rows)
    return rows[len(rows) // 10 :], rows[: len(rows) // 10]


def treebank(tasks: Path) -> tuple[Any, Any]:
    """UD English EWT."""
    return tuple(next(iter(sorted((tasks / "ud_ewt").glob(f"*{part}*.conllu")))) for part in ("train", "dev"))  # type: ignore[return-value]


def squad(tasks: Path) -> tuple[Any, Any]:
    """SQuAD 1.1's questions."""
    return tasks / "squad" / "v1.1-train.json", tasks / "squad" / "v1.1-dev.json"


def questions(file: Path) -> list[dict[str, Any]]:
    """Each question of a SQuAD file with its text."""
    found = json.loads(file.read_text("utf-8"))["data"]
    return [
        {"id": q["id"], "question": q["question"], "context": p["context"], "answers": first(q["answers"])}
        for article in found
        for p in article["paragraphs"]
        for q in p["qas"]
    ]


def first(answers: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The first of a question's answers, as `datasets` writes them."""
    return {"text": [answers[0]["text"]], "answer_start": [answers[0]["answer_start"]]}


NAMES = "Anna Omar Lucia Peter Mei Carlos Fatima John Ingrid Raj Sofia Kofi Elena David Yuki Ahmed Clara Ivan Rosa Tom"
PLACES = "Berlin Kenya Madrid Brazil London Peru Chicago Japan Norway Vienna Egypt Texas Rome India Boston Poland"
YEARS = "1804 1853 1879 1901 1912 1927 1936 1948 1955 1969 1974 1983 1990 1998 2004 2016"
THINGS = "bike,red car,piano,house,dog,small boat,camera,guitar,loaf of bread,map,horse,garden,violin,blue hat,radio"
COUNTS = "12 40 75 110 250 300 1,200 5,000 64M 90 18 7 33 900 2M 500k"
FACTS = [
    (PLACES.split(), "{x} lives in {a}", ["Where does {x} live?", "In which place does {x} live?"]),
    (PLACES.split(), "{x} works in {a}", ["Where does {x} work?", "Where is {x}'s work?"]),
    (PLACES.split(), "{x} was born in {a}", ["Where was {x} born?", "What is {x}'s birthplace?"]),
    (PLACES.split(), "{x} went to {a}", ["Where did {x} go?", "What place did {x} go to?"]),
    (YEARS.split(), "{x} was born in {a}", ["When was {x} born?", "In what year was {x} born?"]),
    (YEARS.split(), "{x} left school in {a}", ["When did {x} leave school?", "What year did {x} leave school?"]),
    (THINGS.split(","), "{x} bought a {a}", ["What did {x} buy?", "What has {x} bought?"]),
    (THINGS.split(","), "{x} wants a {a}", ["What does {x} want?"]),
    (COUNTS.split(), "{x} has {a} books", ["How many books does {x} have?"]),
    (COUNTS.split(), "{x} sold {a} tickets", ["How many tickets did {x} sell?"]),
]
"""Kinds of answers, a statement, and questions about it."""


OWNERS = "hotel ship school farm castle museum factory library village bridge tower theatre station zoo bank town"
COUNTED = "rooms windows doors seats floors workers books engines trees beds lamps wheels members cows offices"
COUNTINGS = [
    "The {x} has {a} {n} and {b} {m}",
    "The {x} is well equipped, with {a} {n}, {b} {m} and {c} {o}",
    "The {x} has {a} {n} and {b} {m}, and {c} {o} in all",
    "With {a} {n} and {b} {m}, the {x} also has {c} {o}",
]


def two_facts(count: int) -> list[dict[str, Any]]:
    """Made-up sentences of facts of one kind, one of which is asked: which is it, and where does its answer end?"""
    chance, rows = random.Random(0), []
    for number in range(count):
        question, text, answer, behind = (two_people if chance.random() < 0.6 else some_counts)(chance)
        start = text.index(answer, behind)
        given = {"text": [answer], "answer_start": [start]}
        rows.append({"id": f"facts-{number}", "question": question, "context": text, "answers": given})
    return rows


def two_people(chance: random.Random) -> tuple[str, str, str, int]:
    """(question, text, answer, where to look for it from): each of two has or does something."""
    answers, statement, questions = chance.choice(FACTS)
    (x, y), (a, b) = chance.sample(NAMES.split(), 2), chance.sample(answers, 2)
    glue = chance.choice((" and ", " and ", ", and ", ", while ", " but ", ". "))
    text = statement.format(x=x, a=a) + glue + statement.format(x=y, a=b) + chance.choice(("", "."))
    asked, answer = chance.choice(((x, a), (y, b)))
    return chance.choice(questions).format(x=asked), text, answer, text.index(asked)


def some_counts(chance: random.Random) -> tuple[str, str, str, int]:
    """The same of one thing that has several others, each with its number."""
    x, nouns, numbers = (
        chance.choice(OWNERS.split()),
        chance.sample(COUNTED.split(), 3),
        chance.sample(COUNTS.split(), 3),
    )
    statement = chance.choice(COUNTINGS)
    text = statement.format(x=x, **dict(zip("abc", numbers)), **dict(zip("nmo", nouns))) + chance.choice(".!")
    known = [(noun, n) for noun, n in zip(nouns, numbers) if f"{n} {noun}" in text]
    noun, answer = chance.choice(known)
    return f"How many {noun} does the {x} have?", text, answer, text.index(f"{answer} {noun}")
