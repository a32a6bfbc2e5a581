"""Make everybert-small again: text in, a model in a box out. Every step keeps what is done: run again to go on.

    python recipes/everybert_small.py trunk    --work W --text part-*.txt        # tokenizer, corpus, pre-training
    python recipes/everybert_small.py shrink   --work W                          # int8, a byte a weight
    python recipes/everybert_small.py labels   --work W --text part-0.txt --teacher MINILM      # cheap, from text
    python recipes/everybert_small.py first    --work W --tasks DIR              # trained on these: before SQuAD, STS-B
    python recipes/everybert_small.py adapters --work W --tasks DIR              # three seeds each
    python recipes/everybert_small.py polish   --work W --tasks DIR              # the qa adapter, on short texts
    python recipes/everybert_small.py scores   --work W --tasks DIR              # full and lora, three seeds each
    python recipes/everybert_small.py box      --work W --out src/everybert/models/everybert-small
    python recipes/everybert_small.py student  --work W                          # half the layers, taught by the trunk
    python recipes/everybert_small.py scores   --work W --tasks DIR --trunks fp32,student

DIR holds glue/, squad/, ud_ewt/, ner/, sick/, snli_dev_test/ and blimp/ as their makers publish them. `--set` tries
other settings beside the first ones, and `box` takes the adapters of the best. Several processes can share the work by
`--only` and `--first-seed`. `--minutes` starts nothing new after so many; `--tiny` rehearses every step on a CPU in a
minute, with a toy trunk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from small_adapters import JOBS, adapters, labels, pick, polish
from small_card import write_card
from small_scores import TRUNKS, first, scores, suggestions

from everybert.corpus.build import build_corpus
from everybert.files import MANIFEST, atomic_folder
from everybert.inference.model import load
from everybert.quickstart import draw_curves
from everybert.text.readers import read_documents
from everybert.text.train_tokenizer import train_tokenizer
from everybert.training.distil import distil
from everybert.training.evaluate import score_corpus
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


# ── the box ──────────────────────────────────────────────────────────────────────────────────────────────────


def box(args: argparse.Namespace) -> None:
    """The trunk, its adapters, the curve and the card in one folder, complete or absent."""
    with atomic_folder(args.out) as draft:
        for file in (args.work / "trunk").iterdir():
            if file.is_file() and file.name != MANIFEST:
                shutil.copy(file, draft / file.name)
        picked = pick(args.work)
        for name, best in picked.items():
            wanted = ("adapter_config.json", "adapter_model.safetensors", "everybert.json")
            (draft / "adapters" / name).mkdir(parents=True)
            for part in wanted:
                source = args.work / "polished" / name if best.polished is not None else best.folder
                shutil.copy(source / part, draft / "adapters" / name / part)
            halve(draft / "adapters" / name / "adapter_model.safetensors")
            place(draft / "adapters" / name / "adapter_config.json", args.out.name)
        said = json.loads((draft / "everybert.json").read_text("utf-8"))
        said["adapters"] = {name: JOBS[name].default for name in picked}
        said["glue"] = suggestions(args.work / "scores")
        (draft / "everybert.json").write_text(json.dumps(said, indent=2) + "\n", "utf-8")
        curve(args.work / "run" / "log.jsonl", draft / "loss.png")
        write_card(args.work, draft / "README.md")
    size = sum(f.stat().st_size for f in args.out.rglob("*") if f.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB, adapters: {', '.join(picked)}", flush=True)


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
    steps = {"trunk": trunk, "labels": labels, "shrink": shrink, "first": first, "adapters": adapters}
    steps["polish"] = polish
    steps |= {"scores": scores, "box": box, "student": student}
    parser.add_argument("step", choices=steps)
    parser.add_argument("--work", type=Path, required=True, help="where all steps leave what they make")
    parser.add_argument("--text", type=Path, nargs="*", help="plain text, blank lines between documents")
    parser.add_argument("--tasks", type=Path, help="the folder of labelled sets")
    parser.add_argument("--teacher", type=Path, help="all-MiniLM-L6-v2's folder")
    parser.add_argument("--recipe", type=Path, default=HERE / "everybert-small.toml")
    parser.add_argument("--out", type=Path, help="box: the folder to write")
    parser.add_argument(
        "--only", help="first, adapters, scores: these, with commas; scores: also SQuAD+cloze, RTE+nli, SST-2+own"
    )
    parser.add_argument("--modes", default="full,lora", help="first, scores: these, with commas")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="first, adapters, scores: lr=1e-3, rank=12"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="adapters, scores: several processes can share them")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing new after so many")
    parser.add_argument("--trunks", default="int8", help=f"scores: of these, with commas: {', '.join(TRUNKS)}")
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    steps[args.step](args)


if __name__ == "__main__":
    main()
