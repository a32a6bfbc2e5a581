"""Reranking: a cross-encoder reads a query with a text and gives their relevance, one output.

Trained by the binary cross-entropy of relevance = label / (highest label) over pairs; scored over the texts of each
query. An example is a pair (query, text); the pairs of a query are held out together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from everybert.errors import EverybertError
from everybert.model.heads import Network
from everybert.tasks import dataset, metrics
from everybert.tasks.classify import Regress
from everybert.tasks.dataset import Examples
from everybert.tasks.features import Features

OLDER_KEY = "sbert_ce_default_activation_function"
ACTIVATIONS = {name: getattr(nn, name)() for name in ("Sigmoid", "Identity", "Tanh", "ReLU")}
"""The activations that a folder of sentence-transformers may name; all of them keep the order."""


@dataclass(frozen=True)
class Ranked:
    """One of the texts that were ranked."""

    index: int
    """Its place in the list that was given, from 0."""
    score: float
    """Its relevance to the query; higher is better."""


def relevance(logits: np.ndarray, raw_config: Mapping[str, Any] | None = None) -> np.ndarray:
    """Outputs through the activation that config.json names, as sentence-transformers writes it; else a sigmoid."""
    raw = raw_config or {}
    name = (raw.get("sentence_transformers") or {}).get("activation_fn") or raw.get(OLDER_KEY) or "torch.nn.Sigmoid"
    activation = ACTIVATIONS.get(name.rpartition(".")[2]) if name.startswith("torch.nn.") else None
    if activation is None:
        known = ", ".join(f"torch.nn.{known}" for known in ACTIVATIONS)
        raise EverybertError(f"the folder's activation is {name}; everybert ranks with {known}: change config.json")
    return activation(torch.from_numpy(np.asarray(logits, dtype=float))).numpy()


@dataclass(frozen=True, kw_only=True)
class Rank(Regress):
    """The relevance of texts to a query; predictions are logits."""

    highest: float = 1.0
    """The label of the most relevant texts."""

    name = "rank"
    metrics = ("mrr", "ndcg@10")
    saved = ()  # type: ignore[assignment]
    problem_type = None  # type: ignore[assignment]
    grouped = True

    read = staticmethod(dataset.read_ranked)

    @classmethod
    def fit(cls, examples: Examples) -> dict[str, Any]:
        """The highest label comes from the training examples."""
        if min(examples.targets) == max(examples.targets):
            raise EverybertError(f"{examples.where}: every text is labelled {examples.targets[0]:g}; add other texts")
        return {"highest": float(max(examples.targets))}

    def gold(self, examples: Examples) -> np.ndarray:
        """(E, 1) relevance, at most 1: targets of the binary cross-entropy."""
        labels = np.asarray(examples.targets, dtype=np.float32)[:, None]
        return np.minimum(labels / self.highest, 1.0)

    def score(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """mrr and ndcg@10: means over the queries that have both a relevant text and another."""
        guess, gold = self.example_logits(network, features)[:, 0], np.asarray(examples.targets, dtype=float)
        groups: dict[str, list[int]] = {}
        for i, (query, _) in enumerate(examples.inputs):
            groups.setdefault(query, []).append(i)
        scores = [metrics.ranking_scores(gold[rows], guess[rows]) for rows in groups.values() if np.ptp(gold[rows]) > 0]
        if not scores:
            raise EverybertError(f"{examples.where}: no query has both a relevant text and another; add texts to rank")
        return {name: float(np.mean([query_scores[name] for query_scores in scores])) for name in scores[0]}
