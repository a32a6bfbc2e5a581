"""Make everybert-small again: text in, a model in a box out. Every step keeps what is done: run again to go on.

    python recipes/everybert_small.py trunk    --work W --text part-*.txt        # tokenizer, corpus, pre-training
    python recipes/everybert_small.py shrink   --work W                          # int8, a byte a weight
    python recipes/everybert_small.py adapters --work W --tasks DIR --text part-0.txt --teacher MINILM
    python recipes/everybert_small.py scores   --work W --tasks DIR              # full and lora, three seeds each
    python recipes/everybert_small.py box      --work W --out src/everybert/models/everybert-small
    python recipes/everybert_small.py student  --work W                          # half the layers, taught by the trunk
    python recipes/everybert_small.py scores   --work W --tasks DIR --trunks fp32,student

DIR holds glue/, squad/, ud_ewt/, ner/, sick/, snli_dev_test/ and blimp/ as their makers publish them. `--minutes`
starts nothing new after so many minutes; `--tiny` rehearses every step on a CPU in a minute, with a toy trunk.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from small_card import write_card
from small_scores import LORA, TRUNKS, chosen, scores, whole
from small_sets import entailment, entities, glue_set, squad, treebank

from everybert.corpus.build import build_corpus
from everybert.corpus.cloze import write_cloze
from everybert.inference.model import load
from everybert.plots import draw_curves
from everybert.store.folder import MANIFEST, atomic_folder
from everybert.text.readers import read_documents
from everybert.text.sentences import split_sentences
from everybert.text.train_tokenizer import train_tokenizer
from everybert.training.distil import distil
from everybert.training.evaluate import score_corpus
from everybert.training.finetune import finetune
from everybert.training.pretrain import pretrain

HERE = Path(__file__).parent
TINY = {"model__layers": 2, "model__hidden_size": 64, "model__heads": 2, "model__intermediate_size": 128}
TINY |= {"model__max_positions": 128, "batch__tokens": 2048, "batch__pack": 2048, "schedule__warmup": 10}
TINY |= {"budget": "15s", "run__workers": 0, "phase": [{"share": 1.0, "length": 128, "rate": [0.3, 0.15]}]}
TINY_STUDENT = {**TINY, "model__layers": 1}


# ── the trunk ────────────────────────────────────────────────────────────────────────────────────────────────


def trunk(args: argparse.Namespace) -> None:
    """Tokenizer, corpus, pre-training; W/run/model is the result."""
    words, shards = args.work / "tokenizer", args.work / "corpus"
    if not words.exists():
        tokenizer, report = train_tokenizer(read_documents(args.text), size=2000 if args.tiny else 30_000)
        with atomic_folder(words) as draft:
            tokenizer.save(draft)
        print(report, flush=True)
    if not shards.exists():
        build_corpus(args.text, words, shards, workers=args.workers)
    more: dict[str, Any] = dict(TINY) if args.tiny else {}
    result = pretrain(args.recipe, shards, args.work / "run", **more)
    print(json.dumps({"finished": result.finished, "step": result.step, **result.figures}), flush=True)


def shrink(args: argparse.Namespace) -> None:
    """W/trunk: the model in int8, and W/heldout.json: before and after. All that follows uses it."""
    folders = {label: args.work / TRUNKS[label] for label in ("fp32", "int8")}
    for label, folder in folders.items():
        if not folder.exists():
            release(args.work / "run" / "model", folder, int8=label == "int8")
    found: dict[str, Any] = {}
    for label, folder in folders.items():
        model = load(folder)
        for kind, length in (("pairs", model.window), ("full", model.window), ("full", 128)):
            found[f"{label} {kind} {length}"] = score_corpus(model, args.work / "corpus", kind, length)
    (args.work / "heldout.json").write_text(json.dumps(found, indent=1), "utf-8")


def release(trained: Path, out: Path, int8: bool = False) -> None:
    """The trained model as fine-tuning should find it: with BERT's dropout, which much text could do without."""
    model = load(trained, device="cpu")
    model.network.config = replace(model.network.config, dropout=0.1, attention_dropout=0.1)
    model.save(out, int8=int8)


def student(args: argparse.Namespace) -> None:
    """W/taught: half of the trunk's layers, taught by it."""
    recipe = HERE / "everybert-small-student.toml"
    more: dict[str, Any] = dict(TINY_STUDENT) if args.tiny else {}
    result = distil(args.work / "run" / "model", args.work / "corpus", args.work / "student", recipe=recipe, **more)
    print(json.dumps({"finished": result.finished, "step": result.step, **result.figures}), flush=True)
    if result.finished and not (args.work / TRUNKS["student"]).exists():
        release(args.work / "student" / "model", args.work / TRUNKS["student"])


# ── labelled data, as its makers publish it ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Job:
    """One adapter: what it is trained on, and which task takes it by itself."""

    task: str
    default: list[str]
    data: Callable[[Path], tuple[Any, Any]]
    options: dict[str, Any]
    settings: dict[str, Any]
    warm: str | None = None
    """Trained on this first (cheap labels made from text), then on the data."""


JOBS = {
    "sentiment": Job("classify", ["classify"], glue_set("SST-2"), {"labels": ["negative", "positive"]}, {"epochs": 3}),
    "entailment": Job("classify", ["classify pair"], entailment, {}, {"epochs": 4}),
    "paraphrase": Job("classify", [], glue_set("MRPC"), {"metric": "f1"}, {"epochs": 6}),
    "acceptability": Job("classify", [], glue_set("CoLA"), {"metric": "matthews"}, {"epochs": 6}),
    "ner": Job("tag", ["tag"], entities, {}, {"epochs": 4}),
    "pos": Job("tag", [], treebank, {"metric": "accuracy"}, {"epochs": 4}),
    "qa": Job("answer", ["answer"], squad, {}, {"epochs": 4}, warm="cloze"),
    "similarity": Job("embed", ["embed"], glue_set("STS-B"), {}, {"epochs": 4}, warm="likeness"),
}
COLUMNS = {"pos": {"label": "upos"}}
NAMED = {"sentiment": {"0": "negative", "1": "positive"}, "acceptability": {"0": "unacceptable", "1": "acceptable"}}
NAMED["paraphrase"] = {"0": "different", "1": "paraphrase"}
"""GLUE's numbers in words."""


def read_job(name: str, tasks: Path) -> tuple[Any, Any]:
    """Both sets of an adapter; labels that are numbers in words."""
    train, dev = JOBS[name].data(tasks)
    if name not in NAMED:
        return train, dev
    from everybert.tasks.classify import read

    out = []
    for source in (train, dev):
        found = read(source, None, True)
        texts = [x if isinstance(x, tuple | list) else (x,) for x in found.inputs]
        out.append([(*x, NAMED[name][str(y)]) for x, y in zip(texts, found.targets)])
    return out[0], out[1]


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────────────────


def adapters(args: argparse.Namespace) -> None:
    """Each adapter of the box, the best of the seeds by its dev score."""
    end = time.monotonic() + 60 * args.minutes
    for name, job in JOBS.items():
        out = args.work / "adapters" / name
        if out.exists() or time.monotonic() > end or (args.only and name not in args.only.split(",")):
            continue
        start = warm(name, job.warm, args) if job.warm else None
        train, dev = read_job(name, args.tasks)
        settings: dict[str, Any] = {**job.settings, "mode": "lora", "lora": LORA, "quiet": True}
        settings |= chosen(args.set) | ({"epochs": 1} if args.tiny else {})
        options = {k: v for k, v in job.options.items() if k != "labels" or name not in NAMED}
        if isinstance(train, list) and args.tiny:
            train, dev = train[:64], dev[:32]
        more = {"start": str(start)} if start else {}
        tuned = finetune(
            args.work / "trunk", job.task, train, dev, out, seeds=args.seeds, options=options, skip_bad=True,
            columns=COLUMNS.get(name), **settings, **more,
        )  # fmt: skip
        print(f"{name}: {whole(tuned)}", flush=True)


def warm(name: str, kind: str, args: argparse.Namespace) -> Path:
    """An adapter trained on labels that text gives for nothing."""
    out = args.work / "warm" / name
    out.parent.mkdir(exist_ok=True)
    if not out.exists():
        settings: dict[str, Any] = {"mode": "lora", "lora": LORA, "epochs": 1, "batch_size": 64, "quiet": True}
        whole(finetune(args.work / "trunk", JOBS[name].task, make_labels(kind, args), None, out, **settings))
    return out


def labels(args: argparse.Namespace) -> None:
    """W/cloze.jsonl and W/likeness.jsonl: they need no trunk, so another process can make them while it is trained."""
    for job in JOBS.values():
        if job.warm:
            make_labels(job.warm, args)


def make_labels(kind: str, args: argparse.Namespace) -> Path:
    """A file of questions cut from text, or of likenesses that the teacher gives to its sentences."""
    made = args.work / f"{kind}.jsonl"
    if not made.exists():
        documents, count = read_documents(args.text), 200 if args.tiny else args.cheap
        draft = made.with_suffix(".part")
        if kind == "cloze":
            write_cloze(documents, draft, count)
        else:
            write_likeness(documents, args.teacher, draft, count)
        draft.replace(made)
    return made


def write_likeness(documents: Iterator[str], teacher: Path, out: Path, count: int) -> None:
    """Pairs of sentences, near neighbours and strangers, with the cosine that the teacher gives them."""
    chance = random.Random(0)
    sentences: list[str] = []
    for document in documents:
        sentences += [s for s in split_sentences(document.replace("\n", " "))[:12] if 20 < len(s) < 300]
        if len(sentences) > count:
            break
    vectors = load(teacher).embed(sentences, normalize=True)
    with out.open("w", encoding="utf-8") as file:
        for i in islice(range(len(sentences) - 1), count):
            j = i + 1 if chance.random() < 0.5 else chance.randrange(len(sentences))
            row = {"sentence1": sentences[i], "sentence2": sentences[j], "score": float(vectors[i] @ vectors[j])}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


# ── the box ──────────────────────────────────────────────────────────────────────────────────────────────────


def box(args: argparse.Namespace) -> None:
    """The trunk, its adapters, the curve and the card in one folder, complete or absent."""
    with atomic_folder(args.out) as draft:
        for file in (args.work / "trunk").iterdir():
            if file.is_file() and file.name != MANIFEST:
                shutil.copy(file, draft / file.name)
        names = [name for name in JOBS if (args.work / "adapters" / name).exists()]
        for name in names:
            wanted = ("adapter_config.json", "adapter_model.safetensors", "everybert.json")
            (draft / "adapters" / name).mkdir(parents=True)
            for part in wanted:
                shutil.copy(args.work / "adapters" / name / part, draft / "adapters" / name / part)
            halve(draft / "adapters" / name / "adapter_model.safetensors")
            place(draft / "adapters" / name / "adapter_config.json", args.out.name)
        said = json.loads((draft / "everybert.json").read_text("utf-8"))
        said["adapters"] = {name: JOBS[name].default for name in names}
        (draft / "everybert.json").write_text(json.dumps(said, indent=2) + "\n", "utf-8")
        curve(args.work / "run" / "log.jsonl", draft / "loss.png")
        write_card(args.work, draft / "README.md", JOBS)
    size = sum(f.stat().st_size for f in args.out.rglob("*") if f.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB, adapters: {', '.join(names)}", flush=True)


def halve(file: Path) -> None:
    """An adapter in fp16: half the bytes, and far finer than the int8 of the trunk it goes on."""
    from safetensors.torch import load_file, save_file

    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def place(file: Path, trunk: str) -> None:
    """The trunk by its name, not by where it lay when the adapter was trained."""
    said = json.loads(file.read_text("utf-8")) | {"base_model_name_or_path": trunk}
    file.write_text(json.dumps(said, indent=2) + "\n", "utf-8")


def curve(log: Path, out: Path) -> None:
    """The loss of the run, and on held-out text."""
    rows = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    names = {"loss": "training text", "heldout_loss": "held-out text, 15 % masked"}
    curves = {name: [(r["step"], r[key]) for r in rows if key in r] for key, name in names.items()}
    draw_curves({name: points for name, points in curves.items() if points}, out, "loss")


def main() -> None:
    """Read the command line and do one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = {"trunk": trunk, "labels": labels, "shrink": shrink, "adapters": adapters, "scores": scores, "box": box}
    steps["student"] = student
    parser.add_argument("step", choices=steps)
    parser.add_argument("--work", type=Path, required=True, help="where all steps leave what they make")
    parser.add_argument("--text", type=Path, nargs="*", help="plain text, blank lines between documents")
    parser.add_argument("--tasks", type=Path, help="the folder of labelled sets")
    parser.add_argument("--teacher", type=Path, help="all-MiniLM-L6-v2's folder")
    parser.add_argument("--recipe", type=Path, default=HERE / "everybert-small.toml")
    parser.add_argument("--out", type=Path, help="box: the folder to write")
    parser.add_argument("--only", help="adapters, scores: these, with commas; scores: also SQuAD+cloze, RTE+nli")
    parser.add_argument("--modes", default="full,lora", help="scores: these, with commas")
    parser.add_argument("--cheap", type=int, default=60_000, help="labels made from text for qa and similarity")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="adapters, scores: lr=1e-3")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="scores: several processes can share the seeds")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing new after so many")
    parser.add_argument("--trunks", default="int8", help=f"scores: of these, with commas: {', '.join(TRUNKS)}")
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    steps[args.step](args)


if __name__ == "__main__":
    main()
