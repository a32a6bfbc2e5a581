"""How to train on few labels: modes and epochs at 100, 300, 1,000 and 10,000 rows of a labelled file.

    python benchmarks/small_data.py --train SST-2/train.tsv --test SST-2/dev.tsv
    python benchmarks/small_data.py --train banking77/train.csv --test banking77/test.csv --sizes 1000 --seeds 3

Each run is what `everybert finetune` does without --dev: a tenth of the rows chooses the epoch. The table has the
accuracy on the first rows of the test file in per cent, mean over the seeds, and the seconds of a run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from everybert.store.hub import resolve
from everybert.tasks import task_class
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import finetune

KINDS = {
    "full, 3 epochs": {"mode": "full", "epochs": 3},
    "full, 3 epochs, new pooler": {"mode": "full", "epochs": 3, "new_pooler": True},
    "full, 10 epochs, new pooler": {"mode": "full", "epochs": 10, "new_pooler": True},
    "lora, 10 epochs, new pooler": {"mode": "lora", "epochs": 10, "new_pooler": True},
    "full, 30 epochs, new pooler": {"mode": "full", "epochs": 30, "new_pooler": True},
    "top:2, 10 epochs, new pooler": {"mode": "top:2", "epochs": 10, "new_pooler": True},
    "frozen, 30 epochs": {"mode": "frozen", "epochs": 30},
    "fewshot, 30 epochs": {"mode": "fewshot", "epochs": 30},
}
MOST, FEW = 3000, 300
"""Only three epochs are measured for more rows than this; and fewshot for few."""


def main() -> None:
    """Print a row per kind, a column per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="everybert-small")
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--sizes", default="100,300,1000,10000")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1000, help="of the test file")
    parser.add_argument("--device")
    args = parser.parse_args()
    kind, tokenizer = task_class("classify"), Tokenizer.load(resolve(args.model))
    train, test = (kind.read(path) for path in (args.train, args.test))
    test = test.take(range(min(args.rows, len(test))))
    for size in map(int, args.sizes.split(",")):
        for name, settings in KINDS.items():
            if (settings["epochs"] > 3 and size > MOST) or (settings["mode"] == "fewshot" and size > FEW):
                continue
            found, began = [], time.perf_counter()
            for seed in range(args.seeds):
                order = random.Random(seed).sample(range(len(train)), min(size, len(train)))
                rows = [(train.inputs[i], train.targets[i]) for i in order]
                tuned = finetune(args.model, "classify", rows, seed=seed, quiet=True, device=args.device, **settings)
                network = tuned.runs[0].network
                features = tuned.task.features(tokenizer, network.config, test)
                found.append(tuned.task.score(network, features, test)["accuracy"])
            seconds = (time.perf_counter() - began) / args.seeds
            shown = ", ".join(f"{100 * value:.1f}" for value in found)
            print(f"{size:6} {name:28} {100 * sum(found) / len(found):5.1f}  ({shown})  {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
