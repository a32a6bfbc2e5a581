"""What each choice of pre-training is worth: one change at a time, the same tokens, held-out masks that never change.

    python benchmarks/ablations.py --corpus CORPUS --work W [--steps 400] [--seeds 1] [--minutes 9]
    python benchmarks/ablations.py --corpus CORPUS --work W --device cpu --tiny

The base run is 6×256 pre-norm, Muon, 30 % dynamic token masks, BERT's pairs. Figures: loss and accuracy at 15 % masking
on held-out documents. Finished runs are kept in W/ablations.json; run again to go on. The corpus needs `--pmi` for
the PMI row. A row says what differs from the base; where it does not say, nothing does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from everybert.tasks.metrics import interval
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
        "AdamW 1e-3": {"optimizer__kind": "adamw", "schedule__peak": 1e-3},
        "AdamW 2e-3": {"optimizer__kind": "adamw", "schedule__peak": 2e-3},
    },
}
TINY = {"model__layers": 2, "model__hidden_size": 64, "model__heads": 2, "model__intermediate_size": 128}
TINY |= {"batch__tokens": 2048, "batch__pack": 2048, "run__workers": 0}


def main() -> None:
    """Run what is not done yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("--device")
    parser.add_argument("--tiny", action="store_true", help="a toy model: rehearse on a CPU")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    kept, began = args.work / "ablations.json", time.monotonic()
    done: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    (args.work / "base.toml").write_text(RECIPE, "utf-8")
    for seed in range(args.seeds):
        for changes in (change for rows in ROWS.values() for change in rows.values()):
            key = json.dumps([changes, args.steps, seed], sort_keys=True)
            if key in done or time.monotonic() - began > 60 * args.minutes:
                continue
            out = args.work / "run"
            shutil.rmtree(out, ignore_errors=True)
            overrides = {**(TINY if args.tiny else {}), **changes, "steps": args.steps, "seed": seed}
            start = time.monotonic()
            result = pretrain(args.work / "base.toml", args.corpus, out, device=args.device, quiet=True, **overrides)
            done[key] = {**result.figures, "seconds": round(time.monotonic() - start, 1)}
            kept.write_text(json.dumps(done, indent=1), "utf-8")
            print(key, done[key], flush=True)
    show(done, args.steps, args.seeds)


def show(done: dict[str, Any], steps: int, seeds: int) -> None:
    """The table, as Markdown."""
    print(f"\n{steps} steps, {seeds} seed(s)\n\n| choice | | held-out loss | accuracy | pairs |\n|---|---|---|---|---|")
    for choice, rows in ROWS.items():
        for name, changes in rows.items():
            found = [done.get(json.dumps([changes, steps, seed], sort_keys=True)) for seed in range(seeds)]
            runs = [run for run in found if run]
            cells = ["–", "–", "–"]
            if runs:
                cells[0] = f"{interval([r['heldout_loss'] for r in runs]).mean:.3f}"
                cells[1] = f"{100 * interval([r['accuracy'] for r in runs]).mean:.1f} %"
                pairs = [r["pair_accuracy"] for r in runs if "pair_accuracy" in r]
                cells[2] = f"{100 * interval(pairs).mean:.1f} %" if pairs else "–"
            print(f"| {choice} | {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
