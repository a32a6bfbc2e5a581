"""Reproduce everybert-small, from plain text to the published folder. Each step skips work that is already done.

    python recipes/everybert_small.py pretrain     --work W --text part-[0-2].txt --everyday part-3.txt   # two runs
    python recipes/everybert_small.py curve        --work W --tasks DIR          # BLiMP at each checkpoint
    python recipes/everybert_small.py quantize     --work W --tasks DIR          # int8: one byte per weight
    python recipes/everybert_small.py labels       --work W --text part-0.txt --teacher MINILM   # labels from text
    python recipes/everybert_small.py intermediate --work W --tasks DIR          # training before SQuAD and STS-B
    python recipes/everybert_small.py adapters     --work W --tasks DIR          # three seeds each
    python recipes/everybert_small.py polish       --work W --tasks DIR          # the qa adapter, on short texts
    python recipes/everybert_small.py scores       --work W --tasks DIR          # full and lora, three seeds each
    python recipes/everybert_small.py folder       --work W --out src/everybert/models/everybert-small
    python recipes/everybert_small.py distil       --work W                      # a student with half the layers
    python recipes/everybert_small.py scores       --work W --tasks DIR --models fp32,student

DIR contains glue/, squad/, ud_ewt/, ner/, sick/, snli_dev_test/ and blimp/ as their authors publish them. `--set` adds
runs with other settings; `folder` takes the adapters with the best settings. Several processes can share the work
through `--only` and `--first-seed`. After `--minutes` no new run starts. `--tiny` tests every step on a CPU in a
minute, with a toy model. `pretrain` resumes where it was stopped (Ctrl-C or SIGTERM); with `--only first` it stops
after the first run, and the second needs of that no more than W/first/model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from safetensors.torch import load_file
from small_adapters import ADAPTERS, adapters, best_adapters, labels, polish
from small_card import write_card
from small_scores import MODELS, intermediate, scores, suggestions

from everybert.corpus.build import build_corpus
from everybert.evaluation.blimp import blimp, read_pairs
from everybert.files import MANIFEST, atomic_folder
from everybert.inference.model import Model, load
from everybert.text.readers import read_documents, read_records
from everybert.text.train_tokenizer import train_tokenizer
from everybert.training import distil as distillation
from everybert.training import pretrain as pretraining
from everybert.training.checkpoint import checkpoints, read_progress
from everybert.training.evaluate import score_corpus
from everybert.training.recipe import Recipe

HERE = Path(__file__).parent
RECIPES = {"first": HERE / "everybert-small.toml", "run": HERE / "everybert-small-second.toml"}
"""The recipe of each of the two runs, by its folder below W."""
TINY_RUN: dict[str, Any] = {"batch__tokens": 2048, "batch__pack": 2048, "batch__length": 128, "schedule__warmup": 10}
TINY_RUN |= {"budget": "20s", "run__workers": 0, "run__save_every": 20, "run__evaluate_every": 20}
TINY_SHAPE = {"model__layers": 2, "model__hidden_size": 64, "model__heads": 2, "model__intermediate_size": 128}
TINY_SHAPE |= {"model__max_positions": 128}
TINY_PHASES: list[dict[str, Any]] = [{"share": 0.5, "length": 64}, {"share": 0.5, "length": 128, "kind": "pairs"}]
TINY: dict[str, dict[str, Any]] = {
    "first": TINY_RUN | TINY_SHAPE | {"phase": TINY_PHASES},
    "run": TINY_RUN | {"phase": TINY_PHASES},
    "student": TINY_RUN | TINY_SHAPE | {"model__layers": 1, "phase": [{"share": 1.0, "length": 128}]},
}
"""Changes of the recipes for --tiny."""
EVERYDAY = 3
"""How often the tokenizer is given the everyday text: for "fridge" and "wallet" to be tokens."""
EACH = 150
"""BLiMP pairs of each paradigm in `curve`; `quantize` takes all of them."""


# ── pre-training ─────────────────────────────────────────────────────────────────────────────────────────────


def pretrain(args: argparse.Namespace) -> None:
    """Train the tokenizer, build the corpus, pre-train: W/first, and W/run from its weights.

    The result is W/run/model. Weights in W/first/model are taken as they are.
    """
    tokenizer_folder, corpus = args.work / "tokenizer", args.work / "corpus"
    if not tokenizer_folder.exists():
        files = [*args.text, *(args.everyday or []) * EVERYDAY]
        texts = chain.from_iterable(read_documents([file]) for file in files)
        tokenizer, report = train_tokenizer(texts, size=2000 if args.tiny else 30_000)
        with atomic_folder(tokenizer_folder) as draft:
            tokenizer.save(draft)
        print(report, flush=True)
    if not corpus.exists():
        parts = {"encyclopaedic": args.text} | ({"everyday": args.everyday} if args.everyday else {})
        build_corpus(None, tokenizer_folder, corpus, languages=parts, workers=args.workers)
    for run, recipe in recipes(args).items():
        if not (args.work / run / "model").exists():
            result = pretraining.pretrain(recipe, corpus, args.work / run)
            print(json.dumps({"run": run, "finished": result.finished, "step": result.step, **result.figures}))
            if not result.finished:
                return
        if args.only == run:
            return


def recipes(args: argparse.Namespace) -> dict[str, Recipe]:
    """The recipe of each run."""
    init = {"model__init": str(args.work / "first" / "model")}
    changes = {run: (init if run == "run" else {}) | (TINY[run] if args.tiny else {}) for run in RECIPES}
    return {run: Recipe.load(file, **changes[run]) for run, file in RECIPES.items()}


def curve(args: argparse.Namespace) -> None:
    """Add to W/curve.jsonl what the checkpoints of both runs can do, those that are not in it yet.

    Checkpoints that were written on another occasion (a stop, a new plan) are left out, except for the last.
    """
    out = args.work / "curve.jsonl"
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()] if out.exists() else []
    for run, recipe in recipes(args).items():
        saved = checkpoints(args.work / run / "checkpoints")
        for step, folder in saved.items():
            regular = step % recipe.run.save_every == 0 or step == max(saved)
            if not regular or any((row["run"], row["step"]) == (run, step) for row in rows):
                continue
            setting = pretraining.prepare(recipe, args.work / "corpus", args.work / run, None)
            network = pretraining.build_network(setting)
            network.load_state_dict(load_file(folder / "network.safetensors"), strict=False)
            model, progress = Model(network.to(setting.device), setting.tokenizer), read_progress(folder)
            known = {"run": run, "step": step, "seconds": progress.seconds, "tokens": progress.tokens}
            known |= zero_shot(model, args.tasks, 4 if args.tiny else EACH)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known) + "\n")
            print(known, flush=True)


def zero_shot(model: Model, tasks: Path, each: int | None = None) -> dict[str, float]:
    """The share of BLiMP's pairs, and of everyday.tsv's masks with a sensible word among the first three guesses."""
    found = blimp(model, read_pairs([tasks / "blimp"], each))
    rows = list(read_records(HERE / "everyday.tsv"))
    right = [bool({c.token for c in model.fill(row["text"], top=3)[0]} & set(row["sensible"].split())) for row in rows]
    return {"blimp": found.accuracy, "everyday": sum(right) / len(right)}


def quantize(args: argparse.Namespace) -> None:
    """Write W/fp32, W/int8 (which all later steps use) and what both can do without fine-tuning, W/heldout.json."""
    folders = {label: args.work / MODELS[label] for label in ("fp32", "int8")}
    for label, folder in folders.items():
        if not folder.exists():
            release(args.work / "run" / "model", folder, label == "int8", args.pooling)
    found: dict[str, Any] = {}
    for label, folder in folders.items():
        model = load(folder)
        for kind, length in (("pairs", model.window), ("full", model.window), ("full", 128)):
            found[f"{label} {kind} {length}"] = score_corpus(model, args.work / "corpus", kind, length)
        found[label] = zero_shot(model, args.tasks, 4 if args.tiny else None)
        print(label, found[label], flush=True)
    (args.work / "heldout.json").write_text(json.dumps(found, indent=1), "utf-8")


def release(trained: Path, out: Path, int8: bool = False, pooling: str = "cls") -> None:
    """Save the pre-trained model with BERT's dropout, for fine-tuning. Pre-training itself used none.

    `pooling` is what a sequence classifier reads.
    """
    model = load(trained, device="cpu")
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "classifier_dropout": 0.1}
    model.network.config = replace(model.network.config, classifier_pooling=pooling, **rates)  # type: ignore[arg-type]
    model.save(out, int8=int8)


def distil(args: argparse.Namespace) -> None:
    """Distil a student with half of the layers into W/distilled."""
    recipe = HERE / "everybert-small-student.toml"
    overrides = TINY["student"] if args.tiny else {}
    teacher, out = args.work / "run" / "model", args.work / "student"
    result = distillation.distil(teacher, args.work / "corpus", out, recipe=recipe, **overrides)
    print(json.dumps({"finished": result.finished, "step": result.step, **result.figures}), flush=True)
    if result.finished and not (args.work / MODELS["student"]).exists():
        release(out / "model", args.work / MODELS["student"])


# ── the published folder ─────────────────────────────────────────────────────────────────────────────────────


def folder(args: argparse.Namespace) -> None:
    """Write the encoder, its adapters, the loss curve and the model card to one folder, complete or absent."""
    with atomic_folder(args.out) as draft:
        for file in (args.work / MODELS["int8"]).iterdir():
            if file.is_file() and file.name != MANIFEST:
                shutil.copy(file, draft / file.name)
        best = best_adapters(args.work)
        for name, adapter in best.items():
            (draft / "adapters" / name).mkdir(parents=True)
            source = args.work / "polished" / name if adapter.polished is not None else adapter.folder
            for file_name in ("adapter_config.json", "adapter_model.safetensors", "everybert.json"):
                shutil.copy(source / file_name, draft / "adapters" / name / file_name)
            convert_to_fp16(draft / "adapters" / name / "adapter_model.safetensors")
            set_base_model(draft / "adapters" / name / "adapter_config.json", args.out.name)
        settings = json.loads((draft / "everybert.json").read_text("utf-8"))
        settings["adapters"] = {name: ADAPTERS[name].default for name in best}
        settings["embedding"] = {"normalize": True}
        settings["glue"] = suggestions(args.work / "scores")
        (draft / "everybert.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        plot_loss([args.work / run / "log.jsonl" for run in RECIPES], draft / "loss.png", args.work / "curve.jsonl")
        write_card(args.work, draft / "README.md")
    size = sum(f.stat().st_size for f in args.out.rglob("*") if f.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB, adapters: {', '.join(best)}", flush=True)


def convert_to_fp16(file: Path) -> None:
    """Store an adapter in fp16: half the size, and still far more precise than the int8 encoder."""
    from safetensors.torch import load_file, save_file

    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def set_base_model(file: Path, name: str) -> None:
    """Refer to the base model by its name instead of the path used in training."""
    config = json.loads(file.read_text("utf-8")) | {"base_model_name_or_path": name}
    file.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def plot_loss(logs: Sequence[Path], out: Path, curve: Path | None = None) -> None:
    """Plot the loss at masked tokens of runs that follow each other, and BLiMP, over the minutes."""
    from matplotlib.figure import Figure  # not pyplot: no display is needed

    figure, panels = Figure(figsize=(7, 4 if curve is None else 7), layout="constrained"), 1 if curve is None else 2
    axes, *lower = figure.subplots(panels, sharex=True, squeeze=False)[:, 0]
    lines: dict[str, list[tuple[float, float]]] = {"training text": [], "held-out text, 15 % masked": []}
    begins, minutes = {}, 0.0
    for log in logs:
        begins[log.parent.name] = before = minutes
        for row in map(json.loads, log.read_text("utf-8").splitlines()):
            minutes = before + row["seconds"] / 60 if "seconds" in row else minutes
            for points, loss in zip(lines.values(), (row.get("mlm", row.get("loss")), row.get("heldout_loss"))):
                points += [] if loss is None else [(minutes, loss)]
    for label, points in lines.items():
        if points:
            axes.plot(*zip(*points), label=label, marker="o" if len(points) < 20 else "")
    axes.set(ylabel="loss", xlabel="minutes on one H200" if curve is None else None)
    if curve is not None:
        rows = [json.loads(line) for line in curve.read_text("utf-8").splitlines()]
        points = sorted((begins[row["run"]] + row["seconds"] / 60, 100 * row["blimp"]) for row in rows)
        lower[0].plot(*zip(*points), label="BLiMP", marker="o")
        lower[0].set(ylabel="pairs judged right, %", xlabel="minutes on one H200")
    for panel in (axes, *lower):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(out, dpi=120)


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    functions = (pretrain, curve, quantize, labels, intermediate, adapters, polish, scores, folder, distil)
    steps = {function.__name__: function for function in functions}
    parser.add_argument("step", choices=steps)
    parser.add_argument("--work", type=Path, required=True, help="folder for the results of all steps")
    parser.add_argument("--text", type=Path, nargs="*", help="plain text, blank lines between documents")
    parser.add_argument("--everyday", type=Path, nargs="*", help="everyday text, which is drawn more often")
    parser.add_argument("--tasks", type=Path, help="folder of the labelled data sets")
    parser.add_argument("--teacher", type=Path, help="labels: folder of all-MiniLM-L6-v2")
    parser.add_argument("--out", type=Path, help="folder: the model folder to write")
    parser.add_argument(
        "--only", help="first; or names for intermediate, adapters, scores (also SQuAD+cloze, RTE+nli, SST-2+own)"
    )
    parser.add_argument("--modes", default="full,lora", help="intermediate, scores: comma-separated training modes")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a training setting: lr=1e-3, rank=12"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="adapters, scores: several processes can share seeds")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--pooling", choices=("cls", "mean"), default="cls", help="quantize: what classifiers read")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no new run after this many minutes")
    parser.add_argument("--models", default="int8", help=f"scores: comma-separated models of {', '.join(MODELS)}")
    parser.add_argument("--tiny", action="store_true", help="test the step with a toy model on a CPU")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    steps[args.step](args)


if __name__ == "__main__":
    main()
