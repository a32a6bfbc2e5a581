"""The labelled data sets of everybert-small: (train, dev) of each, as files or rows."""

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
    """SICK and the dev and test sets of SNLI, with three labels; a tenth is held out."""
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
    """Wikigold, WNUT-17 and the Broad Twitter Corpus with common labels: PER, LOC, ORG, MISC."""
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
    """Convert IOB1 or BIO tags of any of the sets to BIO tags with the common labels."""
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
    """Split the rows into nine tenths and one tenth, at random with a fixed seed."""
    random.Random(0).shuffle(rows)
    return rows[len(rows) // 10 :], rows[: len(rows) // 10]


def treebank(tasks: Path) -> tuple[Any, Any]:
    """UD English EWT."""
    return tuple(next(iter(sorted((tasks / "ud_ewt").glob(f"*{part}*.conllu")))) for part in ("train", "dev"))  # type: ignore[return-value]


def squad(tasks: Path) -> tuple[Any, Any]:
    """SQuAD 1.1's questions."""
    return tasks / "squad" / "v1.1-train.json", tasks / "squad" / "v1.1-dev.json"


def squad_rows(file: Path) -> list[dict[str, Any]]:
    """The questions of a SQuAD file, each with its context."""
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
"""(possible answers, a statement, questions about it)."""


OWNERS = "hotel ship school farm castle museum factory library village bridge tower theatre station zoo bank town"
COUNTED = "rooms windows doors seats floors workers books engines trees beds lamps wheels members cows offices"
COUNTINGS = [
    "The {x} has {a} {n} and {b} {m}",
    "The {x} is well equipped, with {a} {n}, {b} {m} and {c} {o}",
    "The {x} has {a} {n} and {b} {m}, and {c} {o} in all",
    "With {a} {n} and {b} {m}, the {x} also has {c} {o}",
]


def fact_questions(count: int) -> list[dict[str, Any]]:
    """Sentences from templates that state several facts of one kind, with a question about one of them."""
    rng, rows = random.Random(0), []
    for number in range(count):
        question, text, answer, begin = (two_people if rng.random() < 0.6 else several_counts)(rng)
        start = text.index(answer, begin)
        given = {"text": [answer], "answer_start": [start]}
        rows.append({"id": f"facts-{number}", "question": question, "context": text, "answers": given})
    return rows


def two_people(rng: random.Random) -> tuple[str, str, str, int]:
    """(question, text, answer, position from which to search for it): facts about two people."""
    answers, statement, questions = rng.choice(FACTS)
    (x, y), (a, b) = rng.sample(NAMES.split(), 2), rng.sample(answers, 2)
    joint = rng.choice((" and ", " and ", ", and ", ", while ", " but ", ". "))
    text = statement.format(x=x, a=a) + joint + statement.format(x=y, a=b) + rng.choice(("", "."))
    asked, answer = rng.choice(((x, a), (y, b)))
    return rng.choice(questions).format(x=asked), text, answer, text.index(asked)


def several_counts(rng: random.Random) -> tuple[str, str, str, int]:
    """The same, about one thing that has several others in different numbers."""
    x, nouns, numbers = (
        rng.choice(OWNERS.split()),
        rng.sample(COUNTED.split(), 3),
        rng.sample(COUNTS.split(), 3),
    )
    statement = rng.choice(COUNTINGS)
    text = statement.format(x=x, **dict(zip("abc", numbers)), **dict(zip("nmo", nouns))) + rng.choice(".!")
    known = [(noun, n) for noun, n in zip(nouns, numbers) if f"{n} {noun}" in text]
    noun, answer = rng.choice(known)
    return f"How many {noun} does the {x} have?", text, answer, text.index(f"{answer} {noun}")
