"""Computes what the tests of this folder compare, through public interfaces only, and records it.

    python tests/golden/record.py                 everything
    python tests/golden/record.py commands http   some groups: the others stay as they are
    python tests/golden/record.py --old old       write the folders of data/old first

A group is a function of a scratch folder that gives {entry: function without arguments}. data/outputs.json holds, by
group and entry, what each returned: numbers in full, long arrays as shape, first values, sum and norm.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
from safetensors.numpy import load_file, save_file

import everybert

HERE = Path(__file__).parent
DATA = HERE / "data"
OUTPUTS = DATA / "outputs.json"
TIMES = {"seconds", "tokens_per_second", "data_wait", "mfu"}
"""Keys of logs and reports that no two runs have in common."""
Entries = dict[str, Callable[[], Any]]
GROUPS: dict[str, Callable[[Path], Entries]] = {}


def group(function: Callable[[Path], Entries]) -> Callable[[Path], Entries]:
    """Add a group under the function's name."""
    GROUPS[function.__name__] = function
    return function


def compute(name: str, scratch: Path) -> dict[str, Any]:
    """Every entry of a group as JSON values; an entry that raises is recorded as its error's class."""
    out, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry, function in GROUPS[name](scratch).items():
            try:
                value = function()
            except everybert.EverybertError as error:
                value = {"raised": type(error).__name__, "message": str(error)}
            text = json.dumps(plain(value))
            for path, name in ((scratch, "SCRATCH"), (DATA, "DATA"), (Path(everybert.__file__).parent, "PACKAGE")):
                text = text.replace(str(path), name)
            out[entry] = json.loads(text)
    torch.set_num_threads(threads)
    return out


def machine() -> dict[str, str]:
    """What decides the last digits of a float."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {"platform": f"{platform.system()} {platform.machine()}", "cpu": cpu, "torch": torch.__version__}


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────


def plain(value: Any) -> Any:
    """Anything as JSON values; what measures time is left out, and arrays of many numbers are reduced."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain({f.name: getattr(value, f.name) for f in fields(value)})
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items() if k not in TIMES}
    if isinstance(value, list | tuple) and value and not _numbers(value):
        return [plain(v) for v in value]
    if isinstance(value, list | tuple):
        value = np.asarray(value) if len(value) else []
    if isinstance(value, np.ndarray):
        if value.size <= 12 and value.ndim == 1:
            return value.tolist()
        if value.dtype.kind in "iub":
            return {
                "shape": list(value.shape),
                "digest": hashlib.sha256(value.astype("<i8").tobytes()).hexdigest()[:16],
            }
        flat = value.ravel().astype(np.float64)
        picked = flat[:: max(1, len(flat) // 6)][:6]
        at = {"shape": list(value.shape), "picked": picked.tolist(), "sum": float(flat.sum())}
        return {**at, "norm": float(np.sqrt((flat * flat).sum()))}
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Path) else value


def _numbers(value: Any) -> bool:
    """Whether a list is a (nested) array of numbers, as long as it need be to be worth reducing."""
    try:
        array = np.asarray(value)
    except ValueError:
        return False
    return array.dtype.kind in "if" and array.size > 12


def sha256(path: Path) -> str:
    """Of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def written(folder: Path) -> list[str]:
    """The files below a folder."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def weights(folder: Path) -> dict[str, Any]:
    """A folder's weights: the file bit for bit, and (for other processors) a few numbers of its tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    both = np.concatenate([tensors[k].ravel() for k in sorted(tensors)])
    return {"sha256": sha256(file), "tensors": list(tensors), "values": both}


# ── tiny models, drawn from shapes ───────────────────────────────────────────────────────────────────────────

SPECS = json.loads((DATA / "tiny.json").read_text())
"""Models of every family as `transformers` has them: configuration, and the names and shapes of their tensors."""


def tiny(scratch: Path, name: str) -> Path:
    """A folder of such a model. Weights depend on the names alone, and on no library's generator of normals."""
    folder, spec = scratch / "tiny" / name, SPECS[name]
    if folder.exists():
        return folder
    shutil.copytree(DATA / "tokenizers" / spec["tokenizer"], folder)
    (folder / "manifest.json").unlink()
    (folder / "config.json").write_text(json.dumps(spec["config"]))
    tensors = {}
    for key, shape in spec["tensors"].items():
        draw = np.random.RandomState(zlib.crc32(f"{name} {key}".encode())).random_sample(shape).astype(np.float32)
        scale = "norm" in key.lower() and key.endswith("weight")
        tensors[key] = 1 + 0.4 * (draw - 0.5) if scale else draw - 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ── the command line, and the encoder's batches ──────────────────────────────────────────────────────────────


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def command(*arguments: object) -> Done:
    """`python -m everybert …` in this process (a fresh one takes seconds)."""
    out, err, before = io.StringIO(), io.StringIO(), (sys.argv, warnings.showwarning, dict(os.environ))
    sys.argv = ["everybert", *map(str, arguments)]
    os.environ |= {"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module("everybert", run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:  # a fault of the library, which a process would end with
        code = 1
        err.write(f"Traceback: {error!r}\n")
    finally:
        sys.argv, warnings.showwarning, environment = before
        os.environ.clear()
        os.environ |= environment
    return Done(code, out.getvalue(), err.getvalue())


def json_of(*arguments: object) -> Any:
    """What a command prints as JSON."""
    done = command(*arguments, "--json")
    if done.code not in (0, 1):
        return {"code": done.code, "error": done.err}
    return json.loads(done.out.splitlines()[-1])


class Batches:
    """Hashes of what the encoder is given: one a batch in training, one for all others together."""

    def __init__(self, stop_at: int = 0) -> None:
        self.training: list[str] = []
        self.others, self.count, self.stop_at = hashlib.sha256(), 0, stop_at

    def __call__(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if type(module).__name__ != "Encoder":
            return
        batch = next(x for x in given if hasattr(x, "tokens_T"))
        found = hashlib.sha256(repr(tuple(batch.lengths)).encode())
        for part in (batch.tokens_T, batch.positions_T, batch.segments_T):
            found.update(b"none" if part is None else part.to(torch.int64).numpy().tobytes())
        if module.training:
            self.training.append(found.hexdigest()[:10])
            if len(self.training) == self.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.others.update(found.digest())
            self.count += 1

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {"training": self.training, "others": self.others.hexdigest()[:10], "count": self.count}


@contextlib.contextmanager
def watched(stop_at: int = 0) -> Iterator[Batches]:
    """Hash the encoder's batches meanwhile; at the `stop_at`-th of training, ask the process to end (SIGTERM)."""
    seen = Batches(stop_at)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(seen)
    try:
        yield seen
    finally:
        hook.remove()


# ── Model ────────────────────────────────────────────────────────────────────────────────────────────────────

LONG = " ".join((DATA / "text.txt").read_text().split()[:150])
MASKS = {"wordpiece": "[MASK]", "unigram": "[MASK]", "bpe": "<mask>"}


def methods(m: Any, mask: str, tmp: Path) -> Entries:
    """Every method that needs no task head."""
    a, b = "The old farmer paints a boat by the river.", "Many wolves find it."
    ids = m.tokenizer.encode(a).ids
    segments = [[0] * (len(ids) - 2) + [1] * 2]
    return {
        "about": lambda: [repr(m), m.window, str(m.report), m.labels],
        "fill": lambda: m.fill(f"The old {mask} paints a {mask}.", top=3),
        "fill pair": lambda: m.fill(f"The {mask} paints.", top=2, pair=f"It is {mask}."),
        "fill long": lambda: m.fill(f"{LONG} {mask} {LONG}", top=2),
        "embed": lambda: m.embed([a, b, "", LONG]),
        "embed one": lambda: m.embed(a),
        "embed none": lambda: m.embed([]),
        "embed cls": lambda: m.embed([a, LONG], pooling="cls"),
        "embed max": lambda: m.embed([a, LONG], pooling="max"),
        "embed sqrt": lambda: m.embed([a, LONG], pooling="mean_sqrt_len_tokens"),
        "embed normalize": lambda: m.embed([a, b], normalize=True),
        "embed plain": lambda: m.embed([a, b], normalize=False),
        "embed cut": lambda: m.embed([a, LONG], long="cut"),
        "tokens": lambda: m.tokens(a),
        "tokens 0": lambda: m.tokens(a, layer=0),
        "tokens -2": lambda: m.tokens(a, layer=-2),
        "tokens pair": lambda: m.tokens(a, pair=b),
        "tokens long": lambda: m.tokens(LONG),
        "tokens 99": lambda: m.tokens(a, layer=99),
        "next_sentence": lambda: [m.next_sentence(a, b), m.next_sentence(b, a)],
        "attention": lambda: m.attention(a),
        "attention pair": lambda: m.attention(a, pair=b),
        "attention long": lambda: m.attention(LONG * 9),
        "trace": lambda: (lambda t: [t.tokens, t.ids, t.segments, {n: t[n] for n in t.names}])(m.trace(a, pair=b)),
        "score": lambda: m.score(a),
        "score long": lambda: m.score(LONG),
        "hidden": lambda: m.hidden([ids, ids[:4], ids[:4]]),
        "hidden segments": lambda: m.hidden([ids], segments=segments),
        "hidden global": lambda: m.hidden([ids], global_tokens=[[0, 2]]),
        "neighbours": lambda: m.neighbours("boat", [a, "A boat and a boat."], top=3),
        "save": lambda: _saved(m, tmp / "saved"),
        "save int8": lambda: _saved(m, tmp / "saved8", int8=True),
    }


def tasks(m: Any) -> Entries:
    """Every method that needs a task head, or an adapter."""
    a, b = "The old farmer paints a boat by the river.", "Many wolves find it."
    question = "Where is the boat?"
    return {
        "classify": lambda: m.classify([a, b, "", LONG]),
        "classify pair": lambda: m.classify([(a, b), (LONG, b), (LONG, LONG)]),
        "regress": lambda: m.regress([a, (a, b), LONG]),
        "tag": lambda: m.tag([a, "Fox!", LONG]),
        "tag words": lambda: m.tag([["The", "fox", "paints", "."]]),
        "answer": lambda: m.answer(question, a, top=3),
        "answer long": lambda: m.answer([question, "Who?"], [LONG, a], top=2),
        "choose": lambda: m.choose(a, ["It floats.", "The wolves sing.", "No."]),
        "choose long": lambda: m.choose(LONG, ["It floats.", LONG]),
        "attribution": lambda: m.attribution(a),
        "attribution gradient": lambda: m.attribution(a, pair=b, method="gradient"),
        "attribution answer": lambda: m.attribution(question, pair=a, task="answer"),
    }


def _saved(m: Any, folder: Path, **options: Any) -> Any:
    m.save(folder, **options)
    config = json.loads((folder / "config.json").read_text())
    again = everybert.load(folder, device="cpu")
    found = {"files": written(folder), "config": config, "embed": again.embed(["The old farmer."])}
    return found if options else {**found, "sha256": sha256(folder / "model.safetensors")}


@group
def small(tmp: Path) -> Entries:
    """The bundled model with its adapters."""
    m = everybert.load("everybert-small", device="cpu")
    text = "Istanbul is a great [MASK] to visit"
    found = methods(m, "[MASK]", tmp)
    for slow in ("save", "save int8", "trace", "attention long", "score long"):
        del found[slow]
    adapters = {
        f"classify {name}": lambda name=name: m.classify([text, ("A dog sleeps.", "A dog is awake.")], adapter=name)
        for name in ("sentiment", "entailment", "paraphrase", "acceptability")
    }
    context = "Matt lives in Canada and Sinan lives in California, where John Smith of Acme works."
    return {
        **found,
        **tasks(m),
        **adapters,
        "trace names": lambda: (lambda t: [t.names, t["output"]])(m.trace(text)),
        "fill city": lambda: m.fill(text),
        "tag ner": lambda: m.tag(context),
        "tag pos": lambda: m.tag(context, adapter="pos"),
        "answer matt": lambda: m.answer("Where does Matt live?", context, top=3),
        "embed trunk": lambda: _trunk(m),
        "int8": lambda: everybert.load("everybert-small", device="cpu", dtype="int8").embed([text, LONG]),
    }


def _trunk(m: Any) -> Any:
    """Vectors under an adapter in use, and of the bare trunk."""
    m.use("sentiment")
    under = m.embed(["A dog sleeps."])
    m.use(None)
    return [under, m.embed(["A dog sleeps."])]


def _family(name: str) -> Callable[[Path], Entries]:
    def entries(tmp: Path) -> Entries:
        out: Entries = {}
        for full, spec in SPECS.items():
            family, _, head = full.rpartition("-")
            if family == name:
                m = everybert.load(tiny(tmp, full), device="cpu")
                mask = MASKS[spec["tokenizer"]]
                own = methods(m, mask, tmp / full) | tasks(m) if head == "mlm" else tasks(m)
                own |= {"save": methods(m, mask, tmp / full)["save"]}
                out |= {f"{head}: {entry}": function for entry, function in own.items()}
        return out

    return entries


GROUPS |= {name: _family(name) for name in dict.fromkeys(full.rpartition("-")[0] for full in SPECS)}


@group
def sentence_transformers(tmp: Path) -> Entries:
    """A folder with sentence-transformers' files: pooling, a dense layer, a prompt, a normalisation."""
    folder = shutil.copytree(tiny(tmp, "bert-mlm"), tmp / "dense")
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    rows = [
        {"idx": i, "name": str(i), "path": f"{i}_{k}" if i else "", "type": f"sentence_transformers.models.{k}"}
        for i, k in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24, "do_lower_case": True}))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "The nurse asks: "}, "default_prompt_name": "query"})
    )
    both = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    for name, settings in (("1_Pooling", both), ("2_Dense", {"activation_function": "torch.nn.Tanh"})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(settings))
    draw = np.random.RandomState(5).random_sample((6, 33)).astype(np.float32) - 0.5
    dense = {"linear.weight": draw[:, :32].copy(), "linear.bias": draw[:, 32].copy()}
    save_file(dense, folder / "2_Dense" / "model.safetensors")
    m = everybert.load(folder, device="cpu")
    own = {k: v for k, v in methods(m, "[MASK]", tmp).items() if k.startswith(("embed", "save"))}
    return own | {"again": lambda: everybert.load(tmp / "saved", device="cpu").embed(["A boat.", LONG])}


# ── pre-training ─────────────────────────────────────────────────────────────────────────────────────────────

RECIPE = """
seed = 3
steps = 30
[model]
layers = 2
hidden_size = 16
heads = 2
intermediate_size = 32
max_positions = 32
[examples]
kind = "pairs"
[batch]
tokens = 256
pack = 128
length = 32
[schedule]
peak = 5e-3
warmup = 4
[run]
log_every = 1
evaluate_every = 15
save_every = 1000
keep = 1
evaluate_packs = 2
tensorboard = false
workers = 0
"""
RUNS = {
    "pairs": [],
    "pairs, 2 workers": ["run.workers=2"],
    "order": ["examples.kind=order", "mask.replacement=unigram"],
    "full, words": ["examples.kind=full", "mask.strategy=word"],
    "document, spans, 2 workers": ["examples.kind=document", "mask.strategy=span", "run.workers=2"],
    "spans, boundary": ["examples.kind=full", "mask.strategy=span", "mask.boundary=true"],
    "pmi": ["examples.kind=full", "mask.strategy=pmi", "mask.rate=[0.3, 0.15]"],
    "static": ["mask.static_duplicates=2", "schedule.kind=cosine", "schedule.floor=0.1"],
    "muon": ["examples.kind=full", "optimizer.kind=muon", "schedule.kind=wsd", "run.checkpointing=true"],
    "phases": [
        "phase=[{share=0.5, length=16, tokens=[128, 256]}, {share=0.5, length=32, rate=0.3}]",
    ],
    "modern": [
        *("model.preset=modernbert-base", "model.windows=[4, 4]", "examples.kind=full"),
    ],
    "albert": ["model.family=albert", "model.layer_groups=1", "model.embedding_size=8", "examples.kind=order"],
}


def pretrain(out: Path, *changes: str, corpus: Path = DATA / "corpus", stop_at: int = 0, more: tuple = ()) -> Any:
    """A run by the command line: losses, batches, scores and weights."""
    recipe = out.parent / "recipe.toml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(RECIPE)
    sets = [part for change in changes for part in ("--set", change)]
    name = more if more else ("pretrain", recipe)
    with watched(stop_at) as batches:
        said = json_of(*name, "--corpus", corpus, "--out", out, "--device", "cpu", "--quiet", *sets)
    if "error" in said:
        return said
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    found = {"said": said, "log": log, "batches": batches.plain(), "files": written(out)}
    return found | ({"weights": weights(out / "model")} if said["finished"] else {})


def _runs(tmp: Path, names: tuple[str, ...]) -> Entries:
    return {name: lambda name=name: pretrain(tmp / name.replace(" ", "") / "run", *RUNS[name]) for name in names}


@group
def pretraining(tmp: Path) -> Entries:
    """Short runs; a stopped one goes on to the very weights of one that was not."""
    return _runs(tmp, ("pairs", "pairs, 2 workers", "full, words", "spans, boundary", "pmi")) | {
        "stopped": lambda: pretrain(tmp / "stopped" / "run", stop_at=25),
        "resumed": lambda: pretrain(tmp / "stopped" / "run"),
    }


@group
def pretraining_kinds(tmp: Path) -> Entries:
    """More kinds of them, one from a trained folder, and one under a teacher."""
    start, recipe = tiny(tmp, "bert-mlm"), tmp / "recipe.toml"
    teacher = ("distil", "--teacher", start, "--student", recipe, "--recipe", recipe)
    lessons = ("distil.hidden=1", "distil.relation=1", "distil.relation_heads=2")
    return _runs(tmp, tuple(name for name in RUNS if name not in GROUPS["pretraining"](tmp))) | {
        "from a folder": lambda: pretrain(tmp / "init", more=("pretrain", recipe, "--init", start)),
        "distil": lambda: pretrain(tmp / "distil", *lessons, more=teacher),
    }


# ── fine-tuning ──────────────────────────────────────────────────────────────────────────────────────────────

LINES = [line for line in (DATA / "text.txt").read_text().splitlines() if line][:120]
ANIMALS = {"dog", "cat", "horse", "fox", "bird", "goat", "duck", "bear", "wolf", "frog"}
PLACES = {"garden", "river", "hill", "market", "forest", "harbour"}


def _tagged(line: str) -> tuple[list[str], list[str]]:
    words = line.replace(".", " .").split()
    kinds = [(ANIMALS, "B-ANIMAL"), (PLACES, "B-PLACE")]
    return words, [next((tag for names, tag in kinds if w.rstrip("s") in names), "O") for w in words]


def _asked(line: str, lead: str = "") -> tuple[str, str, dict[str, list[Any]]]:
    place = next((p for p in sorted(PLACES) if p in line), None)
    golds = {"text": [place], "answer_start": [len(lead) + line.index(place)]} if place else {"text": []}
    return "Where?", lead + line, golds


def _choice(i: int, line: str) -> tuple[str, list[str], int]:
    words, right = line.split(), i % 2
    endings = [" ".join(words[3:]), f"{words[-1]} red"]
    return " ".join(words[:3]), endings[::-1] if right else endings, right


EXAMPLES: dict[str, list[Any]] = {
    "classify": [(line, "many" if line.split()[0] in ("These", "Those", "Many") else "one") for line in LINES],
    "regress": [(line, float(len(line.split()))) for line in LINES],
    "tag": [_tagged(line) for line in LINES],
    "answer": [_asked(line) for line in LINES],
    "choose": [_choice(i, line) for i, line in enumerate(LINES)],
    "embed": list(zip(LINES[::2], LINES[1::2])),
}
MODES = ("full", "top:1", "frozen", "lora")
SETTINGS = {"epochs": 10, "batch_size": 8, "lr": 5e-3, "log_every": 1, "device": "cpu", "quiet": True}
USES: dict[str, Callable[[Any], Any]] = {
    "classify": lambda m: m.classify(LINES[:4]),
    "regress": lambda m: m.regress(LINES[:4]),
    "tag": lambda m: m.tag(LINES[:4]),
    "answer": lambda m: m.answer(["Where?"] * 4, LINES[:4]),
    "choose": lambda m: m.choose(*EXAMPLES["choose"][0][:2]),
    "embed": lambda m: m.embed(LINES[:4]),
}


def finetune(tmp: Path, task: str, name: str, train: list[Any] | None = None, **settings: Any) -> Any:
    """A run of 30 steps by Python: losses, batches, scores, files, and what the written folder predicts."""
    rows = EXAMPLES[task] if train is None else train
    base, out = tiny(tmp, settings.pop("base", "bert-mlm")), tmp / "tuned" / name.replace(" ", "-").replace(":", "")
    with watched() as batches:
        tuned = everybert.finetune(base, task, rows[:24], rows[24:34], out, **(SETTINGS | settings))
    run = tuned.runs[0]
    again = everybert.load(out, device="cpu")
    return {
        "history": tuned.history,
        "scores": {k: [v.mean, v.half, v.runs] for k, v in tuned.scores.items()},
        "run": [run.epoch, run.lr, run.trained, run.finished, run.seed],
        "notes": tuned.notes,
        "batches": batches.plain(),
        "files": written(out),
        "said": json.loads((out / "everybert.json").read_text()),
        "predictions": USES[task](again),
    }


def _modes(tmp: Path, names: list[tuple[str, str]]) -> Entries:
    return {f"{t} {m}": lambda t=t, m=m: finetune(tmp, t, f"{t} {m}", mode=m) for t, m in names}


@group
def finetuning(tmp: Path) -> Entries:
    """Every task in one mode, and one task in every mode."""
    return _modes(tmp, [*((task, "full") for task in EXAMPLES), *(("classify", mode) for mode in MODES[1:])])


@group
def finetuning_modes(tmp: Path) -> Entries:
    """The other tasks in the other modes."""
    return _modes(tmp, [(task, mode) for task in list(EXAMPLES)[1:] for mode in MODES[1:]])


@group
def finetuning_options(tmp: Path) -> Entries:
    """What else fine-tuning can be told."""
    long = [(f"{LONG} {text}", label) for text, label in EXAMPLES["classify"]]
    multi = [(text, f"{label}|long" if len(text) > 40 else label) for text, label in EXAMPLES["classify"]]
    pairs = [(a, b, label) for (a, label), b in zip(EXAMPLES["classify"], LINES[5:])]
    scored = [(a, b, i % 5 / 4) for i, (a, b) in enumerate(EXAMPLES["embed"])]
    long_tags = [(LONG.split() + words, ["O"] * len(LONG.split()) + tags) for words, tags in EXAMPLES["tag"]]
    long_answers = [_asked(line, f"{LONG} ") for line in LINES]
    whole = {"epochs": 2}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "calibrate": ("classify", {"options": {"calibrate": True, "class_weights": "balanced", "metric": "f1_macro"}}),
        "multi": ("classify", {"train": multi, "options": {"multi": True}}),
        "pairs": ("classify", {"train": pairs, "layer_decay": 0.8, "reinit": 1, "accumulate": 2}),
        "patience": ("classify", {"patience": 1, "evaluations": 2, "new_pooler": True, "warmup": 0.5}),
        "seeds": ("classify", {"seeds": 2, "seed": 5, **whole}),
        "grid": ("classify", {"grid": {"lr": (1e-2, 1e-3), "batch_size": (4, 8)}, **whole}),
        "long": ("classify", {"train": long, **whole}),
        "long window": ("classify", {"train": long, "window": 24, "overlap": 4, **whole}),
        "long cut": ("classify", {"train": long, "long": "cut", **whole}),
        "sum of four": ("classify", {"mode": "frozen", "features": "sum", "pool": "cls"}),
        "unknown option": ("classify", {"options": {"colour": "red"}}),
        "tag all": ("tag", {"options": {"pieces": "all", "decode": "greedy", "class_weights": "balanced"}}),
        "tag long": ("tag", {"train": long_tags, **whole}),
        "tag cut": ("tag", {"train": long_tags, "long": "cut", **whole}),
        "answer long": ("answer", {"train": long_answers, **whole}),
        "answer cut": ("answer", {"train": long_answers, "long": "cut", **whole}),
        "embed scored": ("embed", {"train": scored, "options": {"pooling": "cls", "scale": 10.0}}),
        "roberta": ("classify", {"base": "roberta-mlm", "mode": "lora", **whole}),
        "distilbert": ("tag", {"base": "distilbert-mlm", **whole}),
        "albert": ("answer", {"base": "albert-mlm", **whole}),
        "longformer": ("answer", {"base": "longformer-mlm", **whole}),
        "modernbert": ("choose", {"base": "modernbert-mlm", **whole}),
        "megatron": ("regress", {"base": "megatron-bert-mlm", **whole}),
    }
    found: Entries = {
        name: lambda name=name, task=task, more=more: finetune(tmp, task, name, **more)
        for name, (task, more) in cases.items()
    }
    found["taught"] = lambda: finetune(tmp, "classify", "taught", teacher=tmp / "tuned" / "seeds", **whole)
    found["started"] = lambda: _started(tmp)
    found["never finite"] = lambda: _never_finite(tmp)
    return found


def _started(tmp: Path) -> Any:
    """An adapter that goes on from another."""
    finetune(tmp, "classify", "first", mode="lora", epochs=1)
    return finetune(tmp, "classify", "second", mode="lora", epochs=1, start=tmp / "tuned" / "first")


def _never_finite(tmp: Path) -> Any:
    """A model whose every loss is not a number: what the guard tells fine-tuners."""
    folder = shutil.copytree(tiny(tmp, "bert-mlm"), tmp / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.bias"] = tensors["bert.embeddings.LayerNorm.bias"] * np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return everybert.finetune(folder, "classify", EXAMPLES["classify"][:24], EXAMPLES["classify"][24:34], **SETTINGS)


# ── the command line and HTTP ────────────────────────────────────────────────────────────────────────────────

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


# ── folders that were written when the outputs were recorded ─────────────────────────────────────────────────

OLD = {"classify": "full", "tag": "lora", "regress": "frozen", "embed": "full"}
"""Task → the mode in which data/old/TASK was fine-tuned, from data/old/base."""


def write_old() -> None:
    """Write data/old: models of several kinds, and a run that was stopped. Paths are relative: none is written down."""
    shutil.rmtree(DATA / "old", ignore_errors=True)
    (DATA / "old").mkdir()
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(DATA / "old"):
        shutil.copytree(tiny(Path(scratch), "bert-mlm"), "base")
        for task, mode in OLD.items():
            rows = EXAMPLES[task]
            everybert.finetune("base", task, rows[:24], rows[24:34], task, **(SETTINGS | {"epochs": 1, "mode": mode}))
        everybert.load("base", device="cpu").save("int8", int8=True)
        pretrain(Path("run"), corpus=Path("../corpus"), stop_at=25)


@group
def old(tmp: Path) -> Entries:
    """They load, and predict what they did; the run goes on to the weights of one that was never stopped."""
    place = shutil.copytree(DATA / "old", tmp / "old")
    base = everybert.load(place / "base", device="cpu")
    found: Entries = {
        task: lambda task=task: USES[task](everybert.load(place / task, device="cpu"))
        for task, mode in OLD.items()
        if mode != "lora"
    }
    return found | {
        "tag": lambda: base.tag(LINES[:4], adapter=base.add_adapter(place / "tag")),
        "int8": lambda: everybert.load(place / "int8", device="cpu").embed(LINES[:4]),
        "int8 computed": lambda: everybert.load(place / "int8", device="cpu", dtype="int8").embed(LINES[:4]),
        "run": lambda: pretrain(place / "run"),
        "corpus": lambda: json_of("corpus", "info", DATA / "corpus", "--check"),
    }


# ── recording ────────────────────────────────────────────────────────────────────────────────────────────────


def main(names: list[str]) -> None:
    """Record these groups, or all."""
    recorded = json.loads(OUTPUTS.read_text()) if OUTPUTS.exists() else {}
    recorded["machine"] = machine()
    for name in names or GROUPS:
        with tempfile.TemporaryDirectory() as scratch:
            recorded[name] = compute(name, Path(scratch))
        lines = [
            f"{json.dumps(key)}: {{\n"
            + ",\n".join(f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in value.items())
            + "\n}"
            for key, value in recorded.items()
        ]
        OUTPUTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{name}: {len(recorded[name])} entries")


if __name__ == "__main__":
    if "--old" in sys.argv:
        write_old()
    main([name for name in sys.argv[1:] if name != "--old"])
