"""Replaced-token detection: a small generator fills masked tokens, the model finds those that are wrong.

ELECTRA (Clark et al. 2020) trains both at once, L = L_MLM(generator) + λ L_BCE(model), and shares their embeddings.
The generator learns from the masked tokens, the model from every token of the text with the generator's samples in it.
No gradient passes through a sample, and one that happens to be the original token counts as original. During a run
the generator is a head of the model; then it is a model folder of its own.

DeBERTa v3 (He et al. 2023) shares the embeddings in one direction: where they are tied, the two losses pull them apart.

Legend: T tokens in the batch, M masked positions, V vocabulary, H hidden, E embedding width.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from everybert.corpus.packs import DRAWS
from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.engine import device_of
from everybert.model.heads import Network
from everybert.model.losses import IGNORE, PretrainTargets, cross_entropy
from everybert.model.ragged import Ragged
from everybert.store import config_json
from everybert.training.recipe import RtdSettings


def generator_of(network: Network) -> Network:
    """The network that predicts masked tokens: the model's generator or, without one, the model itself."""
    return cast(Network, network.heads["generator"]) if "generator" in network.heads else network


def generator_config(config: EncoderConfig, settings: RtdSettings) -> EncoderConfig:
    """The configuration of a new generator: narrower or shallower, with embeddings and heads of the same width."""
    hidden, width = round(settings.width * config.hidden_size), config.embedding_width
    try:
        generator = config.replace(
            hidden_size=hidden,
            embedding_size=None if hidden == width else width,
            layers=max(1, round(settings.layers * config.layers)),
            heads=max(1, hidden // config.head_size),
            intermediate_size=round(settings.width * config.intermediate_size),
        )
        config_json.write(generator)  # it will be a folder of its own
    except EverybertError as problem:
        raise EverybertError(f"[rtd] width = {settings.width}: {problem}, or width = 1.0") from None
    return generator


@torch.no_grad()
def add_generator(network: Network, settings: RtdSettings) -> None:
    """Add a new generator to a model and share the embeddings, which begin as the model's."""
    generator = Network(generator_config(network.config, settings), {"mlm": None})
    for name in ("token", "position", "segment", "task", "norm"):
        mine, theirs = (getattr(each.encoder.embeddings, name) for each in (network, generator))
        if mine is not None and settings.sharing == "tied":
            setattr(generator.encoder.embeddings, name, mine)
        elif mine is not None:
            theirs.load_state_dict(mine.state_dict())
            if isinstance(mine, nn.Embedding):
                nn.init.zeros_(mine.weight)
                parametrize.register_parametrization(mine, "weight", Disentangled(theirs))
    network.heads["generator"] = generator


class Disentangled(nn.Module):
    """E = sg(E_G) + Δ: the model reads the generator's table but trains what it adds alone (He et al. 2023, §3.3)."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, delta_VE: Tensor) -> Tensor:
        """Δ → E."""
        return self.table.weight.detach() + delta_VE


def remove_generator(network: Network) -> Network:
    """Take the generator out of a model, whose tables become plain ones; returns it."""
    for part in network.encoder.embeddings.children():
        if parametrize.is_parametrized(part):
            parametrize.remove_parametrizations(part, "weight")
    return cast(Network, network.heads.pop("generator"))


# ── the loss ─────────────────────────────────────────────────────────────────────────────────────────────────


def sample(logits_MV: Tensor, draw_M: Tensor, temperature: float = 1.0) -> Tensor:
    """(M): tokens from softmax(logits / temperature), at the quantiles of the draws, which come with the batch."""
    sum_MV = (logits_MV.detach().float() / temperature).softmax(-1).cumsum(-1)
    quantile_M1 = (draw_M / DRAWS)[:, None] * sum_MV[:, -1:]  # the sum is 1 up to rounding
    return torch.searchsorted(sum_MV, quantile_M1, right=True).squeeze(-1)


def detect(network: Network, batch: Ragged, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (M, V) of the generator, logits (T) of the model on the sampled text, (T) which tokens were replaced."""
    generator, targets = generator_of(network), batch.targets_as(PretrainTargets)
    index_M, label_M, draw_M = targets.mask_index_M, targets.mask_label_M, targets.draw_M
    assert draw_M is not None
    logits_MV = generator.mlm_logits(generator.encoder(batch), index_M)
    used_M = label_M != IGNORE  # unused slots point at token 0, which is never masked, and must not change it
    sample_M = torch.where(used_M, sample(logits_MV, draw_M, temperature), batch.tokens_T[index_M])
    tokens_T = batch.tokens_T.scatter(0, index_M, sample_M)
    replaced_T = torch.zeros_like(tokens_T, dtype=torch.bool).scatter(0, index_M, used_M & (sample_M != label_M))
    x_TH = network.encoder(replace(batch, tokens_T=tokens_T))
    return logits_MV, network.token_logits(x_TH, "rtd").squeeze(-1), replaced_T


def rtd_loss(settings: RtdSettings, network: Network, batch: Ragged) -> tuple[Tensor, Tensor]:
    """Σ −log p(token) / masked + λ Σ −log p(replaced or not) / tokens (Clark et al. 2020, §2); figures (mlm, rtd).

    The sums over this pack are divided by the counts of the step; the figures add up to the loss.
    """
    targets = batch.targets_as(PretrainTargets)
    logits_MV, logits_T, replaced_T = detect(network, batch, settings.temperature)
    mlm = cross_entropy(logits_MV, targets.mask_label_M) / targets.masked
    each_T = F.binary_cross_entropy_with_logits(logits_T.float(), replaced_T.float(), reduction="none")
    real_T = torch.arange(len(each_T), device=each_T.device) < targets.real
    parts = torch.stack((mlm, settings.weight * (each_T * real_T).sum() / targets.tokens))
    return parts.sum(), parts.detach()


@torch.no_grad()
def score_detection(network: Network, packs: Iterable[Ragged]) -> dict[str, float]:
    """Accuracy, precision and recall with which the model finds the tokens that its generator replaced."""
    counts = torch.zeros(5, device=device_of(network.encoder), dtype=torch.float64)
    for pack in packs:
        _, logits_T, replaced_T = detect(network, pack.to(counts.device))
        flagged_T = logits_T > 0
        each = (flagged_T == replaced_T, torch.ones_like(flagged_T), flagged_T & replaced_T, flagged_T, replaced_T)
        counts += torch.stack([x_T.sum() for x_T in each])
    right, tokens, both, flagged, replaced = counts.clamp(min=1).tolist()
    names = ("detection_accuracy", "detection_precision", "detection_recall")
    return dict(zip(names, (right / tokens, both / flagged, both / replaced)))
