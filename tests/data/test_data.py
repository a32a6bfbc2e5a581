"""The bundled text is consistent, and the classification task tests what it says."""

import re
from collections import Counter

import quickstart_text

from everybert import data

GOOD = "wonderful excellent lovely great delightful superb amazing pleasant charming brilliant perfect fine splendid"
GOOD += " marvellous fantastic beautiful"
BAD = "terrible awful horrible poor dreadful nasty disappointing boring unpleasant disgusting shabby weak miserable"
BAD += " hopeless ugly dull"
OPINIONS = {*GOOD.split(), *BAD.split()}


def words(text):
    return set(re.findall(r"\w+", text.lower()))


def test_documents_are_many_and_varied():
    texts = data.documents()
    assert len(texts) == 5000 and len(set(texts[:500])) > 450 and data.documents(3) == texts[:3]
    assert all(text.strip() and text[0].isupper() and text[-1] in ".!" for text in texts)


def test_masked_sentences_are_nowhere_but_can_be_inferred():
    text = "\n".join(data.documents())
    assert len(data.rows("masked.tsv")) == 10
    for sentence, answer in data.rows("masked.tsv"):
        assert sentence.replace("[MASK]", answer).lower() not in text.lower()
        assert len(re.findall(rf"\b{answer}\b", text)) >= 15, sentence
    assert "Paris is the capital of France." in text and "puppy" in text


def test_the_text_is_what_its_rules_write():
    assert list(quickstart_text.documents()) == data.documents()
    assert len(data.read("world.txt").encode()) < 400_000


def test_facts_are_never_contradicted():
    text = "\n".join(data.documents())
    for pattern in (r"capital of (\w+) is (\w+)\.", r"baby (\w+) is called a (\w+)\.", r"([A-Z]\w+) is a (\w+) from"):
        found = {}
        for key, value in re.findall(pattern, text):
            assert found.setdefault(key, value) == value


def test_the_task_is_balanced_and_disjoint_and_its_test_words_are_new():
    parts = {name: data.rows(f"{name}.tsv") for name in ("train", "dev", "unseen")}
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 400, "dev": 200, "unseen": 200}
    for rows in parts.values():
        counts = Counter(label for _, label in rows)
        assert counts["praise"] == counts["complaint"]
    texts = [text for rows in parts.values() for text, _ in rows]
    assert len(set(texts)) == len(texts)
    used = {name: words(" ".join(text for text, _ in rows)) & OPINIONS for name, rows in parts.items()}
    assert not used["unseen"] & used["train"] and used["dev"] <= used["train"]
    assert words(" ".join(data.documents())) >= OPINIONS  # pre-training can learn all of them


def test_the_last_opinion_word_decides_the_label():
    """Such as "not dull at all, it was superb"."""
    for text, label in (*data.rows("train.tsv"), *data.rows("unseen.tsv")):
        last = [word for word in re.findall(r"\w+", text.lower()) if word in OPINIONS][-1]
        assert (last in GOOD.split()) == (label == "praise"), text
