"""Examples of a task from what users have: files, DataFrames, lists of dictionaries or of tuples.

Columns are found by name; a guess is reported in the notes. A row that cannot be used is an error that names it, or is
skipped and listed under `skip_bad`.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from everybert.errors import EverybertError
from everybert.tasks.words import Entity, Splitter, convert_tags, find_scheme, write_tags
from everybert.text.readers import (
    CONLLU_FIELDS,
    ReadReport,
    expand,
    kind,
    lines,
    read_conll,
    read_conllu,
    read_records,
    read_squad,
)

Source = Any
"""A path, a pandas DataFrame, a list of dictionaries, or a list of tuples whose last entry is the target."""
Row = Mapping[str, Any]
Columns = Mapping[str, str] | None
"""Column names given by the user, by role (text, pair, label …)."""

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
WORDS, TAGS = ("words", "tokens"), ("tags", "ner_tags", "labels", "pos_tags", "upos", "label")
QUESTIONS, CONTEXTS = ("question", "query"), ("context", "passage", "paragraph", "text")
PROMPTS, ENDINGS = ("startphrase", "prompt", "context", "question", "text", "sent1"), ("endings", "choices", "options")
ANCHORS = ("anchor", "query", "question", "sentence1", "text1", "premise", "sentence_A", "a")
POSITIVES = ("positive", "passage", "answer", "sentence2", "text2", "hypothesis", "sentence_B", "b")
NEGATIVES = ("negative", "hard_negative", "negatives")


class Question(NamedTuple):
    """A question about a context."""

    question: str
    context: str
    id: str = ""


class Gold(NamedTuple):
    """A true answer and where it begins in the context."""

    text: str
    start: int


@dataclass(frozen=True)
class Examples:
    """Inputs and targets, side by side."""

    inputs: list[Any]
    targets: list[Any]
    where: str
    """The source, for messages."""
    notes: tuple[str, ...] = ()
    """What was guessed or skipped."""
    bad: tuple[str, ...] = field(default=(), repr=False)
    """Rows skipped under skip_bad, as "where: why"."""

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, which: Iterable[int]) -> Examples:
        """The examples with these numbers."""
        which = list(which)
        return replace(self, inputs=[self.inputs[i] for i in which], targets=[self.targets[i] for i in which])


# ── rows of any source ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Rows:
    """The records of a source as they were read."""

    rows: list[dict[str, Any]]
    where: str
    bad: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_rows(source: Source, fields: Sequence[str], skip_bad: bool = False) -> Rows:
    """The records of any source. `fields` names the entries of tuples; shorter tuples lack those before the last."""
    if isinstance(source, str | Path):
        return _read_file(Path(source), skip_bad)
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        rows, where = source.to_dict("records"), "the DataFrame"
    else:
        where = "the data"
        if isinstance(source, Mapping) or not hasattr(source, "__iter__"):
            raise EverybertError(f"{where} is a {type(source).__name__}; give a file, a DataFrame or a list of rows")
        rows = list(source)
    if not rows:
        raise EverybertError(f"{where} has 0 rows; there is nothing to learn from")
    if all(isinstance(row, Mapping) for row in rows):
        return Rows([dict(row) for row in rows], where)
    named = []
    for i, row in enumerate(rows):
        if not isinstance(row, tuple | list) or not 1 < len(row) <= len(fields):
            raise EverybertError(f"{where}, row {i + 1}: expected a tuple ({', '.join(fields)}), not {str(row)[:60]!r}")
        named.append(dict(zip([*fields[: len(row) - 1], fields[-1]], row)))
    return Rows(named, where)


def _read_file(path: Path, skip_bad: bool) -> Rows:
    (path,) = expand(path) if not path.is_dir() else (path,)
    names = _headerless_names(path)
    report = ReadReport()
    rows = list(read_records(path, skip_bad=skip_bad, columns=names, report=report))
    if not rows:
        raise EverybertError(f"{path} has 0 rows; there is nothing to learn from")
    notes = (f"{path} has no header row: its columns are taken as {', '.join(names)}",) if names else ()
    return Rows(rows, str(path), tuple(report.bad), notes)


def _headerless_names(path: Path) -> list[str] | None:
    """Column names for a csv or tsv file whose first row is data, by what the columns hold; None with a header."""
    if kind(path) not in (".csv", ".tsv"):
        return None
    head = [line for _, line in islice(lines(path), 20)]
    if not head:
        return None
    if kind(path) == ".tsv":
        rows = list(csv.reader(head, delimiter="\t", quoting=csv.QUOTE_NONE))
    else:
        rows = list(csv.reader(head, delimiter=max(",;\t", key=head[0].count)))
    rows = [row for row in rows if len(row) == len(rows[0])]
    known = {name.lower() for group in (TEXTS, LABELS, SCORES, *PAIRS) for name in group}
    known |= {"index", "idx", "id", "words", "tokens", "startphrase", "context", "answers"}
    if any(cell.strip().lower() in known for cell in rows[0]):
        return None
    if not any(len(cell) > 40 or cell.count(" ") > 2 or number_of(cell) is not None for cell in rows[0]):
        return None
    width = len(rows[0])
    if width == 4 and all(row[1] in ("0", "1") and row[2] in ("", "*") for row in rows):
        return ["source", "label", "mark", "sentence"]  # CoLA as GLUE ships it
    length = [sum(len(row[i]) for row in rows) for i in range(width)]
    if width == 2:
        return ["text", "label"] if length[0] >= length[1] else ["label", "text"]
    if width == 3:
        names = ["sentence1", "sentence2"]
        names.insert(length.index(min(length)), "label")
        return names
    raise EverybertError(f"{path} has no header row and {width} columns; add a header row that names them")


class RowError(Exception):
    """Why a row cannot be used."""


def collect(
    table: Rows, read: Callable[[int, dict[str, Any]], tuple[Any, Any]], skip_bad: bool, note: str | None = None
) -> Examples:
    """Examples of `read(number, row) -> (input, target)`; a RowError skips the row, or stops without `skip_bad`."""
    inputs, targets, bad = [], [], list(table.bad)
    for i, row in enumerate(table.rows):
        try:
            given, target = read(i, row)
        except RowError as error:
            place = f"{table.where}, row {i + 1}"
            if not skip_bad:
                raise EverybertError(f"{place}: {error}; fix the row, or skip such rows with skip_bad") from None
            bad.append(f"{place}: {error}")
            continue
        inputs.append(given)
        targets.append(target)
    if not inputs:
        raise EverybertError(f"{table.where} has no usable row; {bad[0]}")
    notes = list(table.notes)
    if bad:
        notes.append(f"{len(bad)} bad rows of {table.where} were skipped, the first: {bad[0]}")
    return Examples(inputs, targets, table.where, (*notes, *([note] if note else [])), tuple(bad))


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────


def find_column(row: Row, role: str, names: Sequence[str], columns: Columns, where: str) -> str | None:
    """The column for a role: the one the user chose (which must exist), else the first of the usual names."""
    if columns and role in columns:
        if columns[role] not in row:
            has = ", ".join(map(str, row))
            raise EverybertError(f"{where} has no column {columns[role]!r} for the {role}; it has {has}")
        return columns[role]
    lower = {str(name).strip().lower(): name for name in row}
    return next((lower[name.lower()] for name in names if name.lower() in lower), None)


def find_texts(row: Row, columns: Columns, where: str, taken: Iterable[str] = ()) -> list[str]:
    """One text column, or the two of a pair."""
    if columns and ("text" in columns or "pair" in columns):
        found = (find_column(row, "text", TEXTS, columns, where), find_column(row, "pair", (), columns, where))
        return [name for name in found if name is not None]
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
    has = ", ".join(map(str, row))
    raise EverybertError(f"{where}: which column is the text? It has {has}; name it (columns: text=…, pair=…)")


def find_columns(row: Row, columns: Columns, where: str, **roles: Sequence[str]) -> Iterator[str]:
    """The columns of roles (each with its usual names) that must all exist."""
    for role, names in roles.items():
        column = find_column(row, role, names, columns, where)
        if column is None:
            has = ", ".join(map(str, row))
            raise EverybertError(f"{where} has no column for the {role} (it has {has}); name it (columns: {role}=…)")
        yield column


def find_endings(row: Row, columns: Columns, where: str) -> tuple[list[str], bool]:
    """The column that lists the endings (True), or the numbered ones: ending0, ending1 … (False)."""
    numbered = [c for c in row if re.fullmatch(r"(ending|choice|option)_?\d+", str(c))]
    if numbered and find_column(row, "endings", ENDINGS, columns, where) is None:
        return sorted(numbered, key=lambda c: int(re.sub(r"\D", "", c))), False
    return list(find_columns(row, columns, where, endings=ENDINGS)), True


def cell(row: Row, column: str) -> str:
    """A cell as text; a missing one is empty."""
    value = row.get(column)
    return value if isinstance(value, str) else "" if value is None else str(value)


def text_reader(row: Row, columns: Columns, where: str) -> Callable[[Row], str]:
    """Reads the text of a row without a target."""
    text = find_texts(row, columns, where)[0]
    return lambda row: cell(row, text)


def pair_reader(row: Row, columns: Columns, where: str) -> Callable[[Row], str | tuple[str, str]]:
    """Reads a text, or a pair if there are two text columns."""
    texts = find_texts(row, columns, where)
    if len(texts) == 1:
        return text_reader(row, columns, where)
    return lambda row: (cell(row, texts[0]), cell(row, texts[1]))


def question_reader(row: Row, columns: Columns, where: str) -> Callable[[Row], tuple[str, str]]:
    """Reads a question and its context."""
    question, context = find_columns(row, columns, where, question=QUESTIONS, context=CONTEXTS)
    return lambda row: (cell(row, question), cell(row, context))


def choice_reader(row: Row, columns: Columns, where: str) -> Callable[[Row], tuple[str, list[str]]]:
    """Reads a prompt and its endings."""
    (prompt,), (endings, listed) = find_columns(row, columns, where, text=PROMPTS), find_endings(row, columns, where)
    return lambda row: (cell(row, prompt), row[endings[0]] if listed else [cell(row, c) for c in endings])


def _text(row: Row, column: str, what: str | None = None) -> str:
    """A cell that must hold text."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"{what or f'the text in column {column!r}'} is empty or not text")
    return value


# ── texts and pairs with a label, several labels, or a number ────────────────────────────────────────────────


def read_labelled(
    source: Source, columns: Columns, skip_bad: bool, names: Sequence[str], target: Callable[[Any], Any]
) -> Examples:
    """Texts or pairs, and `target` of the cell in the label column, whose usual names are `names`."""
    table = read_rows(source, ("text", "text_pair", "label"), skip_bad)
    first, where = table.rows[0], table.where
    (label,) = find_columns(first, columns, where, label=names)
    texts = find_texts(first, columns, where, [label])

    def read(number: int, row: dict[str, Any]) -> tuple[Any, Any]:
        if missing := [c for c in (*texts, label) if c not in row]:
            raise RowError(f"no column {missing[0]!r}")
        for column in texts:
            if not isinstance(row[column], str):
                raise RowError(f"the column {column!r} is not text ({row[column]!r}); are columns swapped?")
            if not row[column].strip():
                raise RowError(f"the text in column {column!r} is empty")
        given = row[texts[0]] if len(texts) == 1 else tuple(row[c] for c in texts)
        return given, target(row[label])

    note = None
    if isinstance(source, str | Path) and not {*texts, label} <= set((columns or {}).values()):
        shown = " and ".join(map(repr, texts)) + f", label from {label!r}"
        note = f"{where}: text read from {shown} (guessed; choose with columns)"
    return collect(table, read, skip_bad, note)


def number_of(value: Any) -> float | None:
    """A finite number, or None."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def read_numbers(source: Source, columns: Columns = None, skip_bad: bool = False) -> Examples:
    """Texts or pairs with a finite number each."""

    def target(value: Any) -> float:
        if (number := number_of(value)) is None:
            raise RowError(f"the target {value!r} is not a finite number")
        return number

    return read_labelled(source, columns, skip_bad, SCORES, target)


def read_classes(
    source: Source, columns: Columns = None, skip_bad: bool = False, multi: bool | None = None
) -> Examples:
    """Texts or pairs with their labels. Multi-label if labels are lists, or `multi` is set ("a|b" is split)."""
    examples = read_labelled(source, columns, skip_bad, LABELS, lambda value: value)
    if multi is None:
        multi = any(isinstance(t, list | tuple | set) for t in examples.targets)
    if not multi:
        return examples
    where = examples.where
    return replace(examples, targets=[split_labels(t, f"{where}, row {i + 1}") for i, t in enumerate(examples.targets)])


def split_labels(value: Any, place: str) -> tuple[str, ...]:
    """("a", "b") of ["a", "b"], "a|b" or "a;b"; () of an empty list or text."""
    if isinstance(value, str):
        value = [part for part in value.replace(";", "|").split("|") if part.strip()]
    elif not isinstance(value, list | tuple | set):
        value = [value]
    names = [label_name(v) for v in value]
    if any(not name for name in names):
        raise EverybertError(f"{place}: one of the labels is missing ({value!r}); fill it in")
    return tuple(str(name) for name in names)


# ── sentences of tagged words ────────────────────────────────────────────────────────────────────────────────


def read_tagged(source: Source, columns: Columns = None, skip_bad: bool = False, scheme: str | None = None) -> Examples:
    """Sentences of words with a tag each; entity tags become well-formed BIO or BIOES (by default as they were)."""
    examples = read_raw_tags(source, columns, skip_bad)
    found = find_scheme(examples.targets)
    where, notes, tags = examples.where, list(examples.notes), examples.targets
    if found == "plain":
        if scheme not in (None, "plain") and any(t != "O" for sentence in tags for t in sentence):
            raise EverybertError(f"{where}: the tags have no B-, I- … prefixes, so they cannot become {scheme}")
        return examples
    target = scheme or ("BIO" if found == "IOB1" else found)
    fresh = [convert_tags(t, target) for t in tags]
    if found != target:
        notes.append(f"{where}: tags converted from {found} to {target}")
    elif changed := sum(a != list(b) for a, b in zip(fresh, tags)):
        notes.append(f"{where}: {changed} sentences had ill-formed {target} tags, which were corrected")
    return replace(examples, targets=fresh, notes=tuple(notes))


def read_raw_tags(source: Source, columns: Columns = None, skip_bad: bool = False) -> Examples:
    """Sentences with their tags as written: CoNLL, CoNLL-U (`label` names the column), records, or marked texts."""
    columns = columns or {}
    if isinstance(source, str | Path):
        path = Path(source)
        if kind(path) == ".conllu":
            column = columns.get("label", "upos")
            if column not in CONLLU_FIELDS:
                raise EverybertError(f"{path}: CoNLL-U has no column {column!r}; it has {', '.join(CONLLU_FIELDS)}")
            trees = list(read_conllu(path))
            words, tags = ([[word[name] for word in tree] for tree in trees] for name in ("form", column))
            return Examples(words, tags, str(path), (f"{path}: labels read from the column {column!r}",))
        if kind(path) not in (".jsonl", ".ndjson", ".json", ".parquet", ".csv"):
            sentences, column = list(read_conll(path)), columns.get("label", "-1")
            width = len(sentences[0][0])
            if not column.lstrip("-").isdigit() or not -width <= int(column) < width:
                raise EverybertError(
                    f"{path} has {width} columns without names; give the label's number, 0 … {width - 1}"
                )
            tags = [[row[int(column)] for row in s] for s in sentences]
            return Examples([[row[0] for row in s] for s in sentences], tags, str(path))
    table = read_rows(source, ("words", "tags"), skip_bad)
    first, where = table.rows[0], table.where
    spans = find_column(first, "spans", ("spans", "entities", "ents"), columns, where)
    if spans is not None and isinstance(first.get("text"), str):
        note = f"{where}: entities read from {spans!r}, words split by everybert"
        return collect(table, lambda i, row: _marked(row, spans), skip_bad, note)
    text, label = find_columns(first, columns, where, text=WORDS, label=TAGS)

    def read(number: int, row: dict[str, Any]) -> tuple[list[str], list[str]]:
        words, tags = _list(row.get(text)), _list(row.get(label))
        if not words or any(not isinstance(w, str) or not w.strip() for w in words):
            raise RowError("the words are missing, or one of them is empty")
        if len(words) != len(tags):
            raise RowError(f"{len(words)} words but {len(tags)} tags")
        if any(not label_name(tag) for tag in tags):
            raise RowError("a tag is missing")
        return words, [str(label_name(tag)) for tag in tags]

    return collect(table, read, skip_bad)


def _marked(row: Row, column: str) -> tuple[list[str], list[str]]:
    """Words and BIO tags of a text with marked spans ({"start", "end", "label"} or [start, end, label]).

    A span that begins or ends inside a word takes the whole word.
    """
    text = str(row.get("text") or "")
    words = Splitter().split(text)
    if not words:
        raise RowError("the text is empty")
    entities = []
    for span in row.get(column) or []:
        keys = ("start", "end", "label")
        start, end, label = (span[k] for k in keys) if isinstance(span, Mapping) else tuple(span)[:3]
        if not 0 <= int(start) < int(end) <= len(text):
            raise RowError(f"the span {start}–{end} ({label}) lies outside the text of {len(text)} characters")
        inside = [k for k, w in enumerate(words) if w.end > int(start) and w.start < int(end)]
        if not inside:
            raise RowError(f"the span {start}–{end} ({label}) contains no word")
        entities.append(Entity(str(label), inside[0], inside[-1] + 1))
    try:
        tags = write_tags(sorted(entities, key=lambda e: e.start), len(words))
    except EverybertError as error:
        raise RowError(str(error)) from None
    return [w.text for w in words], tags


def _list(value: Any) -> list[Any]:
    """A list as it is; a text split at its spaces (csv)."""
    if isinstance(value, str):
        return value.split()
    return list(value) if value is not None and hasattr(value, "__iter__") else []


# ── questions about contexts ─────────────────────────────────────────────────────────────────────────────────


def read_questions(source: Source, columns: Columns = None, skip_bad: bool = False) -> Examples:
    """SQuAD 1.1 or 2.0 JSON; or records with question, context and answers, as SQuAD or `datasets` write them."""
    if isinstance(source, str | Path) and kind(Path(source)) == ".json" and _is_squad(Path(source)):
        table = Rows(list(read_squad(source)), str(source))
    else:
        table = read_rows(source, ("question", "context", "answers"), skip_bad)
    if not table.rows:
        raise EverybertError(f"{table.where} has 0 questions; there is nothing to learn from")
    first, where = table.rows[0], table.where
    roles = {"question": QUESTIONS, "context": CONTEXTS, "answers": ("answers", "answer")}
    question, context, answers = find_columns(first, columns, where, **roles)

    def read(number: int, row: dict[str, Any]) -> tuple[Question, tuple[Gold, ...]]:
        asked, text = (_text(row, column, "the question or the context") for column in (question, context))
        golds = [_placed(gold, text) for gold in _golds(row.get(answers), row.get("answer_start"))]
        return Question(asked, text, str(row.get("id", number))), tuple(golds)

    return collect(table, read, skip_bad)


def _is_squad(path: Path) -> bool:
    """Whether the file begins like SQuAD's: an object, with paragraphs soon after."""
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(4096)
    return head.lstrip("\ufeff \n\r\t").startswith("{") and '"paragraphs"' in head


def _golds(value: Any, start: Any) -> list[tuple[str, Any]]:
    """(text, start) of each answer, in any of the usual forms."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [(value, start)]
    if isinstance(value, Mapping):  # {"text": [...], "answer_start": [...]}, or one answer
        texts, starts = value.get("text", []), value.get("answer_start", value.get("start"))
        if isinstance(texts, str):
            return [(texts, starts)] if texts else []
        return [(str(t), s) for t, s in zip(texts, list(starts) if starts is not None else [None] * len(texts))]
    return [pair for item in value for pair in _golds(item, None)]


def _placed(gold: tuple[str, Any], context: str) -> Gold:
    """An answer with its place in the context, checked."""
    text, start = gold
    if start is None or start == "":
        if text not in context:
            raise RowError(f"the answer {text!r} is not in the context")
        return Gold(text, context.find(text))
    start = int(start)
    if start < 0 or start + len(text) > len(context):
        raise RowError(f"the answer {text!r} at {start} lies outside the context of {len(context)} characters")
    there = context[start : start + len(text)]
    if there != text:
        raise RowError(f"the answer {text!r} is not at {start}, where the context has {there!r}")
    return Gold(text, start)


# ── prompts with endings; pairs and triplets ─────────────────────────────────────────────────────────────────


def read_choices(source: Source, columns: Columns = None, skip_bad: bool = False) -> Examples:
    """SWAG's own columns (startphrase, ending0 …, label), or a prompt, a list of endings, and the right number."""
    table = read_rows(source, ("prompt", "endings", "label"), skip_bad)
    first, where = table.rows[0], table.where
    roles = {"text": PROMPTS, "label": ("label", "answer", "gold", "target")}
    prompt, label = find_columns(first, columns, where, **roles)
    endings, listed = find_endings(first, columns, where)

    def read(number: int, row: dict[str, Any]) -> tuple[tuple[str, list[str]], int]:
        asked = _text(row, prompt, f"the prompt in column {prompt!r}")
        options = row.get(endings[0]) if listed else [row.get(c) for c in endings]
        if not isinstance(options, list | tuple) or len(options) < 2:
            raise RowError("fewer than two endings")
        if any(not isinstance(o, str) or not o.strip() for o in options):
            raise RowError("an ending is empty or not text")
        right = label_name(row.get(label)) or ""
        if not right.isdigit() or int(right) >= len(options):
            raise RowError(f"the label {row.get(label)!r} is not the number of an ending (0 … {len(options) - 1})")
        return (asked, list(options)), int(right)

    shown = repr(endings[0]) if listed else f"{endings[0]} … {endings[-1]}"
    note = f"{where}: prompt read from {prompt!r}, endings from {shown}, label from {label!r}"
    return collect(table, read, skip_bad, note)


def read_pairs(source: Source, columns: Columns = None, skip_bad: bool = False) -> Examples:
    """(anchor, positive), (anchor, positive, negative), or (text, text, score) if there is a score column."""
    table = read_rows(_name_pairs(source), ("anchor", "positive", "negative"), skip_bad)
    first, where = table.rows[0], table.where
    anchor, positive = find_columns(first, columns, where, text=ANCHORS, pair=POSITIVES)
    negative = find_column(first, "negative", NEGATIVES, columns, where)
    score = find_column(first, "label", SCORES[:3], columns, where)
    score = score or ("label" if negative is None and "label" in first else None)
    names = [anchor, positive, *([negative] if negative and score is None else [])]

    def read(number: int, row: dict[str, Any]) -> tuple[tuple[str, ...], float | None]:
        texts = tuple(_text(row, name) for name in names)
        value = number_of(row.get(score)) if score else None
        if score and value is None:
            raise RowError(f"the score {row.get(score)!r} is not a number")
        return texts, value

    shown = ", ".join(map(repr, names)) + (f", score from {score!r}" if score else "")
    return collect(table, read, skip_bad, f"{where}: texts read from {shown}")


def _name_pairs(source: Source) -> Source:
    """Tuples with a number last are scored pairs; with two or three texts, pairs and triplets."""
    if not isinstance(source, list) or not source or not isinstance(source[0], tuple | list):
        return source
    size = len(source[0])
    names = ("anchor", "positive", "score" if size == 3 and not isinstance(source[0][2], str) else "negative")
    if size not in (2, 3) or any(len(row) != size for row in source):
        raise EverybertError("embed needs tuples (anchor, positive), (anchor, positive, negative) or (a, b, score)")
    return [dict(zip(names, row)) for row in source]


# ── labels ───────────────────────────────────────────────────────────────────────────────────────────────────


def _plain(value: Any) -> Any:
    """A numpy scalar as Python's own."""
    return value.item() if hasattr(value, "item") and not isinstance(value, str) else value


def label_name(value: Any) -> str | None:
    """A label as text: 1 and 1.0 are "1", True is "True"; None and NaN are None."""
    value = _plain(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def label_kind(value: Any) -> str:
    """numbers, text or truth values: labels of one column are of one kind."""
    value = _plain(value)
    return {bool: "truth values", int: "numbers", float: "numbers", str: "text"}.get(type(value), type(value).__name__)


def name_labels(values: Sequence[Any], where: str) -> list[str]:
    """Every label as text; a missing one, or mixed kinds, is an error that names the row."""
    kinds: dict[str, int] = {}
    names: list[str] = []
    for i, value in enumerate(values):
        name = label_name(value)
        if not name:
            raise EverybertError(f"{where}, row {i + 1}: the label is missing; fill it in or remove the row")
        kinds.setdefault(label_kind(value), i)
        names.append(name)
    if len(kinds) > 1:
        seen = " and ".join(f"{kind} (row {i + 1}: {values[i]!r})" for kind, i in kinds.items())
        raise EverybertError(f"{where}: the labels mix {seen}; make them all one kind")
    return names


def order_labels(names: Iterable[str]) -> list[str]:
    """The label order: by value if all are numbers, else alphabetical. It is saved in the model folder."""
    distinct = set(names)
    numeric = all(number_of(name) is not None for name in distinct)
    return sorted(distinct, key=float) if numeric else sorted(distinct)


def check_labels(counts: Counter[str], rows: int, where: str) -> None:
    """Refuse labels that cannot be learned: a single one, or so many that the columns look swapped."""
    if len(counts) == 1:
        only = next(iter(counts))
        raise EverybertError(f"{where}: every row has the label {only!r}; two labels or more are needed")
    if rows >= 20 and len(counts) > max(20, rows // 2):
        numeric = all(number_of(name) is not None for name in counts)
        remedy = "use the task regress for numbers" if numeric else "are text and label columns swapped?"
        raise EverybertError(f"{where}: {len(counts)} different labels in {rows} rows; {remedy}")


def label_ids(names: Sequence[str], labels: Sequence[str], where: str) -> list[int]:
    """The index of each label; labels that are not in the training data are an error that lists them."""
    number = {label: i for i, label in enumerate(labels)}
    unseen = sorted(set(names) - set(number))
    if unseen:
        shown = ", ".join(map(repr, unseen[:10])) + (f" and {len(unseen) - 10} more" if len(unseen) > 10 else "")
        known = ", ".join(map(repr, labels[:10])) + (" …" if len(labels) > 10 else "")
        raise EverybertError(f"{where} has labels that the training data has not: {shown}; known are {known}")
    return [number[name] for name in names]
