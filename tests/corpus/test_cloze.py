"""Cloze questions: every answer stands where it is said to, and not in its own question."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.corpus.cloze import LONGEST, ask, clause, cloze_questions, passages, spans, write_cloze
from everybert.errors import EverybertError
from everybert.tasks.questions import read
from everybert.text.sentences import split_sentences

TEXT = (
    "Ada Lovelace was born in London in 1815, and she loved machines from the first. Her mother taught her numbers. "
    "In 1833 she met Charles Babbage at a party. "
    "Charles Babbage showed her his engine, and Ada Lovelace understood it at once."
)


def test_questions_point_at_their_answers():
    found = list(cloze_questions([TEXT], each=5, kept=0.0))
    assert {c.answer for c in found} == {"Ada Lovelace", "Charles Babbage"}
    for c in found:
        assert c.context[c.start : c.start + len(c.answer)] == c.answer
        assert c.answer not in c.question
        assert re.match(r".*\b(who|what|which|where)\b.*\?$", c.question, re.IGNORECASE)


def test_a_passage_may_keep_the_sentence_that_is_asked():
    found = list(cloze_questions([TEXT], each=9, kept=1.0, alone=0.0))
    assert {"London", "1815", "1833"} <= {c.answer for c in found}
    sentences = split_sentences(TEXT)
    for c in found:
        assert c.context == TEXT and c.context[c.start : c.start + len(c.answer)] == c.answer
        assert c.answer not in c.question
        own = next(s for s in sentences if c.start < TEXT.index(s) + len(s))
        words = {"who", "what", "which", "when", "where", "place", "year", "in"}
        asked = set(re.findall(r"\w+", c.question.lower())) - words
        assert asked <= set(re.findall(r"\w+", own.lower())) and c.question.rstrip("?") not in own


def test_clauses_hold_their_span():
    whole = "In 1833, when it was cold outside, she met Charles Babbage at a party."
    part, at, span = clause(whole, whole.index("Charles"), "Charles Babbage")
    assert part == "she met Charles Babbage at a party." and part[at : at + len(span)] == span
    assert clause(whole, 3, "1833") == (whole, 3, "1833")  # a clause that says nothing else


def test_spans_are_names_and_numbers():
    assert [t for _, t in spans("The King of Spain paid 1,200 ducats to Juan in May 1503.")] == [
        "King of Spain",
        "1,200",
        "Juan",
        "May",
        "1503",
    ]
    assert spans("However it rained.") == []
    assert [t for _, t in spans("it has 340M weights, 12 thousand words and 5% more")] == ["340M", "12 thousand", "5%"]


def test_places_are_asked_by_where_and_sentences_alone():
    found = list(cloze_questions([TEXT] * 40, each=9, kept=1.0))
    asked = {ask("Ada was born in London.", 16, "London", random.Random(i)) for i in range(40)}
    assert {"Where Ada was born?", "Ada was born where?", "What Ada was born in?"} <= asked
    assert not any("in where" in question.lower() for question in asked)
    short = [c for c in found if c.context != TEXT]
    assert 0.15 < len(short) / len(found) < 0.45


def test_a_short_sentence_may_be_joined_to_another():
    sentences = set(split_sentences(TEXT))
    found = [c.context for c in cloze_questions([TEXT] * 40, each=9, kept=1.0, alone=1.0)]
    joined = {context for context in found if context not in sentences}
    pairs = {f"{a.rstrip('.')} and {b}" for a in sentences for b in sentences if a != b}
    assert joined and joined <= pairs
    assert any(c.startswith("In 1833 she met Charles Babbage at a party and ") for c in joined)
    assert any(c.endswith(" and In 1833 she met Charles Babbage at a party.") for c in joined)


SOME = (
    "Anna",
    "met",
    "Berlin",
    "in",
    "1900",
    "the",
    "of",
    "Danube.",
    "ran.",
    "12",
    "cats!",
    "Karl",
    "Marx?",
    "\n",
    "a",
)
WORDS = st.sampled_from(SOME)


@settings(deadline=None, max_examples=100)
@given(st.lists(WORDS, max_size=120), st.integers(0, 3))
def test_laws_hold_for_any_text(words, seed):
    text = " ".join(words) + " " + TEXT
    for c in cloze_questions([text], seed):
        assert c.context[c.start : c.start + len(c.answer)] == c.answer
        assert c.question.endswith("?") and c.answer
    assert list(cloze_questions([text], seed)) == list(cloze_questions([text], seed))
    for run in passages(text):
        assert len(run) == 1 or len(" ".join(run)) <= LONGEST


def test_the_file_is_read_by_the_task(tmp_path):
    count = write_cloze([TEXT] * 10, tmp_path / "q.jsonl", count=7)
    assert count == 7
    rows = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 7
    examples = read(tmp_path / "q.jsonl")
    assert len(examples) == 7 and not examples.bad


def test_text_without_questions_says_so(tmp_path):
    with pytest.raises(EverybertError, match="no questions"):
        write_cloze(["nothing here."], tmp_path / "q.jsonl", count=3)
    assert not list(tmp_path.iterdir())
