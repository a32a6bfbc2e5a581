"""Why pre-training matters: SST-2 with random and with pre-trained weights, frozen and full, few and many examples.

    python benchmarks/why_pretrain.py --model FOLDER --train SST-2/train.tsv --dev SST-2/dev.tsv --work W
    python benchmarks/why_pretrain.py … --work W --part 2/9      # the second of nine processes

Dev accuracy in per cent, mean ± 95 % interval over the seeds. The random model has the encoder's shape and tokenizer. W
has one file per finished run; run the command again to continue. Small sets are trained for more epochs, so that every
run has at least as many steps as 1,000 examples give.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch

from everybert.files import atomic_folder
from everybert.model.heads import Network
from everybert.store.huggingface import read_config, save_network
from everybert.tasks import Classify
from everybert.tasks.metrics import interval
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import Data, prepare_data, run_once
from everybert.training.tuning import FinetuneSettings

SIZES = (100, 1000, 0)
"""Numbers of training examples; 0 means all."""
EPOCHS = {100: 30, 1000: 10, 0: 3}
STARTS = ("random, full", "pre-trained, frozen", "pre-trained, full")


def random_twin(folder: Path, out: Path) -> None:
    """A model of the same shape with random weights."""
    torch.manual_seed(0)
    with atomic_folder(out) as draft:
        save_network(Network(read_config(folder)[0], {}, pooler=True), draft, tokenizer=Tokenizer.load(folder))


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="training examples, 0 for all")
    parser.add_argument("--work", type=Path, default=Path("why_pretrain"))
    parser.add_argument("--part", default="1/1", help="K/N: the runs of the K-th of N processes")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no new run after this many minutes")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found = Classify.read(args.train, None, True)
    rows: list[Any] = list(zip(found.inputs, found.targets))
    sizes = [int(size) for size in args.sizes.split(",")]
    part, parts = map(int, args.part.split("/"))
    longest_first = sorted(sizes, key=lambda size: -size or -len(rows))
    runs = [(start, size, seed) for size in longest_first for start in STARTS for seed in range(args.seeds)]
    with tempfile.TemporaryDirectory() as scratch:
        twin = Path(scratch) / "random"
        random_twin(args.model, twin)
        whole: dict[Path, Data] = {}  # all examples are the same for every seed, and so are frozen features of them
        for start, size, seed in runs[part - 1 :: parts]:
            kept = args.work / f"{start} {size} {seed}.json"
            if kept.exists() or time.monotonic() - began > 60 * args.minutes:
                continue
            some = random.Random(seed).sample(rows, size) if size else rows
            folder, mode = (twin if "random" in start else args.model), start.split(", ")[1]
            data = whole.get(folder) if not size else None
            if data is None:
                data = prepare_data("classify", folder, Tokenizer.load(folder), some, args.dev, skip_bad=True)
                whole |= {folder: data} if not size else {}
            epochs = EPOCHS.get(size, 10) * (3 if mode == "frozen" else 1)
            run = run_once(data, FinetuneSettings(mode=mode, epochs=epochs), seed, quiet=True)
            if not run.finished:
                raise SystemExit("interrupted: the current run is discarded; run the same command again to continue")
            draft = kept.with_suffix(".part")
            draft.write_text(json.dumps(100 * run.metric), "utf-8")
            draft.replace(kept)
            print(kept.stem, f"{100 * run.metric:.1f}", flush=True)
    show(args.work, sizes)


def show(work: Path, sizes: list[int]) -> None:
    """The table, as Markdown."""
    print("\n| SST-2, accuracy | " + " | ".join(f"{size or 'all'} examples" for size in sizes) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    for start in STARTS:
        scores = [[json.loads(f.read_text("utf-8")) for f in work.glob(f"{start} {size} *.json")] for size in sizes]
        print(f"| {start} | " + " | ".join(str(interval(found)) if found else "–" for found in scores) + " |")


if __name__ == "__main__":
    main()
