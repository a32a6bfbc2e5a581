import bz2
import csv
import gzip
import io
import json
import logging
import lzma
import os
import sys
import threading
from io import BytesIO, TextIOWrapper
from unittest.mock import patch

import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from refusals import refuses

from everybert.errors import EverybertError
from everybert.text import readers
from everybert.text.readers import (
    RECORD_KINDS,
    ReadReport,
    blocks,
    expand,
    kind,
    lines,
    open_bytes,
    read_conll,
    read_conllu,
    read_documents,
    read_records,
    read_rows,
    read_squad,
)

PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("packing", PACKERS)
def test_packed_files_are_unpacked_and_damage_is_named(tmp_path, packing):
    path = tmp_path / f"a.txt{packing}"
    body = "".join(f"line {n * n}\n" for n in range(5000)).encode()
    packed = PACKERS[packing](body)
    path.write_bytes(packed)
    assert kind(path) == ".txt"
    assert [line for _, line in lines(path)] == body.decode().split("\n")[:-1]
    path.write_bytes(packed[: len(packed) // 2])
    if packing != ".zst":  # a zstd frame cut between its blocks cannot be told from a finished one
        refuses(r"a\.txt\..*damaged", list, lines(path))
    path.write_bytes(b"\0not packed at all")
    refuses("damaged", list, lines(path))


def test_two_streams_in_one_file_are_both_read(tmp_path):
    for packing, pack in PACKERS.items():
        path = tmp_path / f"a.txt{packing}"
        path.write_bytes(pack(b"one\n") + pack(b"two\n"))
        assert [line for _, line in lines(path)] == ["one", "two"]


def test_expand_sorts_folders_and_skips_hidden_files(tmp_path):
    (tmp_path / "d/sub").mkdir(parents=True)
    for name in ("d/b.txt", "d/a.txt", "d/sub/c.txt", "d/.hidden"):
        (tmp_path / name).write_text("x")
    assert [p.name for p in expand([tmp_path / "d"])] == ["a.txt", "b.txt", "c.txt"]
    (tmp_path / "empty").mkdir()
    for bad, message in ((tmp_path / "gone", "does not exist"), (tmp_path / "empty", "no files")):
        refuses(message, expand, [bad])
    refuses("no input files", expand, [])


def test_bad_bytes_are_located_or_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK", 7)
    path = tmp_path / "mixed.txt"
    path.write_bytes("naïve \ufffd\n".encode() * 3 + "café\n".encode("latin-1") + b"end\n")
    offset = path.read_bytes().index(b"caf\xe9") + 3
    refuses(rf"mixed\.txt is not UTF-8 at byte {offset} \(0xe9\)", list, blocks(path, "strict", ReadReport(), 99))
    refuses(f"byte {offset} ", list, lines(path))
    report = ReadReport()
    text = "".join(blocks(path, "replace", report, 99))
    assert "caf\ufffd" in text
    assert report.replaced == 1  # the three that were there before do not count


def test_binary_and_utf16_are_told(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"abc\ndef\0ghi")
    refuses(r"binary .*byte 7", list, lines(path))
    report = ReadReport()
    assert [line for _, line in lines(path, "replace", report)] == ["abc", "def\ufffdghi"]
    assert report.replaced == 1
    path.write_bytes("hello".encode("utf-16"))
    refuses("UTF-16", list, lines(path))
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert list(lines(path)) == [(1, "hello")]


@given(st.text(st.characters(exclude_characters="\0\r\ufeff", exclude_categories=["Cs"])), st.integers(1, 9))
def test_blocks_lose_nothing(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("b") / "x.txt"
    path.write_text(text, "utf-8", newline="")
    with patch.object(readers, "BLOCK", size):
        assert "".join(blocks(path, "strict", ReadReport(), 5)) == text


def test_unreadable_file_is_told(tmp_path):
    with pytest.raises(EverybertError, match="cannot be read"), open_bytes(tmp_path):
        pass


def test_pipes_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"one\ntwo\n",))
    writer.start()
    assert [line for _, line in lines(tmp_path / "pipe")] == ["one", "two"]
    writer.join()


words = st.lists(st.text("abß漢 .", min_size=1).filter(str.strip), min_size=1)


@given(st.lists(words, min_size=1), st.integers(3, 40), st.sampled_from(["\n\n", "\n \t\n\n", "\r\n\r\n"]))
def test_blank_lines_separate_documents_whatever_the_block(tmp_path_factory, documents, size, separator):
    path = tmp_path_factory.mktemp("r") / "x.txt"
    bodies = ["\n".join(document) for document in documents]
    path.write_text(separator.join(bodies), "utf-8", newline="")
    with patch.object(readers, "BLOCK", size):
        assert list(read_documents(path)) == [body.strip() for body in bodies]


def test_a_line_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK", 4)
    (tmp_path / "x.txt").write_text("one\ntwo\n\nthree and more")
    assert list(read_documents(tmp_path / "x.txt", per_line=True)) == ["one", "two", "three and more"]


def test_endless_documents_are_cut_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK", 64)
    monkeypatch.setattr(readers, "LONGEST", 100)
    for end in " \n":
        (tmp_path / "x.txt").write_text(f"word{end}" * 100)
        report = ReadReport()
        found = list(read_documents(tmp_path / "x.txt", report=report))
        assert len(found) == report.cut + 1 > 2
        assert "\n".join(found).split() == ["word"] * 100


def test_endless_lines_and_json_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK", 64)
    monkeypatch.setattr(readers, "LINE", 1 << 20)
    monkeypatch.setattr(readers, "WHOLE", 1 << 20)
    for name, start, line in (("a.csv.gz", b"text,label\n", 2), ("a.jsonl.gz", b"", 1), ("a.json.gz", b"", 1)):
        (tmp_path / name).write_bytes(gzip.compress(start + b"x" * (1 << 21)))
        with pytest.raises(EverybertError, match=rf"{name}.*(line {line} is longer than 1 MB|more than 1 MB of JSON)"):
            list(read_records(tmp_path / name))


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
    write(tmp_path, "c.csv", _csv(rows))
    expected = [row["text"] for row in rows]
    for path in sorted(tmp_path.iterdir()):
        assert list(read_documents(path)) == expected, path
    assert list(read_documents(tmp_path)) == expected * 6


def test_colas_files_have_no_header_and_semicolons_separate(tmp_path):
    path = write(tmp_path, "a.tsv", "gj04\t1\t\tHi.\n")
    assert list(read_records(path)) == [{"source": "gj04", "label": "1", "mark": "", "sentence": "Hi."}]
    assert list(read_records(write(tmp_path, "b.csv", "a;b\nx,y;z\n"))) == [{"a": "x,y", "b": "z"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", '{"text": "x"}\n[1]\n', r"a\.jsonl:2: a list"),
        ("a.csv", "text,label\nx,1\ny\n", r"a\.csv:3: 1 columns where the header has 2"),
        ("a.tsv", "text\tlabel\nx\t1\t2\n", r"a\.tsv:2: 3 columns"),
        ("a.csv", 'text,label\nx,1\n"y,1\nx,1\nx,2\n' + "x,1\n" * 99, r"a\.csv:3: a quote that never closes"),
        ("a.csv", 'text,label\nx,1\n"y,1\nx,1\n"x",2\n', r"a\.csv:3: ',' expected"),
        ("a.csv", "text,label\nx,1\ny\ry,1\nx,1\n", r"a\.csv:3: new-line character seen in unquoted field: fix"),
    ],
)
def test_bad_lines_are_named_or_skipped(tmp_path, name, text, message):
    path = write(tmp_path, name, text)
    refuses(message, list, read_records(path))
    found = [record for _, record in read_rows(path)]
    kept = [record for record in found if not isinstance(record, str)]
    assert all(record["text"] == "x" for record in kept)
    assert len(found) == len(kept) + 1 and len(kept) + 2 == sum(map(bool, text.split("\n"))) + (name == "a.jsonl")


@pytest.mark.parametrize(
    ("read", "name", "text", "message"),
    [
        (read_records, "a.json", "[1, ", "not JSON"),
        (read_records, "a.json", '"x"', "not a list"),
        (read_records, "a.csv", "", "no records"),
        (read_records, "a.csv", "a,a\n1,2\n", "twice"),
        (read_records, "a.parquet", "junk", "parquet"),
        (read_records, "a.bin", "junk", "rename or convert"),
        (read_conll, "a.conll", "a O\nb X O\n", r"a\.conll:2: 3 columns"),
        (read_conll, "a.conll", "a\n", ":1: 1 columns, 2 expected"),
        (read_conll, "a.conll", "\n", "no sentences"),
        (read_conllu, "a.conllu", "1\tx\n", "2 columns, 10 expected"),
        (read_conllu, "a.conllu", "# nothing\n", "no sentences"),
        (read_squad, "a.json", '{"rows": []}', "'paragraphs' is missing"),
        (read_squad, "a.json", "[]", "no records"),
        (read_squad, "a.json", "{", "not JSON"),
    ],
)
def test_bad_files_are_told(tmp_path, read, name, text, message):
    refuses(message, lambda: list(read(write(tmp_path, name, text))))


@pytest.mark.parametrize("read", [read_records, read_conll, read_conllu, read_squad])
def test_missing_files_and_folders_are_told(tmp_path, read):
    for path, message in ((tmp_path / "gone.json", "No such file"), (tmp_path, "Is a directory|records are read from")):
        assert "damaged" not in refuses(message, lambda path=path: list(read(path)))


def test_columns_are_guessed_or_listed(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"a": "x", "b": "y", "n": 1}\n{"b": "z", "a": null}\n')
    refuses("It has a, b, n", list, read_documents(path))
    refuses("column 'c' is no text \\(missing, it has a, b, n", list, read_documents(path, column="c"))
    refuses("column 'n' is no text \\(int", list, read_documents(path, column="n"))
    assert list(read_documents(path, column="a")) == ["x"]
    assert list(read_documents(write(tmp_path, "b.jsonl", '{"only": "x", "n": 1}'))) == ["x"]


def test_unknown_extensions_are_said_to_be_text(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    assert list(read_documents(write(tmp_path, "a.foo", "hello"))) == ["hello"]
    assert "unknown extension .foo" in caplog.text


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"one\n\ntwo\n")))
    assert list(read_documents("-")) == ["one", "two"]


def test_conll_in_tabs_and_spaces(tmp_path):
    spaces = "-DOCSTART- -X- -X- O\n\nAda NNP B-NP B-PER\nwrote VBD B-VP O\n\n\nYes UH O O\n"
    expected = [[["Ada", "NNP", "B-NP", "B-PER"], ["wrote", "VBD", "B-VP", "O"]], [["Yes", "UH", "O", "O"]]]
    assert list(read_conll(write(tmp_path, "a.conll", spaces))) == expected
    assert list(read_conll(write(tmp_path, "b.conll", spaces.replace(" ", "\t")))) == expected
    assert list(read_conll(write(tmp_path, "c.conll", "New York\tB-LOC\n"))) == [[["New York", "B-LOC"]]]


def test_conllu_keeps_words_only(tmp_path):
    rest = "\t".join("_" * 4)
    rows = ["1-2\tdu\t_\t_\t_\t" + "_\t_\t_\t_\t_", f"1\tde\tde\tADP\t_\t_\t3\tcase\t{rest[:3]}"]
    rows += [f"2\tle\tle\tDET\t_\t_\t3\tdet\t{rest[:3]}", "2.1\tx" + "\t_" * 8]
    path = write(tmp_path, "a.conllu", "# text = du\n" + "\n".join(rows) + "\n\n")
    (sentence,) = read_conllu(path)
    assert [(word["id"], word["form"], word["head"], word["deprel"]) for word in sentence] == [
        ("1", "de", "3", "case"),
        ("2", "le", "3", "det"),
    ]


def test_squad_one_and_two(tmp_path):
    qas = [
        {"id": 7, "question": "Where?", "answers": [{"text": "Bern", "answer_start": 3, "extra": 1}]},
        {"id": "8", "question": "Who?", "answers": [], "is_impossible": True},
    ]
    data = {"data": [{"title": "T", "paragraphs": [{"context": "In Bern.", "qas": qas}]}]}
    first, second = read_squad(write(tmp_path, "a.json", json.dumps(data)))
    answer = {"text": "Bern", "answer_start": 3}
    assert first == {"id": "7", "question": "Where?", "context": "In Bern.", "answers": [answer]}
    assert second["answers"] == []


# ── laws ─────────────────────────────────────────────────────────────────────────────────────────────────────

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MARKS = "ab1é漢\U0001f642 \t\n\r\"',;:{}[]\\-\u2028\u0085\u00a0"
cells = st.text(MARKS, max_size=12)
noise = st.binary(max_size=200) | st.text(MARKS + "\0\ufeff", max_size=120).map(str.encode)


def _csv(rows: list[dict[str, str]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["id", "text"], lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _tsv(rows: list[dict[str, str]]) -> str:
    return "\n".join("\t".join(row) for row in (("id", "text"), *(row.values() for row in rows))) + "\n"


def _lines(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "write"), [("x.csv", _csv), ("x.tsv", _tsv), ("x.jsonl", _lines), ("x.json", json.dumps)]
)
@given(texts=st.lists(cells, min_size=1, max_size=5))
@QUICK
def test_records_come_back_as_they_were_written(tmp_path, name, write, texts):
    if name == "x.tsv":  # which has no way to write these
        texts = [" ".join(text.split()) for text in texts]
    if name == "x.csv":  # a line may end in any of three ways, and is read as ending in one
        texts = [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]
    rows = [{"id": f"r{i}", "text": text} for i, text in enumerate(texts)]
    (tmp_path / name).write_text(write(rows), "utf-8", newline="")
    assert list(read_records(tmp_path / name)) == rows
    assert list(read_documents(tmp_path / name, column="text")) == [text.strip() for text in texts if text.strip()]


@pytest.mark.parametrize("kind", [*RECORD_KINDS, ".txt", ".xml", ".txt.gz", ".csv.bz2", ".jsonl.xz", ".jsonl.zst"])
@given(content=noise)
@example(content=b"[" * 5000)
@example(content=b'{"text": ' * 3000)
@example(content=b"\xff\xfea\0")
@example(content=b'"')
@example(content=b"a,b\n1")
@QUICK
def test_noise_is_read_or_refused_in_a_line(tmp_path, kind, content):
    path = tmp_path / f"x{kind}"
    path.write_bytes(content)
    readings = [lambda: read_documents(path), lambda: read_documents(path, errors="replace")]
    if kind in RECORD_KINDS:
        readings += [lambda: read_records(path), lambda: read_rows(path)]
    for reading in readings:
        try:
            list(reading())
        except EverybertError as error:
            assert "\n" not in str(error) and path.name in str(error)
