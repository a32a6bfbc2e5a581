"""Pre-training throughput on the CPU: everybert's `tiny-cpu` and transformers' Trainer, same model and text.

    python benchmarks/pretrain_cpu.py [--text FILE] [--threads 2] [--steps 60] [--rounds 3]

The text is Python's language reference, which every installation has, or any file, or `bundled` (the text of the
quickstart). A paragraph is a document; sequences have at most 64 tokens. The Trainer masks with
DataCollatorForLanguageModeling and pads to the longest sequence of its batch. Its batch size gives the recipe's 2,048
tokens on average. Padding does not count. Rounds are interleaved; medians are printed for wall time and for processor
time, which depends less on other load.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from everybert.corpus.build import build_corpus
from everybert.data import documents
from everybert.store.huggingface import load_network
from everybert.text.train_tokenizer import train_tokenizer
from everybert.training import logs
from everybert.training import pretrain as pretrain_module
from everybert.training.pretrain import pretrain
from everybert.training.recipe import Recipe

TRAINER = "transformers Trainer, AdamW"


def read(source: str) -> list[str]:
    """The documents of a text."""
    if source == "bundled":
        return list(documents())
    if source == "python":
        text = "\n\n".join(importlib.import_module("pydoc_data.topics").topics.values())
    else:
        text = Path(source).read_text(encoding="utf-8")
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


def prepare(texts: list[str], folder: Path) -> Path:
    """The text as a corpus."""
    (folder / "text.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    tokenizer, _ = train_tokenizer(iter(texts), size=4000)
    build_corpus(folder / "text.txt", tokenizer, folder / "corpus", heldout=0.02)
    return folder / "corpus"


Mark = tuple[float, float, int]
"""(wall time, processor time, tokens without padding so far)."""


def speeds(marks: list[Mark]) -> tuple[float, float]:
    """Tokens per second of wall time and of processor time between two marks."""
    (wall, cpu, first), (wall_end, cpu_end, last) = marks[0], marks[-1]
    return (last - first) / (wall_end - wall), (last - first) / (cpu_end - cpu)


def everybert_speed(corpus: Path, folder: Path, steps: int, optimizer: str) -> tuple[float, float]:
    """`everybert pretrain tiny-cpu`, including its data pipeline."""
    out = Path(tempfile.mkdtemp(dir=folder))
    marks: list[Mark] = []

    class Clock(logs.Logs):
        def write(self, step: int, values: dict) -> None:
            if "tokens" in values:
                marks.append((time.perf_counter(), time.process_time(), values["tokens"]))

    quiet = {"run__evaluate_every": 0, "run__save_every": 10**6, "run__tensorboard": False}
    pretrain_module.Logs = Clock
    pretrain(Recipe.load("tiny-cpu", steps=steps, optimizer__kind=optimizer, **quiet), corpus, out, quiet=True)
    pretrain_module.Logs = logs.Logs
    return speeds(marks)


def trainer_speed(texts: list[str], model_folder: Path, folder: Path, steps: int) -> tuple[float, float]:
    """transformers' Trainer on the same model."""
    from transformers import (
        AutoModelForMaskedLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        logging,
    )

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForMaskedLM.from_pretrained(model_folder)
    rows = [tokenizer(text, truncation=True, max_length=64) for text in texts]
    mean = statistics.mean(len(row["input_ids"]) for row in rows)
    marks: list[Mark] = []
    seen = 0
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2)

    def collate(batch: list) -> dict:
        nonlocal seen
        made = collator(batch)
        seen += int(made["attention_mask"].sum())
        return made

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            marks.append((time.perf_counter(), time.process_time(), seen))

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=round(2048 / mean),
        learning_rate=1e-3,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model, arguments, data_collator=collate, train_dataset=rows, callbacks=[Clock()]).train()
    return speeds(marks[10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default="python", help="python, bundled, or a text file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = read(chosen.text)
        corpus = prepare(texts, folder)
        quiet = {"run__evaluate_every": 0, "run__tensorboard": False}
        model = pretrain(Recipe.load("tiny-cpu", steps=1, **quiet), corpus, folder / "first", quiet=True).model
        size = sum(p.numel() for p in load_network(model).network.parameters())
        rows: dict[str, list[tuple[float, float]]] = {TRAINER: [], "everybert, AdamW": [], "everybert, Muon": []}
        for _ in range(chosen.rounds):
            rows[TRAINER].append(trainer_speed(texts, model, folder, chosen.steps))
            rows["everybert, AdamW"].append(everybert_speed(corpus, folder, chosen.steps, "adamw"))
            rows["everybert, Muon"].append(everybert_speed(corpus, folder, chosen.steps, "muon"))
    print(f"tiny-cpu, {size:,} parameters, {chosen.threads} threads: tokens per second of wall and processor time")
    base = [statistics.median(column) for column in zip(*rows[TRAINER])]
    for label, found in rows.items():
        medians = [statistics.median(column) for column in zip(*found)]
        print(f"{label:30}" + "".join(f"{m:12,.0f} {m / b:6.2f}x" for m, b in zip(medians, base)))


if __name__ == "__main__":
    main()
