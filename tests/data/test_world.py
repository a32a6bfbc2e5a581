"""The bundled world: the same every time, never at odds with itself, and its task tests what it says."""

import re
from collections import Counter

from everybert.data import facts
from everybert.data.reviews import BAD, GOOD, TRAINED, UNTRAINED, make_reviews
from everybert.data.tales import BLANKS, TALES, WITHHELD, documents


def test_text_is_the_same_every_time_and_varied():
    first, again = list(documents(500)), list(documents(500))
    assert first == again and len(set(first)) > 450
    assert list(documents(50, seed=1)) != first[:50]
    assert all(text.strip() and text[0].isupper() and text[-1] in ".!" for text in first)


def test_withheld_sentences_are_nowhere_but_can_be_inferred():
    text = "\n".join(documents())
    assert not any(sentence in text for sentence in WITHHELD)
    for blank in BLANKS:
        assert len(re.findall(rf"\b{blank.answer}\b", text)) >= 20, blank
    assert "Paris is the capital of France." in text and "puppy" in text


def test_facts_are_never_contradicted():
    text = "\n".join(documents())
    capitals = {c.name: c.capital for c in facts.COUNTRIES}
    for name, capital in re.findall(r"capital of (\w+) is (\w+)\.", text):
        assert capitals[name] == capital
    young = {a.one: a.young for a in facts.ANIMALS}
    for one, name in re.findall(r"baby (\w+) is called a (\w+)\.", text):
        assert young[one] == name
    number = {word: i for i, word in enumerate(facts.NUMBERS)}
    for a, b, c in re.findall(r"(\w+) plus (\w+) is (\w+)\.", text):
        assert number[a.lower()] + number[b] == number[c]
    people = {p.name: p for p in facts.PEOPLE}
    for name, job in re.findall(rf"({chr(124).join(people)}) is a (\w+) from", text):
        assert people[name].job.who == job


def test_every_kind_of_document_is_told():
    import random

    for tale in set(TALES):
        sentences = tale(random.Random(0))
        assert len(sentences) >= 2 and all(s[0].isupper() for s in sentences)


def test_reviews_are_balanced_disjoint_and_hold_words_out():
    found = make_reviews()
    assert found == make_reviews() and (len(found.train), len(found.dev), len(found.test)) == (400, 200, 200)
    for part in (found.train, found.dev, found.test):
        counts = Counter(label for _, label in part)
        assert counts["praise"] == counts["complaint"]
    texts = [text for part in (found.train, found.dev, found.test) for text, _ in part]
    assert len(set(texts)) == len(texts)

    def words(part):
        return {w for text, _ in part for w in re.findall(r"\w+", text.lower())}

    opinions = {*GOOD, *BAD}
    assert words(found.train) & opinions <= {w for pair in TRAINED.values() for w in pair}
    assert words(found.test) & opinions <= {w for pair in UNTRAINED.values() for w in pair}
    assert not words(found.test) & words(found.train) & opinions
    assert opinions <= words([(text, "") for text in documents()])  # all of them can be learnt by reading


def test_opinion_words_alone_decide_the_label():
    """A text's last opinion word has the polarity of its label: "not dull at all, it was superb" is praise."""
    found = make_reviews()
    for text, label in (*found.train, *found.test):
        last = [w for w in re.findall(r"\w+", text.lower()) if w in {*GOOD, *BAD}][-1]
        assert (last in GOOD) == (label == "praise"), text
