import json
import logging
import sys
from io import BytesIO, TextIOWrapper

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everybert.errors import EverybertError
from everybert.text import files, readers
from everybert.text.files import ReadReport
from everybert.text.readers import read_documents, read_records

words = st.lists(st.text("abß漢 .", min_size=1).filter(str.strip), min_size=1)


@given(st.lists(words, min_size=1), st.integers(3, 40), st.sampled_from(["\n\n", "\n \t\n\n", "\r\n\r\n"]))
def test_blank_lines_separate_documents_whatever_the_block(tmp_path_factory, documents, size, separator):
    path = tmp_path_factory.mktemp("r") / "x.txt"
    bodies = ["\n".join(document) for document in documents]
    path.write_text(separator.join(bodies), "utf-8", newline="")
    block, files.BLOCK = files.BLOCK, size
    try:
        found = list(read_documents(path))
    finally:
        files.BLOCK = block
    assert found == [body.strip() for body in bodies]


def test_a_line_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 4)
    (tmp_path / "x.txt").write_text("one\ntwo\n\nthree and more")
    assert list(read_documents(tmp_path / "x.txt", per_line=True)) == ["one", "two", "three and more"]


def test_endless_documents_are_cut_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 64)
    monkeypatch.setattr(readers, "LONGEST", 100)
    text = "word " * 60
    (tmp_path / "x.txt").write_text(text)
    report = ReadReport()
    assert list(read_documents(tmp_path / "x.txt", report=report)) == [text.strip()]
    assert report.cut == 0  # a line is held whole up to a limit of its own
    (tmp_path / "x.txt").write_text("word\n" * 60)
    found = list(read_documents(tmp_path / "x.txt", report=report))
    assert len(found) == report.cut + 1 == 5
    assert "\n".join(found).split() == ["word"] * 60


def write(path, name, text):
    (path / name).write_text(text, "utf-8")
    return path / name


def test_records_of_every_kind_are_documents(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"id": i, "text": f'say "{i}",\nthen go'} for i in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    write(tmp_path, "b.json", json.dumps(rows))
    write(tmp_path, "b2.json", json.dumps({"data": rows}))
    write(tmp_path, "b3.json", "\n".join(map(json.dumps, rows)))
    quoted = "".join('{id},"say ""{id}"",\nthen go"\n'.format(**row) for row in rows)
    write(tmp_path, "c.csv", "id,text\n" + quoted)
    expected = [row["text"] for row in rows]
    for path in sorted(tmp_path.iterdir()):
        assert list(read_documents(path)) == expected, path
    assert list(read_documents(tmp_path)) == expected * 6


def test_tsv_quotes_are_letters(tmp_path):
    path = write(tmp_path, "a.tsv", 'label\tsentence\n1\t"The start\n0\tthe end"\n')
    assert list(read_records(path)) == [
        {"label": "1", "sentence": '"The start'},
        {"label": "0", "sentence": 'the end"'},
    ]
    assert list(read_documents(path)) == ['"The start', 'the end"']


def test_columns_may_be_named_and_semicolons_separate(tmp_path):
    path = write(tmp_path, "a.tsv", "gj04\t1\t\tHi.\n")
    assert list(read_records(path, columns=["source", "label", "mark", "sentence"])) == [
        {"source": "gj04", "label": "1", "mark": "", "sentence": "Hi."}
    ]
    assert list(read_records(write(tmp_path, "b.csv", "a;b\nx,y;z\n"))) == [{"a": "x,y", "b": "z"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", '{"text": "x"}\n[1]\n', r"a\.jsonl:2: a list"),
        ("a.csv", "text,label\nx,1\ny\n", r"a\.csv:3: 1 columns where the header has 2"),
        ("a.tsv", "text\tlabel\nx\t1\t2\n", r"a\.tsv:2: 3 columns"),
    ],
)
def test_bad_lines_are_named_or_skipped(tmp_path, name, text, message, caplog):
    path = write(tmp_path, name, text)
    with pytest.raises(EverybertError, match=message):
        list(read_records(path))
    report = ReadReport()
    kept = list(read_records(path, skip_bad=True, report=report))
    assert all(record["text"] == "x" for record in kept)
    assert len(report.bad) == 1
    assert "1 bad lines" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[1, ", "not JSON"),
        ("a.json", '"x"', "not a list"),
        ("a.csv", "", "no records"),
        ("a.csv", "a,a\n1,2\n", "twice"),
        ("a.parquet", "junk", "parquet"),
        ("a.bin", "junk", "rename or convert"),
    ],
)
def test_bad_record_files_are_told(tmp_path, name, text, message):
    with pytest.raises(EverybertError, match=message):
        list(read_records(write(tmp_path, name, text)))
    with pytest.raises(EverybertError, match="not a file"):
        list(read_records(tmp_path / "gone.csv"))


def test_columns_are_guessed_or_listed(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"a": "x", "b": "y", "n": 1}\n{"b": "z", "a": null}\n')
    with pytest.raises(EverybertError, match="It has a, b, n"):
        list(read_documents(path))
    with pytest.raises(EverybertError, match="no column 'c', it has a, b, n"):
        list(read_documents(path, column="c"))
    with pytest.raises(EverybertError, match="is a int, not text"):
        list(read_documents(path, column="n"))
    assert list(read_documents(path, column="a")) == ["x"]
    assert list(read_documents(write(tmp_path, "b.jsonl", '{"only": "x", "n": 1}'))) == ["x"]


def test_unknown_extensions_are_said_to_be_text(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    assert list(read_documents(write(tmp_path, "a.foo", "hello"))) == ["hello"]
    assert "unknown extension .foo" in caplog.text


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"one\n\ntwo\n")))
    assert list(read_documents("-")) == ["one", "two"]
