"""Pre-training throughput on one GPU: everybert and transformers, the same model, tokens and step, in one process.

    python benchmarks/pretrain_gpu.py                    # BERT-base at 128 and 512, bf16, full training step
    python benchmarks/pretrain_gpu.py --quick            # fewer peers and steps
    python benchmarks/pretrain_gpu.py --preset modernbert-base --lengths 8192   # long texts, against SDPA and flash
    python benchmarks/pretrain_gpu.py --preset everybert-small --tokens 98304 --profile   # kernels of a recipe

A full step is forward, backward, gradient clipping and fused AdamW on fp32 master weights. `natural` samples lengths
like those of text (log-normal, mean 150, at most 512): transformers pads to 512, everybert packs; padding does not
count. MFU is relative to the dense bf16 rate of the data sheet; memory is the peak of the whole process.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from everybert.model.config import PRESETS
from everybert.model.heads import Network
from everybert.model.losses import PretrainTargets, pretrain_loss
from everybert.store.huggingface import save_network
from everybert.training.data import collate
from everybert.training.optim import Optimizer, OptimizerConfig
from everybert.training.plan import flops_per_token, peak_flops
from everybert.training.recipe import Recipe
from everybert.training.step import Compute

MASKED = 0.15
VOCABULARY = 30528  # BERT's 30,522 rounded up to a multiple of 64


def lengths_of(kind: str | int, tokens: int, rng: np.random.Generator) -> list[int]:
    """Sequence lengths that sum to `tokens`: all equal, or distributed like those of text."""
    if kind != "natural":
        return [int(kind)] * (tokens // int(kind))
    out: list[int] = []
    while sum(out) < tokens:
        out.append(min(int(np.clip(rng.lognormal(4.75, 0.75), 8, 512)), tokens - sum(out)))
    return out


def timed(step, steps: int, device: str) -> float:
    """Median seconds per step, measured with CUDA events."""
    for i in range(4):
        step(i)
    marks = []
    for i in range(steps):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step(i)
            end.record()
            marks.append((start, end))
        else:
            began = time.perf_counter()
            step(i)
            marks.append(time.perf_counter() - began)
    if device == "cuda":
        torch.cuda.synchronize()
        marks = [a.elapsed_time(b) / 1e3 for a, b in marks]
    return statistics.median(marks)


def profiled(step, steps: int, device: str) -> float:
    """`timed`, and a table of the kernels that take the most time in three steps."""
    seconds = timed(step, steps, device)
    with torch.profiler.profile() as record:
        for i in range(3):
            step(i)
        if device == "cuda":
            torch.cuda.synchronize()
    by = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    print(record.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=80), flush=True)
    return seconds


def everybert(config, kind, tokens, steps, device, optimizer="adamw", measure=None):
    """Seconds per step of everybert: packed and compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    half = torch.bfloat16 if device == "cuda" else torch.float32
    compute = Compute(Network(config, {"mlm": None}), pretrain_loss, device, half, compile=device == "cuda")
    mover = Optimizer(compute.master, OptimizerConfig(kind=optimizer))
    batches = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        lengths = lengths_of(kind, tokens, rng)
        ids = rng.integers(1000 if config.vocab_size > 2000 else 5, config.vocab_size, sum(lengths))
        index = np.sort(rng.choice(len(ids), int(len(ids) * MASKED), replace=False))
        pack = {"tokens": ids, "lengths": lengths, "segments": ids * 0, "mask_index": index, "mask_label": ids[index]}
        longest = 512 if kind == "natural" else int(kind)
        batch = collate(pack, max_length=longest, capacity=tokens)
        counts = torch.tensor([float(len(index)), 1.0, float(tokens)])
        batches.append(replace(batch, targets=batch.targets_as(PretrainTargets).of_step(counts)).to(device))

    def step(i: int) -> None:
        compute.run(batches[i % 3])
        mover.step(1e-4)
        compute.master.zero_grad()
        compute.refresh()

    return (measure or timed)(step, steps, device), tokens


def transformers(config, kind, tokens, steps, device, compiled, attention=None):
    """Seconds per step of their masked language model with bf16 autocast, padded to 512 if lengths differ."""
    from transformers import AutoModelForMaskedLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    how = {} if attention is None else {"attn_implementation": attention}
    with tempfile.TemporaryDirectory() as folder:
        save_network(Network(config, {"mlm": None}), Path(folder))
        model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32, **how).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    rng = np.random.default_rng(0)
    if kind == "natural":  # as many rows as fit into the same number of positions
        lengths = lengths_of(kind, tokens, rng)[: tokens // 512]
        wide, real = 512, sum(lengths)
    else:
        lengths = lengths_of(kind, tokens, rng)
        wide, real = int(kind), tokens
    ids = torch.from_numpy(rng.integers(5, config.vocab_size, (len(lengths), wide)))
    mask = torch.arange(wide)[None] < torch.tensor(lengths)[:, None]
    labels = torch.where((torch.rand(ids.shape) < MASKED) & mask, ids, -100)
    ids, mask, labels = ids.to(device), mask.long().to(device), labels.to(device)
    given = {"attention_mask": mask} if kind == "natural" else {}
    run = torch.compile(model) if compiled else model

    def step(i: int) -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = run(input_ids=ids, labels=labels, **given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, steps, device), real


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens per step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--preset", default="bert-base-uncased", help="the model's shape: a preset, or a recipe")
    parser.add_argument("--lengths", help="only these, comma-separated, against transformers with SDPA and with flash")
    parser.add_argument("--profile", action="store_true", help="everybert alone, 128 and 512, and where its time goes")
    parser.add_argument("--tiny", action="store_true", help="a toy model, to test the script")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    off = {"dropout": 0.0, "attention_dropout": 0.0}
    shape = PRESETS[args.preset] if args.preset in PRESETS else Recipe.load(args.preset).config
    config = shape.replace(vocab_size=VOCABULARY, pad_id=0, **off)
    if args.tiny:
        small = {"layers": 2, "hidden_size": 64, "heads": 4, "intermediate_size": 128, "vocab_size": 512}
        config, args.tokens, args.steps = config.replace(**small), 2048, 2
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {args.tokens:,} tokens per step, masked {MASKED:.0%}, bf16", flush=True)
    cases = [(128, "transformers eager", False), (128, "transformers compile", True), (128, "everybert", None)]
    cases += [(512, "transformers eager", False), (512, "transformers compile", True), (512, "everybert", None)]
    cases += [("natural", "transformers eager, padded", False), ("natural", "everybert", None)]
    if args.lengths:
        peers = [(f"transformers {kind}", kind) for kind in ("sdpa", "flash_attention_2")]
        cases = [(int(n), what, how) for n in args.lengths.split(",") for what, how in [*peers, ("everybert", None)]]
    elif args.profile:
        cases = [(128, "everybert", None), (512, "everybert", None)]
    elif args.quick:
        cases = [c for c in cases if "compile" not in c[1]]
    else:
        cases += [
            (128, "everybert, dropout 0.1", 0.1),
            (512, "everybert, dropout 0.1", 0.1),
            (128, "everybert, Muon", "muon"),
        ]
    rows = []
    print(f"| {'length':>8} | {'what':<28} | ms/step | tokens/s | MFU | × first | GB |")
    print("|---|---|---|---|---|---|---|")
    for kind, what, how in cases:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if what.startswith("transformers"):
            compiled, attention = (how, None) if isinstance(how, bool) else (False, how)
            try:
                seconds, real = transformers(config, kind, args.tokens, args.steps, device, compiled, attention)
            except (ImportError, ValueError, torch.OutOfMemoryError) as error:
                print(f"| {kind!s:>8} | {what:<28} | not measured: {str(error)[:80]!r} |", flush=True)
                continue
        elif how == "muon":
            seconds, real = everybert(config, kind, args.tokens, args.steps, device, "muon")
        else:
            changed = config.replace(dropout=how, attention_dropout=how) if how else config
            measure = profiled if args.profile else None
            seconds, real = everybert(changed, kind, args.tokens, args.steps, device, measure=measure)
        speed = real / seconds
        mean = 150.0 if kind == "natural" else float(kind)
        mfu = speed * flops_per_token(config, mean, MASKED) / (peak_flops(name) or float("inf"))
        memory = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else float("nan")
        rows.append({"length": kind, "what": what, "ms": seconds * 1e3, "tokens_per_second": speed, "mfu": mfu})
        rows[-1]["memory"] = memory
        eager = next(r for r in rows if r["length"] == kind)["tokens_per_second"]
        figures = f"{seconds * 1e3:.1f} | {speed / 1e3:,.0f}k | {mfu:.3f} | {speed / eager:.2f} | {memory:.1f}"
        print(f"| {kind!s:>8} | {what:<28} | {figures} |", flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
