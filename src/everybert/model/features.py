"""Feature-based heads: a linear layer on the frozen encoder's last layer, or on its last four, summed or concatenated.

Devlin et al. 2019, §5.3. They are kept apart from heads.py because `transformers` has no such heads: a folder's
everybert.json says that it has one.

Legend: T tokens in the batch, B sequences, H hidden, C labels, F features (H, or 4H where concatenated).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.encoder import initialise
from everybert.model.heads import Network
from everybert.model.pooling import pool
from everybert.model.ragged import Ragged

SEQUENCE_HEADS = ("classify", "choose", "nsp")
LAST = 4
"""How many layers are summed or concatenated."""


@dataclass(frozen=True)
class FeatureConfig:
    """What a feature-based head reads."""

    layers: Literal["last", "sum", "concat"] = "last"
    """The last layer, the sum of the last four, or those four side by side."""
    pool: Literal["mean", "cls"] = "mean"
    """For whole sequences: the mean over tokens, or [CLS]."""

    def __post_init__(self) -> None:
        if self.layers not in ("last", "sum", "concat") or self.pool not in ("mean", "cls"):
            raise EverybertError("feature-based heads read last, sum or concat layers, pooled by mean or cls")


class FeatureHead(nn.Module):
    """dropout → linear on features that nothing trains."""

    def __init__(self, config: EncoderConfig, labels: int, features: FeatureConfig, name: str) -> None:
        super().__init__()
        self.features = features
        self.pooled = name in SEQUENCE_HEADS
        width = config.hidden_size * (min(LAST, config.layers) if features.layers == "concat" else 1)
        rate = config.classifier_dropout if config.classifier_dropout is not None else config.dropout
        self.dropout = nn.Dropout(rate)
        self.output = nn.Linear(width, labels)
        initialise(self, config)

    def read(self, states: Sequence[Tensor], batch: Ragged) -> Tensor:
        """The L + 1 hidden states → (B, F) for whole sequences, (T, F) for tokens."""
        last = states[-min(LAST, len(states) - 1) :]
        if self.features.layers == "last":
            x = states[-1]
        elif self.features.layers == "sum":
            x = torch.stack(list(last)).sum(0)
        else:
            x = torch.cat(list(last), dim=-1)
        if not self.pooled:
            return x
        return pool(x, batch, self.features.pool)

    def forward(self, x: Tensor) -> Tensor:
        """(…, F) → (…, C)."""
        return self.output(self.dropout(x))


def add_feature_head(network: Network, name: str, labels: int, features: FeatureConfig) -> FeatureHead:
    """Put a feature-based head in the place of the family's own."""
    head = FeatureHead(network.config, labels, features, name)
    like = network.encoder.embeddings.token.weight
    network.heads[name] = head.to(like.device, like.dtype)
    return head


def read_features(network: Network, batch: Ragged, name: str) -> Tensor:
    """What the head of that name reads: (B, F) or (T, F)."""
    head = network.heads[name]
    assert isinstance(head, FeatureHead)
    states: list[Tensor] = []
    network.encoder(batch, states)
    return head.read(states, batch)


def head_logits(network: Network, batch: Ragged, name: str) -> Tensor:
    """Encoder and head together: (B, C) for whole sequences, (T, C) for tokens, whatever kind of head it is."""
    head = network.heads[name] if name in network.heads else None
    if isinstance(head, FeatureHead):
        return head(read_features(network, batch, name))
    x_TH = network.encoder(batch)
    if name in SEQUENCE_HEADS:
        return network.sequence_logits(x_TH, batch, name)
    return network.token_logits(x_TH, name)
