"""Readers of the field's task files: CoNLL columns, CoNLL-U trees, SQuAD questions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everybert.errors import EverybertError
from everybert.text.files import ReadReport, decode, expand, lines, open_bytes

CONLLU_FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")


def read_conll(path: str | Path) -> Iterator[list[list[str]]]:
    """The sentences of a CoNLL-2003 style file, each a list of rows of columns (word first, tag last).

    Columns are split at tabs where the file has any, else at white space; blank lines end sentences;
    -DOCSTART- lines are left out. Every row of a file has the same number of columns.
    """
    path = _file(path)
    sentence: list[list[str]] = []
    width = 0
    for number, line in lines(path):
        if not line.strip():
            if sentence:
                yield sentence
            sentence = []
            continue
        row = line.split("\t") if "\t" in line else line.split()
        if row[0].startswith("-DOCSTART-"):
            continue
        width = width or len(row)
        if len(row) != width or width < 2:
            raise EverybertError(
                f"{path}:{number}: {len(row)} columns, {max(width, 2)} expected: put a word and its tag on every line"
            )
        sentence.append(row)
    if sentence:
        yield sentence
    if not width:
        raise EverybertError(f"{path} has no sentences: it needs a word and its tag on every line")


def read_conllu(path: str | Path) -> Iterator[list[dict[str, str]]]:
    """The sentences of a CoNLL-U file: a dictionary of the ten fields for every word.

    Multiword ranges (3-4) and empty nodes (5.1) are left out, as their words carry the tree.
    """
    path = _file(path)
    sentence: list[dict[str, str]] = []
    found = False
    for number, line in lines(path):
        if not line.strip():
            if sentence:
                yield sentence
            sentence = []
        elif not line.startswith("#"):
            row = line.split("\t")
            if len(row) != len(CONLLU_FIELDS):
                raise EverybertError(f"{path}:{number}: {len(row)} columns where CoNLL-U has 10, tab separated")
            if row[0].isdigit():
                sentence.append(dict(zip(CONLLU_FIELDS, row)))
                found = True
    if sentence:
        yield sentence
    if not found:
        raise EverybertError(f"{path} has no sentences: is it a CoNLL-U file?")


def read_squad(path: str | Path) -> Iterator[dict[str, Any]]:
    """The questions of a SQuAD 1.1 or 2.0 file: id, question, context, answers, is_impossible, title.

    `answers` is a list of {"text", "answer_start"}, empty where there is no answer.
    """
    path = _file(path)
    with open_bytes(path) as stream:
        text = decode(stream.read(), path, 0, "strict", ReadReport())
    try:
        articles = json.loads(text)["data"]
        for article in articles:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield {
                        "id": str(question["id"]),
                        "question": question["question"],
                        "context": paragraph["context"],
                        "answers": [
                            {"text": a["text"], "answer_start": a["answer_start"]}
                            for a in question.get("answers") or []
                        ],
                        "is_impossible": bool(question.get("is_impossible", False)),
                        "title": article.get("title", ""),
                    }
    except json.JSONDecodeError as error:
        raise EverybertError(f"{path} is not JSON ({error}): mend the file") from None
    except (KeyError, TypeError) as error:
        raise EverybertError(
            f"{path} is not a SQuAD file ({error} is missing): it needs data, paragraphs, context, qas, id, question"
        ) from None


def _file(path: str | Path) -> Path:
    path = Path(path)
    if path.is_dir():
        raise EverybertError(f"{path} is a folder: name a file")
    return expand(path)[0]
