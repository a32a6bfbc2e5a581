"""Zero-shot transfer across languages: fine-tune a multilingual encoder on one language, score it on others.

    python recipes/zero_shot.py classify --model RUN/model --train en.tsv --test en=en-test.tsv --test es=es-test.tsv
    python recipes/zero_shot.py tag --model RUN/model --train en.conllu --test en=en-dev.conllu --test fr=fr-test.conllu

RUN is a run of recipes/multilingual-small.toml. The languages of --test were in the pre-training text, but only that of
--train has labels (XNLI, say: pairs of sentences with a label each). The same is done with random weights of the same
shape: what they reach in another language comes from the form of the task alone (words that are alike, common labels).
Prints a row per language: both scores, means over the seeds with their 95 % intervals, and how much of the first
language's score is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch

from everybert.errors import EverybertError
from everybert.evaluation.evaluate import evaluate
from everybert.files import atomic_folder
from everybert.model.heads import Network
from everybert.store.huggingface import read_config, save_network
from everybert.tasks.metrics import Interval, interval
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import finetune


def random_weights(folder: Path, out: Path, seed: int) -> Path:
    """A model of the same shape and vocabulary with random weights."""
    torch.manual_seed(seed)
    with atomic_folder(out) as draft:
        save_network(Network(read_config(folder)[0], {}, pooler=True), draft, tokenizer=Tokenizer.load(folder))
    return out


def transfer(args: argparse.Namespace) -> dict[str, dict[str, Interval]]:
    """Language → start → score."""
    tests = [test.partition("=")[::2] for test in args.test]
    if not all(file for _, file in tests):
        raise EverybertError("--test: write LANGUAGE=FILE")
    settings = {"epochs": args.epochs, "lr": args.lr, "device": args.device, "quiet": True}
    settings = {key: value for key, value in settings.items() if value is not None}
    found: dict[str, dict[str, list[float]]] = {language: {} for language, _ in tests}
    for seed in range(args.seed, args.seed + args.seeds):
        with tempfile.TemporaryDirectory() as scratch:
            random = random_weights(args.model, Path(scratch) / "random", seed)
            for name, start in {"pre-trained": args.model, "random weights": random}.items():
                out = Path(scratch) / name.replace(" ", "-")
                finetune(start, args.task, args.train, None, out, seed=seed, **settings)
                for language, file in tests:
                    scored = evaluate(args.task, str(out), file)
                    found[language].setdefault(name, []).append(scored.scores[scored.metric])
    return {language: {name: interval(runs) for name, runs in row.items()} for language, row in found.items()}


def cell(score: Interval) -> str:
    """A score times 100, with its interval if there were several runs."""
    return f"{100 * score.mean:.1f}" + (f" ± {100 * score.half:.1f}" if score.half is not None else "")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", choices=("classify", "regress", "tag", "answer"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--train", required=True, help="labelled data in one language")
    parser.add_argument("--test", action="append", required=True, metavar="LANGUAGE=FILE", help="that language first")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3, help="runs, with seeds from --seed on")
    parser.add_argument("--device")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        table = transfer(args)
    except EverybertError as error:
        sys.exit(f"error: {error}")
    if args.json:
        print(json.dumps({language: {k: asdict(v) for k, v in row.items()} for language, row in table.items()}))
        return
    first = next(iter(table.values()))["pre-trained"].mean
    print("| language | pre-trained | random weights | kept |\n|---|---|---|---|")
    for language, row in table.items():
        kept = row["pre-trained"].mean / first
        print(f"| {language} | {' | '.join(cell(score) for score in row.values())} | {100 * kept:.0f} % |")


if __name__ == "__main__":
    main()
