"""Ablation of pre-training choices: one change at a time, equal numbers of tokens, the same held-out masked tokens.

    python benchmarks/ablations.py --corpus CORPUS --work W [--steps 400] [--seeds 1] [--minutes 9]
    python benchmarks/ablations.py --corpus CORPUS --work W --part 2/7   # the second of seven processes
    python benchmarks/ablations.py --corpus CORPUS --work W --device cpu --tiny

The base run is 6 × 256 pre-norm, Muon, 30 % dynamic token masks, BERT's pairs. The table has the loss and accuracy at
15 % masking on running text of held-out documents, and the accuracy of the run's own pair task. W has one file per
finished run; run the command again to continue. The PMI row needs a corpus that was built with `--pmi`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from everybert.errors import EverybertError
from everybert.inference.model import load
from everybert.tasks.metrics import interval
from everybert.training.evaluate import score_corpus
from everybert.training.pretrain import pretrain

RECIPE = """
steps = 400
[model]
preset = "prenorm-bert-base"
layers = 6
hidden_size = 256
heads = 4
intermediate_size = 1024
max_positions = 128
dropout = 0.0
attention_dropout = 0.0
[examples]
kind = "pairs"
[mask]
rate = 0.30
[batch]
tokens = 65_536
length = 128
pack = 65_536
[optimizer]
kind = "muon"
[schedule]
kind = "wsd"
peak = 6e-3
warmup = 50
decay = 0.5
[run]
evaluate_every = 0
save_every = 100_000
tensorboard = false
"""
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "masking rate": {
        "15 %": {"mask__rate": 0.15},
        "30 %": {},
        "40 %": {"mask__rate": 0.40},
        "80 %": {"mask__rate": 0.80},
    },
    "masks": {"dynamic": {}, "static, 10 copies": {"mask__static_duplicates": 10}},
    "pairs": {
        "next sentence": {},
        "sentence order": {"examples__kind": "order"},
        "none (full sentences)": {"examples__kind": "full"},
    },
    "unit": {
        "token": {},
        "whole word": {"mask__strategy": "word"},
        "span": {"mask__strategy": "span"},
        "PMI": {"mask__strategy": "pmi"},
    },
    "optimizer": {
        "Muon 6e-3": {},
        "AdamW 3e-4": {"optimizer__kind": "adamw", "schedule__peak": 3e-4},
        "AdamW 1e-3": {"optimizer__kind": "adamw", "schedule__peak": 1e-3},
        "AdamW 2e-3": {"optimizer__kind": "adamw", "schedule__peak": 2e-3},
    },
}
TINY = {"model__layers": 2, "model__hidden_size": 64, "model__heads": 2, "model__intermediate_size": 128}
TINY |= {"batch__tokens": 2048, "batch__pack": 2048, "run__workers": 0}


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--part", default="1/1", help="K/N: the runs of the K-th of N processes")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no new run after this many minutes")
    parser.add_argument("--device")
    parser.add_argument("--tiny", action="store_true", help="a toy model, to test the script on a CPU")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    part, parts = map(int, args.part.split("/"))
    changes = list({name_of(c): c for rows in ROWS.values() for c in rows.values()}.values())  # the base once
    runs = [(change, seed) for seed in range(args.seeds) for change in changes]
    for change, seed in runs[part - 1 :: parts]:
        kept = file_of(args.work, change, args.steps, seed)
        if not kept.exists() and time.monotonic() - began < 60 * args.minutes:
            try:
                found = run(args, change, seed)
            except EverybertError as error:  # no collocations in this corpus
                print(f"left out: {name_of(change)}: {error}", flush=True)
                continue
            draft = kept.with_suffix(".part")
            draft.write_text(json.dumps(found), "utf-8")
            draft.replace(kept)
            print(kept.stem, found, flush=True)
    show(args.work, args.steps, args.seeds)


def name_of(change: dict[str, Any]) -> str:
    """`mask__rate=0.8`, or `base` without a change."""
    return ",".join(f"{key}={value}" for key, value in sorted(change.items())) or "base"


def file_of(work: Path, change: dict[str, Any], steps: int, seed: int) -> Path:
    """The file with the results of a run."""
    return work / f"{name_of(change)} {steps} {seed}.json"


def run(args: argparse.Namespace, change: dict[str, Any], seed: int) -> dict[str, float]:
    """Pre-train once, and evaluate on held-out text."""
    overrides = {**(TINY if args.tiny else {}), **change, "steps": args.steps, "seed": seed}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        recipe = Path(place) / "base.toml"
        recipe.write_text(RECIPE, "utf-8")
        result = pretrain(recipe, args.corpus, Path(place) / "run", device=args.device, quiet=True, **overrides)
        if not result.finished:
            raise SystemExit("interrupted: the current run is discarded; run the same command again to continue")
        model = load(Path(place) / "run" / "model", device=args.device)
        found = score_corpus(model, args.corpus, "full", 128, tokens=10_000 if args.tiny else 1_000_000)
    own = {key: value for key, value in result.figures.items() if key == "pair_accuracy"}
    return {**found, **own, "seconds": round(time.monotonic() - start, 1)}


def spread(values: list[float], digits: int) -> str:
    """`27.0`; with several seeds `27.0 ± 0.2`, the 95 % interval."""
    found = interval(values)
    return f"{found.mean:.{digits}f}" + ("" if found.half is None else f" ± {found.half:.{digits}f}")


def show(work: Path, steps: int, seeds: int) -> None:
    """The table, as Markdown."""
    print(f"\n{steps} steps\n\n| choice | | seeds | held-out loss | accuracy | pairs |\n|---|---|---|---|---|---|")
    for choice, rows in ROWS.items():
        for name, change in rows.items():
            files = [file_of(work, change, steps, seed) for seed in range(seeds)]
            runs = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
            cells = ["–", "–", "–"]
            if runs:
                cells[0] = spread([r["heldout_loss"] for r in runs], 3)
                cells[1] = f"{spread([100 * r['accuracy'] for r in runs], 1)} %"
                pairs = [r["pair_accuracy"] for r in runs if "pair_accuracy" in r]
                cells[2] = f"{spread([100 * p for p in pairs], 1)} %" if pairs else "–"
            print(f"| {choice} | {name} | {len(runs)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
