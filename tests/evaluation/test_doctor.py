"""The doctor finds each illness in data that has it, and none in data that has not."""

import json

import tiny_bert as tiny

from everybert.evaluation.doctor import doctor as examine


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
    assert kinds(diagnosis) == {"reading"}
    assert diagnosis.labels["train"] == {"good": 20, "bad": 20}
    assert diagnosis.rows == {"train": 40, "dev": 20}


def test_duplicates_conflicts_and_leaks():
    train = [*healthy(), ("Film  0 the the", "good"), ("film 0 The the", "bad"), (healthy()[3][0].upper(), "bad")]
    diagnosis = examine("classify", train, [*healthy(10, start=100), healthy()[5]])
    conflict = only(diagnosis, "conflicts")
    assert conflict.count == 1 and conflict.examples == ("rows 41, 42: film 0 the the → bad and good",)
    assert only(diagnosis, "duplicates").count == 1
    leak = only(diagnosis, "leakage")
    assert leak.severity == "error" and leak.count == 1 and "9.1%" in leak.message and leak.remedy
    assert diagnosis.findings[0].severity == "error"


def test_label_balance():
    rows = [*healthy(200), ("a rare film", "rare")]
    diagnosis = examine("classify", rows, healthy(10, start=300))
    assert only(diagnosis, "rare labels").examples == ("rare: 1",)
    assert "balanced" in only(diagnosis, "balance").remedy
    unseen = examine("classify", healthy(), [("x y z", "ugly"), ("q r s", "good")])
    assert [f.message for f in unseen.findings if f.severity == "error"] == [
        "the data has labels that the model does not know: 'ugly'; known are 'bad', 'good'"
    ]
    single = examine("classify", [("x y", "a"), ("z", "a")])
    assert any("every row has the label 'a'" in f.message for f in single.findings)
    swapped = examine("classify", [("good", text) for text, _ in healthy()])
    assert any("swapped" in f.message for f in swapped.findings)


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
    assert diagnosis.lengths["train"]["longest"] == 122 and diagnosis.window == 64
    blown = examine("classify", [("xqzwkvbn plmokn qazwsx " * 10, "a"), ("rfvtgbyhn ujmikolp", "b")], model=folder)
    assert "tokens per word" in only(blown, "tokenisation").message
    cut = examine("choose", [("good " * 60, ["bad film", "a cat"], 0), ("who", ["a b", "c d"], 1)], model=folder)
    assert only(cut, "length").severity == "warning"


def test_tags():
    good = (["john", "smith", "lives", "in", "paris"], ["B-PER", "I-PER", "O", "O", "B-LOC"])
    bad = (["mary", "is", "in", "acme", "paris"], ["B-PER", "O", "O", "I-ORG", "I-LOC"])
    diagnosis = examine("tag", [good, bad])
    assert "1 sentences were not well-formed BIO" in only(diagnosis, "reading").message
    assert diagnosis.labels["train"] == {"PER": 2, "LOC": 2, "ORG": 1}
    assert "IOB1" in only(examine("tag", [(["a", "b", "c", "d"], ["I-X", "O", "I-X", "B-X"])]), "reading").message
    assert "reading" not in kinds(examine("tag", [good]))
    short = (["why", "?"], ["O", "O"])
    assert "leakage" not in kinds(examine("tag", [good, short], [short]))


def test_answers():
    rows = [
        ("where ?", "john is in paris", {"text": ["paris"], "answer_start": [11]}),
        ("who ?", "john is in paris", {"text": ["mary"], "answer_start": [0]}),
    ]
    diagnosis = examine("answer", rows, [("when ?", "john is in paris", "john")])
    assert "is not at 0, where the context has 'john'" in only(diagnosis, "bad rows").examples[0]
    assert "split by context" in only(diagnosis, "leakage").remedy


def test_numbers_choices_and_pairs():
    rows = [(f"text {i}", float(i % 5)) for i in range(60)]
    assert kinds(examine("regress", rows)) == {"reading"}
    assert "labels" in kinds(examine("regress", [("a", 1), ("b", 1)]), "error")
    choices = [(f"prompt {i}", [f"a {i}", f"b {i}"], 0) for i in range(20)]
    assert kinds(examine("choose", choices)) <= {"reading"}
    pairs = examine("embed", [("a b", "c"), ("c", "d"), ("A  b", "c")])
    assert only(pairs, "duplicates").count == 1
