"""The speed of a model on this machine: throughput and latency by length, load time, size of the weights.

Every variant (a dtype, or transformers) takes its turn at every length, round after round, so that a busy moment of the
machine affects all of them. Inputs are token ids; tokenization is not measured.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everybert.errors import EverybertError
from everybert.inference.model import load
from everybert.model.engine import BUDGET_CPU, BUDGET_GPU, Inputs, encode, pick_device
from everybert.model.heads import Network
from everybert.store.hub import resolve

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
ROUNDS = 3
Run = Callable[[list[list[int]]], Any]


def bench(
    name: str | Path,
    dtypes: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    device: str | None = None,
    against: str | None = None,
    seconds: float = 20.0,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Measure for about this many seconds, without loading. Ctrl-C ends it early. `progress` gets the share done."""
    where = pick_device(device)
    cuda = where.type == "cuda"
    known = {long: short for short, long in DTYPES.items()}
    runs: dict[str, Run] = {}
    variants = []
    for short in [known.get(d, d) for d in dtypes or ["bf16" if cuda else "fp32"]]:
        if short not in DTYPES:
            raise EverybertError(f"there is no dtype {short!r}; choose among {', '.join(DTYPES)}, with commas between")
        begin = time.perf_counter()
        model = load(name, device=where, dtype=DTYPES[short])
        runs[short] = partial(_encode, model.network)
        variants.append(_variant(short, begin, model.network))
    if against is not None:
        if against != "transformers":
            raise EverybertError(f"a model can be measured against transformers, not {against!r}")
        begin = time.perf_counter()
        theirs = _load_transformers(name).eval().to(where)
        runs["transformers fp32"] = torch.inference_mode()(lambda ids: theirs(torch.tensor(ids, device=where)))
        variants.append(_variant("transformers fp32", begin, theirs))
    if lengths and (bad := [n for n in lengths if not 1 <= n <= model.window]):
        raise EverybertError(f"the model reads 1 to {model.window} tokens; a length of {bad[0]} cannot be measured")
    sizes = lengths or [n for n in (8, 16, 32, 64, 128, 256, 512) if n <= model.window]
    waits: dict[tuple[str, int], list[float]] = {(variant, n): [] for n in sizes for variant in runs}
    rates: dict[tuple[str, int], list[float]] = {key: [] for key in waits}
    draw, stopped, start = random.Random(0), False, time.perf_counter()
    budget = 2 * BUDGET_GPU if cuda else BUDGET_CPU * torch.get_num_threads()
    share = seconds / (len(waits) * ROUNDS)
    try:
        while (spent := time.perf_counter() - start) < seconds:
            for key in waits:
                progress(min(1.0, spent / seconds))
                run, n = runs[key[0]], key[1]
                texts = [[draw.randrange(model.config.vocab_size) for _ in range(n)] for _ in range(budget // n)]
                _timed(run, texts, cuda)  # warm up
                end = time.perf_counter() + share
                while not waits[key] or time.perf_counter() < end:
                    waits[key].append(_timed(run, texts[:1], cuda))
                    rates[key].append(len(texts) * n / _timed(run, texts, cuda))
    except KeyboardInterrupt:
        stopped = True
    return {
        "model": str(name),
        "device": torch.cuda.get_device_name(where) if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ways": variants,
        "cells": [_cell(*key, rates[key], waits[key]) for key in waits],
        "stopped": stopped,
    }


def _encode(network: Network, ids: list[list[int]]) -> None:
    encode(network, Inputs(ids), lambda which, batch, x_TH: None)


def _load_transformers(name: str | Path) -> Any:
    """The model as transformers loads it."""
    try:
        from transformers import AutoModel
    except ImportError:
        raise EverybertError("--against transformers needs transformers: pip install transformers") from None
    try:
        return AutoModel.from_pretrained(resolve(name))
    except (OSError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        advice = "`everybert export hf` writes a folder that it reads"
        raise EverybertError(f"transformers cannot read {name} ({cause}); {advice}") from None


def _variant(name: str, begin: float, network: torch.nn.Module) -> dict[str, Any]:
    size = sum(x.numel() * x.element_size() for x in (*network.parameters(), *network.buffers()))
    return {"name": name, "load_seconds": time.perf_counter() - begin, "weights_mb": size / 1e6}


def _cell(variant: str, length: int, rates: list[float], waits: list[float]) -> dict[str, Any]:
    """Medians and percentiles; None where nothing was measured."""
    rate = float(np.median(rates)) if rates else None
    marks = np.percentile(waits, (50, 90, 99)) * 1e3 if waits else [None] * 3
    found = {"way": variant, "length": length, "tokens_per_s": rate, "texts_per_s": rate and rate / length}
    return found | {f"p{p}_ms": mark and float(mark) for p, mark in zip((50, 90, 99), marks)}


def _timed(run: Run, ids: list[list[int]], cuda: bool) -> float:
    begin = time.perf_counter()
    run(ids)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin
