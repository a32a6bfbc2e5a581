"""The cost of a training run, estimated before it starts: memory, time, money.

Memory is counted. Time follows from the model FLOPs utilisation (MFU): the share of the GPU's peak that is spent on
operations which the mathematics needs (Chowdhery et al. 2022, appendix B). Seven runs on one H200 reached 0.385 to
0.474, one with rotary positions 0.235 (docs/LOG.md); every GPU is assumed to reach the same, within 15 %.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from everybert.errors import EverybertError
from everybert.files import read_json
from everybert.model.config import EncoderConfig, padded_vocabulary
from everybert.model.heads import Network
from everybert.store.huggingface import SkipInit
from everybert.training.recipe import Phase, Recipe, seconds
from everybert.training.rtd import add_generator, generator_of

GPUS: dict[str, dict[str, float]] = read_json(Path(__file__).with_name("gpus.json"))
"""Data sheets: dense bf16 (V100: fp16) FLOP/s, bytes of memory, bytes per second to others, one way (link)."""
MFU = {"rotary": 0.235, "others": 0.43}
"""The share of the peak that training reaches, checkpointing and the network aside, by the kind of positions."""
BESIDE = (("v100", 8), ("tpu-v2", 16), ("tpu-v3", 16), ("a100", 8), ("h100", 8), ("h200", 1))
"""Machines of the past and of today, whose days are printed beside the plan: work shared evenly, at today's MFU."""
NODE, NETWORK = 8, 400e9 / 8
"""GPUs per machine; bytes per second between machines, per GPU, one way: one 400 Gb/s card each."""


@dataclass(frozen=True)
class Machine:
    """The hardware of a run."""

    gpu: str = "h200"
    """Which GPU: h200, h100, a100, v100, l40s, l4 or 4090; tpu-v2 and tpu-v3 count chips."""
    gpus: int = 1
    """Number of GPUs, eight per machine."""
    price: float = 3.5
    """Dollars per GPU hour: an assumption, not an offer."""

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise EverybertError(f"there is no GPU {self.gpu!r} in the table; it has {', '.join(GPUS)}")
        if self.gpus < 1:
            raise EverybertError("give at least one GPU")


def plan(recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """What a run of this recipe needs, as JSON values; memory in GB."""
    if recipe.model.init is not None:
        raise EverybertError("the recipe starts from a folder, whose size is not known here; give [model] a preset")
    config = recipe.config.replace(vocab_size=padded_vocabulary(recipe.config.vocab_size))
    with torch.device("meta"), SkipInit():
        network = Network(config, recipe.heads)
        if recipe.rtd is not None:
            add_generator(network, recipe.rtd)
    parameters = sum(p.numel() for p in network.parameters())

    def phases(machine: Machine, total: int) -> list[dict[str, Any]]:
        return [_phase(recipe, network, parameters, machine, phase, total) for phase in recipe.phases]

    def days(rows: list[dict[str, Any]]) -> float:
        return sum(row["days"] for row in rows)

    rows = phases(machine, recipe.steps or 1_000_000)
    if recipe.budget is not None:  # as many steps as fit the time
        rows = phases(machine, max(1, round(seconds(recipe.budget) / days(rows) / 86400 * 1e6)))
    memory = _memory(recipe, network, parameters)
    steps = sum(row["steps"] for row in rows)
    hours = 24 * machine.gpus * days(rows)
    return {
        "gpu": machine.gpu,
        "gpus": machine.gpus,
        "parameters": parameters,
        "tokens": sum(row["steps"] * row["tokens"] for row in rows),
        "days": days(rows),
        "gpu_hours": hours,
        "dollars": hours * machine.price,
        "phases": rows,
        "memory_gb": memory,
        "days_beside": {f"{n} × {name}": days(phases(Machine(name), steps)) / n for name, n in BESIDE},
        "notes": _notes(recipe, machine, rows, memory["total"]),
    }


def _phase(
    recipe: Recipe, network: Network, parameters: int, machine: Machine, phase: Phase, total: int
) -> dict[str, Any]:
    """Steps, speed, MFU and days of one phase of a run of `total` steps."""
    gpu, packs = GPUS[machine.gpu], max(1, round(sum(phase.tokens) / 2 / recipe.batch.pack))
    busiest = math.ceil(packs / machine.gpus)
    rate = sum(phase.rate or recipe.mask_rate) / 2
    flops = training_flops(network, phase.length, rate)
    again = 4 / 3 if recipe.run.checkpointing else 1  # one more forward pass besides three units of work
    mfu = MFU.get(network.config.positions, MFU["others"])
    compute = busiest * recipe.batch.pack * flops * again / (mfu * gpu["flops"])
    # Over a ring each GPU sends (N − 1)/N of the fp32 gradients twice (all-reduce). It does so after the last pack, so
    # its time adds to that of compute.
    sent = (machine.gpus - 1) / machine.gpus * parameters * 8
    sending = sent / (gpu["link"] if machine.gpus <= NODE else min(gpu["link"], NETWORK))
    step = compute + sending
    speed, steps = packs * recipe.batch.pack / step, round(phase.share * total)
    return {
        "length": phase.length,
        "steps": steps,
        "tokens": packs * recipe.batch.pack,
        "packs": packs,
        "tokens_per_second": speed,
        "mfu": speed * flops / (machine.gpus * gpu["flops"]),
        "network_share": sending / step,
        "days": steps * step / 86400,
    }


def _memory(recipe: Recipe, network: Network, parameters: int) -> dict[str, float]:
    """GB on one GPU by part."""
    config, both = network.config, {network, generator_of(network)}
    matrices = parameters - config.embedding_width * config.vocab_size if recipe.optimizer.kind == "muon" else 0
    parts = {
        "weights": 6 * parameters,  # fp32 and bf16
        "gradients": 6 * parameters,
        "optimizer": 8 * (parameters - matrices) + 4 * matrices,
        "activations": recipe.batch.pack * sum(activation_bytes(n.config, recipe.run.checkpointing) for n in both),
        # fp32 logits and their gradients; a generator samples, which takes as much
        "logits": recipe.batch.pack * max(*recipe.mask_rate, 1 / 8) * config.vocab_size * 8 * len(both),
    }
    return {name: size / 1e9 for name, size in (parts | {"total": sum(parts.values())}).items()}


def _notes(recipe: Recipe, machine: Machine, rows: list[dict[str, Any]], needed: float) -> list[str]:
    """Problems to expect."""
    notes = [
        f"{packs} packs per step do not share out evenly over {machine.gpus} GPUs: "
        f"set batch.pack so that tokens / pack is a multiple of {machine.gpus}"
        for packs in sorted({row["packs"] for row in rows if row["packs"] % machine.gpus})
    ]
    if needed > 0.9 * GPUS[machine.gpu]["memory"] / 1e9:
        notes.append(f"{needed:.0f} GB would not fit: lower batch.pack, or set run.checkpointing = true")
    if any(row["network_share"] > 0.5 for row in rows):
        notes.append("the network takes longer than the computation: use fewer GPUs, or more tokens per step")
    if machine.gpu != "h200":
        notes.append("speeds were measured on an H200: this GPU is assumed to reach the same share of its peak")
    if recipe.distil is not None:
        notes.append("the teacher's forward pass is not counted")
    return notes


# ── operations and memory of a step ─────────────────────────────────────────────────────────────────────────


def peak_flops(device_name: str) -> float | None:
    """The dense bf16 peak of a device by its name, or None if it is not known."""
    return next((gpu["flops"] for key, gpu in GPUS.items() if key in device_name.lower()), None)


def flops_per_token(config: EncoderConfig, length: float, masked: float = 0.15) -> float:
    """Operations per token of a training step: 6 per matrix weight, and 12·n·H per layer for attention to n tokens.

    `masked` is the share of tokens that reach the MLM head and its decoder; a sliding window bounds n.
    """
    width, hidden = config.embedding_width, config.hidden_size
    inner = (3 if config.feed_forward == "glu" else 2) * config.intermediate_size
    layer = (sum(config.qkv_rows) + hidden + inner) * hidden
    factors = width * hidden if config.embedding_size is not None else 0
    head = masked * (hidden * width + width * config.vocab_size)
    reach = (length if (w := config.window(i)) is None else min(length, 2 * w + 1) for i in range(config.layers))
    weights = layer * len(config.layer_order) + factors + head
    return 6.0 * weights + 12.0 * hidden * config.inner_layers * sum(reach)


def training_flops(network: Network, length: float, masked: float) -> float:
    """`flops_per_token` of a network and, with replaced-token detection, of its generator."""
    generator, config = generator_of(network), network.config
    if generator is network:
        return flops_per_token(config, length, masked)
    detection = 6.0 * config.hidden_size**2  # a dense layer, at every token
    return flops_per_token(config, length, 0.0) + detection + flops_per_token(generator.config, length, masked)


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
