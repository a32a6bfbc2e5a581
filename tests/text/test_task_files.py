import json

import pytest

from everybert.errors import EverybertError
from everybert.text.task_files import read_conll, read_conllu, read_squad


def write(path, text):
    path.write_text(text, "utf-8")
    return path


def test_conll_in_tabs_and_spaces(tmp_path):
    spaces = "-DOCSTART- -X- -X- O\n\nAda NNP B-NP B-PER\nwrote VBD B-VP O\n\n\nYes UH O O\n"
    expected = [[["Ada", "NNP", "B-NP", "B-PER"], ["wrote", "VBD", "B-VP", "O"]], [["Yes", "UH", "O", "O"]]]
    assert list(read_conll(write(tmp_path / "a.conll", spaces))) == expected
    assert list(read_conll(write(tmp_path / "b.conll", spaces.replace(" ", "\t")))) == expected
    assert list(read_conll(write(tmp_path / "c.conll", "New York\tB-LOC\n"))) == [[["New York", "B-LOC"]]]


def test_bad_conll_is_told_with_its_line(tmp_path):
    with pytest.raises(EverybertError, match=r"a\.conll:2: 3 columns"):
        list(read_conll(write(tmp_path / "a.conll", "a O\nb X O\n")))
    with pytest.raises(EverybertError, match=":1: 1 columns, 2 expected"):
        list(read_conll(write(tmp_path / "a.conll", "a\n")))
    with pytest.raises(EverybertError, match="no sentences"):
        list(read_conll(write(tmp_path / "a.conll", "\n")))
    with pytest.raises(EverybertError, match="is a folder"):
        list(read_conll(tmp_path))
    with pytest.raises(EverybertError, match="does not exist"):
        list(read_conll(tmp_path / "gone"))


def test_conllu_keeps_words_only(tmp_path):
    rest = "\t".join("_" * 4)
    rows = ["1-2\tdu\t_\t_\t_\t" + "_\t_\t_\t_\t_", f"1\tde\tde\tADP\t_\t_\t3\tcase\t{rest[:3]}"]
    rows += [f"2\tle\tle\tDET\t_\t_\t3\tdet\t{rest[:3]}", "2.1\tx" + "\t_" * 8]
    path = write(tmp_path / "a.conllu", "# text = du\n" + "\n".join(rows) + "\n\n")
    (sentence,) = read_conllu(path)
    assert [(word["id"], word["form"], word["head"], word["deprel"]) for word in sentence] == [
        ("1", "de", "3", "case"),
        ("2", "le", "3", "det"),
    ]
    with pytest.raises(EverybertError, match="2 columns where CoNLL-U has 10"):
        list(read_conllu(write(path, "1\tx\n")))
    with pytest.raises(EverybertError, match="no sentences"):
        list(read_conllu(write(path, "# nothing\n")))


def test_squad_one_and_two(tmp_path):
    qas = [
        {"id": 7, "question": "Where?", "answers": [{"text": "Bern", "answer_start": 3, "extra": 1}]},
        {"id": "8", "question": "Who?", "answers": [], "is_impossible": True},
    ]
    data = {"data": [{"title": "T", "paragraphs": [{"context": "In Bern.", "qas": qas}]}]}
    first, second = read_squad(write(tmp_path / "a.json", json.dumps(data)))
    assert first == {
        "id": "7",
        "question": "Where?",
        "context": "In Bern.",
        "answers": [{"text": "Bern", "answer_start": 3}],
        "is_impossible": False,
        "title": "T",
    }
    assert second["is_impossible"]
    assert second["answers"] == []
    for text, message in (('{"rows": []}', "'data' is missing"), ("[]", "not a SQuAD"), ("{", "not JSON")):
        with pytest.raises(EverybertError, match=message):
            list(read_squad(write(tmp_path / "a.json", text)))
