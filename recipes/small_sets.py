"""The labelled sets of everybert-small, as their makers publish them: (train, dev) of each, files or rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everybert.evaluation.glue import find_file, find_tasks
from everybert.text.task_files import read_conll

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


def two_facts(count: int) -> list[dict[str, Any]]:
    """Made-up sentences of two facts of one kind, one of which is asked: which is it, and where does its answer end?"""
    chance, rows = random.Random(0), []
    for number in range(count):
        answers, statement, questions = chance.choice(FACTS)
        (x, y), (a, b) = chance.sample(NAMES.split(), 2), chance.sample(answers, 2)
        glue = chance.choice((" and ", " and ", ", and ", ", while ", " but ", ". "))
        text = statement.format(x=x, a=a) + glue + statement.format(x=y, a=b) + chance.choice(("", "."))
        asked, answer = chance.choice(((x, a), (y, b)))
        start = text.index(asked)  # the answer stands behind its own name
        start = text.index(answer, start)
        question = chance.choice(questions).format(x=asked)
        given = {"text": [answer], "answer_start": [start]}
        rows.append({"id": f"two-{number}", "question": question, "context": text, "answers": given})
    return rows
