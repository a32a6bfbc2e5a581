"""Tagged sentences from CoNLL columns, CoNLL-U trees, records and tuples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from everybert.errors import EverybertError
from everybert.tasks import columns as col
from everybert.tasks import schemes
from everybert.tasks.records import Bad, Examples, Rows, Source, read_rows
from everybert.tasks.words import Splitter, Word
from everybert.text.readers import CONLLU_FIELDS, kind, read_conll, read_conllu


def read(
    source: Source,
    columns: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    scheme: str | None = None,
) -> Examples:
    """Sentences of words with a tag each, from CoNLL, CoNLL-U (`columns={"label": "upos"}`), records, or tuples.

    Entities come out in BIO (IOB1 and ill-formed sequences are rewritten) or BIOES, as they were or as `scheme` says.
    """
    raw = read_raw(source, columns, skip_bad)
    where, notes, tags = raw.where, list(raw.notes), raw.targets
    found = schemes.find_scheme(tags)
    if found == "plain":
        if scheme not in (None, "plain") and any(t != "O" for sentence in tags for t in sentence):
            raise EverybertError(f"{where}: the tags have no B-, I- … prefixes, so they cannot become {scheme}")
        return raw
    target = scheme or ("BIO" if found == "IOB1" else found)
    fresh = [schemes.convert(t, target) for t in tags]
    if found != target:
        notes.append(f"{where}: tags converted from {found} to {target}")
    elif changed := sum(a != list(b) for a, b in zip(fresh, tags)):
        notes.append(f"{where}: {changed} sentences had ill-formed {target} tags, which were put right")
    return replace(raw, targets=fresh, notes=tuple(notes))


def read_raw(source: Source, columns: Mapping[str, str] | None = None, skip_bad: bool = False) -> Examples:
    """The sentences with their tags as they are written."""
    chosen = dict(columns or {})
    if isinstance(source, str | Path):
        path = Path(source)
        if kind(path) == ".conllu":
            column = chosen.get("label", "upos")
            if column not in CONLLU_FIELDS:
                raise EverybertError(f"{path}: CoNLL-U has no column {column!r}; it has {', '.join(CONLLU_FIELDS)}")
            trees = list(read_conllu(path))
            tags = [[w[column] for w in tree] for tree in trees]
            note = f"{path}: labels read from the column {column!r}"
            return Examples([[w["form"] for w in tree] for tree in trees], tags, str(path), (note,))
        if kind(path) not in (".jsonl", ".ndjson", ".json", ".parquet", ".csv"):
            return _columns(path, chosen.get("label", "-1"))
    return _records(source, chosen, skip_bad)


def _columns(path: Path, column: str) -> Examples:
    """CoNLL columns: the word is the first, the tag the last unless its number (from 0) is given."""
    sentences = list(read_conll(path))
    width = len(sentences[0][0])
    if not column.lstrip("-").isdigit() or not -width <= int(column) < width:
        raise EverybertError(f"{path} has {width} columns without names; give the label's number, 0 … {width - 1}")
    tags = [[row[int(column)] for row in s] for s in sentences]
    return Examples([[row[0] for row in s] for s in sentences], tags, str(path))


def _records(source: Source, chosen: dict[str, str], skip_bad: bool) -> Examples:
    table = read_rows(source, ("words", "tags"), skip_bad)
    first, where = table.rows[0], table.where
    spans = col.find(first, "spans", ("spans", "entities", "ents"), chosen, where)
    if spans is not None and isinstance(first.get("text"), str):
        return _spans(table, spans, skip_bad)
    text = col.find(first, "text", ("words", "tokens"), chosen, where)
    label = col.find(first, "label", ("tags", "ner_tags", "labels", "pos_tags", "upos", "label"), chosen, where)
    if text is None or label is None:
        raise EverybertError(
            f"{where}: tagging needs words and tags; it has {', '.join(map(str, first))} (columns: text=…, label=…)"
        )
    bad = Bad(where, skip_bad, table.bad)
    words: list[list[str]] = []
    tags: list[list[str]] = []
    for i, row in enumerate(table.rows):
        w, t = _list(row.get(text)), _list(row.get(label))
        if not w or any(not isinstance(x, str) or not x.strip() for x in w):
            bad(i, "the words are missing, or one of them is empty")
        elif len(w) != len(t):
            bad(i, f"{len(w)} words but {len(t)} tags")
        elif any(not col.label_name(x) for x in t):
            bad(i, "a tag is missing")
        else:
            words.append([str(x) for x in w])
            tags.append([str(col.label_name(x)) for x in t])
    if not words:
        raise EverybertError(f"{where} has no usable row; {bad.found[0]}")
    return Examples(words, tags, where, (*table.notes, *bad.notes()), tuple(bad.found))


def _spans(table: Rows, column: str, skip_bad: bool) -> Examples:
    """Texts with marked places ({"start", "end", "label"} or [start, end, label]): words by our own splitter, BIO tags.

    A place that cuts a word takes the whole of it.
    """
    bad = Bad(table.where, skip_bad, table.bad)
    words: list[list[str]] = []
    tags: list[list[str]] = []
    for i, row in enumerate(table.rows):
        found = Splitter().split(str(row.get("text") or ""))
        if not found:
            bad(i, "the text is empty")
            continue
        try:
            marked = sorted(_entity(span, found, str(row["text"])) for span in row.get(column) or [])
            tags.append(schemes.write_tags([e for _, e in marked], len(found)))
            words.append([w.text for w in found])
        except EverybertError as error:
            bad(i, str(error))
    if not words:
        raise EverybertError(f"{table.where} has no usable row; {bad.found[0]}")
    note = f"{table.where}: entities read from {column!r}, words split by everybert"
    return Examples(words, tags, table.where, (*table.notes, *bad.notes(), note), tuple(bad.found))


def _entity(span: Any, words: list[Word], text: str) -> tuple[int, schemes.Entity]:
    """(first word, entity) of a marked place."""
    keys = ("start", "end", "label")
    start, end, label = (span[k] for k in keys) if isinstance(span, Mapping) else tuple(span)[:3]
    if not 0 <= int(start) < int(end) <= len(text):
        raise EverybertError(f"the span {start}–{end} ({label}) lies outside the text of {len(text)} characters")
    inside = [k for k, w in enumerate(words) if w.end > int(start) and w.start < int(end)]
    if not inside:
        raise EverybertError(f"the span {start}–{end} ({label}) holds no word")
    return inside[0], schemes.Entity(str(label), inside[0], inside[-1] + 1)


def _list(value: Any) -> list[Any]:
    """A list as it is; a text at its spaces (csv)."""
    if isinstance(value, str):
        return value.split()
    return list(value) if value is not None and hasattr(value, "__iter__") else []
