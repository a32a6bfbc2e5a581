"""What a model answers with: plain data, numpy arrays and Python numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Candidate:
    """A token that may stand in a blank."""

    token: str
    """As text; a piece that continues a word keeps WordPiece's ##."""
    score: float
    """Its probability, among the whole vocabulary."""
    id: int = -1
    """Its number in the vocabulary."""


@dataclass(frozen=True)
class TokenVectors:
    """The tokens of a text and one vector for each, the special tokens included."""

    tokens: list[str]
    """As the vocabulary spells them."""
    offsets: list[tuple[int, int]]
    """Where each stands in its text, in characters; (0, 0) for special tokens."""
    vectors: np.ndarray
    """float32 (n, H)."""
    ids: list[int]
    """The tokens' numbers in the vocabulary."""
    segments: list[int]
    """0 in the first text and 1 in the second, where the model tells them apart."""
    layer: int
    """Which layer's output the vectors are; 0 is the embeddings."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class TokenScore:
    """How well the model foresaw one token of a text."""

    token: str
    score: float
    """ln P(token | all other tokens)."""
    start: int
    end: int
    """Where the token stands in the text, in characters."""


@dataclass(frozen=True)
class Score:
    """The pseudo-log-probability of a text (Salazar et al. 2020): Σ ln P(token | the others)."""

    total: float
    tokens: list[TokenScore]

    @property
    def perplexity(self) -> float:
        """exp(−total / n): the number of equally likely tokens the model wavers between."""
        return float(np.exp(-self.total / max(len(self.tokens), 1)))
