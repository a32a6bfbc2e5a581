"""A blank filled from its left, from its right, and from both sides: what "bidirectional" means, in numbers.

Legend: M blanks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding, Tokenizer


@dataclass(frozen=True)
class Guess:
    """A piece that may stand in a blank."""

    token: str
    score: float
    id: int


@dataclass(frozen=True)
class Original:
    """The word that stood where the blank is."""

    word: str
    pieces: list[str]
    score: float | None
    """Its probability; None where it is more than one piece, which one blank cannot hold."""
    rank: int | None
    """1 for the most probable piece."""


@dataclass(frozen=True)
class Blank:
    """What one blank is filled with."""

    both: list[Guess]
    left: list[Guess]
    """With what stands before it alone."""
    right: list[Guess]
    """With what stands after it alone."""
    original: Original | None = None


@torch.inference_mode()
def read_blanks(
    network: Network,
    tokenizer: Tokenizer,
    text: str,
    pair: str | None = None,
    originals: Sequence[str | None] = (),
    top: int = 8,
    size: int | None = None,
) -> list[Blank]:
    """Each [MASK] of a text or pair, foreseen three ways; `originals` are the words that stood there, if known."""
    if tokenizer.mask_id is None:
        raise EverybertError("this model's vocabulary has no mask token; use a model that was trained with one")
    encoding = tokenizer.encode(text, pair)
    size = size or network.config.max_positions
    if len(encoding) > size:
        raise EverybertError(f"the text has {len(encoding)} tokens, the model reads {size} at once; give a shorter one")
    at = [i for i, token in enumerate(encoding.ids) if token == tokenizer.mask_id]
    if not at:
        raise EverybertError("the text has no [MASK]; put [MASK] where a word is missing, or click a word")
    views: list[tuple[Encoding, int]] = []
    for i in at:
        for side in ("left", "right"):
            alone = tokenizer.encode(*_half(encoding, i, text, pair, side))
            places = [k for k, token in enumerate(alone.ids) if token == tokenizer.mask_id]
            views.append((alone, places[-1 if side == "left" else 0]))
    p_MV = _probabilities(network, [*((encoding, i) for i in at), *views])[:, : tokenizer.size]
    blanks = []
    for m, i in enumerate(at):
        left, right = len(at) + 2 * m, len(at) + 2 * m + 1
        word = originals[m] if m < len(originals) else None
        original = _original(tokenizer, word, p_MV[m], encoding.offsets[i][0] > 0) if word else None
        both, before, after = (_best(tokenizer, p_MV[row], top) for row in (m, left, right))
        blanks.append(Blank(both, before, after, original))
    return blanks


def _half(encoding: Encoding, i: int, text: str, pair: str | None, side: str) -> tuple[str, str | None]:
    """The text or pair up to a blank, or from it on."""
    start, end = encoding.offsets[i]
    second = encoding.sequence[i] == 1
    if side == "left":
        return (text, (pair or "")[:end]) if second else (text[:end], None)
    return ((pair or "")[start:], None) if second else (text[start:], pair)


def _probabilities(network: Network, views: Sequence[tuple[Encoding, int]]) -> Tensor:
    """(M, V): the distribution at one place of each sequence."""
    device = network.encoder.embeddings.token.weight.device
    batch = Ragged.of([e.ids for e, _ in views], [e.segments for e, _ in views], device=device)
    network.encoder.check(batch)
    index_M = batch.first_B.long() + torch.tensor([i for _, i in views], device=device)
    return network.mlm_logits(network.encoder(batch), index_M).float().softmax(-1).cpu()


def _best(tokenizer: Tokenizer, p_V: Tensor, top: int) -> list[Guess]:
    scores, ids = p_V.topk(min(top, len(p_V)))
    return [Guess(spelt(tokenizer, i), s, i) for s, i in zip(scores.tolist(), ids.tolist())]


def _original(tokenizer: Tokenizer, word: str, p_V: Tensor, spaced: bool) -> Original:
    """How probable the word that stood there is; byte-level pieces know the space before them."""
    space = " " if spaced and tokenizer.kind == "bpe" else ""
    encoding = tokenizer.encode(space + word, specials=False)
    if len(encoding) != 1:
        return Original(word, encoding.tokens, None, None)
    score = p_V[encoding.ids[0]]
    return Original(word, encoding.tokens, float(score), int((p_V > score).sum()) + 1)


def spelt(tokenizer: Tokenizer, token: int) -> str:
    """A piece as text; one that is nothing but white space as the vocabulary spells it."""
    return tokenizer.decode([token], skip_special=False).strip() or tokenizer.token(token)
