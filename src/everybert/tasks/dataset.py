"""Examples of a task from what users have: files, DataFrames, lists of dictionaries or of tuples.

Columns are found by name; a guess is reported in the notes. A row that cannot be used is an error that names it, or is
skipped and listed under `skip_bad`.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, repeat
from pathlib import Path
from typing import Any, NamedTuple

from everybert.errors import EverybertError
from everybert.tasks.words import Entity, Splitter, convert_tags, find_scheme, write_tags
from everybert.text import readers
from everybert.text.readers import kind

Source = Any
"""A path, a table (see `held_rows`), a list of dictionaries, or a list of tuples whose last entry is the target."""
Row = Mapping[str, Any]
Columns = Mapping[str, str] | None
"""Column names given by the user, by role (text, pair, label …)."""

NAMES: dict[str, Any] = json.loads(Path(__file__).with_name("columns.json").read_text(encoding="utf-8"))
"""The usual names of columns, by what they hold; the first that a source has is taken."""


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

    def take(self, numbers: Iterable[int]) -> "Examples":
        """The examples with these numbers."""
        numbers = list(numbers)
        return replace(self, inputs=[self.inputs[i] for i in numbers], targets=[self.targets[i] for i in numbers])


@dataclass(frozen=True)
class View:
    """How the data doctor reads the examples of a task."""

    sequences: Callable[[Any], Sequence[str | tuple[str, str]]] = lambda example: [example]
    """The texts and pairs that the model reads for an input."""
    labels: Callable[[Any], Iterable[str]] = lambda target: ()
    """The labels of a target."""
    target: Callable[[Any], str] = str
    """Equal for targets that are the same."""
    least: int = 1
    """Words of an input that should not occur twice."""
    contexts: bool = False
    """Whether the second text is a context that several inputs share."""
    cuts: bool = False
    """Whether long inputs are truncated rather than read in windows."""

    def texts(self, example: Any) -> list[str]:
        """The different texts of an input."""
        each = ([s] if isinstance(s, str) else s for s in self.sequences(example))
        return list(dict.fromkeys(text for texts in each for text in texts))

    def key(self, example: Any) -> tuple[str, ...]:
        """Equal for inputs that differ in case and white space only; empty for those that may well occur twice."""
        texts = self.texts(example)
        return tuple(map(plain, texts)) if sum(len(text.split()) for text in texts) >= self.least else ()


def plain(text: str) -> str:
    """Equal for texts that differ in case and white space only."""
    return " ".join(text.casefold().split())


# ── rows of any source ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Table:
    """The rows of a source, and what is known about its columns."""

    rows: list[Any]
    """Records; or, for a line of a file that could not be read, the reason."""
    where: str
    """The source, for messages."""
    columns: Columns = None
    places: Sequence[str] = ()
    """The place of each row, for messages; by default its number."""

    @cached_property
    def first(self) -> Row:
        """The first record, which has all columns."""
        records = [row for row in self.rows if isinstance(row, Mapping)]
        if not records:
            raise EverybertError(f"{self.where} has no usable row; {self.places[0]}: {self.rows[0]}")
        return records[0]

    def find(self, role: str, names: Sequence[str]) -> str | None:
        """The column for a role: the one the user chose (which must exist), else the first of the usual names."""
        if chosen := (self.columns or {}).get(role):
            if chosen not in self.first:
                has = ", ".join(map(str, self.first))
                raise EverybertError(f"{self.where} has no column {chosen!r} for the {role}; it has {has}")
            return chosen
        lower = {str(name).strip().lower(): name for name in self.first}
        return next((lower[name.lower()] for name in names if name.lower() in lower), None)

    def need(self, role: str, names: Sequence[str]) -> str:
        """The column for a role, which must exist."""
        column = self.find(role, names)
        if column is None:
            has, remedy = ", ".join(map(str, self.first)), f"name it in columns: {role}=NAME"
            raise EverybertError(f"{self.where} has no column for the {role} (it has {has}); {remedy}")
        return column

    def texts(self, taken: Iterable[str] = ()) -> list[str]:
        """The column of texts, or the two of pairs, among those that are not `taken`."""
        if self.columns and ("text" in self.columns or "pair" in self.columns):
            return [name for name in (self.find("text", NAMES["texts"]), self.find("pair", ())) if name is not None]
        first = {name: value for name, value in self.first.items() if name not in taken}
        lower = {str(name).strip().lower(): name for name in first}
        for names in (*NAMES["pairs"], *((name,) for name in NAMES["texts"])):
            if all(name.lower() in lower for name in names):
                return [lower[name.lower()] for name in names]
        strings = [name for name in first if isinstance(first[name], str)]
        return strings if len(strings) == 1 else [self.need("text", ())]

    def collect(
        self, pick: Callable[[Row], Any], target: Callable[[Row, Any], Any], skip_bad: bool, read: Iterable[str] = ()
    ) -> Examples:
        """Examples of `pick(row)` and `target(row, input)`; an error skips the row, or stops without `skip_bad`.

        A note names the columns `read` that the user did not choose.
        """
        inputs, targets, bad = [], [], []
        for place, row in zip(self.places or (f"{self.where}, row {i}" for i in count(1)), self.rows):
            try:
                if isinstance(row, str):
                    raise EverybertError(row)
                example = pick(row)
                if not has_text(example):
                    raise EverybertError("one of its texts is empty")
                value = target(row, example)
            except (ValueError, TypeError, LookupError) as error:  # an EverybertError is a ValueError
                ours = isinstance(error, EverybertError)
                why = error if ours else f"it cannot be read ({type(error).__name__}: {error})"
                if not skip_bad:
                    raise EverybertError(f"{place}: {why}; fix the row, or skip such rows with skip_bad=True") from None
                bad.append(f"{place}: {why}")
                continue
            inputs.append(example)
            targets.append(value)
        if not inputs:
            raise EverybertError(f"{self.where} has no usable row; {bad[0]}")
        notes = [f"{len(bad)} bad rows of {self.where} were skipped, the first: {bad[0]}"] if bad else []
        if set(read) - set((self.columns or {}).values()):
            named = ", ".join(map(repr, read))
            notes.append(f"{self.where}: read from the columns {named} (guessed; columns may name others)")
        return Examples(inputs, targets, self.where, tuple(notes), tuple(bad))


def read_table(
    source: Source,
    columns: Columns,
    fields: Sequence[str],
    roles: Sequence[str],
    read: Callable[[Path], Iterable[tuple[int, Any]]] = readers.read_rows,
) -> Table:
    """The records of any source. `fields` names the entries of tuples; shorter tuples lack those before the last.

    `roles` are those that the task reads; columns for others are refused. `read` gives the rows of files.
    """
    if unknown := set(columns or {}) - set(roles):
        raise EverybertError(f"columns: this task reads no {sorted(unknown)[0]}, but {', '.join(roles)}")
    if isinstance(source, str | Path):
        numbered = list(read(Path(source)))
        return Table([row for _, row in numbered], str(source), columns, [f"{source}:{n}" for n, _ in numbered])
    rows = held_rows(source)
    if not rows:
        raise EverybertError("the data has 0 rows; there is nothing to learn from")
    for i, row in enumerate(rows):
        if isinstance(row, tuple | list) and 1 < len(row) <= len(fields):
            rows[i] = dict(zip([*fields[: len(row) - 1], fields[-1]], row))
        elif not isinstance(row, Mapping):
            wrong = f"expected a tuple ({', '.join(fields)}), not {str(row)[:60]!r}"
            raise EverybertError(f"the data, row {i + 1}: {wrong}")
    return Table(rows, "the data", columns)


def held_rows(source: Any) -> list[Any]:
    """The rows of data in memory: a dictionary of columns, a table, an iterable, or a dataset of torch.

    Tables are those of pandas, polars, pyarrow and `datasets`, whose names of classes replace their numbers. They are
    known by their methods: none of these libraries is imported.
    """
    if isinstance(source, Mapping):
        if any(map(_is_table, source.values())):
            parts = ", ".join(map(str, source))
            raise EverybertError(f"the data has the parts {parts}; give one of them, as data[{next(iter(source))!r}]")
        columns = [v.tolist() if hasattr(v, "tolist") else v for v in source.values()]
        if not all(isinstance(c, list | tuple) for c in columns) or len(set(map(len, columns))) > 1:
            raise EverybertError("the data is a dictionary; give one of columns, which are lists of equal length")
        return [dict(zip(source, row)) for row in zip(*columns)]
    if isinstance(features := getattr(source, "features", None), Mapping):
        source = source.with_format(None) if hasattr(source, "with_format") else source  # Python's own values
        return [{name: _class_names(value, features.get(name)) for name, value in row.items()} for row in source]
    for method in ("to_dicts", "to_pylist", "to_list", "tolist"):  # of polars, Arrow, numpy and columns of pandas
        if hasattr(source, method):
            return list(getattr(source, method)())
    if _is_table(source) and hasattr(source, "to_dict"):  # pandas
        if not source.columns.is_unique:
            raise EverybertError(f"the data names a column twice ({', '.join(map(str, source.columns))}); rename one")
        return list(source.to_dict("records"))
    if hasattr(source, "__iter__"):
        return list(source)
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise EverybertError(f"the data is a {type(source).__name__}; give a file, a table or a list of rows")
    return [source[i] for i in range(len(source))]


def split_sets(train: Source, dev: Source | None) -> tuple[Source, Source | None]:
    """The training and the dev set of a dictionary of tables, such as `datasets.DatasetDict`; others as they are."""
    if not isinstance(train, Mapping) or "train" not in train or not any(map(_is_table, train.values())):
        return train, dev
    held = next((train[name] for name in ("validation", "dev", "valid") if name in train), None)
    return train["train"], held if dev is None else dev


def _is_table(source: Any) -> bool:
    return hasattr(source, "columns") or hasattr(source, "column_names")


def _class_names(value: Any, feature: Any) -> Any:
    """The name of a class by its number, or of a list of them, if the column is of ClassLabels; −1 is no label."""
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
        return [_class_names(element, inner) for element in value]
    names = getattr(feature, "names", None)
    return value if names is None or not isinstance(value, int) else names[value] if value >= 0 else None


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────


def cell(row: Row, column: str) -> str:
    """A cell as text."""
    value = row.get(column)
    if isinstance(value, str | int | float) and value == value:  # not NaN
        return str(value)
    why = "has no text" if value is None or value != value else f"holds a {type(value).__name__}, not text"
    raise EverybertError(f"the column {column!r} {why}")


def text_reader(table: Table) -> Callable[[Row], str]:
    """Reads the text of a row without a target."""
    text, *others = table.texts()
    if others:
        raise EverybertError(f"{table.where}: read {text} or {others[0]}? Name the one of the text")
    return lambda row: cell(row, text)


def pair_reader(table: Table, taken: Iterable[str] = ()) -> Callable[[Row], str | tuple[str, ...]]:
    """Reads a text, or a pair if there are two text columns."""
    texts = table.texts(taken)
    if len(texts) == 1:
        return lambda row: cell(row, texts[0])
    return lambda row: tuple(cell(row, name) for name in texts)


def question_reader(table: Table) -> Callable[[Row], tuple[str, str]]:
    """Reads a question and its context."""
    question, context = table.need("question", NAMES["questions"]), table.need("context", NAMES["contexts"])
    return lambda row: (cell(row, question), cell(row, context))


def choice_reader(table: Table) -> Callable[[Row], tuple[str, list[str]]]:
    """Reads a prompt and its endings: one column with a list, or numbered ones (ending0, ending1 …)."""
    prompt, listed = table.need("text", NAMES["prompts"]), table.find("endings", NAMES["endings"])
    endings = [listed] if listed else _numbered(table, "ending|choice|option") or [table.need("endings", ())]
    return lambda row: (cell(row, prompt), _list_of_texts(row, endings))


def _numbered(table: Table, stems: str) -> list[str]:
    """Columns such as ending0, ending1 …, in the order of their numbers."""
    columns = [name for name in table.first if re.fullmatch(rf"({stems})_?\d+", str(name))]
    return sorted(columns, key=lambda name: int(re.sub(r"\D", "", name)))


def _list_of_texts(row: Row, columns: Sequence[str]) -> list[str]:
    """The texts of several columns; a cell may hold a list of them."""
    cells = [text for c in columns for text in (row[c] if isinstance(row.get(c), list | tuple) else [cell(row, c)])]
    if not all(isinstance(text, str) for text in cells):
        raise EverybertError(f"the column {columns[0]!r} is not a list of texts")
    return cells


def has_text(example: Any) -> bool:
    """Whether none of an input's texts is empty; a list is of words."""
    parts = example if isinstance(example, tuple) else [" ".join(example) if isinstance(example, list) else example]
    return all(t.strip() for part in parts for t in ([part] if isinstance(part, str) else part))


def as_texts(texts: Any, pairs: bool = True) -> list[Any]:
    """One text or pair, or many: a list, an array, a Series, or a table's one column of texts (two for pairs)."""
    if isinstance(texts, str) or (pairs and isinstance(texts, tuple) and len(texts) == 2):
        texts = [texts]
    if isinstance(texts, Set) or not (isinstance(texts, Iterable) or hasattr(texts, "__getitem__")):
        raise EverybertError(f"a {type(texts).__name__} is no list of texts; give a list, or the column of texts")
    rows = held_rows(texts)
    if rows and (isinstance(texts, Mapping) or _is_table(texts)):
        columns = _text_columns(rows[0], pairs)
        rows = [row[columns[0]] if len(columns) == 1 else [row[name] for name in columns] for row in rows]
    out = []
    for i, row in enumerate(rows):
        parts = [row] if isinstance(row, str) else list(row) if isinstance(row, list | tuple) else []
        if not 1 <= len(parts) <= 1 + pairs or not all(isinstance(part, str) for part in parts):
            wanted = "strings, or pairs of strings" if pairs else "strings"
            raise EverybertError(f"text {i + 1} is a {type(row).__name__} ({str(row)[:40]}): give {wanted}")
        out.append(parts[0] if len(parts) == 1 else tuple(parts))
    return out


def _text_columns(first: Row, pairs: bool) -> list[str]:
    """The only column of a table, or the first if they have no names, or those with the usual names of texts."""
    names = list(first) if isinstance(first, Mapping) else []  # a table of an unknown kind has no rows
    with suppress(EverybertError):
        if len(names) > 1 and any(isinstance(name, str) for name in names):
            names = Table([dict(first)], "the table").texts()
        if 1 <= len(names) <= 1 + pairs:
            return names
    has = f" with {', '.join(map(str, first))[:80]}" if isinstance(first, Mapping) else ""
    raise EverybertError(f"a table{has} is no list of texts; give a list, or the column of texts")


# ── texts and pairs with a label, several labels, or a number ────────────────────────────────────────────────


def read_labelled(
    source: Source, columns: Columns, skip_bad: bool, names: Sequence[str], target: Callable[[Any], Any]
) -> Examples:
    """Texts or pairs, and `target` of the cell in the label column, whose usual names are `names`."""
    table = read_table(source, columns, ("text", "text_pair", "label"), ("text", "pair", "label"))
    label = table.need("label", names)
    read = [*table.texts([label]), label]
    return table.collect(pair_reader(table, [label]), lambda row, _: target(row.get(label)), skip_bad, read)


def finite(value: Any) -> float:
    """A finite number, or why the row cannot be used."""
    try:
        if math.isfinite(number := float(value)):
            return number
    except (TypeError, ValueError):
        pass
    raise EverybertError(f"the target {value!r} is not a finite number")


def read_numbers(source: Source, columns: Columns = None, skip_bad: bool = False) -> Examples:
    """Texts or pairs with a finite number each."""
    return read_labelled(source, columns, skip_bad, NAMES["scores"], finite)


def read_classes(
    source: Source, columns: Columns = None, skip_bad: bool = False, multi: bool | None = None
) -> Examples:
    """Texts or pairs with their label, or all their labels if these are lists, or `multi` is set ("a|b" is split)."""

    def target(value: Any) -> str | tuple[str, ...]:
        listed = isinstance(value, list | tuple | set)
        if multi and isinstance(value, str):
            value, listed = [part for part in value.replace(";", "|").split("|") if part.strip()], True
        names = [label_name(v) or "" for v in (value if listed else [value])]
        if not all(names):
            raise EverybertError(f"the label is missing ({value!r})")
        return tuple(names) if multi or (listed and multi is None) else "|".join(names)

    examples = read_labelled(source, columns, skip_bad, NAMES["labels"], target)
    several = [isinstance(names, tuple) for names in examples.targets]
    if any(several) and not all(several):
        raise EverybertError(f"{examples.where}: some labels are lists, others are not; make them all lists")
    return examples


# ── sentences of tagged words ────────────────────────────────────────────────────────────────────────────────


def read_tagged(source: Source, columns: Columns = None, skip_bad: bool = False, scheme: str | None = None) -> Examples:
    """Sentences of words with a tag each: CoNLL, CoNLL-U (`label` names the column), records, or marked texts.

    Entity tags become well-formed BIO or BIOES (by default as they were).
    """
    examples = _tagged(source, columns, skip_bad)
    where, tags = examples.where, examples.targets
    written = find_scheme(t for sentence in tags for t in sentence)
    if written == "plain":
        if scheme not in (None, "plain") and any(t != "O" for sentence in tags for t in sentence):
            raise EverybertError(f"{where}: the tags have no B-, I- … prefixes, so they cannot become {scheme}")
        return examples
    target = written if scheme in (None, "plain") else scheme
    fresh = [convert_tags(t, target) for t in tags]
    changed = sum(a != b for a, b in zip(fresh, tags))
    note = f"{where}: the tags of {changed} sentences were not well-formed {target} (IOB1?); they are converted"
    return replace(examples, targets=fresh, notes=(*examples.notes, *([note] if changed else [])))


def _tagged(source: Source, columns: Columns, skip_bad: bool) -> Examples:
    """Sentences with their tags as written."""
    table = read_table(source, columns, ("words", "tags"), ("text", "label", "spans"), _tagged_rows)
    spans = table.find("spans", NAMES["spans"])
    if spans is not None and isinstance(table.first.get("text"), str):
        pick = lambda row: [word.text for word in Splitter().split(cell(row, "text"))]  # noqa: E731
        marked = lambda row, _: _span_tags(cell(row, "text"), row.get(spans) or [])  # noqa: E731
        return table.collect(pick, marked, skip_bad, ("text", spans))
    text, label = table.need("text", NAMES["words"]), table.need("label", NAMES["tags"])

    def words(row: Row) -> list[str]:
        sentence = _words_or_tags(row.get(text))
        if not sentence or not all(isinstance(w, str) for w in sentence):
            raise EverybertError("the words are missing")
        return sentence

    def tags(row: Row, sentence: list[str]) -> list[str]:
        names = [label_name(tag) for tag in _words_or_tags(row.get(label))]
        if len(sentence) != len(names) or not all(names):
            raise EverybertError(f"{len(sentence)} words but {sum(map(bool, names))} tags")
        return [str(tag) for tag in names]

    return table.collect(words, tags, skip_bad, [label] if table.places else [])


def _tagged_rows(path: Path) -> Iterator[tuple[Any, Any]]:
    """Records; or the sentences of a CoNLL file, whose columns have numbers, or of a CoNLL-U file, whose have names."""
    if kind(path) in readers.RECORD_KINDS and kind(path) != ".tsv":
        yield from readers.read_rows(path)
    elif kind(path) == ".conllu":
        for number, tree in enumerate(readers.read_conllu(path), 1):
            yield f"sentence {number}", {name: [word[name] for word in tree] for name in readers.CONLLU_FIELDS}
    else:
        for number, rows in enumerate(readers.read_conll(path), 1):
            if number == 1 and {"text", "label"} <= set(rows[0]):
                wrong = f"{path} has a label per text, for classify"
                raise EverybertError(f"{wrong}; tag reads a word and its tag per line")
            width = len(rows[0])
            yield f"sentence {number}", {str(i): [row[i] for row in rows] for i in (*range(width), *range(-width, 0))}


def _span_tags(text: str, spans: Iterable[Any]) -> list[str]:
    """BIO tags of the words of a text with marked spans ({"start", "end", "label"} or [start, end, label]).

    A span that begins or ends inside a word takes the whole word.
    """
    words, entities = Splitter().split(text), []
    for span in spans:
        start, end, label = (span[k] for k in ("start", "end", "label")) if isinstance(span, Mapping) else span[:3]
        inside = [k for k, w in enumerate(words) if w.end > int(start) and w.start < int(end)]
        if not inside or not 0 <= int(start) < int(end) <= len(text):
            raise EverybertError(f"the span {start}–{end} ({label}) lies outside the text, or contains no word")
        entities.append(Entity(str(label), inside[0], inside[-1] + 1))
    return write_tags(sorted(entities, key=lambda e: e.start), len(words))


def _words_or_tags(value: Any) -> list[Any]:
    """A list as it is; a text split at its spaces (csv)."""
    if isinstance(value, str):
        return value.split()
    return list(value) if value is not None and hasattr(value, "__iter__") else []


# ── questions about contexts ─────────────────────────────────────────────────────────────────────────────────


def read_questions(source: Source, columns: Columns = None, skip_bad: bool = False) -> Examples:
    """SQuAD 1.1 or 2.0 JSON; or records with question, context and answers, as SQuAD or `datasets` write them."""
    roles = ("question", "context", "answers")
    table = read_table(source, columns, roles, roles)
    if "paragraphs" in table.first:
        table = replace(table, rows=readers.read_squad(table.where, table.rows), places=())
    pick, answers = question_reader(table), table.need("answers", NAMES["answers"])

    def target(row: Row, pair: tuple[str, str]) -> tuple[Gold, ...]:
        return tuple(_checked_answers(row.get(answers), row.get("answer_start"), pair[1]))

    return table.collect(pick, target, skip_bad)


def _checked_answers(value: Any, start: Any, context: str) -> Iterator[Gold]:
    """The answers in any of the usual forms, each with its place in the context, checked."""
    if isinstance(value, Mapping):  # {"text": [...], "answer_start": [...]}, or one answer
        value, start = value.get("text", []), value.get("answer_start")
    if hasattr(value, "__iter__") and not isinstance(value, str):
        many = hasattr(start, "__iter__") and not isinstance(start, str)
        for answer, at in zip(value, start if many else repeat(None), strict=many):
            yield from _checked_answers(answer if isinstance(answer, str | Mapping) else str(answer), at, context)
        return
    if value is None or value == "":
        return
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    at = context.find(value) if start is None or start == "" else int(start)
    if at < 0 and start in (None, ""):
        raise EverybertError(f"the answer {value!r} is not in the context")
    actual = context[max(at, 0) : max(at, 0) + len(value)]
    if at < 0 or actual != value:
        raise EverybertError(f"the answer {value!r} is not at {at}, where the context has {actual!r}")
    yield Gold(value, at)


# ── prompts with endings; pairs and triplets ─────────────────────────────────────────────────────────────────


def read_choices(source: Source, columns: Columns = None, skip_bad: bool = False) -> Examples:
    """SWAG's own columns (startphrase, ending0 …, label), or a prompt, a list of endings, and the right number."""
    table = read_table(source, columns, ("prompt", "endings", "label"), ("text", "endings", "label"))
    pick, label = choice_reader(table), table.need("label", NAMES["choices"])

    def target(row: Row, prompt: tuple[str, list[str]]) -> int:
        if len(prompt[1]) < 2:
            raise EverybertError("fewer than two endings")
        right, last = label_name(row.get(label)) or "", len(prompt[1]) - 1
        if not right.isdigit() or int(right) > last:
            raise EverybertError(f"the label {row.get(label)!r} is not the number of an ending (0 … {last})")
        return int(right)

    return table.collect(pick, target, skip_bad, [label])


def read_pairs(source: Source, columns: Columns = None, skip_bad: bool = False) -> Examples:
    """(anchor, positive), (anchor, positive, negatives …), or (text, text, score) if there is a score column.

    Negatives are one column with a text or a list of texts, or numbered ones (negative_1, negative_2 …).
    """
    if isinstance(source, list) and source and isinstance(source[0], tuple | list):
        known = ("anchor", "positive", "score")[: 2 + (not isinstance(source[0][-1], str))]
        more = any(len(row) > len(known) for row in source)
        source = [dict(zip(known, row)) | ({"negatives": list(row[len(known) :])} if more else {}) for row in source]
    table = read_table(source, columns, ("anchor", "positive"), ("text", "pair", "negative", "label"))
    names = [table.need("text", NAMES["anchors"]), table.need("pair", NAMES["positives"])]
    negative = table.find("negative", NAMES["negatives"])
    negatives = [negative] if negative else _numbered(table, "negative")
    score = table.find("label", NAMES["scores"][:4])
    score = score or ("label" if not negatives and "label" in table.first else None)
    negatives = [] if score else negatives

    def pick(row: Row) -> tuple[str, ...]:
        return (*(cell(row, name) for name in names), *_list_of_texts(row, negatives))

    read = [*names, *negatives, *([score] if score else [])]
    return table.collect(pick, lambda row, _: finite(row.get(score)) if score else None, skip_bad, read)


def read_ranked(source: Source, columns: Columns = None, skip_bad: bool = False) -> Examples:
    """Pairs (query, text), each with a label of 0 or more; of (query, positive, negatives …) the labels are 1 and 0."""
    examples = read_pairs(source, columns, skip_bad)
    if examples.targets[0] is None:
        pairs = [((query, text), float(not i)) for query, *texts in examples.inputs for i, text in enumerate(texts)]
        return replace(examples, inputs=[pair for pair, _ in pairs], targets=[label for _, label in pairs])
    if (least := min(examples.targets)) < 0:
        raise EverybertError(f"{examples.where}: the label {least:g} is below 0; relevance is 0 or more")
    return examples


# ── labels ───────────────────────────────────────────────────────────────────────────────────────────────────


def label_name(value: Any) -> str | None:
    """A label as text: 1 and 1.0 are "1", True is "True"; None and NaN are None."""
    if hasattr(value, "item") and not isinstance(value, str):  # a scalar of numpy
        value = value.item()
    if value is None or value != value:
        return None
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()


def order_labels(names: Iterable[str]) -> list[str]:
    """The label order: by value if all are numbers, else alphabetical. It is saved in the model folder."""
    distinct = set(names)
    try:
        return sorted(distinct, key=finite)
    except EverybertError:
        return sorted(distinct)


def check_labels(counts: Counter[str], rows: int, where: str) -> None:
    """Refuse labels that cannot be learned: a single one, or so many that the columns look swapped."""
    if len(counts) == 1:
        only = next(iter(counts))
        raise EverybertError(f"{where}: every row has the label {only!r}; two labels or more are needed")
    if rows >= 20 and len(counts) > max(20, rows // 2):
        remedy = "are text and label columns swapped? For numbers use the task regress"
        raise EverybertError(f"{where}: {len(counts)} different labels in {rows} rows; {remedy}")


def label_ids(names: Sequence[str], labels: Sequence[str], where: str) -> list[int]:
    """The index of each label; labels that are not in the training data are an error that lists them."""
    number = {label: i for i, label in enumerate(labels)}
    if len(number) < len(labels):
        raise EverybertError(f"the labels {', '.join(labels)[:100]} name one twice; give each once")
    if unseen := sorted(set(names) - set(number)):
        shown = ", ".join(map(repr, unseen[:10])) + (f" and {len(unseen) - 10} more" if len(unseen) > 10 else "")
        known = ", ".join(map(repr, labels[:10])) + (" …" if len(labels) > 10 else "")
        raise EverybertError(f"{where} has labels that the model does not know: {shown}; known are {known}")
    return [number[name] for name in names]
