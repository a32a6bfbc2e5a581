import json
import re

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from typer.testing import CliRunner

from everybert.cli.main import app
from everybert.text.tokenizer import Tokenizer

WORDS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "the", "river", "sings", "hill", "."]


@pytest.fixture
def place(tmp_path):
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    Tokenizer(backend).save(tmp_path / "t")
    (tmp_path / "a.txt").write_text("the river sings. The hill.\n\nthe hill\n\nthe hill\n")
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["corpus", *map(str, arguments)])


def common(place):
    return ("--tokenizer", place / "t", "--out", place / "c", "--workers", 1, "--heldout", 0)


def test_build_and_info_print_the_counts(place):
    result = run("build", place / "a.txt", *common(place))
    assert result.exit_code == 0, result.output
    for shown in (result, run("info", place / "c", "--check")):
        for line in (r"unknown rate +0\.1111", r"duplicates +1", r"train +\d"):
            assert re.search(f"^{line}", shown.stdout, re.MULTILINE), shown.stdout


def test_json_is_all_of_stdout(place):
    result = run("build", place / "a.txt", *common(place), "--json", "--pmi")
    summary = json.loads(result.stdout)
    assert summary["counts"] == {
        "documents": 2,
        "sentences": 3,
        "tokens": 9,
        "unknown": 1,
        "empty": 0,
        "duplicates": 1,
        "replaced": 0,
        "cut": 0,
    }
    assert summary["collocations"] == 0
    assert json.loads(run("info", place / "c", "--json").stdout)["counts"] == summary["counts"]


def test_languages_by_name(place):
    (place / "b.txt").write_text("the river")
    result = run("build", "--language", f"en={place / 'a.txt'}", "--language", f"de={place / 'b.txt'}", *common(place))
    assert re.search(r"de +1\nen +2", result.stdout)
    wrong = run("build", "--language", "en", *common(place))
    assert wrong.exit_code == 2 and "LANGUAGE=FILE" in wrong.stderr


def test_ctrl_c_says_how_to_go_on(place, monkeypatch):
    from everybert.corpus import build

    def stop(*rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(build.ShardWriter, "write", stop)
    result = run("build", place / "a.txt", *common(place))
    assert result.exit_code == 130
    assert "run the same command again" in result.stderr


def test_tokenizers_side_by_side(place):
    vocabulary = place / "v" / "vocab.txt"
    vocabulary.parent.mkdir()
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "ri", "##ver"]))
    texts, names = ["the river", "The hill"], [str(place / "t"), str(vocabulary)]
    options = [part for name in names for part in ("--tokenizer", name)]
    result = CliRunner().invoke(app, ["tokenizer", "show", *texts, *options, "--json"])
    found = json.loads(result.stdout)
    assert [(row["text"], row["tokenizer"]) for row in found] == [(text, name) for text in texts for name in names]
    first, second, _, fourth = found
    assert first["pieces"] == ["the", "river"] and second["pieces"] == ["the", "ri", "##ver"]
    assert second["ids"] == [5, 6, 7] and fourth["unknown"] == 1
    assert (first["case"], second["case"]) == ("cased", "uncased")
    assert (first["tokens_per_word"], second["tokens_per_word"]) == (1.0, 1.5)
    table = CliRunner().invoke(app, ["tokenizer", "show", *texts, *options]).stdout
    assert re.search(r"vocab.txt +wordpiece +uncased +8 +3 +0 +1\.5000", table)
    assert f"{names[1]}: the 5  ri 6  ##ver 7" in table
    refused = CliRunner().invoke(app, ["tokenizer", "show", "x", "--tokenizer", "nowhere"])
    assert refused.exit_code == 2 and "no tokenizer at nowhere" in refused.stderr
