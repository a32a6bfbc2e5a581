"""Words of raw text: nothing is lost, and the split follows the training words."""

import time
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.tasks.words import Splitter, learn_splitter

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
    assert Splitter.of(splitter.state()) == splitter


def test_a_long_run_of_marks_takes_no_time():
    began = time.process_time()
    assert len(Splitter().split("?!" * 50_000)) == 100_000
    assert len(Splitter().split("a;" * 50_000)) == 100_000
    assert time.process_time() - began < 5
