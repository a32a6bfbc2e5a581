"""Embedding speed on one GPU in bf16: everybert and sentence-transformers from strings, and transformers from ids.

    python benchmarks/infer_gpu.py                                # generated texts and a tokenizer trained on them
    python benchmarks/infer_gpu.py --tokenizer FOLDER --text FILE # your own
    python benchmarks/infer_gpu.py --compile                      # also torch.compile, from ids
    python benchmarks/infer_gpu.py --only ids                     # without sentence-transformers and strings
    python benchmarks/infer_gpu.py --fp8 --sts STS-B/dev.tsv      # also fp8: speed, and distance from fp32
    python benchmarks/infer_gpu.py --only ids --preset modernbert-base --length 8192 --tokens 262144 --attention sdpa
    python benchmarks/infer_gpu.py --device cpu --tiny            # test the script on a small machine

BERT-base (--preset) with random weights. Texts have natural lengths, about 80 tokens on average. Rounds are
interleaved; the tables have medians. From ids, every sequence has 128 tokens (--length): "forward" starts from a batch
on the host and ends with hidden states on the device, as for transformers; "vectors" ends with pooled vectors on the
host. Memory is the peak beyond the weights.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

os.environ["TOKENIZERS_PARALLELISM"] = "true"
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from serve_cpu import spearman

from everybert.data import documents
from everybert.inference.embedding import pooled_runs
from everybert.inference.model import Model, load
from everybert.model import engine
from everybert.model.config import PRESETS
from everybert.model.encoder import Encoder
from everybert.model.engine import BUDGET_GPU
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.store.huggingface import save_network
from everybert.store.sentence_transformers import Pooling
from everybert.text.sentences import split_sentences
from everybert.text.tokenizer import Tokenizer
from everybert.text.train_tokenizer import train_tokenizer
from everybert.text.windows import TextWindow, cover

Models = dict[str, Model]
OURS = "everybert"

THEIRS = 8192, 32_768
"""Tokens per batch of transformers."""


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


def save_base(folder: Path, preset: str, tokenizer: Tokenizer, tiny: bool) -> None:
    """A folder with random weights that all three libraries load."""
    torch.manual_seed(0)
    config = PRESETS[preset].replace(vocab_size=-(-tokenizer.size // 64) * 64, pad_id=tokenizer.pad_id or 0)
    if tiny:
        config = config.replace(layers=2, hidden_size=64, heads=4, intermediate_size=128)
    folder.mkdir()
    save_network(Network(config, pooler=config.family == "bert"), folder, tokenizer=tokenizer)


def from_strings(folder: Path, models: Models, texts: list[str], few: list[str], device: str) -> dict:
    """{name: (function, texts)}; slow ones get fewer texts."""
    from sentence_transformers import SentenceTransformer

    model = models[OURS]
    theirs = SentenceTransformer(str(folder), device=device).to(model.network.encoder.embeddings.token.weight.dtype)
    theirs.max_seq_length = 512
    how = {"show_progress_bar": False}
    off = np.abs(theirs.encode(few[:64], batch_size=64, **how) - model.embed(few[:64])).max()
    print(f"largest difference between components of 64 vectors: {off:.3f}", flush=True)
    return {
        "sentence-transformers, batch 32": (lambda: theirs.encode(few, batch_size=32, **how), few),
        "sentence-transformers, batch 256": (lambda: theirs.encode(few, batch_size=256, **how), few),
        **{name: (partial(own.embed, texts), texts) for name, own in models.items()},
        "everybert, tokenization alone": (lambda: model.tokenizer.ids_batch(texts), texts),
    }


def from_ids(folder: Path, models: Models, ids: list[list[int]], options: argparse.Namespace) -> dict:
    """{name: function}: every sequence once."""
    from transformers import AutoModel

    device, length = options.device, len(ids[0])
    dtype = models[OURS].network.encoder.embeddings.token.weight.dtype
    pin = torch.cuda.is_available() and device != "cpu"

    def transformers(theirs: torch.nn.Module, batch: int) -> Callable[[], None]:
        parts = [torch.tensor(ids[i : i + batch]) for i in range(0, len(ids), batch)]
        parts = [part.pin_memory() if pin else part for part in parts]

        @torch.inference_mode()
        def run() -> None:
            for part in parts:
                theirs(part.to(device, non_blocking=True))

        return run

    def cut(budget: int) -> list[Ragged]:
        size = max(1, budget // length)
        return [Ragged.of(ids[i : i + size]) for i in range(0, len(ids), size)]

    def everybert(encoder: Encoder, budget: int) -> Callable[[], None]:
        batches = cut(budget)

        @torch.inference_mode()
        def run() -> None:
            for batch in batches:
                engine.forward(encoder, batch)

        return run

    ways: dict[str, Callable[[], object]] = {}
    for kind in options.attention.split(","):
        how = {} if kind == "default" else {"attn_implementation": kind}
        try:
            theirs = AutoModel.from_pretrained(folder, dtype=dtype, **how).to(device).eval()
        except (ImportError, ValueError) as error:
            print(f"transformers with {kind}: {str(error)[:100]}")
            continue
        for size in (max(1, tokens // length) for tokens in THEIRS):
            ways[f"transformers{'' if kind == 'default' else ', ' + kind}, batch {size}"] = transformers(theirs, size)
    run = [cover(row, 1, 1, length) for row in ids]
    for name, model in models.items():
        for budget in map(int, options.budgets.split(",")):
            ways[f"{name}, forward, {budget:,} tokens per batch"] = everybert(model.network.encoder, budget)
        ways[f"{name}, vectors"] = partial(vectors, model.network, run)
    if options.compile:
        fast, batches = torch.compile(models[OURS].network.encoder, dynamic=False), cut(BUDGET_GPU)

        @torch.inference_mode()
        def compiled_forward() -> None:
            for batch in batches:
                fast(replace(batch.to(device), lengths=()))

        ways["everybert, torch.compile"] = compiled_forward
    return ways


def vectors(network: Network, run: list[list[TextWindow]]) -> None:
    """Pool every sequence, and copy the vectors to the host."""
    for _ in pooled_runs(network, [run], Pooling()):
        pass


def distances(name: str, folder: Path | str, texts: list[str], sts: Path | None, device: str) -> dict[str, Any]:
    """Cosines of the sentence vectors in bf16 and fp8 to those in fp32, and STS-B in all three."""
    found: dict[str, Any] = {}
    wanted = np.empty(0)
    for dtype in ("float32", "bfloat16", "fp8"):
        model = load(folder, device=device, dtype=dtype)
        mine = model.embed(texts, normalize=True)
        wanted = mine if dtype == "float32" else wanted
        cosine = (mine * wanted).sum(1)
        found[dtype] = {"mean": float(cosine.mean()), "least": float(cosine.min())}
        found[dtype]["sts"] = spearman(partial(model.embed, normalize=True), sts) if sts else float("nan")
        print(f"| {name}, {dtype} | {' | '.join(f'{x:.5f}' for x in found[dtype].values())} |", flush=True)
    return found


def measure(
    ways: dict[str, Callable[[], object]], rounds: int, device: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each, in interleaved rounds; and the most GB that each took in its first run."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    most: dict[str, float] = {}
    for number in range(-2, rounds):  # two warm-up rounds: a shape is recorded at its second use
        for name, way in ways.items():
            if device != "cpu":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            way()
            if device != "cpu":
                torch.cuda.synchronize()
                most.setdefault(name, (torch.cuda.max_memory_allocated() - before) / 1e9)
            if number >= 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}, most


def table(title: str, rates: dict[str, float], most: dict[str, float], other: str) -> None:
    """Tokens per second, the ratio to the best other library, and memory."""
    base = max(rate for name, rate in rates.items() if name.startswith(other))
    print(f"\n| {title} | tokens/s | × best other | GB |\n|---|---|---|---|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:,.0f} | {rate / base:.2f} | {most.get(name, 0.0):.2f} |")
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
    parser.add_argument("--fp8", action="store_true", help="measure fp8 too (Ada, Hopper or later)")
    parser.add_argument("--sts", type=Path, help="with --fp8: pairs with scores, in GLUE's format of STS-B")
    parser.add_argument(
        "--models", default="everybert-classic,everybert-small", help="with --fp8: whose vectors to compare"
    )
    parser.add_argument("--preset", default="bert-base-uncased", help="the model's shape")
    parser.add_argument("--length", type=int, default=128, help="from ids: tokens per sequence")
    parser.add_argument("--tokens", type=int, default=1_081_344, help="from ids: tokens per round")
    parser.add_argument("--attention", default="default", help="from ids: attention of transformers, comma-separated")
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
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "base"
        save_base(folder, options.preset, tokenizer, options.tiny)
        dtype = "float32" if options.device == "cpu" else "bfloat16"
        models = {OURS: load(folder, device=options.device, dtype=dtype)}
        if options.fp8:
            models["everybert, fp8"] = load(folder, device=options.device, dtype="fp8")
        if options.only != "ids":
            ways = from_strings(folder, models, texts, few, options.device)
            seconds, most = measure({what: how for what, (how, _) in ways.items()}, options.rounds, options.device)
            record["strings"] = {what: tokens[len(some)] / seconds[what] for what, (_, some) in ways.items()}
            table("from strings", record["strings"], most, "sentence")
        if options.only != "strings":
            cls, sep = tokenizer.cls_id or 0, tokenizer.sep_id or 0
            rows = (2048 if options.tiny else options.tokens) // options.length
            middle = [[draw.randrange(5, tokenizer.size) for _ in range(options.length - 2)] for _ in range(rows)]
            ids = [[cls, *part, sep] for part in middle]
            seconds, most = measure(from_ids(folder, models, ids, options), options.rounds, options.device)
            record["ids"] = {what: len(ids) * options.length / found for what, found in seconds.items()}
            table(f"from ids, length {options.length}", record["ids"], most, "transformers")
        if options.fp8:
            print("\n| cosines to fp32 | mean | least | STS-B |\n|---|---|---|---|")
            places = {options.preset: str(folder)} | {name: name for name in options.models.split(",")}
            sample = [*few[:500], *(sentence for text in documents(60) for sentence in split_sentences(text)[:3])]
            for name, where in places.items():
                record[name] = distances(name, where, sample, options.sts, options.device)
    for name, model in models.items():
        recorder = model.network.encoder.recorder
        failed = "" if recorder.works else " (recording failed: see the log)"
        print(f"\n{name}: shapes recorded as CUDA graphs: {len(recorder.recordings)}{failed}")
        record |= {f"{name}, graphs": len(recorder.recordings), f"{name}, graphs work": recorder.works}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
