"""SpanBERT's boundary objective (Joshi et al. 2020, §3.2): a span's words from the two tokens around it.

h = LN(GELU(W₁ [x_left; x_right; p])), y = LN(GELU(W₂ h)), with p an embedding of the word's place in its span; y goes
through the MLM decoder. The head is for training alone: it is kept in checkpoints, not in the finished model.

Legend: T tokens in the batch, M masked positions, H hidden, E embedding width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everybert.model.config import EncoderConfig
from everybert.model.encoder import initialise
from everybert.model.heads import MaskedLM, Network
from everybert.model.ragged import Ragged
from everybert.training.step import word_and_pair_losses

PLACES = 32
"""Places within a span that have an embedding of their own; later ones share the last."""
PLACE_WIDTH = 200
"""Width of that embedding, as in the paper."""


class Boundary(nn.Module):
    """[left; right; place] → what the MLM decoder reads."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.embedding_width
        self.place = nn.Embedding(PLACES, PLACE_WIDTH)
        self.first = nn.Linear(2 * hidden + PLACE_WIDTH, hidden)
        self.first_norm = nn.LayerNorm(hidden, eps=config.norm_eps)
        self.second = nn.Linear(hidden, width)
        self.second_norm = nn.LayerNorm(width, eps=config.norm_eps)

    def forward(self, left_MH: Tensor, right_MH: Tensor, place_M: Tensor) -> Tensor:
        """(M, H), (M, H), (M) → (M, E)."""
        place_MP = self.place(place_M.clamp(max=PLACES - 1))
        h_MH = self.first_norm(F.gelu(self.first(torch.cat((left_MH, right_MH, place_MP), dim=-1))))
        return self.second_norm(F.gelu(self.second(h_MH)))


def add_boundary(network: Network) -> None:
    """Put a fresh boundary head on the network."""
    head = Boundary(network.config)
    initialise(head, network.config)
    network.heads["boundary"] = head


def boundary_loss(network: Network, batch: Ragged) -> tuple[Tensor, Tensor]:
    """The pre-training loss plus Σ −log p(word | boundary) / masked; figures (mlm, nsp, boundary)."""
    x_TH, extra = network.encoder(batch), batch.extra
    loss, figures = word_and_pair_losses(network, x_TH, batch)
    y_ME = network.heads["boundary"](x_TH[extra["span_left"]], x_TH[extra["span_right"]], extra["span_place"])
    head = network.heads["mlm"]
    assert isinstance(head, MaskedLM)
    table_VE = network.encoder.embeddings.token.weight if head.decoder is None else head.decoder.weight
    logits_MV = F.linear(y_ME, table_VE, head.bias).float()
    boundary = F.cross_entropy(logits_MV, extra["mask_label"], ignore_index=-100, reduction="sum") / extra["masked"]
    return loss + boundary, torch.cat((figures, boundary.detach()[None]))
