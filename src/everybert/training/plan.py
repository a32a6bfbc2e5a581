"""The cost of a training run, estimated before it starts: arithmetic, memory, time, network, storage, money.

Memory, network and storage are counted. The time of a step is a sum of parts (matrix products, attention, …), each
the time at the peak of the data sheet multiplied by a factor from rates.json, which benchmarks/fit_rates.py fits to
measurements on one H200. Other GPUs are assumed to reach the same share of their peak. Model FLOPs utilisation (MFU)
counts the operations that the mathematics needs, whatever is recomputed (Chowdhery et al. 2022, appendix B).

Legend: P parameters, N GPUs.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import torch

from everybert.corpus.shards import dtype_for
from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.store.convert import padded_vocabulary
from everybert.store.huggingface import SkipInit
from everybert.training.recipe import Phase, Recipe, seconds


class Gpu(NamedTuple):
    """The data sheet of a GPU."""

    flops: float
    """Dense bf16 FLOP/s."""
    bandwidth: float
    """Bytes per second to and from its memory."""
    memory: float
    """Bytes."""
    link: float
    """Bytes per second to its neighbours in the same machine, one way: NVLink, or PCIe where there is none."""


_FILE = json.loads(resources.files(__package__).joinpath("rates.json").read_text("utf-8"))
GPUS = {name: Gpu(**values) for name, values in _FILE["gpus"].items()}
FACTORS: dict[str, float] = _FILE["factors"]
"""Seconds of each part of a step, as a multiple of its seconds at the peak."""

NODE = 8
"""GPUs that share a machine and its fast links."""
NETWORK = 400e9 / 8
"""Bytes per second between machines, per GPU, one way: one 400 Gb/s card each."""
COMPARED = (8, 64, 512)
"""Numbers of GPUs whose traffic is listed."""
TEXT_BYTES, TOKENS_PER_WORD = 4.8, 1.3
"""Bytes of English text per token, tokens per word: 4,000 lines of encyclopaedia text, WordPiece of 30,000."""
BUILD_RATE = 36.1e6 / 5.6 / 16
"""Tokens per second that one core builds into a corpus (docs/LOG.md: 36.1M tokens in 5.6 s on 16 cores)."""
OPTIMIZER_BYTES = 52
"""Memory traffic per parameter and step: gradient to fp32 (6), norm and clipping (12), AdamW (28), bf16 copy (6)."""
LOGIT_BYTES = 12
"""Memory traffic per logit: written, read for the loss and for its gradient, which two products read."""


# ── operations and time ──────────────────────────────────────────────────────────────────────────────────────


def peak_flops(device_name: str) -> float | None:
    """The dense bf16 peak of a device by its name, or None if it is not known."""
    return next((gpu.flops for key, gpu in GPUS.items() if key in device_name.lower()), None)


def flops_per_token(config: EncoderConfig, length: float, masked: float = 0.15) -> float:
    """Operations per token of a training step: 6 per matrix weight, 12·n·H per layer for attention.

    `masked` is the share of tokens that reach the MLM head and its decoder; a sliding window bounds n.
    """
    return product_flops(config, masked) + attention_flops(config, length)


def layer_weights(config: EncoderConfig) -> int:
    """Matrix weights of one layer."""
    hidden = config.hidden_size
    return 4 * hidden * hidden + (3 if config.feed_forward == "glu" else 2) * hidden * config.intermediate_size


def product_flops(config: EncoderConfig, masked: float) -> float:
    """Operations per token in matrix products, forward and backward: 6 per weight."""
    width, hidden = config.embedding_width, config.hidden_size
    factors = width * hidden if config.embedding_size is not None else 0
    head = masked * (hidden * width + width * config.vocab_size)
    return 6.0 * (layer_weights(config) * len(config.layer_order) + factors + head)


def attention_flops(config: EncoderConfig, length: float) -> float:
    """Operations per token in attention, forward and backward: 12·n·H per layer; a sliding window bounds n."""
    seen = (length if (w := config.window(i)) is None else min(length, 2 * w + 1) for i in range(config.layers))
    return 12.0 * config.hidden_size * config.inner_layers * sum(seen)


def muon_flops(config: EncoderConfig) -> float:
    """Operations per step in five Newton–Schulz iterations: 4m²n + 2m³ per m × n matrix of a layer, m ≤ n."""
    hidden, inner = config.hidden_size, config.intermediate_size
    first = (2 if config.feed_forward == "glu" else 1) * inner
    shapes = [sorted((hidden, width)) for width in (*(hidden,) * 4, first, inner)]
    return 5.0 * sum(4 * m * m * n + 2 * m**3 for m, n in shapes) * len(set(config.layer_order))


@dataclass(frozen=True)
class Work:
    """What one GPU computes in a step."""

    config: EncoderConfig
    length: float
    """Tokens that a token attends to: the length of the sequences, Σn² / Σn where they differ."""
    tokens: int
    masked: float = 0.15
    muon: bool = False

    def at_peak(self, gpu: Gpu) -> dict[str, float]:
        """Seconds of each part of the step if the GPU reached its peak."""
        config = self.config
        positions = config.max_positions if config.positions == "learned" else 0
        tables = config.embedding_width * (config.vocab_size + positions)
        parameters = len(set(config.layer_order)) * layer_weights(config) + tables  # biases and norms are few
        wide = 2.0 * len(config.layer_order) * (config.hidden_size + config.intermediate_size) / gpu.bandwidth
        return {
            "products": self.tokens * product_flops(config, self.masked) / gpu.flops,
            "logits": self.tokens * self.masked * config.vocab_size * LOGIT_BYTES / gpu.bandwidth,
            "attention": self.tokens * attention_flops(config, self.length) / gpu.flops,
            "elementwise": self.tokens * wide,
            "dropout": self.tokens * wide if config.dropout or config.attention_dropout else 0.0,
            "optimizer": OPTIMIZER_BYTES * parameters / gpu.bandwidth,
            "muon": muon_flops(config) / gpu.flops if self.muon else 0.0,
        }


def step_seconds(work: Work, gpu: Gpu = GPUS["h200"], factors: dict[str, float] = FACTORS) -> tuple[float, float]:
    """(seconds of forward and backward, seconds of the optimizer) of a step on one GPU."""
    parts = {name: factors[name] * value for name, value in work.at_peak(gpu).items()}
    optimizer = parts["optimizer"] + parts["muon"]
    return sum(parts.values()) - optimizer, optimizer


# ── memory and network ───────────────────────────────────────────────────────────────────────────────────────


def count_parameters(config: EncoderConfig, heads: dict[str, int | None]) -> int:
    """P: every trained number, heads included."""
    with torch.device("meta"), SkipInit():
        network = Network(config, heads)
    return sum(parameter.numel() for parameter in network.parameters())


def activation_bytes(config: EncoderConfig, checkpointing: bool = False) -> float:
    """Bytes per token that the backward pass needs, in bf16: a layer's input, Q K V, attention's output and its
    log-sum-exp, two sums and their norm, the feed-forward block before and after its activation; Q and K once more
    if they are rotated, and the two halves of a gated block before and after they are multiplied.

    (Korthikanti et al. 2022, §4.1, without attention scores, which flash attention recomputes, and dropout masks.)
    """
    inner = (4 if config.feed_forward == "glu" else 2) * config.intermediate_size
    wide = (9 if config.positions == "rotary" else 7) * config.hidden_size
    layer = 2 * (wide + inner) + 4 * config.heads
    applied = len(config.layer_order)
    return 2 * config.hidden_size * applied + layer if checkpointing else layer * (applied + 1)  # one for its gradients


def traffic_bytes(parameters: int, gpus: int, sharded: bool, packs: int = 1) -> float:
    """Bytes that each GPU sends per step over a ring of N.

    Data parallel: an all-reduce of fp32 gradients, 2·(N − 1)/N · 4P. Sharded: bf16 weights are gathered for the
    forward and again for the backward pass of each pack, (N − 1)/N · 2P each, and fp32 gradients scattered once,
    (N − 1)/N · 4P.
    """
    return (gpus - 1) / gpus * parameters * (4 + 4 * packs if sharded else 8)


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Machine:
    """The hardware of a run."""

    gpu: str = "h200"
    """Which GPU: h200, h100, a100, l40s, l4 or 4090."""
    gpus: int = 1
    """Number of GPUs, eight per machine."""
    sharded: bool = False
    """Shard weights, gradients and optimizer state over the GPUs, instead of a copy on each."""
    price: float = 3.5
    """Dollars per GPU hour: an assumption, not an offer."""

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise EverybertError(f"there is no GPU {self.gpu!r} in the table; it has {', '.join(GPUS)}")
        if self.gpus < 1:
            raise EverybertError("give at least one GPU")

    @property
    def card(self) -> Gpu:
        """The data sheet of the GPU."""
        return GPUS[self.gpu]

    def link(self, gpus: int) -> float:
        """Bytes per second of the slowest link in a ring over this many GPUs."""
        return self.card.link if gpus <= NODE else min(self.card.link, NETWORK)


def plan(recipe: Recipe, machine: Machine, corpus_tokens: float | None = None) -> dict[str, Any]:
    """What a run of this recipe needs, as JSON values."""
    if recipe.model.init is not None:
        raise EverybertError("the recipe starts from a folder, whose size is not known here; give [model] a preset")
    config = recipe.config.replace(vocab_size=padded_vocabulary(recipe.config.vocab_size))
    run = Planned(recipe, config, count_parameters(config, recipe.heads), machine)
    total = recipe.steps
    if total is None:  # as many steps as fit the time
        million = sum(run.phase(phase, 1_000_000)["days"] for phase in recipe.phases) * 86400
        total = max(1, round(seconds(recipe.budget or "") / million * 1e6))
    phases = [run.phase(phase, total) for phase in recipe.phases]
    days = sum(phase["days"] for phase in phases)
    seen = sum(phase["steps"] * phase["tokens"] for phase in phases)
    packs = max(phase["packs"] for phase in phases)
    memory = {kind: run.memory(kind == "sharded", packs) for kind in ("data parallel", "sharded")}
    return {
        "gpu": machine.gpu,
        "gpus": machine.gpus,
        "sharded": machine.sharded,
        "parameters": run.parameters,
        "memory": memory,
        "memory_of_gpu": machine.card.memory,
        "phases": phases,
        "network": [run.traffic(n, packs) for n in sorted({*COMPARED, machine.gpus} - {1})],
        "storage": run.storage(corpus_tokens, seen, max(phase["speed"] for phase in phases)),
        "tokens": seen,
        "days": days,
        "gpu_hours": days * 24 * machine.gpus,
        "dollars": days * 24 * machine.gpus * machine.price,
        "price": machine.price,
        "notes": run.notes(phases, memory),
    }


@dataclass(frozen=True)
class Planned:
    """A recipe on a machine."""

    recipe: Recipe
    config: EncoderConfig
    parameters: int
    machine: Machine

    def phase(self, phase: Phase, total: int) -> dict[str, Any]:
        """Steps, step time in seconds, tokens per second, MFU and days of one phase of a run of `total` steps."""
        recipe, machine = self.recipe, self.machine
        packs = max(1, round(sum(phase.tokens) / 2 / recipe.batch.pack))
        busiest = math.ceil(packs / machine.gpus)
        rate = sum(phase.rate or recipe.mask_rate) / 2
        work = Work(self.config, phase.length, busiest * recipe.batch.pack, rate, recipe.optimizer.kind == "muon")
        passes, optimizer = step_seconds(work, machine.card)
        if recipe.run.checkpointing:
            passes *= 4 / 3  # one more forward pass besides three units of work
        compute = passes + optimizer / (machine.gpus if machine.sharded else 1)
        # Gradients are summed once the last pack is done, so the network's time is added to the computation's.
        network = traffic_bytes(self.parameters, machine.gpus, machine.sharded, busiest) / machine.link(machine.gpus)
        step, steps, tokens = compute + network, round(phase.share * total), packs * recipe.batch.pack
        flops = flops_per_token(self.config, phase.length, rate)
        return {
            "steps": steps,
            "length": phase.length,
            "tokens": tokens,
            "packs": packs,
            "a_gpu": busiest,
            "compute": compute,
            "network": network,
            "speed": tokens / step,
            "mfu": tokens / step * flops / (machine.gpus * machine.card.flops),
            "days": steps * step / 86400,
            "step": step,
        }

    def memory(self, sharded: bool, packs: int) -> dict[str, float]:
        """Bytes on one GPU by part, during one of the `packs` of a step."""
        recipe, config, parameters = self.recipe, self.config, self.parameters
        share = self.machine.gpus if sharded else 1
        layer = parameters / max(1, len(set(config.layer_order)))
        gathered = min(2 * layer, parameters) if sharded else parameters  # layer by layer, two at once
        matrices = parameters - config.embedding_width * config.vocab_size if recipe.optimizer.kind == "muon" else 0
        accumulated = packs > self.machine.gpus  # whole until the last pack, then summed over GPUs
        parts = {
            "fp32 weights": 4 * parameters / share,
            "bf16 weights": 2 * gathered,
            "fp32 gradients": 4 * parameters / (1 if accumulated else share),
            "bf16 gradients": 2 * gathered,
            "optimizer": (8 * (parameters - matrices) + 4 * matrices) / share,
            "activations": recipe.batch.pack * activation_bytes(config, recipe.run.checkpointing),
            "logits": recipe.batch.pack * max(*recipe.mask_rate, 1 / 8) * config.vocab_size * 8,
        }
        return parts | {"total": sum(parts.values())}

    def traffic(self, gpus: int, packs: int) -> dict[str, Any]:
        """Bytes and seconds per step on a ring of GPUs, with copies of the model and with shards."""
        link = self.machine.link(gpus)
        row: dict[str, Any] = {"gpus": gpus, "link": link}
        for name, sharded in (("data parallel", False), ("sharded", True)):
            sent = traffic_bytes(self.parameters, gpus, sharded, math.ceil(packs / gpus))
            row[name] = {"bytes": sent, "seconds": sent / link}
        return row

    def storage(self, corpus: float | None, seen: float, speed: float) -> dict[str, float]:
        """Bytes on disk, and bytes per second that training reads; a checkpoint is fp32 weights and moments."""
        width = dtype_for(self.config.vocab_size).itemsize
        checkpoint = 12.0 * self.parameters
        out = {"read": speed * width, "checkpoint": checkpoint, "checkpoints": checkpoint * (self.recipe.run.keep + 1)}
        out["model"] = 4.0 * self.parameters
        if corpus is not None:
            out |= {"tokens": corpus, "text": corpus * TEXT_BYTES, "shards": corpus * width, "epochs": seen / corpus}
            out["build_core_hours"] = corpus / BUILD_RATE / 3600
        return out

    def notes(self, phases: list[dict[str, Any]], memory: dict[str, dict[str, float]]) -> list[str]:
        """Problems to expect."""
        gpus, needed = self.machine.gpus, memory["sharded" if self.machine.sharded else "data parallel"]["total"]
        notes = [
            f"{packs} packs per step do not share out evenly over {gpus} GPUs: "
            f"set batch.pack so that tokens / pack is a multiple of {gpus}"
            for packs in sorted({phase["packs"] for phase in phases if phase["packs"] % gpus})
        ]
        if needed > 0.9 * self.machine.card.memory:
            notes.append(f"{needed / 1e9:.0f} GB would not fit: lower batch.pack, or set run.checkpointing = true")
        if any(phase["network"] > phase["compute"] for phase in phases):
            notes.append("the network takes longer than the computation: use fewer GPUs, or more tokens per step")
        if self.machine.gpu != "h200":
            notes.append("speeds were measured on an H200: this GPU is assumed to reach the same share of its peak")
        if self.machine.sharded and self.recipe.optimizer.kind == "muon":
            notes.append("Muon needs whole matrices: leave out --sharded, or use AdamW")
        if self.recipe.distil is not None:
            notes.append("the teacher's forward pass is not counted")
        return notes
