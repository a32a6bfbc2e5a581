"""Predictions over parquet files: what the model says of each row, the same bytes however they are made."""

import errno
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tiny_model
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from typer.testing import CliRunner

import everybert
from everybert.cli.main import app
from everybert.errors import EverybertError
from everybert.inference.parts import plan_parts, predict_parts, read_part

WORDS = ("good", "bad", "great", "awful", "poor")
TEXTS = [f"the {a} was {b}" + f" {b}" * (25 * i) for i, b in enumerate(WORDS) for a in ("film", "food", "song")] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("m") / "m", {"classify": 2}, ["neg", "pos"])


@pytest.fixture(scope="module")
def model(folder):
    return everybert.load(folder, device="cpu")


@pytest.fixture
def files(tmp_path):
    """Two files of 45 and 20 rows, in row groups that no part ends with."""
    both = {"a": TEXTS, "b": TEXTS[:20]}
    for name, texts in both.items():
        table = pa.table({"id": [f"{name}{i}" for i in range(len(texts))], "body": texts})
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
    return [tmp_path / "a.parquet", tmp_path / "b.parquet"]


def contents(path):
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())}


def embed(folder, files, out, **how):
    return predict_parts("embed", folder, files, out, **{"columns": {"text": "body"}, "part_rows": 16, **how})


def test_every_row_has_its_vector(folder, model, files, tmp_path):
    done = embed(folder, files, tmp_path / "out")
    table = parquet.read_table(tmp_path / "out")
    assert done.rows == 65 and done.before == 0
    assert table.column("id").to_pylist() == [f"a{i}" for i in range(45)] + [f"b{i}" for i in range(20)]
    assert table.column("body").to_pylist() == TEXTS + TEXTS[:20]
    vectors = np.stack(table.column("vector").to_numpy(zero_copy_only=False))
    np.testing.assert_allclose(vectors, model.embed(TEXTS + TEXTS[:20]), atol=1e-5)
    assert len(list((tmp_path / "out").glob("part-*.parquet"))) == 5
    cut = embed(folder, files, tmp_path / "cut", options={"long": "cut", "pooling": "cls", "normalize": True})
    table = parquet.read_table(tmp_path / "cut")
    assert cut.rows == 65 and max(table.column("cut").to_pylist()) > 0
    assert np.linalg.norm(table.column("vector")[3].as_py()) == pytest.approx(1, abs=1e-5)


def test_pairs_are_labelled(folder, model, tmp_path):
    pairs = list(zip(TEXTS, reversed(TEXTS)))
    table = pa.table({"premise": [a for a, _ in pairs], "hypothesis": [b for _, b in pairs]})
    parquet.write_table(table, tmp_path / "in.parquet")
    predict_parts("classify", folder, tmp_path / "in.parquet", tmp_path / "out", options={"scores": True}, part_rows=9)
    rows = parquet.read_table(tmp_path / "out").to_pylist()
    for row, found in zip(rows, model.classify(pairs), strict=True):
        assert row["prediction"] == found.label
        assert row["probability"] == pytest.approx(found.score, abs=1e-4)
        assert row["p(neg)"] + row["p(pos)"] == pytest.approx(1, abs=1e-4)


def test_the_same_bytes_for_any_number_of_workers_and_threads(folder, files, tmp_path):
    made, before = [], torch.get_num_threads()
    for workers, threads in ((1, 1), (2, 2), (3, 1)):
        torch.set_num_threads(threads)
        try:
            embed(folder, files, tmp_path / str(workers), workers=workers)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        made.append(contents(tmp_path / str(workers)))
    assert made[0] == made[1] == made[2]


def test_a_stopped_run_keeps_its_parts_and_goes_on_to_the_same_bytes(folder, files, tmp_path):
    def stop(rows, total):
        assert total == 65
        if rows >= 32:
            raise KeyboardInterrupt

    done = embed(folder, files, tmp_path / "out", progress=stop, workers=1)
    assert done.stopped and 32 <= done.rows < 65 and not (tmp_path / "out").exists()
    (tmp_path / "out.building/.part-000004.parquet.0a0b").write_bytes(b"torn")  # by a worker that was killed
    done = embed(folder, files, tmp_path / "out")
    assert done.rows == 65 and 32 <= done.before < 65
    embed(folder, files, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    again = embed(folder, files, tmp_path / "out")
    assert again.rows == again.before == 65


@pytest.mark.parametrize("call", ["fsync", "rename", "replace"])
def test_a_failing_disk_leaves_nothing_half_written(folder, files, tmp_path, monkeypatch, call):
    embed(folder, files, tmp_path / "whole")
    real = getattr(os, call)
    for step in range(40):
        left = step

        def failing(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args, **kwargs)

        out = tmp_path / f"out{step}"
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                embed(folder, files, out, workers=1)
            except EverybertError as error:
                assert "\n" not in str(error) and "Input/output" in str(error)
        if left >= 0:
            break
        assert not out.exists() or contents(out) == contents(tmp_path / "whole")
        embed(folder, files, out, workers=1)
        assert contents(out) == contents(tmp_path / "whole")
    assert 0 < step < 39


def test_other_inputs_options_and_folders_are_noticed(folder, files, tmp_path):
    embed(folder, files, tmp_path / "out")
    with pytest.raises(EverybertError, match="other inputs"):
        embed(folder, files[:1], tmp_path / "out")
    with pytest.raises(EverybertError, match=r"other options.*--fresh"):
        embed(folder, files, tmp_path / "out", options={"pooling": "cls"})
    other = tiny_model.save(tmp_path / "other", seed=3)
    with pytest.raises(EverybertError, match="other model"):
        embed(other, files, tmp_path / "out")
    assert embed(folder, files[:1], tmp_path / "out", fresh=True).rows == 45
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(EverybertError, match="no folder of predictions"):
            embed(folder, files, tmp_path / "thesis", fresh=fresh)
    embed(folder, files, tmp_path / "half", progress=lambda rows, total: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(EverybertError, match=r"unfinished .* other inputs"):
        embed(folder, files[:1], tmp_path / "half")


def test_a_row_without_text_is_told_with_its_file_or_left_out(folder, files, tmp_path):
    texts = [*TEXTS[:18], None, *TEXTS[:3], None, None]
    parquet.write_table(pa.table({"body": texts, "id": list(range(24))}), tmp_path / "c.parquet")
    with pytest.raises(EverybertError, match=r"c\.parquet: row 19 has no text in body; .*--skip-bad"):
        embed(folder, [*files, tmp_path / "c.parquet"], tmp_path / "out")
    done = embed(folder, [tmp_path / "c.parquet"], tmp_path / "some", skip_bad=True, part_rows=2)
    assert done.rows == 21 and [line.partition(": ")[2] for line in done.bad] == [
        f"row {n} has no text" for n in (19, 23, 24)
    ]
    table = parquet.read_table(tmp_path / "some")
    assert table.column("id").to_pylist() == [i for i, text in enumerate(texts) if text is not None]


def test_what_is_wrong_is_told(folder, files, tmp_path, monkeypatch):
    def wrong(match, table=None, task="embed", source=None, **how):
        if table is not None:
            source = tmp_path / "w.parquet"
            parquet.write_table(pa.table(table), source)
        with pytest.raises(EverybertError, match=match) as caught:
            predict_parts(task, folder, source, tmp_path / "out", **how)
        assert "\n" not in str(caught.value)

    wrong("no column 'text'", {"body": ["a"]}, columns={"text": "text"})
    wrong("no text in column 'text'", {"text": [1]})
    wrong("sentence1 or sentence2", {"sentence1": ["a"], "sentence2": ["b"]})
    wrong("has a column 'vector' already", {"text": ["a"], "vector": [1]})
    wrong("has a column 'prediction' already", {"text": ["a"], "prediction": [1]}, task="classify")
    wrong("no rows in 1 files", {"text": pa.array([], pa.string())})
    wrong("does not exist", source=tmp_path / "none.parquet")
    wrong("at least 1", {"text": ["a"]}, part_rows=0)
    wrong("add --engine ray", {"text": ["a"]}, address="auto")
    (tmp_path / "t.parquet").write_bytes(files[0].read_bytes()[:-20])
    wrong("cannot be read as parquet", source=tmp_path / "t.parquet")
    whole = bytearray(files[0].read_bytes())
    whole[4:200] = b"\xff" * 196
    (tmp_path / "d.parquet").write_bytes(whole)
    wrong(r"d\.parquet cannot be read at rows 1 to", source=tmp_path / "d.parquet", columns={"text": "body"})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    wrong("pip install pyarrow", source=files[0])


@given(
    groups=st.lists(st.integers(1, 2500), min_size=1, max_size=4),
    part_rows=st.integers(1, 3000),
)
def test_parts_hold_every_row_once_and_in_order(tmp_path_factory, groups, part_rows):
    path = tmp_path_factory.mktemp("rows") / "x.parquet"
    rows = sum(groups)
    table = pa.table({"text": [str(i) for i in range(rows)]})
    with parquet.ParquetWriter(path, table.schema) as writer:
        at = 0
        for size in groups:
            writer.write_table(table.slice(at, size), row_group_size=size)
            at += size
    texts, parts = plan_parts("embed", [path], {}, max(part_rows, rows // 20))
    assert texts == ("text",)
    read = [text for part in parts for text in read_part(part).column("text").to_pylist()]
    assert read == table.column("text").to_pylist()


def test_the_command_line(folder, files, tmp_path):
    def run(*words):
        return CliRunner().invoke(app, [*map(str, words)])

    done = run("embed", *files, "--model", folder, "--text-column", "body", "--out", tmp_path / "v", "--part-rows", 30)
    assert done.exit_code == 0 and "65 rows" in done.output
    assert len(list((tmp_path / "v").glob("*.parquet"))) == 3
    done = run("classify", *files, "--model", folder, "--text-column", "body", "--out", tmp_path / "c", "--json")
    assert done.exit_code == 0 and '"rows": 65' in done.output
    assert parquet.read_table(tmp_path / "c").column("prediction")[0].as_py() in ("neg", "pos")
    again = run("classify", *files, "--model", folder, "--text-column", "body", "--out", tmp_path / "c")
    assert "all 65 rows were there already" in again.output
    for words in (("embed", "a text", "--engine", "ray"), ("classify", "a text", "--workers", "2")):
        failed = run(*words, "--model", folder)
        assert failed.exit_code != 0 and "parquet files" in failed.output
    assert Path(tmp_path / "c.building").exists() is False
