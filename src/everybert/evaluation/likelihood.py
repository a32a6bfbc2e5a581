"""Pseudo-log-likelihoods of many texts: PLL(w) = Σ ln P(wᵢ | the other tokens) (Salazar et al. 2020, eq. 1).

A word of several pieces is easy to predict if only one of them is masked. The variant "word" also masks the pieces of
the same word to the right of wᵢ (PLL-word-l2r of Kauf and Ivanova 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from everybert.errors import EverybertError
from everybert.inference.model import Model, pseudo_likelihoods

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
    total: list[float] = []
    for start in range(0, len(texts), CHUNK):
        encodings = model.tokenizer.encode_batch(texts[start : start + CHUNK])
        found = pseudo_likelihoods(model.network, model.tokenizer, encodings, model.window, variant == "word")
        total += [float(values.sum()) for values in found]
        progress(len(total))
    return np.array(total)
