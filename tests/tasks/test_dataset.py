"""What users bring: every kind of source, columns guessed aloud, and bad input told in one line."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.tasks import AnswerQuestions, Choose, Classify, Embed, Regress, Tag, dataset

CONFIG = EncoderConfig(layers=2, hidden_size=32, heads=2, intermediate_size=48)


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# ── sources ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_files_frames_dictionaries_and_tuples_agree(tmp_path):
    rows = [("a good day", "yes"), ("a bad day", "no")]
    sources = [
        rows,
        [{"text": t, "label": y} for t, y in rows],
        pd.DataFrame(rows, columns=["text", "label"]),
        write(tmp_path / "a.csv", "text,label", *(f"{t},{y}" for t, y in rows)),
        write(tmp_path / "a.tsv", "label\tsentence", *(f"{y}\t{t}" for t, y in rows)),
        write(tmp_path / "a.jsonl", *(json.dumps({"text": t, "label": y}) for t, y in rows)),
    ]
    pd.DataFrame(rows, columns=["text", "label"]).to_parquet(tmp_path / "a.parquet")
    for source in [*sources, tmp_path / "a.parquet"]:
        examples = Classify.read(source)
        assert (examples.inputs, examples.targets) == (["a good day", "a bad day"], ["yes", "no"])


@pytest.mark.parametrize(
    "name, lines, inputs, targets",
    [
        ("SST-2", ["sentence\tlabel", "hide new \t0"], ["hide new "], ["0"]),
        ("CoLA", ["gj04\t1\t\tThey drank the pub dry.", "cj99\t0\t*\tThey drank the pub."],
         ["They drank the pub dry.", "They drank the pub."], ["1", "0"]),
        ("MRPC", ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", '1\t7\t8\tHe said "so.\tSo he said.'],
         [('He said "so.', "So he said.")], ["1"]),
        ("RTE", ["index\tsentence1\tsentence2\tlabel", "0\ta b\tc d\tentailment"], [("a b", "c d")], ["entailment"]),
        ("QNLI", ["index\tquestion\tsentence\tlabel", "0\twho?\tJohn.\tnot_entailment"],
         [("who?", "John.")], ["not_entailment"]),
        ("QQP", ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "0\t1\t2\ta?\tb?\t1"], [("a?", "b?")], ["1"]),
        ("MNLI", ["index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label", "0\tfiction\ta\tb\tneutral\tentailment"],
         [("a", "b")], ["entailment"]),
        ("no header", ["A long text about the weather in the north of the country.\tNews"],
         ["A long text about the weather in the north of the country."], ["News"]),
    ],
)  # fmt: skip
def test_glues_own_files(tmp_path, name, lines, inputs, targets):
    examples = Classify.read(write(tmp_path / "train.tsv", *lines))
    assert (examples.inputs, examples.targets) == (inputs, targets)
    assert any("guessed" in note for note in examples.notes)


def test_stsb_scores(tmp_path):
    examples = Regress.read(write(tmp_path / "a.tsv", "sentence1\tsentence2\tscore", "a\tb\t3.800"))
    assert (examples.inputs, examples.targets) == ([("a", "b")], [3.8])


def test_columns_by_name(tmp_path):
    path = write(tmp_path / "a.csv", "id,body,stars,text", "1,right,5,wrong")
    examples = Classify.read(path, {"text": "body", "label": "stars"})
    assert (examples.inputs, examples.targets) == (["right"], ["5"])
    with pytest.raises(EverybertError, match="no column 'bodi' for the text; it has id, body"):
        Classify.read(path, {"text": "bodi", "label": "stars"})


def test_swag(tmp_path):
    path = write(
        tmp_path / "train.csv",
        ",video-id,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label",
        "0,v,A man sits. He,A man sits.,He,gold,eats.,flies.,is.,sings.,2",
    )
    examples = Choose.read(path)
    assert examples.inputs == [("A man sits. He", ["eats.", "flies.", "is.", "sings."])]
    assert examples.targets == [2]
    assert Choose.read([("who", ["a", "b"], 1)]).targets == [1]


def test_multi_label():
    examples = Classify.read([{"text": "x y", "labels": ["a", "b"]}, {"text": "z", "labels": []}])
    task = Classify.from_examples(examples, CONFIG)
    assert task.multi and task.labels == ("a", "b")
    assert task.gold(examples).tolist() == [[1, 1], [0, 0]]
    split = Classify.read([("x", "a|b"), ("y", "b;c")], multi=True)
    assert split.targets == [("a", "b"), ("b", "c")]


# ── labels ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_label_order():
    assert dataset.order_labels(["10", "9", "-1"]) == ["-1", "9", "10"]
    assert dataset.order_labels(["b", "a", "10"]) == ["10", "a", "b"]
    assert Classify.from_examples(Classify.read([("x", True), ("y", False)]), CONFIG).labels == ("False", "True")
    assert Classify.from_examples(Classify.read([("x", 1.0), ("y", 0)]), CONFIG).labels == ("0", "1")
    given = Classify.from_examples(Classify.read([("x", "b"), ("y", "a")]), CONFIG, labels=["b", "a", "c"])
    assert given.labels == ("b", "a", "c")


def test_balanced_weights_are_scikit_learns():
    from sklearn.utils.class_weight import compute_class_weight

    names = ["a"] * 6 + ["b"] * 3 + ["c"]
    task = Classify.from_examples(Classify.read([("x", n) for n in names]), CONFIG, class_weights="balanced")
    assert task.weights == pytest.approx(compute_class_weight("balanced", classes=np.array(["a", "b", "c"]), y=names))


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────


def test_unseen_labels_are_listed():
    task = Classify.from_examples(Classify.read([("x", "a"), ("y", "b")]), CONFIG)
    with pytest.raises(EverybertError, match="training data has not: 'c', 'd'; known are 'a', 'b'"):
        task.gold(Classify.read([("x", "d"), ("y", "c"), ("z", "a")]))


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "0 rows"),
        ([("x", "a"), ("y", "a")], "every row has the label 'a'"),
        ([("x", "a"), ("y", None)], "row 2: the label is missing"),
        ([("x", "a"), ("y", math.nan)], "row 2: the label is missing"),
        ([("x", 1), ("y", "1")], "mix numbers .row 1: 1. and text .row 2: '1'"),
        ([("x", True), ("y", 0)], "mix truth values"),
        ([("x", "a"), ("  ", "b")], "row 2: the text in column 'text' is empty"),
        ([("x", "a"), (3, "b")], "row 2: .* is not text"),
        ([("a text of words", f"label {i}") for i in range(30)], "columns swapped"),
        ([("a text of words", i / 7) for i in range(30)], "regress"),
        ([("x", "a"), "y"], "row 2: expected a tuple"),
    ],
)
def test_bad_classification_rows(rows, message):
    with pytest.raises(EverybertError, match=message):
        Classify.from_examples(Classify.read(rows), CONFIG)


def test_missing_columns(tmp_path):
    with pytest.raises(EverybertError, match="no column for the label"):
        Classify.read(write(tmp_path / "a.csv", "text,other", "x,y"))
    with pytest.raises(EverybertError, match="which column is the text"):
        Classify.read(write(tmp_path / "b.csv", "foo,bar,label", "x,y,1"))
    with pytest.raises(EverybertError, match="no records"):
        Classify.read(write(tmp_path / "c.csv", "text,label"))
    with pytest.raises(EverybertError, match="does not exist"):
        Classify.read(tmp_path / "none.csv")


def test_a_broken_line_is_named_or_skipped(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "x", "label": 1}', '{"text": "y"', '{"text": "z", "label": 0}')
    with pytest.raises(EverybertError, match=r"a\.jsonl:2"):
        Classify.read(path)
    examples = Classify.read(path, skip_bad=True)
    assert examples.inputs == ["x", "z"]
    assert len(examples.bad) == 1 and any("1 bad rows" in n and ":2" in n for n in examples.notes)


def test_bad_numbers():
    for value in (math.nan, math.inf, "high", None):
        with pytest.raises(EverybertError, match="row 2: the target"):
            Regress.read([("x", 1.0), ("y", value)])
    kept = Regress.read([("x", 1.0), ("y", math.nan), ("z", 2)], skip_bad=True)
    assert kept.targets == [1.0, 2.0] and len(kept.bad) == 1
    with pytest.raises(EverybertError, match="every target is 1"):
        Regress.from_examples(Regress.read([("x", 1), ("y", 1)]), CONFIG)


def test_tags_and_words_of_unequal_number(tmp_path):
    with pytest.raises(EverybertError, match="row 2: 2 words but 1 tags"):
        Tag.read([(["a"], ["O"]), (["a", "b"], ["O"])])
    path = write(tmp_path / "a.conll", "John B-PER", "lives O", "", "here", "")
    with pytest.raises(EverybertError, match=r"a\.conll:4"):
        Tag.read(path)
    with pytest.raises(EverybertError, match="has no column 'ner'"):
        Tag.read(write(tmp_path / "a.conllu", "1\tx\tx\tX\t_\t_\t0\troot\t_\t_"), {"label": "ner"})


@pytest.mark.parametrize(
    "answers, message",
    [
        ({"text": ["Paris"], "answer_start": [3]}, "is not at 3, where the context has 'n is '"),
        ({"text": ["Paris"], "answer_start": [90]}, "lies outside the context"),
        ({"text": ["Paris"], "answer_start": [-1]}, "lies outside the context"),
        ("London", "is not in the context"),
    ],
)
def test_misplaced_answers(answers, message):
    with pytest.raises(EverybertError, match=message):
        AnswerQuestions.read([("where?", "John is in Paris", answers)])
    kept = AnswerQuestions.read([("where?", "John is in Paris", answers), ("who?", "John is", "John")], skip_bad=True)
    assert len(kept) == 1 and len(kept.bad) == 1
    assert kept.targets == [(("John", 0),)]


def test_squad_files_and_records_agree(tmp_path):
    question = {"id": "q1", "question": "where?", "answers": [{"text": "Paris", "answer_start": 11}]}
    none = {"id": "q2", "question": "why?", "answers": [], "is_impossible": True}
    paragraph = {"context": "John is in Paris", "qas": [question, none]}
    content = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [paragraph]}]}
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(content))
    records = [
        {"id": "q1", "question": "where?", "context": "John is in Paris",
         "answers": {"text": ["Paris"], "answer_start": [11]}},
        {"id": "q2", "question": "why?", "context": "John is in Paris", "answers": {"text": [], "answer_start": []}},
    ]  # fmt: skip
    from_file, from_records = AnswerQuestions.read(path), AnswerQuestions.read(records)
    assert from_file.inputs == from_records.inputs and from_file.targets == from_records.targets
    assert AnswerQuestions.from_examples(from_file, CONFIG).no_answer


def test_bad_choices():
    for row, message in [
        (("who", ["a"], 0), "fewer than two endings"),
        (("who", ["a", ""], 0), "an ending is empty"),
        (("who", ["a", "b"], 2), "not the number of an ending"),
        (("", ["a", "b"], 0), "the prompt"),
    ]:
        with pytest.raises(EverybertError, match=message):
            Choose.read([row])


def test_embedding_examples():
    assert Embed.read([("a", "b")]).inputs == [("a", "b")]
    assert Embed.read([("a", "b", "c")]).inputs == [("a", "b", "c")]
    scored = Embed.read([("a", "b", 0.5)])
    assert (scored.inputs, scored.targets) == ([("a", "b")], [0.5])
    with pytest.raises(EverybertError, match="needs tuples"):
        Embed.read([("a",)])
    with pytest.raises(EverybertError, match="is not a number"):
        Embed.read([("a", "b", 0.5), ("a", "b", math.nan)])


def test_options_that_do_nothing_are_refused():
    examples = Classify.read([("x", "a"), ("y", "b")])
    with pytest.raises(EverybertError, match="judged by one of"):
        Classify.from_examples(examples, CONFIG, metric="bleu")
    with pytest.raises(EverybertError, match="class_weights"):
        Classify.from_examples(examples, CONFIG, class_weights=[1.0])
