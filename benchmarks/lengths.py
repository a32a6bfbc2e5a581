"""Throughput and latency of a model by length on this machine, for several dtypes, and for transformers.

    python benchmarks/lengths.py ./my-model --dtypes float32,int8
    python benchmarks/lengths.py ./my-model --against-transformers --lengths 16,128 --seconds 30

All variants are interleaved at every length, so that other load affects all of them. Inputs are random
token ids; tokenization is not measured. Prints one JSON line per variant and length.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from everybert.inference.model import load
from everybert.model.engine import BUDGET_CPU, BUDGET_GPU, Inputs, encode, pick_device
from everybert.model.heads import Network
from everybert.store.hub import resolve

Run = Callable[[list[list[int]]], Any]


def run_ours(network: Network, ids: list[list[int]]) -> None:
    encode(network, Inputs(ids), lambda which, batch, x_TH: None)


def timed(run: Run, ids: list[list[int]], cuda: bool) -> float:
    begin = time.perf_counter()
    run(ids)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    """Measure, then print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="everybert-small")
    parser.add_argument("--dtypes", default="float32", help="float32, bfloat16, float16, int8; comma-separated")
    parser.add_argument("--lengths", default="8,16,32,64,128,256,512", help="tokens per text, comma-separated")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--device")
    parser.add_argument("--against-transformers", action="store_true")
    args = parser.parse_args()
    where = pick_device(args.device)
    cuda = where.type == "cuda"
    models = {dtype: load(args.model, device=where, dtype=dtype) for dtype in args.dtypes.split(",")}
    runs: dict[str, Run] = {dtype: partial(run_ours, model.network) for dtype, model in models.items()}
    if args.against_transformers:
        from transformers import AutoModel

        theirs = AutoModel.from_pretrained(resolve(args.model)).eval().to(where)
        runs["transformers"] = torch.inference_mode()(lambda ids: theirs(torch.tensor(ids, device=where)))
    model = next(iter(models.values()))
    lengths = [n for n in map(int, args.lengths.split(",")) if n <= model.window]
    waits: dict[tuple[str, int], list[float]] = {(name, n): [] for n in lengths for name in runs}
    rates: dict[tuple[str, int], list[float]] = {key: [] for key in waits}
    draw, start = random.Random(0), time.perf_counter()
    budget = 2 * BUDGET_GPU if cuda else BUDGET_CPU * torch.get_num_threads()
    while not all(waits.values()) or time.perf_counter() < start + args.seconds:
        for name, n in waits:
            texts = [[draw.randrange(model.config.vocab_size) for _ in range(n)] for _ in range(budget // n)]
            timed(runs[name], texts, cuda)  # warm up
            waits[name, n].append(timed(runs[name], texts[:1], cuda))
            rates[name, n].append(len(texts) * n / timed(runs[name], texts, cuda))
    for name, n in waits:
        p50, p99 = np.percentile(waits[name, n], (50, 99)) * 1e3
        found = {"variant": name, "length": n, "tokens_per_s": round(float(np.median(rates[name, n])))}
        print(json.dumps(found | {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3)}))


if __name__ == "__main__":
    main()
