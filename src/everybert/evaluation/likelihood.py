"""Pseudo-log-likelihoods of many texts: PLL(w) = Σ ln P(wᵢ | the other tokens) (Salazar et al. 2020, eq. 1).

A word of several pieces is easy to predict if only one of them is masked. The variant "word" also masks the pieces of
the same word to the right of wᵢ (PLL-word-l2r of Kauf and Ivanova 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from everybert.errors import EverybertError
from everybert.inference.masks import mask_id, pieces_of
from everybert.inference.model import Model
from everybert.model.likelihood import token_log_probs

Variant = Literal["token", "word"]
CHUNK = 1024
"""Texts whose masked copies are held at once."""


def likelihoods(
    model: Model,
    texts: Sequence[str],
    variant: Variant = "token",
    progress: Callable[[int], None] = lambda texts: None,
) -> np.ndarray:
    """The pseudo-log-likelihood of each text, (texts,) float64. `progress` is called with the number done."""
    if variant not in ("token", "word"):
        raise EverybertError(f"pseudo-log-likelihoods mask by token or word, not {variant!r}")
    mask, total = mask_id(model.tokenizer), np.zeros(len(texts))
    for start in range(0, len(texts), CHUNK):
        part = texts[start : start + CHUNK]
        rows: list[tuple[int, Sequence[int], list[int], list[int]]] = []  # text, ids, positions, ends
        for number, encoding in enumerate(model.tokenizer.encode_batch(part), start):
            for piece in pieces_of(encoding, model.window):
                at = range(piece.at, piece.at + piece.stop - piece.start)
                own = [i for i in at if not encoding.special[i]]  # a long text is scored in windows
                ends = [piece.index(_end(encoding.words, i, at.stop) if variant == "word" else i + 1) for i in own]
                rows.append((number, piece.ids, [piece.index(i) for i in own], ends))
        values = token_log_probs(model.network, *zip(*[row[1:3] for row in rows]), mask, [row[3] for row in rows])
        for row, found in zip(rows, values):
            total[row[0]] += found.sum()
        progress(start + len(part))
    return total


def _end(words: Sequence[int | None], token: int, stop: int) -> int:
    """The index after the last piece, before `stop`, of a token's word."""
    return next((i for i in range(token, stop) if words[i] != words[token]), stop)
