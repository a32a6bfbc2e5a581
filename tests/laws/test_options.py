"""Every option of every command changes what it prints, writes or refuses: a plain table, complete by test.

`@` stands for a model folder and OUT for a new folder. A case runs its line without and with the option; an option that
the line has already gets another value. Being refused is an effect too.
"""

import contextlib
import hashlib
import logging
import re
import shlex
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import safetensors.torch
import tiny_model
import torch
from commandline import every, run
from grammar import write_corpus
from toy import TINY
from typer.testing import CliRunner

from everybert.cli.main import app

Options = dict[str, str | tuple[str, str]]
"""Option → its value; or (another line, value)."""
LOOK: Options = {"--model": "@", "--device": "nowhere", "--allow-pickle": "", "--json": ""}
USE: Options = LOOK | {"--dtype": "int4"}


def rows(line: str, columns: str = "--text-column") -> Options:
    """The options of predictions over files: `line` reads one."""
    return {
        "--file": "data.tsv",
        "--out": (line, "OUT/other.jsonl"),
        columns: (line, "nothing"),
        "--adapter": "nothing",
        "--skip-bad": (line.replace("data.tsv", "broken.jsonl"), ""),
        "--fresh": (line.replace("OUT/rows", "OUT/there"), ""),
    }


def parts(task: str) -> Options:
    """The options of predictions in parts."""
    line = f"{task} rows.parquet --out OUT/parts --model @"
    return {"--part-rows": (line, "1"), "--engine": "ray", "--address": (line, "auto"), "--workers": (line, "2")}


FILE = "data.tsv --out OUT/rows.jsonl --model @"
TUNE = "finetune classify --train data.tsv --dev data.tsv --model @ --out OUT/m --epochs 1 --device cpu"
ANSWER = TUNE.replace("classify", "answer").replace("data.tsv", "questions.jsonl")
EMBED = TUNE.replace("classify", "embed").replace("data.tsv", "near.tsv")
RUN = "pretrain toy.toml --corpus corpus --out OUT/run --steps 2 --device cpu"
SWEEP = "sweep toy.toml --corpus corpus --out OUT/sweep --vary mask.rate=0.15,0.5 --steps 2 --device cpu"
THEN = f"{SWEEP} --then one=data.tsv,data.tsv --epochs 1"
DISTIL = "distil --teacher words --recipe lesson.toml --corpus corpus --out OUT/run --steps 2 --device cpu"
RECIPE: Options = {"--steps": "3", "--set": "seed=9"}
TABLE: dict[str, tuple[str, Options]] = {
    "quickstart": ("quickstart --out OUT/story", {"--out": "OUT/other", "--json": ""}),
    "fill": (
        "fill 'the [MASK] was good' --model @",
        {"--top": "2", "--pair": "'a [MASK]'", "--file": "texts.txt", **USE},
    ),
    "embed": (
        "embed 'the film was good' --model @",
        {
            "--pooling": "max",
            "--prompt": "nothing",
            "--dimensions": "3",
            "--normalize": "",
            "--long": (f"embed '{'good film ' * 200}' --model @", "cut"),
            **{option: value for option, value in rows(f"embed {FILE}").items() if option != "--adapter"},
            **parts("embed"),
            **USE,
            "--file": "texts.txt",
        },
    ),
    "tokens": ("tokens 'the film' --model @", {"--layer": "0", "--pair": "bad", "--file": "texts.txt", **USE}),
    "next": ("next 'the film' 'was good' --model @", {"--file": "texts.txt", **USE}),
    "classify": (
        "classify 'the film was good' --model @",
        {
            "--pair": "bad",
            "--scores": "",
            "--labels": ("classify 'the film' --model nli", "film,food"),
            "--pair-column": (f"classify {FILE}", "nothing"),
            **rows(f"classify {FILE}"),
            **parts("classify"),
            **USE,
        },
    ),
    "regress": (
        "regress 'the film was good' --model number",
        {
            "--pair": "bad",
            "--pair-column": ("regress data.tsv --out OUT/rows.jsonl --model number", "nothing"),
            **rows("regress data.tsv --out OUT/rows.jsonl --model number"),
            **USE,
            "--allow-pickle": ("regress good --model old-number", ""),
        },
    ),
    "tag": ("tag 'the film was good' --model @", {**rows(f"tag {FILE}"), **USE}),
    "answer": (
        "answer 'what was good' 'the film was good' --model @",
        {
            "--context": ("answer 'what was good' --model @", "'a good film'"),
            "--context-file": ("answer 'what was good' --model @", "texts.txt"),
            "--top": "2",
            **rows("answer questions.jsonl --out OUT/rows.jsonl --model @", "--adapter"),
            "--skip-bad": ("answer bad-questions.jsonl --out OUT/rows.jsonl --model @", ""),
            **USE,
        },
    ),
    "choose": (
        "choose 'the film' 'was good' 'was bad' --model @",
        {
            **rows("choose choices.csv --out OUT/rows.jsonl --model @", "--adapter"),
            "--scores": ("choose choices.csv --out OUT/rows.csv --model @", ""),
            "--skip-bad": ("choose bad-choices.csv --out OUT/rows.jsonl --model @", ""),
            **USE,
        },
    ),
    "rank": (
        "rank 'the film' good bad --model number",
        {"--file": "texts.txt", "--top": "1", "--adapter": "nothing", **USE}
        | {"--allow-pickle": ("rank 'the film' good --model old-number", "")},
    ),
    "serve": (
        "serve --model @",
        {
            "--model": "@",
            "--adapter": "nothing",
            "--host": "0.0.0.0",
            "--port": "81",
            "--api-key": "secret",
            "--api-keys": "texts.txt",
            "--allowed-hosts": "here",
            "--device": "cpu",
            "--dtype": "int8",
            "--workers": "2",
            "--allow-pickle": "",
            "--no-playground": "",
            "--access-log": "",
            "--revision": "v2",
            **{f"--max-{name}": "7" for name in ("body", "inputs", "tokens")},
            **{f"--{name}": "7" for name in ("queue", "rate", "connections", "timeout", "budget")},
        },
    ),
    "info": (
        "info @",
        {"--compare": "", "--task": "tag", "--labels": "3", "--accept": "", "--allow-pickle": "", "--json": ""},
    ),
    "export onnx": (
        "export onnx @ OUT/onnx",
        {"--task": "nothing", "--adapter": "nothing", "--allow-pickle": "", "--json": ""},
    ),
    "export hf": (
        "export hf @ OUT/hf",
        {"--adapter": "nothing", "--dtype": "bfloat16", "--allow-pickle": "", "--json": ""},
    ),
    "explain": ("explain 'the [MASK]' --model @", {"--pair": "bad", "--layer": "1", "--head": "1", **LOOK}),
    "attention": (
        "attention 'the film' --model @ --out OUT/page.html",
        {"--out": "OUT/other.html", "--pair": "bad", **{k: v for k, v in LOOK.items() if k != "--json"}},
    ),
    "neighbours": ("neighbours film 'the film' 'a film' --model @", {"--top": "1", **LOOK}),
    "probe heads": (
        "probe heads trees.conllu --model @ --least 1",
        {"--relation": "det", "--least": "3", "--sentences": "1", **LOOK},
    ),
    "probe coref": ("probe coref coref.conllu --model @", LOOK),
    "tokenizer show": ("tokenizer show 'the film' --tokenizer @", {"--tokenizer": "words", "--json": ""}),
    "tokenizer train": (
        "tokenizer train texts.txt --size 30 --out OUT/tok",
        {
            "--out": "OUT/other",
            "--kind": "bpe",
            "--size": "20",
            "--cased": "",
            "--min-frequency": "50",
            "--max-length": "7",
            "--column": ("tokenizer train rows.jsonl --size 30 --out OUT/tok", "x"),
            "--errors": ("tokenizer train latin.txt --size 30 --out OUT/tok", "replace"),
            "--json": "",
        },
    ),
    "corpus build": (
        "corpus build texts.txt --tokenizer model --out OUT/corpus --workers 1 --heldout 0.2",
        {
            "--tokenizer": "corpus/tokenizer",
            "--out": "OUT/other",
            "--language": "xx=latin.txt",
            "--workers": "0",
            "--engine": "steam",
            "--address": "auto",
            "--fresh": ("corpus build other.txt --tokenizer model --out OUT/built --workers 1", ""),
            "--pmi": "",
            "--heldout": "0.5",
            "--wrapped": ("corpus build wrapped.txt --tokenizer model --out OUT/corpus --workers 1", ""),
            "--column": ("corpus build rows.jsonl --tokenizer model --out OUT/corpus --workers 1", "x"),
            "--errors": ("corpus build latin.txt --tokenizer model --out OUT/corpus --workers 1", "replace"),
            "--per-line": "",
            "--json": "",
        },
    ),
    "corpus info": ("corpus info built", {"--check": ("corpus info damaged", ""), "--json": ""}),
    "corpus show": (
        "corpus show corpus --recipe toy.toml",
        {
            "--recipe": "tiny-cpu",
            "--count": "1",
            "--epochs": "1",
            "--length": "8",
            "--set": "mask.rate=0.5",
            "--json": "",
        },
    ),
    "corpus score": (
        "corpus score corpus --model words",
        {"--examples": "document", "--length": "16", "--tokens": "0", "--split": "train", **LOOK}
        | {"--allow-pickle": ("corpus score corpus --model old-words", ""), "--model": "untrained"},
    ),
    "plan": (
        "plan tiny-cpu",
        {"--gpu": "a100", "--gpus": "2", "--price": "9", "--budget": "1h", "--steps": "7"}
        | {"--set": "model.layers=3", "--json": ""},
    ),
    "pretrain": (
        RUN,
        {
            "--corpus": "nothing",
            "--out": "OUT/other",
            "--init": "words",
            "--list": "",
            "--show": "",
            "--allow-pickle": (f"{RUN} --init old-words", ""),
            "--device": "nowhere",
            "--quiet": "",
            "--budget": (RUN.replace(" --steps 2", ""), "1s"),
            "--json": "",
            **RECIPE,
        },
    ),
    "sweep": (
        SWEEP,
        {
            "--corpus": "nothing",
            "--out": "OUT/other",
            "--vary": "mask.rate=0.3,0.4",
            "--seeds": "2",
            "--then": "nothing",
            "--device": "nowhere",
            "--quiet": "",
            "--budget": "1s",
            "--json": "",
            "--mode": (THEN, "nothing"),
            "--epochs": (THEN, "0"),
            "--lr": (THEN, "7"),
            "--batch-size": (THEN, "0"),
            **RECIPE,
        },
    ),
    "distil": (
        DISTIL,
        {
            "--teacher": "untrained",
            "--corpus": "nothing",
            "--out": "OUT/other",
            "--student": "bert-tiny",
            "--recipe": "toy.toml",
            "--allow-pickle": (DISTIL.replace("words", "old-words"), ""),
            "--device": "nowhere",
            "--quiet": "",
            "--budget": (DISTIL.replace(" --steps 2", ""), "1s"),
            "--json": "",
            **RECIPE,
        },
    ),
    "finetune": (
        TUNE,
        {
            "--train": "more.tsv",
            "--out": "OUT/other",
            "--dev": "more.tsv",
            "--seeds": "2",
            "--seed": "1",
            "--window": "8",
            "--overlap": (f"{TUNE} --window 12", "6"),
            "--long": (f"{TUNE} --window 8", "cut"),
            "--grid": "",
            "--overwrite": (TUNE.replace("OUT/m", "OUT/model"), ""),
            "--quiet": "",
            "--columns": "text=nothing",
            "--skip-bad": (TUNE.replace("--train data", "--train bad"), ""),
            "--mode": "frozen",
            "--epochs": "2",
            "--lr": "0.01",
            "--batch-size": "2",
            "--accumulate": "0",
            "--warmup": "0.5",
            "--weight-decay": "0.9",
            "--clip": "0.01",
            "--layer-decay": "0.5",
            "--reinit": "1",
            "--new-pooler": "",
            "--patience": (TUNE.replace("--epochs 1", "--epochs 9 --lr 1e-9"), "1"),
            "--evaluations": (f"{TUNE} --batch-size 2 --lr 0.02", "4"),
            "--features": (f"{TUNE} --mode frozen", "concat"),
            "--pool": (f"{TUNE} --mode frozen", "cls"),
            "--metric": "f1",
            "--class-weights": "1,9",
            "--labels": "pos,neg",
            "--multi": "",
            "--calibrate": "",
            "--longest": (ANSWER, "2"),
            "--pooling": (EMBED, "cls"),
            "--rank": (f"{TUNE} --mode lora", "2"),
            "--alpha": (f"{TUNE} --mode lora", "2"),
            "--lora-dropout": (f"{TUNE} --mode lora", "0.5"),
            "--start": (f"{TUNE} --mode lora", "nothing"),
            **USE,
        },
    ),
    "doctor": (
        "doctor classify --data data.tsv",
        {"--train": ("doctor classify", "data.tsv"), "--dev": "data.tsv", "--model": "model"}
        | {"--columns": "text=nothing", "--json": ""},
    ),
    "quantize": ("quantize @ OUT/int8", {"--allow-pickle": "", "--json": ""}),
    "evaluate": (
        "evaluate classify --data data.tsv --model @",
        {
            "--data": "more.tsv",
            "--columns": "text=nothing",
            "--skip-bad": ("evaluate classify --data bad.tsv --model @", ""),
            **USE,
        },
    ),
    "glue": (
        "glue glue --model @ --out OUT/glue --epochs 1 --device cpu",
        {"--out": "OUT/other", "--tasks": "RTE", "--seeds": "2", "--seed": "1", "--quiet": "", "--mode": "frozen"}
        | {"--epochs": "2", "--lr": "0.01", "--batch-size": "2", **LOOK},
    ),
    "squad": ("squad squad.json --model @", {"--predictions": "answers.json", "--out": "OUT/answers.json", **USE}),
    "blimp": ("blimp pairs.jsonl --model @", {"--limit": "1", **USE}),
}
"""Command → a line, and each of its options."""
SLOW = ("finetune", "glue", "pretrain", "sweep", "distil", "export onnx", "corpus build")
SAMPLE = [("finetune", "--seed"), ("finetune", "--allow-pickle"), ("glue", "--tasks"), ("pretrain", "--allow-pickle")]
SAMPLE += [("distil", "--allow-pickle"), ("corpus build", "--per-line")]
"""Of slow commands, the cases that `make test` runs."""


def cases() -> list[Any]:
    found = [(name, option) for name, (_, options) in TABLE.items() for option in options]
    slow = [pytest.mark.slow]
    return [pytest.param(*one, marks=slow if one[0] in SLOW and one not in SAMPLE else []) for one in found]


# ── what the lines read ──────────────────────────────────────────────────────────────────────────────────────

ROWS = "text\tlabel\n" + "the film was good and the food\tpos\nthe food was bad, so bad, the film\tneg\n" * 4
TREE = "1 the _ DET _ _ 2 det _ _\n2 film _ NOUN _ _ 3 nsubj _ _\n3 was _ VERB _ _ 0 root _ _\n\n".replace(" ", "\t")
QUESTION = '{"question": "what was good", "context": "the film was good", "answer": "the film", "start": 0}\n'
SQUAD = (
    '{"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": "the film was good", "qas": [{"id": "1", '
    '"question": "what was good", "answers": [{"text": "the film", "answer_start": 0}]}]}]}]}'
)
FILES = {
    "texts.txt": "The film was good.\nthe food was bad, the film was not\n" * 9,
    "other.txt": "the food was good\n\nbad film\n" * 9,
    "wrapped.txt": "the film\nwas good\n\nthe food\nwas bad\n\n" * 9,
    "words.txt": "filmic\n",
    "rows.jsonl": '{"text": "the film", "x": "was bad, so bad"}\n' * 9,
    "data.tsv": ROWS,
    "more.tsv": ROWS.replace("so bad", "good"),
    "bad.tsv": ROWS + "\tpos\n",
    "near.tsv": "anchor\tpositive\n" + "the film\ta film\nthe food\tfood\n" * 4,
    "broken.jsonl": '{"text": "the film"}\n{"text"\n',
    "questions.jsonl": QUESTION * 4,
    "bad-questions.jsonl": QUESTION + '{"question": "what"}\n',
    "choices.csv": "prompt,ending0,ending1,label\n" + "the film,was good,was bad,0\n" * 4,
    "bad-choices.csv": "prompt,ending0,ending1,label\nthe film,was good,was bad,0\nthe film\n",
    "tags.conll": "the O\nfilm B-X\nwas O\n\nfood B-X\nwas I-X\n\n" * 4,
    "trees.conllu": TREE + TREE.replace("the", "a"),
    "coref.conllu": 4 * re.sub(r"^(\d)(.*)_$", r"\1\2Entity=(e\1)", TREE, flags=re.MULTILINE),
    "squad.json": SQUAD,
    "answers.json": '{"1": "the film"}',
    "pairs.jsonl": "".join(
        f'{{"sentence_good": "{a} {b} was {c}", "sentence_bad": "{c} {a} {b} was"}}\n'
        for a in ("the", "a", "not")
        for b in ("film", "food", "so")
        for c in ("good", "bad", ".")
    ),
    "toy.toml": TINY,
    "lesson.toml": TINY.replace('kind = "pairs"', 'kind = "full"') + "[distil]\nce = 5.0\n",
    "glue/RTE/train.tsv": "index\tsentence1\tsentence2\tlabel\n"
    + "0\tthe film\tgood film\tentailment\n1\tthe food\tbad\tnot_entailment\n" * 4,
    "glue/SST-2/train.tsv": ROWS.replace("text", "sentence").replace("pos", "1").replace("neg", "0"),
}
HEADS = {"mlm": None, "nsp": None, "classify": 2, "tag": 2, "answer": None, "choose": None}


def pickled(folder: Path, out: Path) -> None:
    """A copy of a folder with pickled weights."""
    shutil.copytree(folder, out)
    torch.save(safetensors.torch.load_file(out / "model.safetensors"), out / "pytorch_model.bin")
    (out / "model.safetensors").unlink()
    (out / "manifest.json").unlink()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("laws")
    for name, text in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
        if name.startswith("glue"):
            (place / name).with_name("dev.tsv").write_text(text)
    (place / "latin.txt").write_bytes(b"caf\xe9 film\n" * 9)
    two = {"text": ["the film was good", "bad food"]}
    pyarrow.parquet.write_table(pa.table(two), place / "rows.parquet")
    for name, seed in (("model", 1), ("other", 2)):
        tiny_model.save(place / name, HEADS, ["neg", "pos"], seed=seed)
    tiny_model.save(place / "number", {"classify": 1}, ["score"], problem_type="regression")
    tiny_model.save(place / "nli", {"classify": 3}, ["entailment", "neutral", "contradiction"])
    write_corpus(place / "corpus", documents=40, heldout=8)
    start = "pretrain toy.toml --corpus corpus --device cpu --quiet --out"
    lines = [f"{start} runs/words --steps 1", f"{start} runs/untrained --steps 2"]
    lines.append("corpus build texts.txt --tokenizer model --out built --workers 1")
    with contextlib.chdir(place):
        for line in lines:
            run(*shlex.split(line))
    for name in ("words", "untrained"):
        shutil.copytree(place / "runs" / name / "model", place / name)
    shutil.copytree(place / "built", place / "damaged")
    counts = (place / "built" / "unigram.npy").read_bytes()
    (place / "damaged" / "unigram.npy").write_bytes(counts[:-1] + b"x")
    for name in ("model", "number", "words"):
        pickled(place / name, place / ("old" if name == "model" else f"old-{name}"))
    return place


# ── the law ──────────────────────────────────────────────────────────────────────────────────────────────────


def digests(folder: Path) -> dict[str, str]:
    """File → its hash, of all that depends on nothing but the command."""
    varying = ("manifest.json", "log.jsonl", "README.md", "SST-2.json", "RTE.json")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in varying]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def outcome(line: str, place: Path, out: Path) -> tuple[Any, ...]:
    """What a command prints and writes."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (out / "there.jsonl").write_text("{}\n")
    if "OUT/model" in line:
        shutil.copytree(place / "model", out / "model")
    if "OUT/built" in line:
        shutil.copytree(place / "built", out / "built")
    done = CliRunner().invoke(app, shlex.split(line.replace("OUT", str(out))))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    logging.getLogger("everybert").handlers.clear()  # finetune's, which prints to the runner's closed stream
    said = re.sub(r"\d[\d.,:]*", "#", done.stderr.replace(str(out), ""))  # times and speeds
    return done.exit_code, done.stdout.replace(str(out), ""), said, digests(out)


def with_option(line: str, option: str, value: str) -> str:
    """The line with an option added, or with another value of it."""
    pattern = rf"{option} (?:'[^']*'|\S+)"
    given = value and re.search(pattern, line)
    return re.sub(pattern, f"{option} {value}", line) if given else f"{line} {option} {value}"


def test_the_table_has_every_command():
    assert set(every()) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_the_table_has_every_option(name):
    options = {max(p.opts, key=len) for p in every()[name].params if p.param_type_name == "option"}
    assert options - {"--help"} == set(TABLE[name][1])


@pytest.fixture(scope="module")
def before(place, tmp_path_factory) -> Any:
    """The outcome of a line without the option, computed once."""
    return cache(lambda line: outcome(line, place, tmp_path_factory.mktemp("before") / "out"))


def printed(settings: Any, host: str, port: int, started: Any) -> None:
    print(settings, host, port)


@pytest.mark.parametrize(("name", "option"), cases())
def test_an_option_has_an_effect(name, option, place, before, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr("everybert.serving.app.serve", printed)
    monkeypatch.setattr("everybert.quickstart.quickstart", lambda out, console: console.print(out) or {"done": True})
    line, options = TABLE[name]
    value = options[option]
    line, value = value if isinstance(value, tuple) else (line, value)
    first = "old" if option == "--allow-pickle" else "model"
    other = "model" if name in ("regress", "rank") else "other"
    plain = re.sub("@", first, line)
    changed = re.sub("@", first, with_option(line, option, re.sub("@", other, value)))
    was, now = before(plain), outcome(changed, place, tmp_path / "out")
    assert was != now, now
    if option == "--allow-pickle" and name != "serve":
        refused = was[0] == 2 and "--allow-pickle" in was[2] and was[2].count("\n") == 1
        assert (refused and now[0] == 0) or "data.tsv" in line, (was, now)
