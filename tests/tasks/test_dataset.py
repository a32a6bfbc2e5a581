"""What users bring: every kind of source, guessed columns, and bad input refused in one line."""

import json
import math
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from refusals import refuses

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.tasks import AnswerQuestions, Choose, Classify, Embed, Regress, Tag, dataset
from everybert.tasks.dataset import Gold, Table

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
    refuses("no column 'bodi' for the text; it has id, body", Classify.read, path, {"text": "bodi", "label": "stars"})


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


class ClassLabel:
    """That of `datasets`."""

    def __init__(self, *names):
        self.names = list(names)


class Sequence:
    """That of `datasets`."""

    def __init__(self, feature):
        self.feature = feature


class Dataset:
    """What is used of a `datasets.Dataset`."""

    def __init__(self, columns, features=None):
        self.columns, self.features = columns, features or dict.fromkeys(columns)

    @property
    def column_names(self):
        return list(self.columns)

    def to_dict(self, batch_size=None):
        raise AssertionError("datasets has another to_dict")

    def __iter__(self):
        return (dict(zip(self.columns, row)) for row in zip(*self.columns.values()))


class Formatted(Dataset):
    """With a format set, rows are not of Python's own values, and `datasets` may give no rows at all."""

    def __iter__(self):
        return ({name: np.asarray(value) for name, value in row.items()} for row in super().__iter__())

    def with_format(self, kind):
        assert kind is None
        return Dataset(self.columns, self.features)


class IterableDataset:
    """What is used of a `datasets.IterableDataset`; its features may be unknown."""

    features, column_names = None, None

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Torch:
    """A map-style dataset of torch: no iterator, no end."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i % len(self.rows)]


COLUMNS = {"text": ["a good day", "a bad day"], "label": [1, 0]}
CLASSES = {"text": None, "label": ClassLabel("no", "yes")}


@pytest.mark.parametrize(
    "source, targets",
    [
        (COLUMNS, ["1", "0"]),
        ({name: np.array(values) for name, values in COLUMNS.items()}, ["1", "0"]),
        (pa.table(COLUMNS), ["1", "0"]),
        (Dataset(COLUMNS), ["1", "0"]),
        (Dataset(COLUMNS, CLASSES), ["yes", "no"]),
        (Formatted(COLUMNS, CLASSES), ["yes", "no"]),
        (IterableDataset([{"text": "a good day", "label": "x"}, {"text": "a bad day", "label": "y"}]), ["x", "y"]),
        (Torch([("a good day", torch.tensor(1)), ("a bad day", torch.tensor(0))]), ["1", "0"]),
        (Torch([{"text": "a good day", "label": 1}, {"text": "a bad day", "label": 0}]), ["1", "0"]),
    ],
)
def test_what_people_hold(source, targets):
    examples = Classify.read(source)
    assert (examples.inputs, examples.targets) == (COLUMNS["text"], targets)


def test_names_of_classes_of_datasets():
    tags = {"tokens": None, "ner_tags": Sequence(ClassLabel("O", "B-PER", "I-PER"))}
    found = Tag.read(Dataset({"tokens": [["John", "Day", "sits"]], "ner_tags": [[1, 2, 0]]}, tags))
    assert found.targets == [["B-PER", "I-PER", "O"]]
    unlabelled = Dataset({"text": ["x", "y"], "label": [-1, 1]}, CLASSES)
    refuses("row 1: the label is missing", Classify.read, unlabelled)
    assert Classify.read(unlabelled, skip_bad=True).targets == ["yes"]
    several = {"text": None, "label": [ClassLabel("a", "b")]}
    assert Classify.read(Dataset({"text": ["x"], "label": [[0, 1]]}, several)).targets == [("a", "b")]


def test_dictionaries_of_tables():
    parts = {"train": Dataset(COLUMNS), "validation": pd.DataFrame(COLUMNS), "test": Dataset(COLUMNS)}
    assert dataset.split_sets(parts, None) == (parts["train"], parts["validation"])
    assert dataset.split_sets(parts, parts["test"]) == (parts["train"], parts["test"])
    assert dataset.split_sets({"train": parts["train"]}, None) == (parts["train"], None)
    assert dataset.split_sets(COLUMNS, None) == (COLUMNS, None)
    refuses(r"the parts train, validation, test; .* data\['train'\]", Classify.read, parts)
    for wrong in ({"text": ["x"], "label": [1, 2]}, {"text": "x", "label": "y"}):
        refuses("lists of equal length", Classify.read, wrong)
    refuses("the data is a int", Classify.read, 3)


def test_arrow_feather_and_excel_files(tmp_path, monkeypatch):
    table = pa.table({"text": COLUMNS["text"], "label": ["yes", "no"]})
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as sink:
        sink.write_table(table)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as sink:
        sink.write_table(table)
    table.to_pandas().to_feather(tmp_path / "a.feather")
    for name in ("stream.arrow", "file.arrow", "a.feather"):
        examples = Classify.read(tmp_path / name)
        assert (examples.inputs, examples.targets) == (COLUMNS["text"], ["yes", "no"])
    (tmp_path / "bad.arrow").write_bytes(b"ARROW1 but no more")
    refuses("cannot be read as arrow", Classify.read, tmp_path / "bad.arrow")
    (tmp_path / "a.xlsx").write_bytes(b"x")
    sheets = {"one": table.to_pandas(), "empty": pd.DataFrame()}
    monkeypatch.setattr(pd, "read_excel", lambda *a, **k: sheets)
    assert Classify.read(tmp_path / "a.xlsx").targets == ["yes", "no"]
    sheets["two"] = sheets["one"]
    refuses("has 2 sheets", Classify.read, tmp_path / "a.xlsx")
    for error, why in ((ImportError(), "needs pandas and openpyxl"), (OSError("zip"), "cannot be read as xlsx")):
        monkeypatch.setattr(pd, "read_excel", Mock(side_effect=error))
        refuses(why, Classify.read, tmp_path / "a.xlsx")


class Polars(pd.DataFrame):
    """The methods of a polars DataFrame that are used."""

    def to_dicts(self):
        return super().to_dict("records")

    def to_dict(self, *, as_series=True):
        raise AssertionError("polars has another to_dict")


def test_texts_of_tables():
    """Column names are never taken for texts."""
    for frame in (pd.DataFrame, Polars):
        both = frame({"a": ["x", "y"], "b": ["z", "w"]})
        assert dataset.as_texts(both) == [("x", "z"), ("y", "w")]
        assert dataset.as_texts(both["a"], pairs=False) == ["x", "y"]
        refuses("a table with a, b is no list of texts", dataset.as_texts, both, pairs=False)
        rows = Classify.read(frame({"text": ["x", "y"], "label": [1, 0]}))
        assert (rows.inputs, rows.targets) == (["x", "y"], ["1", "0"])
    for table in (pd.DataFrame, Polars, dict, pa.table, Dataset):
        named = table({"id": [1, 2], "text": ["x", "y"], "label": ["no", "yes"]})
        assert dataset.as_texts(named) == dataset.as_texts(named, pairs=False) == ["x", "y"]
        assert dataset.as_texts(table({"body of it": ["x", "y"]})) == ["x", "y"]
        pair = table({"premise": ["x"], "hypothesis": ["y"], "label": [0]})
        assert dataset.as_texts(pair) == [("x", "y")]
        for wrong, both in ((pair, False), (table({"u": ["x"], "v": ["y"]}), True)):
            refuses("is no list of texts; give a list, or the column", dataset.as_texts, wrong, pairs=both)
    assert dataset.as_texts(pa.array(["x", "y"])) == dataset.as_texts(Torch(["x", "y"])) == ["x", "y"]
    assert dataset.as_texts(np.array([["x", "y"]])) == [("x", "y")] and dataset.as_texts(pd.DataFrame()) == []
    for wrong in (3, {"x"}):
        refuses("is no list of texts", dataset.as_texts, wrong)
    refuses("text 2 is a NoneType", dataset.as_texts, {"text": ["x", None]})
    assert dataset.as_texts(("x", "y"), pairs=False) == ["x", "y"] and dataset.as_texts(("x", "y")) == [("x", "y")]
    refuses("text 2 is a int", dataset.as_texts, ["x", 3])


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
    with pytest.raises(EverybertError, match="model does not know: 'c', 'd'; known are 'a', 'b'"):
        task.gold(Classify.read([("x", "d"), ("y", "c"), ("z", "a")]))


CLASSIFY = [
    ([], "0 rows"),
    ([("x", "a"), ("y", "a")], "every row has the label 'a'"),
    ([("x", "a"), ("y", None)], "row 2: the label is missing"),
    ([("x", "a"), ("y", math.nan)], "row 2: the label is missing"),
    ([("x", "a"), ("y", "")], "row 2: the label is missing"),
    ([("x", ["a"]), ("y", "b")], "some labels are lists"),
    ([("x", "a"), ("  ", "b")], "row 2: one of its texts is empty"),
    ([("x", "a"), (math.nan, "b")], "row 2: the column 'text' has no text"),
    ([("x", "a"), (["y"], "b")], "row 2: .* holds a list, not text"),
    ([("a text of words", f"label {i}") for i in range(30)], "columns swapped"),
    ([("a text of words", i / 7) for i in range(30)], "regress"),
    ([("x", "a"), "y"], "row 2: expected a tuple"),
]
CHOOSE = [
    (("who", ["a"], 0), "fewer than two endings"),
    (("who", ["a", ""], 0), "one of its texts is empty"),
    (("who", ["a", "b"], 2), "not the number of an ending"),
    (("", ["a", "b"], 0), "one of its texts is empty"),
]


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        *((Classify, rows, message) for rows, message in CLASSIFY),
        *((Regress, [("x", 1.0), ("y", y)], "row 2: the target") for y in (math.nan, math.inf, "high", None)),
        (Regress, [("x", 1), ("y", 1)], "every target is 1"),
        (Tag, [(["a"], ["O"]), (["a", "b"], ["O"])], "row 2: 2 words but 1 tags"),
        *((Choose, [row], message) for row, message in CHOOSE),
        (Embed, [("a",)], "no column for the pair"),
        (Embed, [("a", "b", 0.5), ("a", "b", math.nan)], "is not a finite number"),
    ],
)
def test_bad_rows(task, rows, message):
    refuses(message, lambda: task.from_examples(task.read(rows), CONFIG))


def test_missing_columns(tmp_path):
    refuses("no column for the label", Classify.read, write(tmp_path / "a.csv", "text,other", "x,y"))
    refuses("no column for the text", Classify.read, write(tmp_path / "b.csv", "foo,bar,label", "x,y,1"))
    refuses("no records", Classify.read, write(tmp_path / "c.csv", "text,label"))
    with pytest.raises(EverybertError, match="label"):
        Classify.read(write(tmp_path / "d.tsv", "A long text about the weather.\tNews", "Another.\tSport"))
    refuses("check the path", Classify.read, tmp_path / "none.csv")


def test_a_broken_line_is_named_or_skipped(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "x", "label": 1}', '{"text": "y"', '{"text": "z", "label": 0}')
    refuses(r"a\.jsonl:2", Classify.read, path)
    examples = Classify.read(path, skip_bad=True)
    assert examples.inputs == ["x", "z"]
    assert len(examples.bad) == 1 and any("1 bad rows" in n and ":2" in n for n in examples.notes)
    refuses(r"no usable row; .*b\.jsonl:1: not JSON", Classify.read, write(tmp_path / "b.jsonl", "a text", "another"))
    write(path, '{"text": "x", "label": 1}', '{"text": "y"', '{"text": " ", "label": 0}')
    assert "a.jsonl:3: one of its texts is empty" in Classify.read(path, skip_bad=True).bad[1], "the line in the file"


def test_bad_numbers_are_left_out():
    kept = Regress.read([("x", 1.0), ("y", math.nan), ("z", 2)], skip_bad=True)
    assert kept.targets == [1.0, 2.0] and len(kept.bad) == 1


def test_broken_tables_of_tags(tmp_path):
    with pytest.raises(EverybertError, match="a label per text, for classify; tag reads a word"):
        Tag.read(write(tmp_path / "train.tsv", "text\tlabel", "The music was splendid.\tpraise"))
    path = write(tmp_path / "a.conll", "John B-PER", "lives O", "", "here", "")
    refuses(r"a\.conll:4", Tag.read, path)
    with pytest.raises(EverybertError, match="has no column 'ner'"):
        Tag.read(write(tmp_path / "a.conllu", "1\tx\tx\tX\t_\t_\t0\troot\t_\t_"), {"label": "ner"})


@pytest.mark.parametrize(
    "answers, message",
    [
        ({"text": ["Paris"], "answer_start": [3]}, "is not at 3, where the context has 'n is '"),
        ({"text": ["Paris"], "answer_start": [90]}, "is not at"),
        ({"text": ["Paris"], "answer_start": [-1]}, "is not at"),
        ("London", "is not in the context"),
    ],
)
def test_misplaced_answers(answers, message):
    refuses(message, AnswerQuestions.read, [("where?", "John is in Paris", answers)])
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


@pytest.mark.parametrize(
    "task, row",
    [
        (AnswerQuestions, {"question": "who?", "context": "John", "answers": {"text": ["J"], "answer_start": ["x"]}}),
        (AnswerQuestions, {"question": "who?", "context": "John", "answers": 3}),
        (Tag, {"text": "John", "spans": [{"start": 0}]}),
        (Tag, {"text": "John", "spans": [3]}),
        (Tag, {"text": "John", "spans": [[0, "x", "PER"]]}),
    ],
)
def test_rows_of_a_strange_form_are_named(task, row):
    good = {**row, "answers": "John"} if task is AnswerQuestions else {**row, "spans": []}
    refuses("the data, row 2: it cannot be read", task.read, [good, row])
    assert len(task.read([good, row], skip_bad=True).bad) == 1


@pytest.mark.parametrize("task", [Classify, Regress, Tag, AnswerQuestions, Choose, Embed])
def test_columns_that_a_task_does_not_read_are_refused(task):
    refuses("columns: this task reads no txt, but ", task.read, [{"text": "x"}], {"txt": "text"})


@pytest.mark.parametrize("task", [Tag, Embed])
def test_two_columns_where_one_text_is_read_are_refused(task):
    row = {"sentence1": "x", "sentence2": "y"}
    refuses("rows.csv: read sentence1 or sentence2", task.input_reader, Table([row], "rows.csv"))
    assert task.input_reader(Table([row], "rows.csv", {"text": "sentence2"}))(row) == "y"


def test_embedding_examples():
    assert Embed.read([("a", "b")]).inputs == [("a", "b")]
    assert Embed.read([("a", "b", "c")]).inputs == [("a", "b", "c")]
    scored = Embed.read([("a", "b", 0.5)])
    assert (scored.inputs, scored.targets) == ([("a", "b")], [0.5])


def test_weights_for_every_class_are_asked_for():
    examples = Classify.read([("x", "a"), ("y", "b")])
    for weights in (
        [1.0],
        [1.0, float("nan")],
        [1.0, float("inf")],
        [1.0, -1.0],
        "heavy",
        {"a": 1.0, "b": 2.0},
        {1: 1.0, 2: 2.0},
    ):
        refuses("wrong class_weights=", Classify.from_examples, examples, CONFIG, class_weights=weights)


def test_labels_that_are_named_twice_are_refused():
    examples = Classify.read([("x", "a"), ("y", "b")])
    refuses("the labels a, b, a name one twice", Classify.from_examples, examples, CONFIG, labels=["a", "b", "a"])


def test_a_table_with_two_columns_of_one_name_is_refused():
    table = pd.DataFrame([["x", "y", "a"], ["y", "x", "b"]], columns=["text", "text", "label"])
    refuses("names a column twice", Classify.read, table)


@pytest.mark.parametrize(
    "answers",
    [
        {"text": np.array(["Paris", "Paris"], object), "answer_start": np.array([8, 28])},  # as pandas has them
        {"text": ["Paris", "Paris"], "answer_start": [8, 28]},
        [{"text": "Paris", "answer_start": 8}, {"text": "Paris", "answer_start": 28}],
    ],
)
def test_answers_in_every_form(answers):
    context = "a city: Paris and the other Paris"
    row = {"question": "where?", "context": context, "answers": answers}
    assert dataset.read_questions([row]).targets == [(Gold("Paris", 8), Gold("Paris", 28))]
    one = {"question": "where?", "context": context, "answers": ["Paris"], "answer_start": 8}
    assert dataset.read_questions([one]).targets == [(Gold("Paris", 8),)]
    none = {"question": "where?", "context": context, "answers": {"text": np.array([]), "answer_start": np.array([])}}
    assert dataset.read_questions([row, none]).targets[1] == ()


def test_words_of_white_space_are_words(tmp_path):
    (tmp_path / "a.conll").write_text("a\tO\n\xa0\tO\nb\tB-X\n\n", encoding="utf-8")
    assert dataset.read_tagged(tmp_path / "a.conll").inputs == [["a", "\xa0", "b"]]


def test_clean_tags_beside_plain_ones_stay_as_they_are():
    rows = [(["a", "b", "c"], ["O", "B-X", "I-X"])]
    assert dataset.read_tagged(rows, scheme="plain").targets == [["O", "B-X", "I-X"]]


def test_columns_that_are_not_there_are_not_named():
    assert not any("negatives" in note for note in dataset.read_pairs([("a", "b"), ("c", "d")]).notes)
