"""Words of raw text follow the training words; entities are those of seqeval and conlleval."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from seqeval.metrics.sequence_labeling import get_entities

from everybert.tasks.words import Entity, Splitter, convert_tags, entities, find_scheme, learn_splitter, write_tags

BIO = ["O", "B-A", "I-A", "B-B", "I-B"]
BIOES = [*BIO, "E-A", "S-A", "E-B", "S-B"]

UD = [
    ["I", "do", "n't", "like", "10", "-", "year", "plans", "."],
    ["The", "U.S.", "'s", "plan", ":)", "costs", "1,000"],
]
CONLL = [["The", "10-year", "plan", "of", "Mr.", "O'Neill", "costs", "1,000", "."], ["Mr.", "Day", ":)", ":)"]]


def words(splitter, text):
    return " ".join(w.text for w in splitter.split(text))


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab'’.,:)-!? \n\t1é中かU\U0001f600", max_size=30), st.sampled_from([UD, CONLL, None]))
def test_words_cover_all_but_white_space_in_order(text, data):
    splitter = learn_splitter(data) if data else Splitter()
    found = splitter.split(text)
    assert "".join(w.text for w in found) == "".join(text.split())
    assert all(w.text == text[w.start : w.end] and w.text for w in found)
    assert all(a.end <= b.start for a, b in pairwise(found))


def test_the_default_peels_punctuation():
    assert words(Splitter(), "(John Smith), of the U.S., lives!") == "( John Smith ) , of the U.S. , lives !"
    assert words(Splitter(), "Wait... what?!") == "Wait ... what ? !"
    assert words(Splitter(), "东京tower") == "东 京 tower"
    assert words(Splitter(), "see https://a.org/x?y=1, or a@b.org.") == "see https://a.org/x?y=1 , or a@b.org ."


def test_the_split_is_learnt():
    ud, conll = learn_splitter([*UD, *UD]), learn_splitter(CONLL)
    text = "I don't like the 10-year plan :) which costs 2,500."
    assert words(ud, text) == "I do n't like the 10 - year plan :) which costs 2,500 ."
    assert words(conll, text) == "I don't like the 10-year plan :) which costs 2,500 ."
    assert words(conll, "Mr. O'Neill") == "Mr. O'Neill"
    assert words(ud, "It's") == "It 's"


def test_the_split_survives_json():
    splitter = learn_splitter(UD)
    assert Splitter.from_state(splitter.state()) == splitter


def test_a_long_run_of_marks_takes_no_time():
    began = time.process_time()
    assert len(Splitter().split("?!" * 50_000)) == 100_000
    assert len(Splitter().split("a;" * 50_000)) == 100_000
    assert time.process_time() - began < 5


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([BIO, BIOES]).flatmap(lambda labels: st.lists(st.sampled_from(labels), max_size=10)))
def test_entities_are_seqevals(tags):
    assert [(e.label, e.start, e.stop - 1) for e in entities(tags)] == get_entities(tags)


@pytest.mark.parametrize(
    "tags, scheme",
    [
        (["I-A", "I-A", "B-A", "O"], "BIO"),
        (["B-A", "I-A", "O", "B-A"], "BIO"),
        (["B-A", "E-A", "O", "S-A"], "BIOES"),
        (["U-A", "O"], "BIOES"),
        (["NOUN", "X", "O"], "plain"),
        (["O", "O"], "plain"),
    ],
)
def test_find_scheme(tags, scheme):
    assert find_scheme(tags) == scheme


def test_iob1_becomes_bio():
    assert convert_tags(["I-A", "I-A", "B-A", "I-B", "O"], "BIO") == ["B-A", "I-A", "B-A", "B-B", "O"]
    assert convert_tags(["B-A", "I-A", "L-A", "U-B"], "BIOES") == ["B-A", "I-A", "E-A", "S-B"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(BIOES), max_size=12), st.sampled_from(["BIO", "BIOES"]))
def test_conversion_keeps_the_entities(tags, scheme):
    once = convert_tags(tags, scheme)
    assert entities(once) == entities(tags)
    assert convert_tags(once, scheme) == once


def test_overlapping_entities_are_refused():
    refuses("overlaps", write_tags, [Entity("A", 0, 2), Entity("B", 1, 3)], 4)
