"""Text embeddings whose cosine measures similarity, trained on pairs, triplets or scored pairs.

- pairs and triplets: every other text of the batch is a negative (in-batch negatives; Henderson et al. 2017):
  L = −log softmax(s · cos(aᵢ, pⱼ))ᵢ over all positives and hard negatives j, with scale s = 20;
- scored pairs: CoSENT ranks all pairs of the batch (Su 2022):
  L = log(1 + Σ exp(s · (cos_j − cos_i))) over all i, j with score_i > score_j.

Legend: T tokens in the batch, B sequences, E examples, P positives and hard negatives, H hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everybert.model.config import EncoderConfig
from everybert.model.engine import encode
from everybert.model.heads import Network
from everybert.model.pooling import pool
from everybert.model.ragged import Ragged
from everybert.tasks import dataset, metrics
from everybert.tasks.dataset import Examples, View
from everybert.tasks.features import Features, TaskTargets, constant, text_features
from everybert.tasks.task import Task
from everybert.text.tokenizer import Tokenizer

SCALE = 20.0
"""The factor of cosines in the losses."""


@dataclass(frozen=True, kw_only=True)
class Embed(Task):
    """One vector per text."""

    pooling: Literal["mean", "cls"] = "mean"
    normalize: bool = True
    """Whether vectors are scaled to length 1."""
    scored: bool = False
    """Whether examples are pairs with a score (CoSENT), not pairs and triplets (in-batch negatives)."""

    name = "embed"
    head = None
    metrics = ("recall@1", "mrr")
    window_size = 256
    saved = ("pooling", "normalize")
    view = View(sequences=list, cuts=True)

    read = staticmethod(dataset.read_pairs)
    input_reader = staticmethod(dataset.text_reader)

    @classmethod
    def fit(cls, examples: Examples, pooling: Literal["mean", "cls"] = "mean") -> dict[str, Any]:
        """Whether pairs have scores follows from the examples."""
        return {"pooling": pooling, "scored": examples.targets[0] is not None}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], config: EncoderConfig) -> Self:
        """From the saved values; a model from elsewhere reads its whole window."""
        return super().from_state({"window": {"size": None}, **state}, config)

    def known_metrics(self) -> tuple[str, ...]:
        """Scored pairs are judged by their correlation."""
        return ("spearman", "pearson") if self.scored else self.metrics

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """The two or three texts of an example, one sequence each, truncated at the window; label_E are scores."""
        texts = [text for texts in examples.inputs for text in texts]
        each = text_features(tokenizer, config, texts, replace(self.window, long="cut"), "none")
        scores = {"label_E": np.asarray(examples.targets, dtype=np.float32)} if self.scored else {}
        return each.grouped([len(texts) for texts in examples.inputs]).with_targets(**scores)

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """In-batch negatives, or CoSENT for scored pairs."""
        targets = batch.targets_as(TaskTargets)
        counts = targets.counts
        unit_BH = F.normalize(pool(network.encoder(batch), batch, self.pooling)[: sum(counts)].float(), dim=-1)
        starts = tuple(accumulate(counts, initial=0))[:-1]
        first_E = constant(starts, unit_BH.device)
        if self.scored:
            assert targets.label_E is not None
            return cosent_loss((unit_BH[first_E] * unit_BH[first_E + 1]).sum(-1), targets.label_E)
        hard = constant(tuple(i for s, n in zip(starts, counts) for i in range(s + 2, s + n)), unit_BH.device)
        passages = torch.cat((unit_BH[first_E + 1], unit_BH[hard.long()]))  # all positives, then the hard negatives
        return ranking_loss(unit_BH[first_E], passages)

    def run(self, network: Network, features: Features, budget: int | None = None) -> list[np.ndarray]:
        """The pooled vector of each sequence: (H,)."""
        vectors: dict[int, np.ndarray] = {}
        training = network.training
        network.eval()

        def read(indices: list[int], batch: Ragged, x_TH: Tensor) -> None:
            vectors.update(zip(indices, pool(x_TH, batch, self.pooling).float().cpu().numpy()))

        try:
            encode(network, features, read, budget=budget)
        finally:
            network.train(training)
        return [vectors[i] for i in range(len(features.lengths_S))]

    def score(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """Scored pairs: spearman and pearson of the cosine. Others: recall@1 and mrr among all positives given."""
        vectors = unit(np.stack(self.run(network, features)))
        first = features.first_E1[:-1]
        a, b = vectors[first], vectors[first + 1]
        if self.scored:
            cosine, gold = (a * b).sum(1), np.asarray(examples.targets)
            return {"spearman": metrics.spearman(gold, cosine), "pearson": metrics.pearson(gold, cosine)}
        ranks = np.empty(len(a))
        for i in range(0, len(a), 512):
            part = a[i : i + 512]
            right = (part * b[i : i + 512]).sum(1, keepdims=True)
            ranks[i : i + 512] = (part @ b.T > right + 1e-6).sum(1)
        return {"recall@1": float((ranks == 0).mean()), "mrr": float((1 / (1 + ranks)).mean())}


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def ranking_loss(anchors_EH: Tensor, passages_PH: Tensor, scale: float = SCALE) -> Tensor:
    """Cross-entropy of s · cos(anchor i, passage j), the right passage being j = i. Both are unit vectors."""
    logits_EP = anchors_EH @ passages_PH.T * scale
    return F.cross_entropy(logits_EP, torch.arange(len(anchors_EH), device=logits_EP.device))


def cosent_loss(cosine_E: Tensor, score_E: Tensor, scale: float = SCALE) -> Tensor:
    """log(1 + Σ exp(s · (cos_j − cos_i))) over all i, j with score_i > score_j."""
    gap = scale * (cosine_E[None] - cosine_E[:, None])
    gap = gap.masked_fill(score_E[:, None] <= score_E[None], float("-inf")).flatten()
    return torch.logsumexp(torch.cat((gap.new_zeros(1), gap)), dim=0)
