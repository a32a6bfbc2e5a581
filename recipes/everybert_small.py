"""Reproduce everybert-small, from plain text to the published folder. Each step skips work that is already done.

    python recipes/everybert_small.py pretrain     --work W --text part-*.txt    # tokenizer, corpus, pre-training
    python recipes/everybert_small.py quantize     --work W                      # int8: one byte per weight
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
minute, with a toy model.
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

from small_adapters import ADAPTERS, adapters, best_adapters, labels, polish
from small_card import write_card
from small_scores import MODELS, intermediate, scores, suggestions

from everybert.corpus.build import build_corpus
from everybert.files import MANIFEST, atomic_folder
from everybert.inference.model import load
from everybert.text.readers import read_documents
from everybert.text.train_tokenizer import train_tokenizer
from everybert.training import distil as distillation
from everybert.training import pretrain as pretraining
from everybert.training.evaluate import score_corpus

HERE = Path(__file__).parent
TINY = {"model__layers": 2, "model__hidden_size": 64, "model__heads": 2, "model__intermediate_size": 128}
TINY |= {"model__max_positions": 128, "batch__tokens": 2048, "batch__pack": 2048, "schedule__warmup": 10}
TINY |= {"budget": "15s", "run__workers": 0, "phase": [{"share": 1.0, "length": 128, "rate": [0.3, 0.15]}]}
TINY_STUDENT = {**TINY, "model__layers": 1}


# ── pre-training ─────────────────────────────────────────────────────────────────────────────────────────────


def pretrain(args: argparse.Namespace) -> None:
    """Train the tokenizer, build the corpus, pre-train. The result is W/run/model."""
    tokenizer_folder, corpus = args.work / "tokenizer", args.work / "corpus"
    if not tokenizer_folder.exists():
        tokenizer, report = train_tokenizer(read_documents(args.text), size=2000 if args.tiny else 30_000)
        with atomic_folder(tokenizer_folder) as draft:
            tokenizer.save(draft)
        print(report, flush=True)
    if not corpus.exists():
        build_corpus(args.text, tokenizer_folder, corpus, workers=args.workers)
    overrides: dict[str, Any] = dict(TINY) if args.tiny else {}
    result = pretraining.pretrain(args.recipe, corpus, args.work / "run", **overrides)
    print(json.dumps({"finished": result.finished, "step": result.step, **result.figures}), flush=True)


def quantize(args: argparse.Namespace) -> None:
    """Write W/fp32, W/int8 (which all later steps use) and the held-out scores of both, W/heldout.json."""
    folders = {label: args.work / MODELS[label] for label in ("fp32", "int8")}
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
    """Save the pre-trained model with BERT's dropout, for fine-tuning. Pre-training itself used none."""
    model = load(trained, device="cpu")
    model.network.config = replace(model.network.config, dropout=0.1, attention_dropout=0.1)
    model.save(out, int8=int8)


def distil(args: argparse.Namespace) -> None:
    """Distil a student with half of the layers into W/distilled."""
    recipe = HERE / "everybert-small-student.toml"
    overrides: dict[str, Any] = dict(TINY_STUDENT) if args.tiny else {}
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
        settings["finetune"] = {"new_pooler": True}  # the pooler of next sentences is saturated
        settings["glue"] = suggestions(args.work / "scores")
        (draft / "everybert.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        plot_loss(args.work / "run" / "log.jsonl", draft / "loss.png")
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


def plot_loss(log: Path, out: Path) -> None:
    """Plot the training loss and the held-out loss of a run."""
    from matplotlib.figure import Figure  # not pyplot: no display is needed

    rows = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, name in {"loss": "training text", "heldout_loss": "held-out text, 15 % masked"}.items():
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points), label=name, marker="o" if len(points) < 20 else "")
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    functions = (pretrain, quantize, labels, intermediate, adapters, polish, scores, folder, distil)
    steps = {function.__name__: function for function in functions}
    parser.add_argument("step", choices=steps)
    parser.add_argument("--work", type=Path, required=True, help="folder for the results of all steps")
    parser.add_argument("--text", type=Path, nargs="*", help="plain text, blank lines between documents")
    parser.add_argument("--tasks", type=Path, help="folder of the labelled data sets")
    parser.add_argument("--teacher", type=Path, help="labels: folder of all-MiniLM-L6-v2")
    parser.add_argument("--recipe", type=Path, default=HERE / "everybert-small.toml")
    parser.add_argument("--out", type=Path, help="folder: the model folder to write")
    parser.add_argument(
        "--only", help="comma-separated names for intermediate, adapters, scores (also SQuAD+cloze, RTE+nli, SST-2+own)"
    )
    parser.add_argument("--modes", default="full,lora", help="intermediate, scores: comma-separated training modes")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a training setting: lr=1e-3, rank=12"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="adapters, scores: several processes can share seeds")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no new run after this many minutes")
    parser.add_argument("--models", default="int8", help=f"scores: comma-separated models of {', '.join(MODELS)}")
    parser.add_argument("--tiny", action="store_true", help="test the step with a toy model on a CPU")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    steps[args.step](args)


if __name__ == "__main__":
    main()
