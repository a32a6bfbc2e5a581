"""Embedding speed on one GPU in bf16: everybert and sentence-transformers from strings, and transformers from ids.

    python benchmarks/infer_gpu.py                                # generated texts and a tokenizer trained on them
    python benchmarks/infer_gpu.py --tokenizer FOLDER --text FILE # your own
    python benchmarks/infer_gpu.py --compile                      # also torch.compile, from ids
    python benchmarks/infer_gpu.py --only ids                     # without sentence-transformers and strings
    python benchmarks/infer_gpu.py --device cpu --tiny            # test the script on a small machine

BERT-base with random weights. Texts have natural lengths, about 80 tokens on average. Rounds are interleaved; the
tables have medians. From ids, every sequence has 128 tokens: "forward" starts from a batch on the
host and ends with hidden states on the device, as for transformers; "vectors" ends with pooled vectors on the host.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

os.environ["TOKENIZERS_PARALLELISM"] = "true"
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from everybert.inference.embedding import pooled_runs
from everybert.inference.model import Model, load
from everybert.model import engine
from everybert.model.config import PRESETS
from everybert.model.engine import BUDGET_GPU
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.store.huggingface import save_network
from everybert.store.sentence_transformers import Pooling
from everybert.text.sentences import split_sentences
from everybert.text.tokenizer import Tokenizer
from everybert.text.train_tokenizer import train_tokenizer
from everybert.text.windows import cover

LENGTH = 128
"""Tokens per sequence in the measurement from ids."""


def made_up(count: int, draw: random.Random) -> list[str]:
    """Texts of generated words whose frequencies follow Zipf's law."""
    starts, ends = [*"bcdfghklmnprstvw", "st", "tr", "pl"], [*"aeiou", "an", "er", "in", "ol", "us"]
    words = ["".join(draw.choice(starts) + draw.choice(ends) for _ in range(draw.randint(1, 4))) for _ in range(20_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    lengths = [min(380, max(4, int(draw.lognormvariate(3.9, 0.7)))) for _ in range(count)]
    return [" ".join(draw.choices(words, weights, k=n)).capitalize() + "." for n in lengths]


def drawn(path: Path, count: int, draw: random.Random) -> list[str]:
    """One to six sentences, from random lines."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    texts = []
    for _ in range(count):
        start = draw.randrange(len(lines))
        texts.append(" ".join(split_sentences(" ".join(lines[start : start + 4]))[: draw.choice((1, 1, 2, 3, 4, 6))]))
    return texts


def save_base(folder: Path, tokenizer: Tokenizer, tiny: bool) -> None:
    """A folder with random BERT-base weights that all three libraries load."""
    torch.manual_seed(0)
    config = PRESETS["bert-base-uncased"].replace(vocab_size=-(-tokenizer.size // 64) * 64)
    if tiny:
        config = config.replace(layers=2, hidden_size=64, heads=4, intermediate_size=128)
    folder.mkdir()
    save_network(Network(config, pooler=True), folder, tokenizer=tokenizer)


def from_strings(folder: Path, model: Model, texts: list[str], few: list[str], device: str) -> dict:
    """{name: (function, texts)}; slow ones get fewer texts."""
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(folder), device=device).to(model.network.encoder.embeddings.token.weight.dtype)
    theirs.max_seq_length = 512
    how = {"show_progress_bar": False}
    off = np.abs(theirs.encode(few[:64], batch_size=64, **how) - model.embed(few[:64])).max()
    print(f"largest difference between components of 64 vectors: {off:.3f}", flush=True)
    return {
        "sentence-transformers, batch 32": (lambda: theirs.encode(few, batch_size=32, **how), few),
        "sentence-transformers, batch 256": (lambda: theirs.encode(few, batch_size=256, **how), few),
        "everybert": (lambda: model.embed(texts), texts),
        "everybert, tokenization alone": (lambda: model.tokenizer.ids_batch(texts), texts),
    }


def from_ids(folder: Path, model: Model, ids: list[list[int]], compiled: bool, budgets: list[int], device: str) -> dict:
    """{name: function}: every sequence once."""
    from transformers import AutoModel

    encoder, dtype = model.network.encoder, model.network.encoder.embeddings.token.weight.dtype
    theirs = AutoModel.from_pretrained(folder, dtype=dtype).to(device).eval()
    pin = torch.cuda.is_available() and device != "cpu"

    def transformers(batch: int) -> Callable[[], None]:
        parts = [torch.tensor(ids[i : i + batch]) for i in range(0, len(ids), batch)]
        parts = [part.pin_memory() if pin else part for part in parts]

        @torch.inference_mode()
        def run() -> None:
            for part in parts:
                theirs(part.to(device, non_blocking=True))

        return run

    def cut(budget: int) -> list[Ragged]:
        size = max(1, budget // LENGTH)
        return [Ragged.of(ids[i : i + size]) for i in range(0, len(ids), size)]

    def everybert(budget: int) -> Callable[[], None]:
        batches = cut(budget)

        def run() -> None:
            for batch in batches:
                engine.forward(encoder, batch)

        return run

    ways = {f"transformers, batch {size}": transformers(size) for size in (64, 256)}
    ways |= {f"everybert, forward, {budget:,} tokens per batch": everybert(budget) for budget in budgets}
    run = [cover(row, 1, 1, 512) for row in ids]
    ways["everybert, vectors"] = lambda: list(pooled_runs(model.network, [run], Pooling()))
    if compiled:
        fast, batches = torch.compile(encoder, dynamic=False), cut(BUDGET_GPU)

        @torch.inference_mode()
        def compiled_forward() -> None:
            for batch in batches:
                fast(replace(batch.to(device), lengths=()))

        ways["everybert, torch.compile"] = compiled_forward
    return ways


def measure(ways: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of each, in interleaved rounds that begin with a different one each time."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-2, rounds):  # two warm-up rounds: a shape is recorded at its second use
        for name, way in ways.items():
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            way()
            if device != "cpu":
                torch.cuda.synchronize()
            if number >= 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def table(title: str, rates: dict[str, float], base: float) -> None:
    """Tokens per second, and the ratio to the best other library."""
    print(f"\n| {title} | tokens/s | × best other |\n|---|---|---|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:,.0f} | {rate / base:.2f} |")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer; default: one trained here")
    parser.add_argument("--text", type=Path, help="a text file to sample texts from; default: generated")
    parser.add_argument("--count", type=int, default=24_000, help="texts; a twelfth for sentence-transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", default=str(BUDGET_GPU), help="from ids: tokens per batch, comma-separated")
    parser.add_argument("--only", choices=["strings", "ids"], help="one of the two measurements; default: both")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile too")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few texts, to test the script")
    options = parser.parse_args()
    count = 240 if options.tiny else options.count
    draw = random.Random(0)
    texts = drawn(options.text, count, draw) if options.text else made_up(count, draw)
    if options.tokenizer:
        tokenizer = Tokenizer.load(options.tokenizer)
    else:
        tokenizer, _ = train_tokenizer(texts[:4000], size=12_000)
    few = texts[: max(1, count // 12)]
    tokens = {len(some): sum(map(len, tokenizer.ids_batch(some))) for some in (texts, few)}
    name = torch.cuda.get_device_name() if options.device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, {os.cpu_count()} cores, torch {torch.__version__}; {count:,} texts of {tokens[count] // count}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "base"
        save_base(folder, tokenizer, options.tiny)
        model = load(folder, device=options.device, dtype="float32" if options.device == "cpu" else "bfloat16")
        strings: dict[str, float] = {}
        if options.only != "ids":
            ways = from_strings(folder, model, texts, few, options.device)
            seconds = measure({what: how for what, (how, _) in ways.items()}, options.rounds, options.device)
            strings = {what: tokens[len(some)] / seconds[what] for what, (_, some) in ways.items()}
            table("from strings", strings, max(v for k, v in strings.items() if k.startswith("sentence")))
        given: dict[str, float] = {}
        if options.only != "strings":
            cls, sep = tokenizer.cls_id or 0, tokenizer.sep_id or 0
            rows = 16 if options.tiny else 8448
            middle = [[draw.randrange(5, tokenizer.size) for _ in range(LENGTH - 2)] for _ in range(rows)]
            ids = [[cls, *part, sep] for part in middle]
            budgets = [int(n) for n in options.budgets.split(",")]
            ways = from_ids(folder, model, ids, options.compile, budgets, options.device)
            seconds = measure(ways, options.rounds, options.device)
            given = {what: len(ids) * LENGTH / found for what, found in seconds.items()}
            table(f"from ids, length {LENGTH}", given, max(v for k, v in given.items() if k.startswith("transformers")))
    recorder = model.network.encoder.recorder
    failed = "" if recorder.works else " (recording failed: see the log)"
    print(f"\nshapes recorded as CUDA graphs: {len(recorder.recordings)}{failed}")
    graphs = {"graphs": len(recorder.recordings), "graphs_work": recorder.works}
    print(json.dumps({"strings": strings, "ids": given, **graphs}))


if __name__ == "__main__":
    main()
