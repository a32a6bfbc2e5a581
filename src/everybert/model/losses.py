"""Losses of pre-training and of labels, and the targets that pre-training reads from a batch; see tasks/ for others.

Every loss of pre-training is a sum over the batch divided by a count of the whole *step*, so that packs, gradient
accumulation and ranks add up to the loss of one large batch.

Legend: T tokens in the batch, B sequences, M masked positions, V vocabulary, H hidden, E embedding width, P width of a
position within a span, C labels.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everybert.model.config import EncoderConfig
from everybert.model.encoder import initialise
from everybert.model.heads import MaskedLM, Network
from everybert.model.linear import Linear, linear
from everybert.model.ragged import Ragged, Targets

IGNORE = -100
"""The label of positions and pairs that do not count."""


@dataclass(frozen=True)
class PretrainTargets(Targets):
    """What pre-training predicts: masked tokens, and the label of each sentence pair."""

    mask_index_M: Tensor
    """int64: the masked positions, as indices into the batch's tokens."""
    mask_label_M: Tensor
    """int64: the tokens that were there; IGNORE does not count."""
    pair_label_B: Tensor | None = None
    """int64: 0 next or in order, 1 random or swapped, IGNORE no pair."""
    span_left_M: Tensor | None = None
    """int64: the index of the token before the span of each masked position; None without spans."""
    span_right_M: Tensor | None = None
    """int64: the index of the token after that span."""
    span_place_M: Tensor | None = None
    """int64: the position within that span, from 1."""
    draw_M: Tensor | None = None
    """int64: a uniform number below corpus.packs.DRAWS, for a generator to sample a token with."""
    real: Tensor = field(default_factory=lambda: torch.tensor(1 << 62))
    """0-d: the number of tokens; those after it fill the batch up to a constant size."""
    masked: Tensor = field(default_factory=lambda: torch.tensor(1.0))
    """0-d: masked tokens of the step."""
    pairs: Tensor = field(default_factory=lambda: torch.tensor(1.0))
    """0-d: labelled pairs of the step."""
    tokens: Tensor = field(default_factory=lambda: torch.tensor(1.0))
    """0-d: tokens of the step."""

    def of_step(self, counts: Tensor) -> "PretrainTargets":
        """The same targets with the step's (masked tokens, labelled pairs, tokens)."""
        masked, pairs, tokens = counts.unbind()
        return replace(self, masked=masked, pairs=pairs, tokens=tokens)


# ── masked tokens and sentence pairs ─────────────────────────────────────────────────────────────────────────


def pretrain_loss(network: Network, batch: Ragged) -> tuple[Tensor, Tensor]:
    """Masked LM plus, where pairs are labelled, next sentence or sentence order; figures (mlm, nsp).

    L = Σ −log p(token) / masked + Σ −log p(pair) / pairs (Devlin et al. 2019, §3.1).
    """
    return token_and_pair_losses(network, network.encoder(batch), batch)


def token_and_pair_losses(network: Network, x_TH: Tensor, batch: Ragged) -> tuple[Tensor, Tensor]:
    """`pretrain_loss` from the hidden states: (loss, figures to log)."""
    targets = batch.targets_as(PretrainTargets)
    logits_MV = network.mlm_logits(x_TH, targets.mask_index_M)
    loss = mlm = cross_entropy(logits_MV, targets.mask_label_M) / targets.masked
    nsp = torch.zeros_like(mlm)
    if "nsp" in network.heads and targets.pair_label_B is not None:
        logits_B2 = network.sequence_logits(x_TH, batch, "nsp")
        nsp = cross_entropy(logits_B2, targets.pair_label_B) / targets.pairs
        loss = loss + nsp
    return loss, torch.stack((mlm.detach(), nsp.detach()))


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Σ −log p(label), in fp32; IGNORE does not count."""
    return F.cross_entropy(logits.float(), label, ignore_index=IGNORE, reduction="sum")


# ── SpanBERT's boundary objective ────────────────────────────────────────────────────────────────────────────


class Boundary(nn.Module):
    """Predicts the tokens of a span from the two tokens around it (Joshi et al. 2020, §3.2).

    h = LN(GELU(W₁ [x_left; x_right; p])), y = LN(GELU(W₂ h)), with p an embedding of the position within the span;
    y goes through the MLM decoder. The head is used in training only: checkpoints have it, finished models do not.
    """

    PLACES = 32
    """Positions within a span with an embedding of their own; later ones share the last."""
    PLACE_WIDTH = 200
    """Width of that embedding, as in the paper."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.embedding_width
        self.place = nn.Embedding(self.PLACES, self.PLACE_WIDTH)
        self.first = Linear(2 * hidden + self.PLACE_WIDTH, hidden)
        self.first_norm = nn.LayerNorm(hidden, eps=config.norm_eps)
        self.second = Linear(hidden, width)
        self.second_norm = nn.LayerNorm(width, eps=config.norm_eps)
        initialise(self, config)

    def forward(self, left_MH: Tensor, right_MH: Tensor, place_M: Tensor) -> Tensor:
        """(M, H), (M, H), (M) → (M, E)."""
        place_MP = self.place(place_M.clamp(max=self.PLACES - 1))
        h_MH = self.first_norm(F.gelu(self.first(torch.cat((left_MH, right_MH, place_MP), dim=-1))))
        return self.second_norm(F.gelu(self.second(h_MH)))


def boundary_loss(network: Network, batch: Ragged) -> tuple[Tensor, Tensor]:
    """The pre-training loss plus Σ −log p(token | boundary) / masked; figures (mlm, nsp, boundary)."""
    x_TH, targets = network.encoder(batch), batch.targets_as(PretrainTargets)
    loss, figures = token_and_pair_losses(network, x_TH, batch)
    y_ME = network.heads["boundary"](x_TH[targets.span_left_M], x_TH[targets.span_right_M], targets.span_place_M)
    head = network.heads["mlm"]
    assert isinstance(head, MaskedLM)
    table_VE = network.encoder.embeddings.token.weight if head.decoder is None else head.decoder.weight
    boundary = cross_entropy(linear(y_ME, table_VE, head.bias), targets.mask_label_M) / targets.masked
    return loss + boundary, torch.cat((figures, boundary.detach()[None]))


def label_loss(logits_BC: Tensor, labels: Tensor, weight_C: Tensor | None = None) -> Tensor:
    """Cross-entropy of class numbers (B), binary cross-entropy of shares (B, C), squared error of numbers (B)."""
    logits_BC = logits_BC.float()
    if not labels.is_floating_point():
        return F.cross_entropy(logits_BC, labels, weight=weight_C)
    if labels.dim() == 2:
        return F.binary_cross_entropy_with_logits(logits_BC, labels, pos_weight=weight_C)
    return F.mse_loss(logits_BC.squeeze(-1), labels)
