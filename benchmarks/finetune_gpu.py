"""Fine-tuning speed on one GPU: everybert and transformers' Trainer, the same BERT-base, data, batch size and epochs.

    python benchmarks/finetune_gpu.py --data SST-2 --tokenizer FOLDER
    python benchmarks/finetune_gpu.py --data SST-2 --tokenizer FOLDER --steps 600     # a part of an epoch

SST-2 is a folder with train.tsv and dev.tsv; FOLDER any folder with a tokenizer. Both start from one folder of random
BERT-base weights (or `--model FOLDER`) and train in bf16: Trainer with dynamic padding, everybert with
its defaults.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from everybert.model.config import PRESETS
from everybert.model.heads import Network
from everybert.store.huggingface import load_network, save_network
from everybert.tasks import Classify
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import prepare_data
from everybert.training.tuning import FinetuneSettings, tune


def everybert(folder: Path, train, dev, settings: FinetuneSettings) -> tuple[float, float]:
    """(seconds of training, accuracy)."""
    data = prepare_data("classify", folder, Tokenizer.load(folder), train, dev)
    network = load_network(folder, heads={"classify": 2}, dtype=torch.float32).network
    began = time.perf_counter()
    run = tune(data, network, settings, quiet=True)
    return time.perf_counter() - began, run.scores["accuracy"]


def trainer(folder: Path, train, dev, settings: FinetuneSettings, place: Path) -> tuple[float, float]:
    """(seconds of training, accuracy)."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder)
    sets = []
    for rows in (train, dev):
        coded = tokenizer([text for text, _ in rows], truncation=True, max_length=512)
        sets.append([{"input_ids": i, "label": int(y)} for i, (_, y) in zip(coded["input_ids"], rows)])
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    arguments = TrainingArguments(
        output_dir=str(place),
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=128,
        num_train_epochs=settings.epochs,
        learning_rate=settings.lr or 3e-5,
        warmup_steps=0.1,
        weight_decay=settings.weight_decay,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        logging_steps=500,
        disable_tqdm=True,
    )
    metrics = lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}  # noqa: E731
    job = Trainer(
        model,
        arguments,
        train_dataset=sets[0],
        eval_dataset=sets[1],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=metrics,
    )
    began = time.perf_counter()
    job.train()
    seconds = time.perf_counter() - began
    return seconds, job.evaluate()["eval_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with train.tsv and dev.tsv")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a trained folder to start from; default: random BERT-base")
    parser.add_argument("--preset", default="bert-base-uncased")
    parser.add_argument("--steps", type=int, help="train on this many batches only, once")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-5)
    args = parser.parse_args()
    rows = {}
    for part in ("train", "dev"):
        examples = Classify.read(args.data / f"{part}.tsv", None, False)
        rows[part] = [(x[0] if isinstance(x, tuple) else x, y) for x, y in zip(examples.inputs, examples.targets)]
    if args.steps:
        rows["train"], args.epochs = rows["train"][: args.steps * args.batch_size], 1
    settings = FinetuneSettings(epochs=args.epochs, batch_size=args.batch_size, lr=args.lr)
    with tempfile.TemporaryDirectory() as place:
        folder = args.model
        if folder is None:
            tokenizer = Tokenizer.load(args.tokenizer)
            torch.manual_seed(0)
            folder = Path(place) / "base"
            folder.mkdir()
            config = PRESETS[args.preset].replace(vocab_size=-(-tokenizer.size // 64) * 64)
            save_network(Network(config, pooler=True), folder, tokenizer=tokenizer)
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        count = len(rows["train"]) * args.epochs
        print(f"{name}: {len(rows['train']):,} sentences × {args.epochs}, batch {args.batch_size}, bf16", flush=True)
        print(
            "| what | seconds | sentences/s | steps/s | dev accuracy | × Trainer |\n|---|---|---|---|---|---|",
            flush=True,
        )
        results = {
            "transformers Trainer": trainer(folder, rows["train"], rows["dev"], settings, Path(place) / "hf"),
            "everybert": everybert(folder, rows["train"], rows["dev"], settings),
        }
        slow = results["transformers Trainer"][0]
        for what, (seconds, accuracy) in results.items():
            speed = count / seconds
            each = (
                f"{seconds:.1f} | {speed:,.0f} | {speed / args.batch_size:.1f} | {accuracy:.4f} | {slow / seconds:.2f}"
            )
            print(f"| {what} | {each} |", flush=True)


if __name__ == "__main__":
    main()
