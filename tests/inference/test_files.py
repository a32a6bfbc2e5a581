"""Predictions over files: the same as in memory, whatever the format, resumed where a stopped run ended."""

import csv
import errno
import json
import os
import sys

import numpy as np
import pyarrow as pa
import pytest
import tiny_model
from commandline import mistake, run
from pyarrow import parquet
from refusals import refuses

import everybert
from everybert.errors import EverybertError
from everybert.inference.files import predict_files

WORDS = ("good", "bad", "great", "awful", "poor")
TEXTS = [f"the {a} was {b}" + f" {b}" * (25 * i) for i, b in enumerate(WORDS) for a in ("film", "food", "song")]
ODD = [*TEXTS[:8], 'a "quoted" film', "two\nlines, one text", "", 'ends with a quote"']


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("m") / "m", {"classify": 2}, ["neg", "pos"])


@pytest.fixture(scope="module")
def model(folder):
    return everybert.load(folder, device="cpu")


@pytest.fixture
def files(tmp_path):
    """Two parquet files of 15 and 7 rows, in row groups that no part ends with."""
    for name, texts in {"a": TEXTS, "b": TEXTS[:7]}.items():
        table = pa.table({"id": [f"{name}{i}" for i in range(len(texts))], "body": texts})
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=4)
    return [tmp_path / "a.parquet", tmp_path / "b.parquet"]


def write(path, texts=TEXTS, column="text"):
    rows = [{"id": str(i), column: text} for i, text in enumerate(texts)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, ["id", column], delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return path


def read(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".tsv":
        head, *lines = [line.split("\t") for line in path.read_text().splitlines()]
        return [dict(zip(head, line)) for line in lines]
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    return parquet.read_table(path).to_pylist()


def contents(path):
    """The bytes of the parts, or of the file."""
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())} if path.is_dir() else path.read_bytes()


def label(folder, source, out, **how):
    return predict_files("classify", folder, source, out, **{"part_rows": 4, **how})


def stopping(after):
    def stop(rows):
        if rows >= after:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("given", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("out", ["out.csv", "out.tsv", "out.jsonl", "out"])
def test_rows_come_out_in_order_with_what_the_model_predicts(folder, model, tmp_path, given, out):
    source = write(tmp_path / f"in{given}", TEXTS, "body")
    how = {"columns": {"text": "body"}, "options": {"scores": True}}
    if out == "out" and given != ".parquet":
        refuses("a folder is for rows of parquet", label, folder, source, tmp_path / out, **how)
        return
    seen = []
    done = label(folder, source, tmp_path / out, progress=seen.append, **how)
    rows = read(tmp_path / out)
    assert done.rows == len(TEXTS) == len(rows) and [r["body"] for r in rows] == TEXTS
    assert seen == [4, 8, 12, 15] and not (tmp_path / f"{out}.building").exists()
    for row, p in zip(rows, model.classify(TEXTS)):
        assert row["prediction"] == p.label
        assert float(row["probability"]) == pytest.approx(p.score, abs=1e-5)
        assert float(row["p(neg)"]) == pytest.approx(p.scores["neg"], abs=1e-5)


def test_every_row_has_its_vector(folder, model, files, tmp_path):
    how = {"columns": {"text": "body"}, "part_rows": 8}
    assert predict_files("embed", folder, files, tmp_path / "out", **how).rows == 22
    table = parquet.read_table(tmp_path / "out")
    assert table.column("id").to_pylist() == [f"a{i}" for i in range(15)] + [f"b{i}" for i in range(7)]
    vectors = np.stack(table.column("vector").to_numpy(zero_copy_only=False))
    assert vectors.dtype == np.float32 and len(list((tmp_path / "out").glob("part-*"))) == 3
    np.testing.assert_allclose(vectors, model.embed(TEXTS + TEXTS[:7]), atol=1e-5)
    options = {"long": "cut", "pooling": "cls", "normalize": True}
    predict_files("embed", folder, files, tmp_path / "cut.jsonl", options=options, **how)
    rows = read(tmp_path / "cut.jsonl")
    assert max(row["cut"] for row in rows) > 0
    assert np.linalg.norm(rows[3]["vector"]) == pytest.approx(1, abs=1e-5)


def test_types_of_parquet_columns_stay(folder, tmp_path):
    table = pa.table({"text": TEXTS, "n": pa.array(range(15), pa.int8()), "l": [[1.5]] * 15, "none": [None] * 15})
    parquet.write_table(table, tmp_path / "in.parquet")
    label(folder, tmp_path / "in.parquet", tmp_path / "out")
    found = parquet.read_table(tmp_path / "out").select(table.column_names)
    assert found.schema == table.schema and found.to_pylist() == table.to_pylist()


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", ""])
def test_a_stopped_run_keeps_its_parts_and_ends_with_the_same_bytes(folder, tmp_path, kind):
    source = write(tmp_path / ("in.jsonl" if kind else "in.parquet"), ODD)
    whole, again = (tmp_path / f"{name}.{kind}".rstrip(".") for name in ("whole", "again"))
    label(folder, source, whole)
    done = label(folder, source, again, progress=stopping(8))
    assert done.stopped and done.rows == 8 and not again.exists()
    (tmp_path / f"{again.name}.building" / ".part-000002.0a0b").write_bytes(b"torn")  # by a worker that was killed
    done = label(folder, source, again)
    assert not done.stopped and done.before == 8 and done.rows == len(ODD)
    assert contents(again) == contents(whole)
    assert [row["id"] for row in read(again)] == [str(i) for i in range(len(ODD))]


@pytest.mark.parametrize("call", ["fsync", "rename", "replace"])
@pytest.mark.parametrize("name", ["out", "out.csv"])
def test_a_failing_disk_leaves_nothing_half_written(folder, tmp_path, monkeypatch, call, name):
    source = write(tmp_path / "in.parquet", TEXTS[:6])
    label(folder, source, tmp_path / f"whole{name}")
    real = getattr(os, call)
    for step in range(40):
        left = step

        def failing(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args, **kwargs)

        out = tmp_path / f"{step}{name}"
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                label(folder, source, out)
            except EverybertError as error:
                assert "\n" not in str(error) and "Input/output" in str(error)
        if left >= 0:
            break
        if not out.exists():
            label(folder, source, out)
        assert contents(out) == contents(tmp_path / f"whole{name}")
    assert step < 39 and (step or (call, name) == ("rename", "out.csv"))


def test_other_inputs_options_and_outputs_are_noticed(folder, files, tmp_path):
    how = {"columns": {"text": "body"}, "progress": stopping(4)}
    assert label(folder, files, tmp_path / "out", **how).stopped
    refuses(r"unfinished .* other inputs", label, folder, files[:1], tmp_path / "out", **how)
    refuses(r"other options.*fresh=True", label, folder, files, tmp_path / "out", options={"scores": True}, **how)
    with pytest.raises(EverybertError, match="other model"):
        label(tiny_model.save(tmp_path / "m2", {"classify": 2}, seed=3), files, tmp_path / "out", **how)
    how.pop("progress")
    assert label(folder, files[:1], tmp_path / "out", fresh=True, **how).rows == 15
    refuses(r"exists already.*fresh=True", label, folder, files, tmp_path / "out", **how)
    assert label(folder, files, tmp_path / "out", fresh=True, **how).rows == 22
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("mine")
    refuses("no folder of predictions", label, folder, files, tmp_path / "thesis", fresh=True, **how)


def test_text_files_have_a_text_per_line_and_pairs_are_guessed(folder, model, tmp_path):
    (tmp_path / "in.txt").write_text("the film\nthe song\n\n")
    label(folder, tmp_path / "in.txt", tmp_path / "out.jsonl")
    assert [r["text"] for r in read(tmp_path / "out.jsonl")] == ["the film", "the song", ""]
    (tmp_path / "in.tsv").write_text("sentence1\tsentence2\nthe film\tthe song\n")
    label(folder, tmp_path / "in.tsv", tmp_path / "out.tsv")
    (row,) = read(tmp_path / "out.tsv")
    assert float(row["probability"]) == pytest.approx(model.classify([("the film", "the song")])[0].score, abs=1e-5)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_row_without_text_is_named_or_left_out(folder, tmp_path, suffix):
    source = write(tmp_path / f"in{suffix}", [*TEXTS[:6], None, *TEXTS[:3], None])
    refuses(r":7: the column 'text' has no text; skip_bad=True", label, folder, source, tmp_path / "out.csv")
    done = label(folder, source, tmp_path / "some.csv", skip_bad=True)
    assert done.rows == 9 and [line.split(": ")[0].rpartition(":")[2] for line in done.bad] == ["7", "11"]
    assert [row["id"] for row in read(tmp_path / "some.csv")] == [*"012345", *"789"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_empty_cells_are_left_out_if_asked_for(folder, tmp_path, suffix):
    source = write(tmp_path / f"in{suffix}", [*TEXTS[:2], "", "  ", *TEXTS[:1]])
    assert label(folder, source, tmp_path / "all.csv").rows == 5
    done = label(folder, source, tmp_path / "some.csv", skip_bad=True)
    assert done.rows == 3 and len(done.bad) == 2 and "one of its texts is empty" in done.bad[0]


def test_texts_in_a_tsv_file_keep_their_spaces(folder, tmp_path):
    source = write(tmp_path / "in.jsonl", ["two  spaces", " at\u00a0both ends ", "a\ttab\r\nand a line"])
    label(folder, source, tmp_path / "out.tsv")
    found = [row["text"] for row in read(tmp_path / "out.tsv")]
    assert found == ["two  spaces", " at\u00a0both ends ", "a tab and a line"]


def test_broken_lines_are_left_out_and_listed(folder, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "the film"}\n{"text": \n{"text": "the song"}\n')
    refuses(r"in\.jsonl:2", label, folder, source, tmp_path / "out.jsonl")
    done = label(folder, source, tmp_path / "out2.jsonl", skip_bad=True)
    assert done.rows == 2 and len(done.bad) == 1 and "in.jsonl:2" in done.bad[0]


def test_mistakes_are_one_line(folder, files, tmp_path, monkeypatch):
    def wrong(match, table=None, source=None, out="out", task="classify", **how):
        if table is not None:
            source = tmp_path / "w.parquet"
            parquet.write_table(pa.table(table), source)
        refuses(match, predict_files, task, folder, source, tmp_path / out, **how)

    source = write(tmp_path / "in.csv", column="body")
    wrong("no column 'text'", source=source, out="o.csv", columns={"text": "text"})
    wrong(r"written as \.csv", source=source, out="o.xlsx")
    wrong("is the input too", source=source, out="in.csv")
    wrong("no tag head|no head for tag", source=source, out="o.csv", task="tag", columns={"text": "body"})
    (tmp_path / "two.jsonl").write_text('{"text": "a"}\n{"text": "b", "more": 1}\n')
    wrong("two.jsonl:2: it has the columns text, more, not text", source=tmp_path / "two.jsonl", out="o.csv")
    (tmp_path / "none.txt").touch()
    wrong("has no row", source=tmp_path / "none.txt", out="o.csv")
    for name, why in (("book.xlsx", r"book\.xlsx.*xlsx"), ("book.ods", r"book\.ods: records are read from")):
        (tmp_path / name).write_bytes(b"PK")
        wrong(why, source=tmp_path / name, out="o.csv")
    wrong("sentence1 or sentence2", {"sentence1": ["a"], "sentence2": ["b"]}, task="embed")
    wrong("has a column 'vector' already", {"text": ["a"], "vector": [1]}, task="embed")
    wrong("has a column 'prediction' already", {"text": ["a"], "prediction": [1]})
    wrong("has no records", {"text": pa.array([], pa.string())})
    wrong("does not exist", source=tmp_path / "none.parquet")
    wrong("at least 1", {"text": ["a"]}, part_rows=0)
    wrong("give engine ray", {"text": ["a"]}, address="auto")
    (tmp_path / "t.parquet").write_bytes(files[0].read_bytes()[:-20])
    wrong("cannot be read as parquet", source=tmp_path / "t.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    wrong("pip install pyarrow", source=files[0])


def test_the_command_line(folder, model, tmp_path):
    """More lines are in tests/golden."""
    source = write(tmp_path / "in.csv")
    run("embed", "--file", source, "--model", folder, "--out", tmp_path / "v.npy")
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), model.embed(TEXTS), atol=1e-5)
    done = run("classify", source, "--model", folder, "--out", tmp_path / "c.csv", "--part-rows", 8)
    assert "15 rows" in done.output
    assert "rows of files" in mistake("classify", "a text", "--workers", "2", "--model", folder)
