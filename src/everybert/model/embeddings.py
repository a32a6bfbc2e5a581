"""The sum of token, segment and position embeddings, normalised (Devlin et al. 2019, figure 2).

Legend: T tokens in the batch, B sequences, E embedding width, H hidden, D head size.
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
    angle = positions_T[:, None].float() * rotary_rates(config, theta, positions_T.device)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()
