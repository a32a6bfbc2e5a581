"""What training costs before it is paid for: arithmetic, memory, time, network, storage and money.

Model FLOPs utilisation (Chowdhery et al. 2022, appendix B) counts what the mathematics asks for, forward and
backward, whatever the implementation recomputes. Step times come from speed.py, which is fitted to measurements;
memory, network and storage are counted, not measured.

Legend: P parameters, T tokens computed at once, N GPUs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from everybert.corpus.shards import dtype_for
from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.store.huggingface import Unfilled
from everybert.training.convert import ROUND
from everybert.training.recipe import Phase, Recipe, seconds
from everybert.training.speed import GPUS, Gpu, Work, attention_flops, product_flops, step_seconds

PEAK = {name: gpu.flops for name, gpu in GPUS.items()}
"""Dense bf16 FLOP/s of common GPUs, by the makers' data sheets."""
A_NODE = 8
"""GPUs that share a machine and its fast links."""
NETWORK = 400e9 / 8
"""Bytes a second between machines, for each GPU, one way: a 400 Gb/s card each."""
COMPARED = (8, 64, 512)
"""Numbers of GPUs whose traffic is listed."""
TEXT_BYTES, TOKENS_A_WORD = 4.8, 1.3
"""Bytes of English text a token, tokens a word: 4,000 lines of encyclopaedia text, WordPiece of 30,000."""
BUILD_RATE = 36.1e6 / 5.6 / 16
"""Tokens a second that one core builds into a corpus (docs/LOG.md: 36.1M tokens in 5.6 s on 16 cores)."""


def flops_per_token(config: EncoderConfig, length: float, masked: float = 0.15) -> float:
    """Operations one token of a training step costs: 6 for each matrix weight it meets, 12·n·H a layer for attention.

    `masked` is the share of tokens that reach the MLM head and its decoder; a sliding window bounds n.
    """
    return product_flops(config, masked) + attention_flops(config, length)


def peak_flops(device_name: str) -> float | None:
    """The dense bf16 peak of a device by its name, or None where it is not known."""
    lowered = device_name.lower()
    return next((peak for key, peak in PEAK.items() if key in lowered), None)


@dataclass(frozen=True)
class Machine:
    """What there is to train on."""

    gpu: str = "h200"
    gpus: int = 1
    sharded: bool = False
    """Weights, gradients and optimizer state cut into N parts, instead of a copy on each GPU."""
    price: float = 3.5
    """Dollars for a GPU and hour: an assumption, not an offer."""

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise EverybertError(f"there is no GPU {self.gpu!r} in the table; it has {', '.join(GPUS)}")
        if self.gpus < 1:
            raise EverybertError("give at least one GPU")

    @property
    def card(self) -> Gpu:
        """The GPU's figures."""
        return GPUS[self.gpu]

    def link(self, gpus: int) -> float:
        """Bytes a second of the slowest link in a ring over so many GPUs."""
        return self.card.link if gpus <= A_NODE else min(self.card.link, NETWORK)


@dataclass(frozen=True)
class PhasePlan:
    """A part of the run, in one machine's steps."""

    steps: int
    length: int
    tokens: int
    """Tokens a step, over all GPUs."""
    packs: int
    a_gpu: int
    """Packs of the busiest GPU."""
    compute: float
    """Seconds a step: forward, backward, optimizer."""
    network: float
    """Seconds a step: gradients are summed when the last pack is done, so this comes on top."""
    speed: float
    """Tokens a second, over all GPUs."""
    mfu: float
    days: float

    @property
    def step(self) -> float:
        """Seconds a step."""
        return self.compute + self.network


def plan(recipe: Recipe, machine: Machine, corpus_tokens: float | None = None) -> dict[str, Any]:
    """What a run of this recipe needs, as plain data."""
    if recipe.model.init is not None:
        raise EverybertError("the recipe goes on from a folder, whose size is not known here; give [model] a preset")
    config = recipe.config
    config = config.replace(vocab_size=-(-config.vocab_size // ROUND) * ROUND)
    parameters = count_parameters(config, recipe.examples.paired)
    total = recipe.steps or _steps_in(recipe, config, parameters, machine)
    phases = [_phase(recipe, phase, config, parameters, machine, total) for phase in recipe.phases]
    days = sum(phase.days for phase in phases)
    seen = sum(phase.steps * phase.tokens for phase in phases)
    packs = max(phase.packs for phase in phases)
    memory = {
        kind: memory_parts(recipe, config, parameters, machine.gpus, kind == "sharded", packs)
        for kind in ("data parallel", "sharded")
    }
    return {
        "gpu": machine.gpu,
        "gpus": machine.gpus,
        "sharded": machine.sharded,
        "parameters": parameters,
        "memory": memory,
        "memory_of_gpu": machine.card.memory,
        "phases": [asdict(phase) | {"step": phase.step} for phase in phases],
        "network": [_traffic(parameters, machine, n, packs) for n in sorted({*COMPARED, machine.gpus} - {1})],
        "storage": _storage(config, parameters, recipe, corpus_tokens, seen, max(p.speed for p in phases)),
        "tokens": seen,
        "days": days,
        "gpu_hours": days * 24 * machine.gpus,
        "dollars": days * 24 * machine.gpus * machine.price,
        "price": machine.price,
        "notes": _notes(recipe, machine, phases, memory),
    }


def count_parameters(config: EncoderConfig, paired: bool) -> int:
    """P: every number that is trained, heads included."""
    with torch.device("meta"), Unfilled():
        network = Network(config, {"mlm": None, "nsp": None} if paired else {"mlm": None})
    return sum(parameter.numel() for parameter in network.parameters())


def memory_parts(
    recipe: Recipe, config: EncoderConfig, parameters: int, gpus: int, sharded: bool, packs: int
) -> dict[str, float]:
    """Bytes on one GPU by part, while one of a step's `packs` is computed."""
    share = gpus if sharded else 1
    layer = parameters / max(1, len(set(config.layer_order)))
    matrices = parameters - config.embedding_width * config.vocab_size if recipe.optimizer.kind == "muon" else 0
    moments = 8 * (parameters - matrices) + 4 * matrices
    whole_gradients = packs > gpus  # what accumulates over packs is summed over GPUs once, so it is whole until then
    parts = {
        "fp32 weights": 4 * parameters / share,
        "bf16 weights": 2 * (min(2 * layer, parameters) if sharded else parameters),  # gathered by layers, two at once
        "fp32 gradients": 4 * parameters / (1 if whole_gradients else share),
        "bf16 gradients": 2 * (min(2 * layer, parameters) if sharded else parameters),
        "optimizer": moments / share,
        "activations": recipe.batch.pack * activation_bytes(config, recipe.run.checkpointing),
        "logits": recipe.batch.pack * max(recipe.mask_rate + (1 / 8,)) * config.vocab_size * 8,
    }
    return parts | {"total": sum(parts.values())}


def activation_bytes(config: EncoderConfig, checkpointing: bool = False) -> float:
    """Bytes a token that the backward pass needs, in bf16: a layer's input, Q K V, attention's output and its
    log-sum-exp, two sums and their norm, the feed-forward block before and after its activation; Q and K once more
    where they are rotated, and the two halves of a gated block before and after they are multiplied.

    (Korthikanti et al. 2022, §4.1, without attention scores, which flash attention recomputes, and dropout masks.)
    """
    inner = (4 if config.feed_forward == "glu" else 2) * config.intermediate_size
    wide = (9 if config.positions == "rotary" else 7) * config.hidden_size
    layer = 2 * (wide + inner) + 4 * config.heads
    applied = len(config.layer_order)
    return 2 * config.hidden_size * applied + layer if checkpointing else layer * (applied + 1)  # one for its gradients


def traffic_bytes(parameters: int, gpus: int, sharded: bool, packs: int = 1) -> float:
    """Bytes that each GPU sends in a step over a ring of N.

    Copies: an all-reduce of fp32 gradients, 2·(N − 1)/N · 4P. Sharded: bf16 weights are gathered for the forward and
    again for the backward pass of each pack, (N − 1)/N · 2P each, and fp32 gradients scattered once, (N − 1)/N · 4P.
    """
    part = (gpus - 1) / gpus
    return part * parameters * (4 + 4 * packs if sharded else 8)


def _phase(
    recipe: Recipe, phase: Phase, config: EncoderConfig, parameters: int, machine: Machine, total: int
) -> PhasePlan:
    pack = recipe.batch.pack
    packs = max(1, round(sum(phase.tokens) / 2 / pack))
    a_gpu = math.ceil(packs / machine.gpus)
    rate = sum(phase.rate or recipe.mask_rate) / 2
    work = Work(config, phase.length, a_gpu * pack, rate, recipe.optimizer.kind == "muon")
    passes, optimizer = step_seconds(work, machine.card)
    if recipe.run.checkpointing:
        passes *= 4 / 3  # one more forward pass beside three of work
    if machine.sharded:
        optimizer /= machine.gpus
    sent = traffic_bytes(parameters, machine.gpus, machine.sharded, a_gpu)
    compute, network = passes + optimizer, sent / machine.link(machine.gpus)
    steps, tokens = round(phase.share * total), packs * pack
    speed = tokens / (compute + network)
    mfu = speed * flops_per_token(config, phase.length, rate) / (machine.gpus * machine.card.flops)
    days = steps * (compute + network) / 86400
    return PhasePlan(steps, phase.length, tokens, packs, a_gpu, compute, network, speed, mfu, days)


def _steps_in(recipe: Recipe, config: EncoderConfig, parameters: int, machine: Machine) -> int:
    """How many steps fit a budget of time."""
    assert recipe.budget is not None
    million = [_phase(recipe, phase, config, parameters, machine, 1_000_000) for phase in recipe.phases]
    return max(1, round(seconds(recipe.budget) / (sum(phase.days for phase in million) * 86400) * 1e6))


def _traffic(parameters: int, machine: Machine, gpus: int, packs: int) -> dict[str, Any]:
    row: dict[str, Any] = {"gpus": gpus, "link": machine.link(gpus)}
    for name, sharded in (("data parallel", False), ("sharded", True)):
        sent = traffic_bytes(parameters, gpus, sharded, math.ceil(packs / gpus))
        row[name] = {"bytes": sent, "seconds": sent / machine.link(gpus)}
    return row


def _storage(
    config: EncoderConfig, parameters: int, recipe: Recipe, corpus: float | None, seen: float, speed: float
) -> dict[str, float]:
    """Bytes on disk and what is read of them a second; a checkpoint is fp32 weights and moments."""
    width = dtype_for(config.vocab_size).itemsize
    kept = recipe.run.keep + 1
    out = {"read": speed * width, "checkpoint": 12.0 * parameters, "checkpoints": 12.0 * parameters * kept}
    out["model"] = 4.0 * parameters
    if corpus is not None:
        out |= {"tokens": corpus, "text": corpus * TEXT_BYTES, "shards": corpus * width, "epochs": seen / corpus}
        out["build_core_hours"] = corpus / BUILD_RATE / 3600
    return out


def _notes(recipe: Recipe, machine: Machine, phases: list[PhasePlan], memory: dict[str, dict[str, float]]) -> list[str]:
    """What would surprise whoever runs this."""
    notes = []
    idle = {phase.packs for phase in phases if phase.packs % machine.gpus}
    for packs in sorted(idle):
        short = f"{packs} packs a step do not share out evenly over {machine.gpus} GPUs"
        notes.append(f"{short}: set batch.pack so that tokens / pack is a multiple of {machine.gpus}")
    needed = memory["sharded" if machine.sharded else "data parallel"]["total"]
    if needed > 0.9 * machine.card.memory:
        notes.append(f"{needed / 1e9:.0f} GB would not fit: lower batch.pack, or set run.checkpointing = true")
    if any(phase.network > phase.compute for phase in phases):
        notes.append("GPUs would wait for the network longer than they compute: use fewer, or more tokens a step")
    if machine.gpu != "h200":
        notes.append("speeds were measured on an H200: this GPU is taken to reach the same share of its data sheet")
    if machine.sharded and recipe.optimizer.kind == "muon":
        notes.append("Muon needs whole matrices: copy the model (leave out --sharded), or use AdamW")
    if recipe.distil is not None:
        notes.append("the teacher's forward pass is not counted")
    return notes
