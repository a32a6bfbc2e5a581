"""Predictions over files: the same as in memory, resumed where a stopped run ended, whatever the format."""

import csv
import json

import pytest
import tiny_model

import everybert
from everybert.errors import EverybertError
from everybert.inference import files
from everybert.inference.files import predict_file

TEXTS = [f"the {a} was {b}" for a in ("film", "food", "song", "day") for b in ("good", "bad", "great", "awful", "poor")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model.save(tmp_path_factory.mktemp("m") / "m", {"classify": 2}, ["neg", "pos"])
    return everybert.load(folder)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 6)


def write_csv(path, texts=TEXTS):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["id", "body"], *([i, text] for i, text in enumerate(texts))])
    return path


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rows_of(path):
    """Every record without its probability, whose last digit hangs on the batch."""
    if path.suffix == ".csv":
        return [(r["text"], r["prediction"]) for r in read_csv(path)]
    lines = path.read_text().splitlines()
    if path.suffix == ".tsv":
        return [line.split("\t")[:2] for line in lines]
    return [(json.loads(line)["text"], json.loads(line)["prediction"]) for line in lines]


def test_rows_come_out_in_order_with_what_the_model_says(model, tmp_path):
    source = write_csv(tmp_path / "in.csv")
    done = predict_file(model, "classify", source, tmp_path / "out.csv", columns={"text": "body"}, scores=True)
    rows = read_csv(tmp_path / "out.csv")
    assert done.rows == len(TEXTS) == len(rows) and [r["body"] for r in rows] == TEXTS
    for row, p in zip(rows, model.classify(TEXTS)):
        assert row["prediction"] == p.label
        assert float(row["probability"]) == pytest.approx(p.score, abs=1e-5)
        assert float(row["p(neg)"]) == pytest.approx(p.scores["neg"], abs=1e-5)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
@pytest.mark.parametrize("cut", [0, 1, 37, 200, 500])
def test_a_run_cut_anywhere_goes_on_to_the_same_file(model, tmp_path, suffix, cut):
    texts = [*TEXTS, 'a "quoted" film', "two\nlines, one text", "", 'ends with a quote"']
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    whole, again = tmp_path / f"whole.{suffix}", tmp_path / f"again.{suffix}"
    predict_file(model, "classify", source, whole)
    again.write_bytes(whole.read_bytes()[:cut])
    done = predict_file(model, "classify", source, again)
    assert done.rows == len(texts) and done.before <= len(texts)
    assert rows_of(again) == rows_of(whole)


def test_ctrl_c_keeps_what_is_written(model, tmp_path):
    source = write_csv(tmp_path / "in.csv")

    def stop(rows):
        if rows >= 12:
            raise KeyboardInterrupt

    done = predict_file(model, "classify", source, tmp_path / "out.csv", columns={"text": "body"}, progress=stop)
    assert done.stopped and done.rows == 12
    done = predict_file(model, "classify", source, tmp_path / "out.csv", columns={"text": "body"})
    assert not done.stopped and done.before == 12 and done.rows == len(TEXTS)
    assert [r["body"] for r in read_csv(tmp_path / "out.csv")] == TEXTS
    again = predict_file(model, "classify", source, tmp_path / "out.csv", columns={"text": "body"})
    assert again.before == again.rows == len(TEXTS)


def test_an_output_of_other_input_is_not_continued(model, tmp_path):
    out = tmp_path / "out.csv"
    predict_file(model, "classify", write_csv(tmp_path / "a.csv"), out, columns={"text": "body"})
    other = write_csv(tmp_path / "b.csv", [t.replace("was", "is") for t in TEXTS])
    with pytest.raises(EverybertError, match="was not made from"):
        predict_file(model, "classify", other, out, columns={"text": "body"})
    shorter = write_csv(tmp_path / "c.csv", TEXTS[:4])
    with pytest.raises(EverybertError, match="only 4"):
        predict_file(model, "classify", shorter, out, columns={"text": "body"})
    assert predict_file(model, "classify", shorter, out, columns={"text": "body"}, fresh=True).rows == 4


def test_text_files_have_a_text_a_line_and_pairs_are_guessed(model, tmp_path):
    (tmp_path / "in.txt").write_text("the film\nthe song\n")
    predict_file(model, "classify", tmp_path / "in.txt", tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["text"] for r in rows] == ["the film", "the song"]
    (tmp_path / "in.tsv").write_text("sentence1\tsentence2\nthe film\tthe song\n")
    predict_file(model, "classify", tmp_path / "in.tsv", tmp_path / "out.tsv")
    row = (tmp_path / "out.tsv").read_text().splitlines()[1].split("\t")
    assert float(row[3]) == pytest.approx(model.classify([("the film", "the song")])[0].score, abs=1e-5)


def test_mistakes_are_one_line(model, tmp_path):
    source = write_csv(tmp_path / "in.csv")
    with pytest.raises(EverybertError, match="no column 'text'"):
        predict_file(model, "classify", source, tmp_path / "out.csv", columns={"text": "text"})
    with pytest.raises(EverybertError, match=r"written as \.csv"):
        predict_file(model, "classify", source, tmp_path / "out.xlsx", columns={"text": "body"})
    with pytest.raises(EverybertError, match="is the input too"):
        predict_file(model, "classify", source, source, columns={"text": "body"})
    with pytest.raises(EverybertError, match="no tag head"):
        predict_file(model, "tag", source, tmp_path / "out.csv", columns={"text": "body"})
    (tmp_path / "p.csv").write_text("text,prediction\na,b\n")
    with pytest.raises(EverybertError, match="'prediction' already"):
        predict_file(model, "classify", tmp_path / "p.csv", tmp_path / "o.csv", columns={"text": "text"})
    with pytest.raises(EverybertError, match="not a file"):
        predict_file(model, "classify", tmp_path / "none.csv", tmp_path / "o.csv")


def test_broken_lines_are_left_out_and_listed(model, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "the film"}\n{"text": \n{"text": "the song"}\n')
    with pytest.raises(EverybertError, match=r"in\.jsonl:2"):
        predict_file(model, "classify", source, tmp_path / "out.jsonl")
    done = predict_file(model, "classify", source, tmp_path / "out2.jsonl", skip_bad=True)
    assert done.rows == 2 and len(done.bad) == 1 and "in.jsonl:2" in done.bad[0]
