"""The task commands, in process: fine-tune, evaluate, use on texts and files, doctor, GLUE, SQuAD, pairs."""

import json

import pytest
import tiny_model
from commandline import mistake, run

from everybert.inference.model import Model

FAST = ["--epochs", "2", "--lr", "5e-3", "--batch-size", "8", "--device", "cpu", "--quiet"]


def tsv(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("base") / "base", {"mlm": None})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    texts = [("the film was good", "pos"), ("the food was bad", "neg"), ("a fine song", "pos"), ("an awful day", "neg")]
    return tsv(tmp_path_factory.mktemp("data") / "train.tsv", ("body", "topic"), *(texts * 5))


COLUMNS = ("--columns", "text=body", "--columns", "label=topic")


@pytest.fixture(scope="module")
def tuned(base, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned") / "model"
    result = run("finetune", "classify", "--model", base, "--train", data, "--dev", data, "--out", out, *COLUMNS, *FAST)
    assert "accuracy" in result.output and "finished  yes" in result.output
    return out


def test_finetune_writes_a_folder_whose_card_has_the_settings(tuned):
    assert "| epochs | 2 |" in (tuned / "README.md").read_text()


def test_finetune_as_json_over_seeds_and_an_adapter(base, data, tmp_path):
    out = tmp_path / "lora"
    args = ("--mode", "lora", "--rank", 2, "--seeds", 2, "--json", *COLUMNS, *FAST)
    result = run("finetune", "classify", "--model", base, "--train", data, "--dev", data, "--out", out, *args)
    found = json.loads(result.output.splitlines()[-1])
    assert found["scores"]["accuracy"]["runs"] == 2 and found["finished"] and (out / "adapter_config.json").exists()
    beside = run("classify", "the film was good", "--model", base, "--adapter", out, "--json")
    alone = run("classify", "the film was good", "--model", out, "--json")
    assert json.loads(beside.output) == json.loads(alone.output)


@pytest.mark.parametrize("option", [("--rank", 8), ("--alpha", 2.0), ("--lora-dropout", 0.1)])
def test_settings_of_an_adapter_need_its_mode(base, data, tmp_path, option):
    words = ("finetune", "classify", "--model", base, "--train", data, "--out", tmp_path / "m", *option)
    assert "use --mode lora" in mistake(*words) and not (tmp_path / "m").exists()


def test_rows_left_out_are_counted_and_listed(base, data, tmp_path):
    broken = tmp_path / "broken.tsv"
    broken.write_text(data.read_text() + "\tpos\nno label at all\n")
    args = ("finetune", "classify", "--model", base, "--train", broken, "--dev", data, "--out", tmp_path / "x")
    args += COLUMNS
    assert "broken.tsv" in run(*args, *FAST, code=2).stderr
    result = run(*args, *[a for a in FAST if a != "--quiet"], "--skip-bad")
    assert "2 bad rows" in result.stderr and result.stderr.count("skipped: ") == 2 and "broken.tsv:23" in result.stderr


def test_evaluate_prints_scores_and_labels(tuned, data):
    shown = run("evaluate", "classify", "--model", tuned, "--data", data, *COLUMNS).stdout
    assert "accuracy" in shown and "precision" in shown


def test_classify_texts_pairs_and_scores(tuned):
    lines = run("classify", "the film was good", "the food was bad", "--model", tuned, "--scores").stdout.splitlines()
    assert len(lines) == 3 and {"neg", "pos"} < set(lines[0].split()) and "the film was good" in lines[1]
    found = json.loads(run("classify", "the film", "--pair", "the song", "--model", tuned, "--json").stdout)
    assert set(found[0]["scores"]) == {"neg", "pos"}


def test_ctrl_c_exits_with_130_and_says_how_to_go_on(tuned, data, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Model, "predict", stop)
    result = run("classify", data, "--text-column", "body", "--out", tmp_path / "o.csv", "--model", tuned, code=130)
    assert "run the same command again" in result.stderr


def test_tag_answer_choose_regress_on_texts(tmp_path):
    """Their JSON, and what they do with files, are in tests/golden."""
    tagger = tiny_model.save(tmp_path / "t", {"tag": 2}, ["O", "B-PER"], seed=3)
    assert "John Smith" in run("tag", "John Smith lives", "--model", tagger).stdout
    answerer = tiny_model.save(tmp_path / "q", {"answer": None})
    asked = ("--top", 2, "--model", answerer)
    found = run("answer", "who?", "--context", "john lives in paris", *asked).stdout
    assert "who?" in found and run("answer", "who?", "john lives in paris", *asked).stdout == found
    chooser = tiny_model.save(tmp_path / "c", {"choose": None})
    assert "index" in run("choose", "the dog", "eats", "sees", "--model", chooser).stdout
    regressor = tiny_model.save(tmp_path / "r", {"classify": 1}, problem_type="regression")
    float(run("regress", "the dog", "--model", regressor).stdout.split()[-1])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--longest", "0"), "classify has no option 'longest'"),
        (("--columns", "text=x", "--columns", "text=y"), "--columns names text twice"),
        (("--grid",), "the grid has the values of lr"),
        (
            ("--class-weights", "1,heavy"),
            "wrong --class-weights 1,heavy: give balanced, or",
        ),
    ],
)
def test_options_are_not_ignored(base, data, tmp_path, more, message):
    line = ("finetune", "classify", "--model", base, "--train", data, "--dev", data, "--out", tmp_path / "o", *FAST)
    columns = () if "--columns" in more else COLUMNS
    assert message in mistake(*line, *columns, *more)


def test_a_file_is_not_taken_for_the_text_that_answers(base, tmp_path):
    book, rows = tmp_path / "book.txt", tmp_path / "rows.jsonl"
    book.write_text("john lives in paris")
    rows.write_text('{"question": "who?", "context": "john lives in paris"}\n')
    for words in ((book,), ("--context", book)):
        assert "book.txt is a file, not a text; give --file or --context-file" in mistake("answer", "who?", *words)
    assert "not both" in mistake("answer", "who?", "--context", "john", "--context-file", book)
    for more in (("--top", 2), ("--context", "john")):
        assert "a row has its columns" in mistake("answer", "--file", rows, "--out", tmp_path / "o.jsonl", *more)


def test_doctor_finds_what_is_wrong(base, tmp_path):
    rows = [("the film was good", "pos"), ("the food was bad", "neg")] * 3 + [("the film was good", "neg"), ("", "pos")]
    data = tsv(tmp_path / "sick.tsv", ("text", "label"), *rows)
    result = run("doctor", "classify", "--data", data, "--dev", data, "--model", base, code=1)
    assert "error: " in result.stdout and "neg 4, pos 3" in result.stdout and "longest" in result.stdout


def test_glue_prints_the_published_rows(base, tmp_path):
    rows = [("sentence", "label"), *((f"the film was {word}", int(word == "good")) for word in ("good", "bad", "poor"))]
    for name in ("train", "dev"):
        tsv(tmp_path / "glue" / "SST-2" / f"{name}.tsv", *rows)
    shown = run("glue", tmp_path / "glue", "--model", base, "--out", tmp_path / "out", *FAST).stdout
    assert "BERT-tiny, test" in shown and "83.2" in shown and "this model, dev" in shown


def test_squad_prints_scores(tmp_path):
    """Its JSON is in tests/golden."""
    qas = [{"id": "1", "question": "who?", "answers": [{"text": "john", "answer_start": 0}]}]
    content = {"data": [{"title": "t", "paragraphs": [{"context": "john lives in paris", "qas": qas}]}]}
    (tmp_path / "d.json").write_text(json.dumps(content))
    (tmp_path / "p.json").write_text('{"1": "john"}')
    asked = ("squad", tmp_path / "d.json", "--predictions", tmp_path / "p.json")
    assert "exact" in run(*asked).stdout
    for more in (("--out", tmp_path / "o.json"), ("--model", "nothing")):
        assert "--predictions are scored as they are" in mistake(*asked, *more)


def test_blimp_prints_a_table(base, tmp_path):
    row = {"sentence_good": "he sees it", "sentence_bad": "he see it", "UID": "u", "linguistics_term": "agreement"}
    (tmp_path / "u.jsonl").write_text(json.dumps(row) + "\n")
    result = run("blimp", tmp_path / "u.jsonl", "--model", base)
    assert "agreement" in result.stdout and "\nall " in result.stdout


def test_exports(tuned, tmp_path):
    found = json.loads(run("export", "onnx", tuned, tmp_path / "onnx", "--json").stdout)
    assert found["task"] == "classify" and found["outputs"] == ["logits"] and found["difference"] < 1e-4
    assert {"onnx", "config.json", "everybert.json"} <= {p.name for p in (tmp_path / "onnx").iterdir()}
    assert "BertForSequenceClassification" in run("export", "hf", tuned, tmp_path / "hf").stdout
    assert "no tag head" in mistake("export", "onnx", tuned, tmp_path / "a", "--task", "tag")
    assert not (tmp_path / "a").exists()
