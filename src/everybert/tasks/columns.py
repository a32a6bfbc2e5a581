"""Which column is what: by name, else by a guess that is said aloud; and labels as names in a fixed order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from everybert.errors import EverybertError

PAIRS = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"), ("question1", "question2")),
    *(("#1 String", "#2 String"), ("sentence_A", "sentence_B"), ("text_a", "text_b"), ("text1", "text2")),
    *(("query", "passage"), ("anchor", "positive"), ("query", "positive"), ("text", "text_pair"), ("a", "b")),
)
TEXTS = (
    *("text", "sentence", "content", "body", "review", "comment", "tweet", "document", "article", "message"),
    *("utterance", "question", "query", "title", "description", "sentence1"),
)
LABELS = (
    *("label", "labels", "gold_label", "class", "category", "categories", "target", "sentiment", "intent", "topic"),
    *("Quality", "is_duplicate", "entailment_judgment", "stars", "tag", "tags", "y"),
)
SCORES = ("score", "similarity", "relatedness_score", "similarity_score", "rating", "value", "label", "target", "y")


def find(row: Mapping[str, Any], role: str, names: Sequence[str], chosen: Mapping[str, str], where: str) -> str | None:
    """The column for a role: the one the caller chose (which must be there), else the first known name."""
    if role in chosen:
        if chosen[role] not in row:
            raise EverybertError(
                f"{where} has no column {chosen[role]!r} for the {role}; it has {', '.join(map(str, row))}"
            )
        return chosen[role]
    lower = {str(name).strip().lower(): name for name in row}
    return next((lower[name.lower()] for name in names if name.lower() in lower), None)


def find_texts(row: Mapping[str, Any], chosen: Mapping[str, str], where: str, taken: Iterable[str]) -> list[str]:
    """One text column or the two of a pair."""
    if "text" in chosen or "pair" in chosen:
        first = find(row, "text", TEXTS, chosen, where)
        second = find(row, "pair", (), chosen, where)
        return [name for name in (first, second) if name is not None]
    lower = {str(name).strip().lower(): name for name in row if name not in taken}
    for a, b in PAIRS:
        if a.lower() in lower and b.lower() in lower:
            return [lower[a.lower()], lower[b.lower()]]
    for name in TEXTS:
        if name in lower:
            return [lower[name]]
    strings = [name for name in row if name not in taken and isinstance(row[name], str)]
    if len(strings) == 1:
        return strings
    raise EverybertError(
        f"{where}: which column is the text? It has {', '.join(map(str, row))}; name it (columns: text=…, pair=…)"
    )


def looks_headless(cells: Sequence[str]) -> bool:
    """Whether a file's first row is data: no cell is a name we know, and some cell is no name at all."""
    known = {name.lower() for group in (TEXTS, LABELS, SCORES, *PAIRS) for name in group}
    known |= {"index", "idx", "id", "words", "tokens", "startphrase", "context", "answers"}
    if any(cell.strip().lower() in known for cell in cells):
        return False
    return any(len(cell) > 40 or cell.count(" ") > 2 or _is_number(cell) for cell in cells)


def name_headless(rows: Sequence[Sequence[str]], where: str) -> list[str]:
    """Names for the columns of a file without a header row, by what they hold."""
    width = len(rows[0])
    if width == 4 and all(row[1] in ("0", "1") and row[2] in ("", "*") for row in rows):
        return ["source", "label", "mark", "sentence"]  # CoLA as GLUE ships it
    length = [sum(len(row[i]) for row in rows) / len(rows) for i in range(width)]
    if width == 2:
        text = max(range(2), key=length.__getitem__)
        return ["text" if i == text else "label" for i in range(2)]
    if width == 3:
        label = min(range(3), key=length.__getitem__)
        pair = iter(("sentence1", "sentence2"))
        return ["label" if i == label else next(pair) for i in range(3)]
    raise EverybertError(f"{where} has no header row and {width} columns; add a header row that names them")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ── labels ───────────────────────────────────────────────────────────────────────────────────────────────────


def label_name(value: Any) -> str | None:
    """A label as text: 1 and 1.0 are "1", True is "True"; None and NaN are None."""
    if hasattr(value, "item") and not isinstance(value, str):  # a numpy scalar
        value = value.item()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def kind_of(value: Any) -> str:
    """number, text or truth value: labels of one column are of one kind."""
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    return {bool: "truth values", int: "numbers", float: "numbers", str: "text"}.get(type(value), type(value).__name__)


def name_labels(values: Sequence[Any], where: str) -> list[str]:
    """Every label as text; a missing one, or kinds that are mixed, stop with the row."""
    kinds: dict[str, int] = {}
    names: list[str] = []
    for i, value in enumerate(values):
        name = label_name(value)
        if not name:
            raise EverybertError(f"{where}, row {i + 1}: the label is missing; fill it in or leave the row out")
        kinds.setdefault(kind_of(value), i)
        names.append(name)
    if len(kinds) > 1:
        seen = " and ".join(f"{kind} (row {i + 1}: {values[i]!r})" for kind, i in kinds.items())
        raise EverybertError(f"{where}: the labels mix {seen}; make them all one kind")
    return names


def order_labels(names: Iterable[str]) -> list[str]:
    """The label order: by value where all are numbers, else by their letters. It is written into the model folder."""
    distinct = set(names)
    if all(_is_number(name) for name in distinct):
        return sorted(distinct, key=float)
    return sorted(distinct)


def check_labels(counts: Counter[str], rows: int, where: str) -> None:
    """Refuse what cannot be learnt: one label only; or so many that the columns look swapped."""
    if len(counts) == 1:
        only = next(iter(counts))
        raise EverybertError(f"{where}: every row has the label {only!r}; two labels or more are needed")
    if rows >= 20 and len(counts) > max(20, rows // 2):
        numeric = all(_is_number(name) for name in counts)
        remedy = "use the task regress for numbers" if numeric else "are text and label columns swapped?"
        raise EverybertError(f"{where}: {len(counts)} different labels in {rows} rows; {remedy}")


def label_ids(names: Sequence[str], labels: Sequence[str], where: str) -> list[int]:
    """Each label's number; labels that training did not see are an error that lists them."""
    number = {label: i for i, label in enumerate(labels)}
    unseen = sorted(set(names) - set(number))
    if unseen:
        shown = ", ".join(map(repr, unseen[:10])) + (f" and {len(unseen) - 10} more" if len(unseen) > 10 else "")
        known = ", ".join(map(repr, labels[:10])) + (" …" if len(labels) > 10 else "")
        raise EverybertError(f"{where} has labels that the training data has not: {shown}; known are {known}")
    return [number[name] for name in names]
