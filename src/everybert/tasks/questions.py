"""Questions about contexts, from SQuAD files and from records; answers are checked against their offsets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from everybert.errors import EverybertError
from everybert.tasks import columns as col
from everybert.tasks.records import Bad, Examples, Rows, Source, read_rows
from everybert.text.readers import kind, read_squad


class Question(NamedTuple):
    """A question about a context."""

    question: str
    context: str
    id: str = ""


class Gold(NamedTuple):
    """A true answer and where it begins in the context."""

    text: str
    start: int


def read(source: Source, columns: Mapping[str, str] | None = None, skip_bad: bool = False) -> Examples:
    """SQuAD 1.1 or 2.0 JSON; or records with question, context and answers, as SQuAD or `datasets` write them."""
    chosen = columns or {}
    if isinstance(source, str | Path) and kind(Path(source)) == ".json" and _is_squad(Path(source)):
        table = Rows(list(read_squad(source)), str(source))
    else:
        table = read_rows(source, ("question", "context", "answers"), skip_bad)
    if not table.rows:
        raise EverybertError(f"{table.where} has 0 questions; there is nothing to learn from")
    first, where = table.rows[0], table.where
    question = col.find(first, "question", ("question", "query"), chosen, where)
    context = col.find(first, "context", ("context", "passage", "paragraph", "text"), chosen, where)
    answers = col.find(first, "answers", ("answers", "answer"), chosen, where)
    if question is None or context is None or answers is None:
        raise EverybertError(
            f"{where}: question answering needs question, context and answers; it has {', '.join(map(str, first))}"
        )
    bad = Bad(where, skip_bad, table.bad)
    inputs: list[Any] = []
    targets: list[Any] = []
    for i, row in enumerate(table.rows):
        q, c = row.get(question), row.get(context)
        if not isinstance(q, str) or not q.strip() or not isinstance(c, str) or not c.strip():
            bad(i, "the question or the context is empty or not text")
            continue
        golds = _golds(row.get(answers), row.get("answer_start"))
        problem = next((p for g in golds if (p := _misplaced(g, c))), None)
        if problem:
            bad(i, problem)
            continue
        inputs.append(Question(q, c, str(row.get("id", i))))
        targets.append(tuple(Gold(text, c.find(text) if start is None else start) for text, start in golds))
    if not inputs:
        raise EverybertError(f"{where} has no usable row; {bad.found[0]}")
    return Examples(inputs, targets, where, (*table.notes, *bad.notes()), tuple(bad.found))


def _is_squad(path: Path) -> bool:
    """Whether the file begins like SQuAD's: an object, with paragraphs soon after."""
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(4096)
    return head.lstrip("\ufeff \n\r\t").startswith("{") and '"paragraphs"' in head


def _golds(value: Any, start: Any) -> list[tuple[str, int | None]]:
    """(text, start) of each answer, however they were written down."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [(value, _whole(start))]
    if isinstance(value, Mapping):  # {"text": [...], "answer_start": [...]}, or one answer
        texts, starts = value.get("text", []), value.get("answer_start", value.get("start"))
        if isinstance(texts, str):
            return [(texts, _whole(starts))] if texts else []
        starts = list(starts) if starts is not None else [None] * len(texts)
        return [(str(t), _whole(s)) for t, s in zip(texts, starts)]
    return [pair for item in value for pair in _golds(item, None)]


def _whole(value: Any) -> int | None:
    return None if value is None or value == "" else int(value)


def _misplaced(gold: tuple[str, int | None], context: str) -> str | None:
    """What is wrong with an answer's place, if anything."""
    text, start = gold
    if start is None:
        return None if text in context else f"the answer {text!r} is not in the context"
    if start < 0 or start + len(text) > len(context):
        return f"the answer {text!r} at {start} lies outside the context of {len(context)} characters"
    there = context[start : start + len(text)]
    return None if there == text else f"the answer {text!r} is not at {start}, where the context has {there!r}"
