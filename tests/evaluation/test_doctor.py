"""The doctor finds each illness in data that has it, and none in data that has not."""

import json

import pytest
import tiny_bert as tiny

from everybert.errors import EverybertError
from everybert.evaluation.doctor import examine, histogram


def kinds(diagnosis, severity=None):
    return {f.kind for f in diagnosis.findings if severity in (None, f.severity)}


def healthy(size=40, start=0):
    words = tiny.WORDS
    return [
        (f"{words[i % 60]} {words[(i * 7) % 60]} film {i}", ["good", "bad"][i % 2]) for i in range(start, start + size)
    ]


def only(diagnosis, kind):
    (found,) = [f for f in diagnosis.findings if f.kind == kind]
    return found


def test_healthy_data_has_no_findings():
    diagnosis = examine("classify", healthy(), healthy(20, start=100))
    assert diagnosis.findings == () and diagnosis.healthy
    assert diagnosis.labels["train"] == {"good": 20, "bad": 20}
    assert str(diagnosis) == "nothing is wrong"
    assert diagnosis.rows == {"train": 40, "dev": 20}


def test_duplicates_conflicts_and_leaks():
    train = [*healthy(), ("Film  0 the the", "good"), ("film 0 The the", "bad"), (healthy()[3][0].upper(), "bad")]
    diagnosis = examine("classify", train, [*healthy(10, start=100), healthy()[5]])
    conflict = only(diagnosis, "conflicts")
    assert conflict.count == 1 and conflict.examples == ("rows 41, 42: film 0 the the → bad and good",)
    assert only(diagnosis, "duplicates").count == 1
    leak = only(diagnosis, "leakage")
    assert leak.severity == "error" and leak.count == 1 and "9.1%" in leak.message and leak.remedy
    assert not diagnosis.healthy
    assert diagnosis.findings[0].severity == "error"


def test_label_balance():
    rows = [*healthy(200), ("a rare film", "rare")]
    diagnosis = examine("classify", rows, healthy(10, start=300))
    assert only(diagnosis, "rare labels").examples == ("rare: 1",)
    assert "balanced" in only(diagnosis, "balance").remedy
    unseen = examine("classify", healthy(), [("x y z", "ugly"), ("q r s", "good")])
    assert [f.message for f in unseen.findings if f.severity == "error"] == ["dev has 1 labels that train has not"]
    single = examine("classify", [("x y", "a"), ("z", "a")])
    assert any("every row has the label 'a'" in f.message for f in single.findings)
    mixed = examine("classify", [("x y", 1), ("z", "b")])
    assert any("different kinds: numbers, text" in f.message for f in mixed.findings)
    swapped = examine("classify", [("good", text) for text, _ in healthy()])
    assert any("swapped" in f.remedy for f in swapped.findings)


def test_bad_rows_are_errors_with_their_place(tmp_path):
    path = tmp_path / "train.jsonl"
    lines = [json.dumps({"text": t, "label": y}) for t, y in healthy(4)]
    path.write_text("\n".join([*lines, "{broken", json.dumps({"text": "", "label": "good"})]) + "\n")
    found = only(examine("classify", path), "bad rows")
    assert found.severity == "error" and found.count == 2 and ":5" in found.examples[0]


def test_lengths_pieces_and_unknowns(tmp_path):
    folder = tiny.save(tmp_path / "m")
    rows = [*healthy(30), ("good " * 100, "good"), ("xqzw kvbn " * 15, "bad"), ("中文 film", "good")]
    diagnosis = examine("classify", rows, model=folder)
    length = only(diagnosis, "length")
    assert length.count == 2 and "window of 64" in length.message and "nothing is lost" in length.remedy
    assert only(diagnosis, "unknown pieces").count == 1
    assert sum(n for _, n in diagnosis.lengths["train"]) == len(rows) and diagnosis.window == 64
    blown = examine("classify", [("xqzwkvbn plmokn qazwsx " * 10, "a"), ("rfvtgbyhn ujmikolp", "b")], model=folder)
    assert "pieces per word" in only(blown, "tokenisation").message
    cut = examine("choose", [("good " * 60, ["bad film", "a cat"], 0), ("who", ["a b", "c d"], 1)], model=folder)
    assert only(cut, "length").severity == "warning"


def test_tags():
    good = (["john", "smith", "lives", "in", "paris"], ["B-PER", "I-PER", "O", "O", "B-LOC"])
    bad = (["mary", "is", "in", "acme", "paris"], ["B-PER", "O", "O", "I-ORG", "I-LOC"])
    diagnosis = examine("tag", [good, bad])
    found = only(diagnosis, "tag sequences")
    assert found.count == 1 and "acme/I-ORG" in found.examples[0]
    assert diagnosis.labels["train"] == {"PER": 2, "LOC": 2, "ORG": 1}
    assert "scheme" in kinds(examine("tag", [(["a", "b", "c", "d"], ["I-X", "O", "I-X", "B-X"])]), "note")
    assert "tag sequences" not in kinds(examine("tag", [good]))
    short = (["why", "?"], ["O", "O"])
    assert "leakage" not in kinds(examine("tag", [good, short], [short]))


def test_answers():
    rows = [
        ("where ?", "john is in paris", {"text": ["paris"], "answer_start": [11]}),
        ("who ?", "john is in paris", {"text": ["mary"], "answer_start": [0]}),
        ("why ?", "word " * 60, {"text": [("word " * 40).strip()], "answer_start": [0]}),
    ]
    diagnosis = examine("answer", rows, [("when ?", "john is in paris", "john")])
    assert "is not at 0, where the context has 'john'" in only(diagnosis, "bad rows").examples[0]
    assert only(diagnosis, "long answers").count == 1
    assert "split by context" in only(diagnosis, "leakage").remedy


def test_numbers_choices_and_pairs():
    rows = [(f"text {i}", float(i % 5)) for i in range(60)]
    assert examine("regress", rows).findings == ()
    assert only(examine("regress", [*rows, ("far", 1e6)]), "outliers").examples == ("row 61: 1e+06",)
    assert "targets" in kinds(examine("regress", [("a", 1), ("b", 1)]), "error")
    choices = [(f"prompt {i}", [f"a {i}", f"b {i}"], 0) for i in range(20)]
    assert "balance" not in kinds(examine("choose", [(p, e, i % 2) for i, (p, e, _) in enumerate(choices)]))
    assert only(examine("choose", [("p", ["x", "X"], 0)]), "endings").count == 1
    pairs = examine("embed", [("a b", "a  B"), ("c", "d"), ("e", "d")])
    assert {f.count for f in pairs.findings if f.kind == "pairs"} == {1}


def test_as_json_and_unknown_tasks():
    json.dumps(examine("classify", healthy()).state())
    with pytest.raises(EverybertError, match="there is no 'translate'"):
        examine("translate", healthy())


def test_histogram():
    assert histogram([1, 8, 9, 16, 17]) == [(8, 2), (16, 2), (32, 1)]
    assert histogram([5000])[-1] == (None, 1) and sum(n for _, n in histogram([5000])) == 1
