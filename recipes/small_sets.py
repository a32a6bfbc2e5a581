"""The labelled data sets of everybert-small: (train, dev) of each, as files or rows; and what it may not learn from.

The examples that README, the model card and the tests show are no training data: nobody could tell from them whether
the model reads. `is_published` finds them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from everybert import data
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


# ── what is shown is not learned ─────────────────────────────────────────────────────────────────────────────


def is_published(row: Any) -> bool:
    """Whether a text, or a text inside a row, contains an example that is shown."""
    if isinstance(row, str):
        return published().search(words(row)) is not None
    inner: Iterable[Any] = row.values() if isinstance(row, dict) else row if isinstance(row, list | tuple) else ()
    inner = list(inner)
    if inner and all(isinstance(one, str) for one in inner) and isinstance(row, list):  # the words of a sentence
        return is_published(" ".join(inner))
    return any(is_published(one) for one in inner)


@cache
def published() -> re.Pattern[str]:
    """The examples of at least four words; any word may stand for a mask."""
    texts = [text for row in data.rows("bundled.tsv") for text in row[1:]]
    for file in (Path(__file__).parents[1] / "README.md", Path(__file__).with_name("small_card.py")):
        for block in re.findall(r"```(?:sh|python)\n(.*?)```", file.read_text("utf-8"), re.DOTALL):
            texts += re.findall(r'"([^"\n]+)"', block)
    examples = {words(text) for text in texts if len(words(text).split()) > 3}
    return re.compile(r"\b(?:" + "|".join(sorted(examples)).replace("mask", r"\w+") + r")\b")


def words(text: str) -> str:
    """The words of a text in lower case."""
    return " ".join(re.findall(r"\w+", text.lower()))
