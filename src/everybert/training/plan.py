"""What training costs in arithmetic: the operations of a step, and how much of a machine they use.

Model FLOPs utilisation (Chowdhery et al. 2022, appendix B) counts what the mathematics asks for, forward and
backward, whatever the implementation recomputes.
"""

from __future__ import annotations

from everybert.model.config import EncoderConfig

PEAK = {"h200": 989e12, "h100": 989e12, "a100": 312e12, "l40s": 362e12, "l4": 121e12, "4090": 165e12}
"""Dense bf16 FLOP/s of common GPUs, by the makers' data sheets."""


def flops_per_token(config: EncoderConfig, length: float, masked: float = 0.15) -> float:
    """Operations one token of a training step costs: 6 for each matrix weight it meets, 12·n·H a layer for attention.

    `masked` is the share of tokens that reach the MLM head and its decoder; a sliding window bounds n.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 4 * hidden * hidden + (3 if config.feed_forward == "glu" else 2) * hidden * inner
    total = 6.0 * layer * len(config.layer_order)
    for i in range(config.layers):
        window = config.window(i)
        seen = length if window is None else min(length, 2 * window + 1)
        total += 12.0 * seen * hidden * config.inner_layers
    width = config.embedding_width
    if config.embedding_size is not None:
        total += 6.0 * width * hidden
    return total + 6.0 * masked * (hidden * width + width * config.vocab_size)


def peak_flops(device_name: str) -> float | None:
    """The dense bf16 peak of a device by its name, or None where it is not known."""
    lowered = device_name.lower()
    return next((peak for key, peak in PEAK.items() if key in lowered), None)
