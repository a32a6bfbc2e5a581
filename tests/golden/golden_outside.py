"""Groups: the command line, its complaints, and the HTTP server, by the cases of cases/."""

from __future__ import annotations

import base64
import contextlib
import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet
from golden_tools import DATA, HERE, SPECS, Entries, command, group, sha256, tiny, written

import everybert

SERVED = {"words": "mlm", "labels": "classify", "ner": "tag", "qa": "answer", "score": "regress", "choice": "choose"}
ORDINARY = {"classify", "tag", "answer", "embed", "train", "layers", "corpus", "glue", "text", "label", "one"}
"""Words of command lines that may stand in any sentence."""
PACKED = {"thumbnails": "u1", "weights": "<u2", "data": "<f4", "embedding": "<f4"}
"""Keys of answers that are base64 of numbers."""


def cases(name: str) -> dict[str, list[str]]:
    """The lines of a file of cases, each with the words after its ␞."""
    lines = (HERE / "cases" / name).read_text().splitlines()
    parts = [line.partition(" ␞ ") for line in lines if not line.startswith("#")]
    return {case.rstrip(): words.split() for case, _, words in parts}


def workshop(tmp: Path, names: str) -> Path:
    """A folder with data/files, the corpus, the tokenizers, and the tiny models that are named."""
    place = shutil.copytree(DATA / "files", tmp / "desk")
    (place / "out").mkdir()
    shutil.copy(DATA / "text.txt", place)
    shutil.copytree(DATA / "corpus", place / "corpus")
    shutil.copytree(DATA / "tokenizers", place, dirs_exist_ok=True)
    for name in SPECS:
        if name in names:
            shutil.copytree(tiny(tmp, name), place / name)
    return place


def _content(path: Path) -> Any:
    """What is in a file that a command wrote; None where that differs from run to run, or is compared elsewhere."""
    if path.suffix in (".csv", ".tsv"):
        rows = csv.reader(path.open(newline=""), delimiter="," if path.suffix == ".csv" else "\t")
        return [[_cell(cell) for cell in row] for row in rows]
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    if path.suffix == ".bin" or path.name == "tokenizer.json":
        return {"digest": sha256(path)[:16]}
    return json.loads(path.read_text()) if path.name.startswith(("config", "predictions")) else None


def _cell(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _outcome(place: Path, line: str) -> Any:
    """A command's exit code, what it prints as JSON, and what it writes."""
    before = set(written(place / "out"))
    with contextlib.chdir(place):
        done = command(*shlex.split(line))
    new = {name: _content(place / "out" / name) for name in written(place / "out") if name not in before}
    said = {"json": json.loads(done.out)} if done.code < 2 and "--json" in line else {}
    return {"code": done.code, "files": new, **said, **({"error": done.err} if done.code > 1 else {})}


def _fault(place: Path, line: str, words: list[str]) -> Any:
    """A command's exit code, and what its complaint is about."""
    with contextlib.chdir(place):
        done = command(*shlex.split(line))
    given = {part for word in shlex.split(line)[1:] for part in (word, *re.split("[=,]", word)) if len(part) > 1}
    nouns = _present([*sorted(given - ORDINARY), *words], done.err)
    one = len(done.err.strip().splitlines()) == 1 and not done.out and "Traceback" not in done.err
    return {"code": done.code, "one line": one, "nouns": nouns, "message": re.sub(r"[\s─]+", " ", done.err)}


def _present(words: list[str], text: str) -> list[str]:
    return [w for w in dict.fromkeys(words) if re.search(rf"(?<!\w){re.escape(w)}(?!\w)", text)]


@group
def commands(tmp: Path) -> Entries:
    """Commands that work, with their JSON."""
    place = workshop(tmp, "\n".join(lines := cases("commands.txt")))
    return {line: lambda line=line: _outcome(place, line) for line in lines}


@group
def faults(tmp: Path) -> Entries:
    """Commands that cannot work."""
    place = workshop(tmp, "\n".join(lines := cases("errors.txt")))
    return {line: lambda line=line, words=words: _fault(place, line, words) for line, words in lines.items()}


@group
def http(tmp: Path) -> Entries:
    """Every endpoint of `everybert serve`, with good bodies and bad ones."""
    place = workshop(tmp, "\n".join(f"bert-{head}" for head in SERVED.values()))
    models = [part for name, head in SERVED.items() for part in ("--model", f"{name}=bert-{head}")]
    shutil.copytree(DATA / "old" / "tag", place / "tagger")
    models += ["--adapter", "words:tagger=tagger"]
    path = str(Path(everybert.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "everybert", "serve", "--port", "0", "--device", "cpu", *models],
        cwd=place,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    try:
        url = re.search(r"http://[\w.:]+", process.stdout.readline())[0]
        with httpx.Client(base_url=url, timeout=60) as client:
            found = {line: _answer(client, line, words) for line, words in cases("requests.txt").items()}
    finally:
        process.terminate()
        process.wait(60)
    return {line: lambda line=line: found[line] for line in found}


def _answer(client: Any, line: str, words: list[str]) -> Any:
    """What a request is answered."""
    method, path, body = [*line.split(" ", 2), ""][:3]
    answer = client.request(method, path, content=body.encode(), headers={"content-type": "application/json"})
    status, kind = answer.status_code, answer.headers["content-type"]
    if "json" not in kind:
        return {"status": status, "type": kind}
    said = answer.json()
    if status != 200:
        error = (
            said["error"] if isinstance(said["error"], dict) else {"message": said["error"], "type": said["error_type"]}
        )
        return {"status": status, "nouns": _present(words, error["message"]), **error}
    if path == "/openapi.json":
        return {p: sorted(verbs) for p, verbs in said["paths"].items()}
    counts = {name: answer.headers.get(name) for name in ("x-tokens", "x-cut-tokens")}
    return {"status": status, **counts, "json": _unpacked(said)}


def _unpacked(value: Any, key: str = "") -> Any:
    """An answer with its base64 as arrays."""
    if isinstance(value, dict):
        return {k: _unpacked(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_unpacked(v, key) for v in value]
    if isinstance(value, str) and key in PACKED:
        return np.frombuffer(base64.b64decode(value), PACKED[key]).astype(np.float32)
    return value
