"""Every error of the command line is one line with exit code 2, whatever is wrong with a file."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import tiny_model
from commandline import every, mistake, run

import everybert
from everybert.files import sha256_folder

LINES = {
    "fill": "--file BAD",
    "embed": "--file BAD",
    "tokens": "--file BAD",
    "next": "--file BAD",
    "classify": "--file BAD --out out.csv",
    "regress": "--file BAD --out out.csv",
    "tag": "--file BAD --out out.csv",
    "answer": "--file BAD --out out.jsonl",
    "choose": "--file BAD --out out.csv",
    "rank": "query --file BAD",
    "info": "BAD",
    "export onnx": "BAD onnx",
    "export hf": "BAD hf",
    "explain": "word --model BAD",
    "attention": "word --out page.html --model BAD",
    "neighbours": "word word --model BAD",
    "probe heads": "BAD",
    "probe coref": "BAD",
    "tokenizer train": "BAD --out tokenizer",
    "tokenizer show": "word --tokenizer BAD",
    "corpus build": "BAD --tokenizer MODEL --out corpus",
    "corpus info": "BAD",
    "corpus show": "BAD",
    "corpus score": "BAD",
    "plan": "BAD",
    "pretrain": "tiny-cpu --corpus BAD --out run",
    "sweep": "tiny-cpu --corpus BAD --out runs --vary mask.rate=0.1,0.2",
    "distil": "--teacher BAD --corpus BAD --out run",
    "finetune": "classify --train BAD --out tuned",
    "doctor": "classify --data BAD",
    "quantize": "BAD int8",
    "evaluate": "classify --data BAD",
    "glue": "BAD",
    "squad": "BAD",
    "blimp": "BAD",
    "serve": "--model BAD --port 0",
    "quickstart": "--out BAD.txt",
}
"""Command → a line that needs a file."""
BAD = {"missing": None, "empty": b"", "latin": b"text\tlabel\ncaf\xe9\tx\n", "binary": bytes(range(256)) * 8}


FOLDERS = ("classify", "tag", "tokenizer train", "corpus build")
"""Commands that read the files of a folder."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    heads = {"mlm": None, "nsp": None, "classify": 2, "tag": 2, "answer": None, "choose": None}
    return tiny_model.save(tmp_path_factory.mktemp("laws") / "model", heads, ["a", "b"])


def test_every_command_is_here():
    assert set(every()) == set(LINES)


@pytest.mark.parametrize("kind", [*BAD, "folder"])
@pytest.mark.parametrize("name", LINES)
def test_a_bad_file(name, kind, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "bad.txt"
    if kind == "folder":
        bad.mkdir()
        (bad / "something").write_text("else")
    elif (content := BAD[kind]) is not None:
        bad.write_bytes(content)
    line = LINES[name].replace("BAD.txt" if name == "quickstart" else "BAD", str(bad)).replace("MODEL", str(model))
    takes_model = "--model" not in line and name in ("fill", "embed", "tokens", "next", "classify", "tag", "answer")
    if (kind, name) == ("missing", "quickstart") or (kind == "folder" and name in FOLDERS):
        return
    mistake(*name.split(), *shlex.split(line), *(["--model", str(model)] if takes_model else []))


WRITERS = {
    "tokenizer train": "texts.txt --out MODEL",
    "corpus build": "texts.txt --tokenizer MODEL --out MODEL",
    "pretrain": "tiny-cpu --corpus corpus --out MODEL",
    "distil": "--teacher MODEL --corpus corpus --student bert-tiny --out MODEL",
    "finetune": "classify --train data.tsv --out MODEL",
    "quantize": "MODEL MODEL",
    "export hf": "MODEL MODEL",
    "export onnx": "MODEL MODEL",
    "quickstart": "--out MODEL",
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_model_is_never_replaced_without_a_word(name, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("a film\n" * 9)
    Path("data.tsv").write_text("text\tlabel\na film\ta\nfood\tb\n" * 9)
    before = sha256_folder(model)
    line = WRITERS[name].replace("MODEL", str(model))
    done = run(*name.split(), *shlex.split(line), code=2)
    assert done.stderr.count("\n") == 1, done.output
    assert re.search("holds|exists", done.stderr), done.stderr
    assert sha256_folder(model) == before


@pytest.mark.parametrize("name", LINES)
def test_an_unknown_option(name):
    mistake(*name.split(), "--no-such-option")


@pytest.mark.parametrize("place", [".", "/"])
@pytest.mark.parametrize("line", ["corpus info PLACE", "corpus score PLACE", "info PLACE", "plan PLACE", "squad PLACE"])
def test_a_folder_without_a_name(line, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake(*line.replace("PLACE", place).split())


ROOMS = ("corpus", "evaluation", "inference", "serving", "tasks", "training")


@pytest.mark.parametrize("room", ROOMS)
def test_the_library_names_no_option_of_the_command_line(room):
    """Users of Python read its messages too; but a whole command may stand in them."""
    found = []
    for file in (Path(everybert.__file__).parent / room).glob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Constant)]
        found += [text for text in texts if isinstance(text, str) and re.search(r"(^|[ (])--[a-z]", text)]
    assert not [text for text in found if "everybert " not in text]


def test_the_command_line_spells_the_options_of_the_library(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data.tsv").write_text("text\tlabel\na film\t\nfood\tb\n")
    there = mistake("finetune", "classify", "--train", "data.tsv", "--out", str(model), "--model", str(model))
    assert "give --overwrite to replace it" in there
    bad = mistake("finetune", "classify", "--train", "data.tsv", "--out", "out", "--model", str(model))
    assert "skip such rows with --skip-bad" in bad
