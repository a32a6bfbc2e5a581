"""The sum of token, segment and position embeddings, normalised (Devlin et al. 2019, figure 2); and every other form
of positions: rotary angles, and the distances that some families add to attention scores.

Legend: T tokens, B sequences, E embedding width, H hidden, A heads, D head size, R rates, n tokens of a sequence.
"""

import math

import torch
from torch import Tensor, nn

from everybert.model.attention import Rotary, Watch
from everybert.model.config import FAMILY_TABLES, EncoderConfig
from everybert.model.linear import Linear
from everybert.model.ragged import Ragged


class Embeddings(nn.Module):
    """x = Dropout(LayerNorm(token + segment + position)), projected to H if the tables are narrower (ALBERT)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.embedding_width
        self.offset = config.position_offset
        self.token = nn.Embedding(config.vocab_size, width)
        self.position = self.segment = self.norm = self.projection = None
        if config.positions in ("learned", "sinusoidal"):
            self.position = nn.Embedding(config.position_offset + config.max_positions, width)
            self.position.weight.requires_grad_(config.positions == "learned")
        if config.segments:
            self.segment = nn.Embedding(config.segments, width)
        self.task = nn.Embedding(config.task_types, width) if config.task_types else None
        if config.embedding_norm:
            self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
        self.dropout = nn.Dropout(0.0 if config.family in FAMILY_TABLES["embeddings"]["no_dropout"] else config.dropout)
        self.mask_id = config.mask_id
        if config.embedding_size is not None:  # V·E + E·H parameters instead of V·H
            self.projection = Linear(width, config.hidden_size)

    def forward(self, batch: Ragged, watch: Watch | None = None) -> Tensor:
        """(T) ids → (T, H)."""
        parts = {"token": self.token(batch.tokens_T) if batch.token_TE is None else batch.token_TE}
        if self.mask_id is not None:
            parts["token"] = without_masked(parts["token"], batch, self.mask_id)
        if self.segment is not None:
            if batch.segments_T is not None and self.segment.num_embeddings > 1:
                parts["segment"] = self.segment(batch.segments_T)
            else:
                parts["segment"] = self.segment.weight[0].expand_as(parts["token"])
        if self.position is not None:
            parts["position"] = self.position(batch.positions_T + self.offset)
        if self.task is not None:
            parts["task"] = self.task.weight[0].expand_as(parts["token"])
        x_TE: Tensor = sum(parts.values())  # type: ignore[assignment]
        if watch is not None:
            for name, value in parts.items():
                watch(f"embeddings.{name}", value)
            watch("embeddings.sum", x_TE)
        if self.norm is not None:
            x_TE = self.norm(x_TE)
        x_TE = self.dropout(x_TE)
        x_TH = x_TE if self.projection is None else self.projection(x_TE)
        if watch is not None:
            watch("embeddings", x_TH)
        return x_TH


MASKED = 0.15 * 0.8
"""The share of masked tokens in the pre-training of ESM-2."""


def without_masked(x_TE: Tensor, batch: Ragged, mask_id: int) -> Tensor:
    """Masked tokens as zeros, the others scaled as dropout of masked tokens is (Lin et al. 2023, ESM-2)."""
    real_T1 = (batch.tokens_T != mask_id).float()[:, None]
    share_B1 = batch.reduce(real_T1, "mean")
    return (x_TE * real_T1 * (1 - MASKED) / share_B1[batch.sequence_T]).to(x_TE.dtype)


def sinusoids(rows: int, width: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/E)), PE(pos, 2i+1) = cos(same) (Vaswani et al. 2017, §3.5): (rows, E)."""
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width))
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * rate
    table = torch.empty(rows, width, dtype=torch.float64)
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle.cos()[:, : width // 2]
    return table.float()


def rotary_rates(config: EncoderConfig, theta: float, device: torch.device | None = None) -> Tensor:
    """(D / 2): θ^(−2i/D), divided by the scale and rounded as the configuration says."""
    size = config.head_size
    rate = 1.0 / theta ** (torch.arange(0, size, 2, device=device).float() / size) / config.rotary_scale
    return rate.to(getattr(torch, config.rotary_precision)).float()


def rotary_table(positions_T: Tensor, config: EncoderConfig, theta: float) -> Rotary:
    """The cosines and sines of the rotary angles, position times rate: (T, D) each, in fp32."""
    compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return (cos_sin_once if compiled else cos_sin)(positions_T, rotary_rates(config, theta, positions_T.device))


def cos_sin(positions_T: Tensor, rates_R: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines of all products, twice each: (T, 2 R)."""
    angle = (positions_T[:, None].float() * rates_R).repeat(1, 2)
    return angle.cos(), angle.sin()


cos_sin_once = torch.library.custom_op("everybert::cos_sin", cos_sin, mutates_args=())
"""The same as an operator that torch.compile cannot open: else it computes them anew for every head of every layer."""
cos_sin_once.register_fake(cos_sin)


# ── relative positions: what layers add to attention scores (Encoder._relative) ──────────────────────────────


def gaps(n: int, device: torch.device) -> Tensor:
    """(n, n): i − j."""
    at = torch.arange(n, device=device)
    return at[:, None] - at[None]


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """(A): how much a head's scores fall per token of distance (Press et al. 2022, §3).

    The powers of 2^(−8/A) if A is a power of two; else those of the next lower one, and every other one of the next.
    """
    lower = 2 ** int(math.log2(heads))
    at = torch.arange(heads, device=device, dtype=torch.float64)  # on the device, for recordings
    return torch.exp2(-torch.where(at < lower, 8 * (at + 1), 4 * (2 * (at - lower) + 1)) / lower).float()


def bias_rows(gap: Tensor, buckets: int, far: int) -> Tensor:
    """The bucket of i − j, each with a learnt number per head (Raffel et al. 2020, §2.1).

    Half of the buckets are for each direction; of these, half for exact distances, the others grow logarithmically.
    """
    half, exact = buckets // 2, buckets // 4
    ratio = gap.abs().clamp(min=1).float() / exact
    large = exact + (ratio.log() / math.log(far / exact) * (half - exact)).long()
    return torch.where(gap.abs() < exact, gap.abs(), large.clamp(max=half - 1)) + (gap < 0) * half


def table_rows(gap: Tensor, buckets: int, far: int) -> Tensor:
    """The row of DeBERTa's table for i − j. Half of the buckets are exact, the others grow logarithmically."""
    span, exact = buckets or far, buckets // 2
    if buckets:
        ratio = gap.abs().clamp(min=exact) / exact
        large = (ratio.log() / torch.log(torch.tensor((far - 1) / exact)) * (exact - 1)).ceil().long() + exact
        gap = torch.where(gap.abs() <= exact, gap, large * gap.sign())
    return (gap + span).clamp(0, 2 * span - 1)
