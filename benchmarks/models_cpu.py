"""Embedding speed of several models on the CPU: the same texts, in interleaved rounds.

    python benchmarks/models_cpu.py --models W/int8,W/distilled --text FILE
    python benchmarks/models_cpu.py --models W/int8,W/distilled --text FILE --count 500 --rounds 7

Embeds lines of the file in fp32, as `everybert embed` does. The table has medians over the rounds; the ratio is to the
first model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from everybert.inference.model import load


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, help="folders or bundled names, comma-separated")
    parser.add_argument("--text", type=Path, required=True, help="a text file; its lines are the texts")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with args.text.open(encoding="utf-8") as file:
        texts = [line for line, _ in zip((line.strip() for line in file if len(line) > 20), range(args.count))]
    models = {name: load(name, device="cpu") for name in args.models.split(",")}
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(-1, args.rounds):  # one warm-up round
        for name, model in models.items():
            start = time.perf_counter()
            model.embed(texts)
            if number >= 0:
                times[name].append(time.perf_counter() - start)
    tokens = sum(len(model.tokenizer.encode(text).ids) for model in list(models.values())[:1] for text in texts)
    first = statistics.median(times[next(iter(models))])
    print(f"{len(texts)} texts, {tokens / len(texts):.0f} tokens on average, {args.rounds} rounds")
    print("\n| model | layers | parameters | texts/s | × |\n|---|---|---|---|---|")
    for name, model in models.items():
        middle = statistics.median(times[name])
        size = sum(p.numel() for p in model.network.parameters()) / 1e6
        cells = (Path(name).name, str(model.network.config.layers), f"{size:.1f}M", f"{len(texts) / middle:.1f}")
        print(f"| {' | '.join(cells)} | {first / middle:.2f} |")


if __name__ == "__main__":
    main()
