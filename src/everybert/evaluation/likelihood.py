"""Pseudo-log-likelihoods of many texts at once: each token masked in turn and foreseen from the others.

PLL(w) = Σ ln P(wᵢ | the others) (Salazar et al. 2020, eq. 1). A word of several pieces gives itself away where only one
of them is masked; "word" masks also the pieces of the same word to the right of wᵢ (PLL-word-l2r of Kauf and Ivanova
2023). Masked copies of one length make rectangular batches, and only masked positions are decoded.

Legend: R masked copies, n tokens of a copy, T tokens in the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from everybert.errors import EverybertError
from everybert.inference.masks import mask_id, pieces_of
from everybert.inference.model import Model
from everybert.model.engine import BUDGET_CPU, BUDGET_GPU
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding

Variant = Literal["token", "word"]
CHUNK = 1024
"""Texts whose masked copies are held at once."""


def likelihoods(
    model: Model,
    texts: Sequence[str],
    variant: Variant = "token",
    progress: Callable[[int], None] = lambda texts: None,
) -> np.ndarray:
    """(texts) float64: the pseudo-log-likelihood of each. `progress` is told how many are done."""
    if variant not in ("token", "word"):
        raise EverybertError(f"pseudo-log-likelihoods mask by token or word, not {variant!r}")
    total = np.zeros(len(texts))
    for start in range(0, len(texts), CHUNK):
        part = texts[start : start + CHUNK]
        for owner_R, copies_Rn, place_R, gold_R in masked_copies(model, part, variant):
            np.add.at(total, start + owner_R, score(model, copies_Rn, place_R, gold_R))
        progress(start + len(part))
    return total


Copies = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""(which text, the masked copies, which place is asked for, what stood there)."""


def masked_copies(model: Model, texts: Sequence[str], variant: Variant) -> Iterator[Copies]:
    """All masked copies of the texts, those of one length together."""
    mask = mask_id(model.tokenizer)
    by_length: dict[int, list[Copies]] = {}
    for number, encoding in enumerate(model.tokenizer.encode_batch(texts)):
        for made in copies_of(encoding, mask, model.window, variant == "word"):
            by_length.setdefault(made[0].shape[1], []).append((np.full(len(made[0]), number), *made))
    for _, found in sorted(by_length.items(), reverse=True):
        owner, copies, place, gold = (np.concatenate(column) for column in zip(*found))
        yield owner, copies, place, gold


def copies_of(
    encoding: Encoding, mask: int, window: int, whole: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(copies, places, tokens) of one text; a long text's tokens are each masked in the window that owns them."""
    words = np.array([-1 if word is None else word for word in encoding.words])
    special = np.array(encoding.special)
    for piece in pieces_of(encoding, window):
        at = np.arange(piece.at, piece.at + piece.stop - piece.start)
        at = at[~special[at]]
        if not len(at):
            continue
        ids_n = np.array(piece.ids, dtype=np.int64)
        place_R = at - piece.at + piece.start
        copies_Rn = np.tile(ids_n, (len(at), 1))
        if whole:  # the pieces after the masked one, as long as they are of its word
            ends = np.searchsorted(words[at], words[at], side="right")
            for row, end in enumerate(ends):
                copies_Rn[row, place_R[row] : place_R[end - 1] + 1] = mask
        copies_Rn[np.arange(len(at)), place_R] = mask
        yield copies_Rn, place_R, ids_n[place_R]


@torch.inference_mode()
def score(model: Model, copies_Rn: np.ndarray, place_R: np.ndarray, gold_R: np.ndarray) -> np.ndarray:
    """(R) ln P(gold) at the place asked for in each copy."""
    network, device = model.network, model.device
    budget = BUDGET_CPU if device.type == "cpu" else BUDGET_GPU
    rows, length = max(1, budget // copies_Rn.shape[1]), copies_Rn.shape[1]
    out = np.empty(len(copies_Rn))
    for start in range(0, len(copies_Rn), rows):
        part = slice(start, start + rows)
        copies = copies_Rn[part]
        batch = Ragged.flat(torch.from_numpy(copies.ravel()), [length] * len(copies)).to(device)
        index = torch.from_numpy(np.arange(len(copies)) * length + place_R[part]).to(device)
        logits_RV = network.mlm_logits(network.encoder(batch), index).float()
        chosen_R = logits_RV.gather(1, torch.from_numpy(gold_R[part]).to(device)[:, None])[:, 0]
        out[part] = (chosen_R - logits_RV.logsumexp(-1)).double().cpu().numpy()
    return out
