"""Sentences end where a reader would end them, hold all of the text, and cost time in proportion to it."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everybert.text.sentences import split_sentences

# "|" marks where a sentence ends; it stands for the space there, or for nothing.
_ENGLISH = [
    "One sentence.|Another one!|A third?|And a last one without a stop",
    "Dr. Jones met Mrs. Smith and Prof. Lee in St. Ives.|They left.",
    "It costs 3.14 dollars, i.e. little, e.g. less than no. 5 on p. 12.|Version 2.0 is out.",
    "The U.S. Army was there.|He lives in the U.S.|The rest stayed.",
    "J. R. R. Tolkien wrote it.|Harry S. Truman read it.",
    "He arrived at 5 p.m. on Monday.|At 9 a.m.|He slept.",
    "See Smith et al. (2010), Fig. 3, vol. 2, etc.|The others agree.",
    '"Stop!" he said.|"Why?"|"Because."|Nobody moved.',
    "He was late (as usual.)|She was not.|[Applause.]|Then silence.",
    "Well... yes.|No...|Perhaps.|What?!|Really!",
    "It ended in 1999.[1]|Then it began again.[2][3]|Later it stopped.",
    "1. Introduction\n\n2. Method",
    "everybert.text is a module.|So is www.example.org here.",
    "Smith Inc. makes it.|They sell vitamin C.|The shop is open.",
    "Jan. 5 was cold.|We froze.",
]
_OTHERS = [
    "今日は。|いい天気ですね！|「本当？」|と彼は言った。",
    "你好。|我很好！|谢谢",
    "هل هذا صحيح؟|نعم۔|شكرا",
    "यह सच है।|वह गया।",
    "Das ist z.B. ein Test.|Wirklich?|Ja!",
    "¿Qué es esto?|¡Nada!|Vale.",
    "C’est vrai.|« Oui. »|Il part.|»Ja.«|Er ging.|„Nein!“|Er blieb.",
]


@pytest.mark.parametrize("marked", _ENGLISH + _OTHERS)
def test_where_sentences_end(marked):
    text = marked.replace("|", "" if any(c in marked for c in "。") else " ")
    assert split_sentences(text) == [s for part in marked.split("|") for s in part.split("\n\n")]


def test_lines():
    found = split_sentences("A heading\n\nSome text\nover lines. More")
    assert found == ["A heading", "Some text\nover lines.", "More"]
    assert split_sentences("Dr.\n\nSmith") == ["Dr.", "Smith"]
    assert split_sentences("a\r\n\r\nb") == ["a", "b"]
    assert split_sentences("") == split_sentences(" \n\n ") == []


_ANY = st.text(st.one_of(st.sampled_from(".!?…。！ \n\t\"')(]«»[1aZ.Dré中\u3000\x1c"), st.characters()), max_size=60)


@given(_ANY)
def test_sentences_hold_all_but_space(text):
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


@given(_ANY, _ANY)
def test_a_blank_line_parts_what_is_around_it(first, second):
    assert split_sentences(f"{first}\n\n{second}") == split_sentences(first) + split_sentences(second)


@pytest.mark.parametrize("unit", ["a", "!", ". ", "\n ", ".)", "。", "[1]", ".[1]", "A. ", "\n", '."', "... "])
def test_time_is_linear(unit):
    """Eight times the text may not take much more than eight times as long."""

    def seconds(n):
        text = unit * (n // len(unit)) + "x"
        began = time.process_time()
        split_sentences(text)
        return time.process_time() - began

    small = min(seconds(50_000) for _ in range(3))
    assert seconds(400_000) < 40 * small + 0.05
