"""Compare the speed of two checkouts of everybert: the same work in interleaved rounds.

    python benchmarks/versions.py OLD NEW                      # on the CPU: embed in fp32 and int8, corpus build
    python benchmarks/versions.py OLD NEW --device cuda        # BERT-base in bf16: pre-training, fine-tuning, inference
    python benchmarks/versions.py OLD NEW --tiny --rounds 2    # test the script on a small machine

OLD and NEW are checkouts: folders with src/ and benchmarks/. Each has one process, which keeps its model in memory. The
processes run each workload in turns; the table has the median of the ratios of all rounds, and the ratio of the best
rounds, which an unsteady machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Work = Callable[[], tuple[float, float]]
"""Runs once and returns (units of work, seconds)."""


def timed(units: float, work: Callable[[], object]) -> tuple[float, float]:
    """The units, and the seconds that the work took."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return units, time.perf_counter() - began


def sentences(count: int) -> list[str]:
    """Generated texts with natural lengths, the same for both checkouts."""
    draw = random.Random(0)
    words = [
        "".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(draw.randint(1, 4)))
        for _ in range(20000)
    ]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    lengths = [min(380, max(4, int(draw.lognormvariate(3.9, 0.7)))) for _ in range(count)]
    return [" ".join(draw.choices(words, weights, k=n)).capitalize() + "." for n in lengths]


def pretraining(kind: str, device: str, tiny: bool) -> Iterator[tuple[float, float]]:
    """Full training steps of benchmarks/pretrain_gpu.py; yields (tokens, seconds)."""
    import threading
    from queue import Queue

    import pretrain_gpu

    asked: Queue[None] = Queue()
    told: Queue[float] = Queue()

    def on_demand(step: Callable[[int], None], steps: int, device: str) -> float:
        import torch

        for i in range(6):
            step(i)
        while True:
            asked.get()
            told.put(timed(1, lambda: [step(i) for i in range(steps)])[1] / steps)
            if device == "cuda":
                torch.cuda.synchronize()

    pretrain_gpu.timed = on_demand
    config = pretrain_gpu.PRESETS["bert-base-uncased"].replace(vocab_size=30528, dropout=0.0, attention_dropout=0.0)
    tokens, steps = 65536, 10
    if tiny:
        config = config.replace(layers=2, hidden_size=64, heads=4, intermediate_size=128, vocab_size=512)
        tokens, steps = 2048, 2
    run = lambda: pretrain_gpu.everybert(config, kind if kind == "natural" else int(kind), tokens, steps, device)  # noqa: E731
    threading.Thread(target=run, daemon=True).start()
    while True:
        asked.put(None)
        yield tokens, told.get()


def base_folder(place: Path, tiny: bool) -> Path:
    """A tokenizer and random BERT-base weights, as a folder."""
    import torch
    from transformers import BertConfig, BertModel

    text, folder = place / "text.txt", place / "base"
    text.write_text("\n".join(sentences(2000)), encoding="utf-8")
    command = ["-m", "everybert", "tokenizer", "train", text, "--kind", "wordpiece", "--size", "8000", "--out", folder]
    subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True)
    small = (
        {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128} if tiny else {}
    )
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=8000, **small)).save_pretrained(folder)
    return folder


def gpu_work(place: Path, device: str, tiny: bool) -> dict[str, Work]:
    """Pre-training at two lengths, fine-tuning, embedding from strings and raw hidden states from ids."""
    import everybert

    folder = base_folder(place, tiny)
    runs = {kind: pretraining(kind, device, tiny) for kind in (["128"] if tiny else ["128", "512"])}
    model = everybert.load(folder, device=device, dtype="bfloat16" if device == "cuda" else None)
    texts = sentences(40 if tiny else 36000)
    ids = [[2, *([7] * 126), 3] for _ in range(8 if tiny else 8192)]
    total = len(model.tokenizer.ids_batch(texts)) and sum(map(len, model.tokenizer.ids_batch(texts)))
    draw = random.Random(1)
    short = [(" ".join(t.split()[:12]), draw.choice("ab")) for t in sentences(64 if tiny else 19200)]

    def finetune() -> tuple[float, float]:
        tuned = everybert.finetune(
            folder, task="classify", train=short, dev=short[:64], epochs=1, quiet=True, device=device
        )
        return len(short) / 32, tuned.runs[0].seconds

    work = {f"pre-training, {kind} tokens": (lambda run=run: next(run)) for kind, run in runs.items()}
    work["fine-tuning, batch 32"] = finetune
    work["embed, from strings"] = lambda: timed(total, lambda: model.embed(texts))
    work["hidden states, from ids"] = lambda: timed(128 * len(ids), lambda: model.hidden(ids))
    return work


def cpu_work(place: Path, tiny: bool) -> dict[str, Work]:
    """Embedding with the bundled model in fp32 and int8, and building a corpus."""
    import everybert

    texts = sentences(20 if tiny else 150)
    models = {dtype: everybert.load("everybert-small", device="cpu", dtype=dtype) for dtype in ("float32", "int8")}
    total = sum(map(len, models["float32"].tokenizer.ids_batch(texts)))
    work: dict[str, Work] = {
        f"embed, {dtype}": (lambda model=model: timed(total, lambda: model.embed(texts)))
        for dtype, model in models.items()
    }
    source = place / "corpus.txt"
    source.write_text("\n\n".join(sentences(100 if tiny else 20000)), encoding="utf-8")
    size, count = source.stat().st_size, iter(range(10**6))

    def build() -> tuple[float, float]:
        out = place / f"corpus-{next(count)}"
        command = ["-m", "everybert", "corpus", "build", source, "--tokenizer", models["int8"].folder, "--out", out]
        return timed(
            size, lambda: subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True)
        )

    return work | {"corpus build": build}


def worker(device: str, tiny: bool) -> None:
    """Answer each line, the name of a workload, with [units, seconds]."""
    sys.path.pop(0)  # this file's own folder: each checkout has its benchmarks on PYTHONPATH
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to the log
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        work = (
            cpu_work(place, tiny)
            if device == "cpu" and not os.environ.get("REHEARSE")
            else gpu_work(place, device, tiny)
        )
        print(json.dumps(list(work)), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(work[line.strip()]()), file=out, flush=True)


class Checkout:
    """A process that works with one checkout."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        paths = os.pathsep.join(str((folder / part).resolve()) for part in ("src", "benchmarks"))
        command = [sys.executable, __file__, "--worker", *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
        )

    def read(self) -> list:
        """The next answer; the first one is the list of workloads."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def __call__(self, name: str) -> tuple[float, float]:
        """(units, seconds) of a workload."""
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        units, seconds = self.read()
        return units, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", help="OLD NEW")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--only", default="", help="only workloads whose name contains this, or one of these: from,fine"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.device, args.tiny)
        return
    passed = ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    old, new = (Checkout(folder, passed) for folder in args.checkouts)
    names = [old.read(), new.read()][1]
    print("| work | old, units/s | new, units/s | new ÷ old, median | lowest, highest | of the best rounds |")
    print("|---|---|---|---|---|---|")
    for name in (n for part in args.only.split(",") for n in names if part in n):
        speeds: list[tuple[float, float]] = []
        for number in range(-2, args.rounds):
            pair = [(which, which(name)) for which in ((old, new) if number % 2 else (new, old))]
            rate = {which: units / seconds for which, (units, seconds) in pair}
            if number >= 0:
                speeds.append((rate[old], rate[new]))
        ratios = [b / a for a, b in speeds]
        middle = [statistics.median(column) for column in zip(*speeds)]
        best = max(b for _, b in speeds) / max(a for a, _ in speeds)
        cells = [f"{middle[0]:,.0f}", f"{middle[1]:,.0f}", f"{statistics.median(ratios):.3f}"]
        cells += [f"{min(ratios):.3f}, {max(ratios):.3f}", f"{best:.3f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
