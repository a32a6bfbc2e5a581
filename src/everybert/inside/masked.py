"""Masked tokens predicted from their left context, from their right context, and from both.

Legend: M masked tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.engine import Inputs, masked_logits
from everybert.model.heads import Network
from everybert.text.tokenizer import Encoding, Tokenizer


@dataclass(frozen=True)
class Guess:
    """A candidate for a masked token."""

    token: str
    score: float
    id: int


@dataclass(frozen=True)
class Original:
    """The word that the mask replaced."""

    word: str
    pieces: list[str]
    score: float | None
    """Its probability. None if it has several tokens, because one mask stands for one token."""
    rank: int | None
    """1 for the most probable token."""


@dataclass(frozen=True)
class MaskedToken:
    """The candidates for one masked token."""

    both: list[Guess]
    left: list[Guess]
    """From the text before it alone."""
    right: list[Guess]
    """From the text after it alone."""
    original: Original | None = None


def fill_sides(
    network: Network,
    tokenizer: Tokenizer,
    text: str,
    pair: str | None = None,
    originals: Sequence[str | None] = (),
    top: int = 8,
    size: int | None = None,
) -> list[MaskedToken]:
    """The candidates for each [MASK] of a text or pair. `originals` are the words that the masks replaced, if known."""
    if tokenizer.mask_id is None:
        raise EverybertError("this model's vocabulary has no mask token; use a model that was trained with one")
    encoding = tokenizer.encode(text, pair)
    size = size or network.config.max_positions
    if len(encoding) > size:
        raise EverybertError(f"the text has {len(encoding)} tokens, the model reads {size} at once; give a shorter one")
    at = [i for i, token in enumerate(encoding.ids) if token == tokenizer.mask_id]
    if not at:
        raise EverybertError("the text has no [MASK]; put [MASK] where a word is missing, or click a word")
    views = [(encoding, i) for i in at]
    for i in at:
        for before in (True, False):
            half = tokenizer.encode(*_half(encoding, i, text, pair, before))
            places = [k for k, token in enumerate(half.ids) if token == tokenizer.mask_id]
            views.append((half, places[-1 if before else 0]))
    p_MV = _probabilities(network, views)[:, : tokenizer.size]
    found = []
    for m, i in enumerate(at):
        both, left, right = (_best(tokenizer, p_MV[row], top) for row in (m, len(at) + 2 * m, len(at) + 2 * m + 1))
        word = originals[m] if m < len(originals) else None
        original = _original(tokenizer, word, p_MV[m], encoding.offsets[i][0] > 0) if word else None
        found.append(MaskedToken(both, left, right, original))
    return found


def _half(encoding: Encoding, i: int, text: str, pair: str | None, before: bool) -> tuple[str, str | None]:
    """The text or pair up to the end of token i, or from its start."""
    start, end = encoding.offsets[i]
    second = encoding.sequence[i] == 1
    if before:
        return (text, (pair or "")[:end]) if second else (text[:end], None)
    return ((pair or "")[start:], None) if second else (text[start:], pair)


def _probabilities(network: Network, views: Sequence[tuple[Encoding, int]]) -> Tensor:
    """(M, V): the distribution at one position of each sequence."""
    rows: dict[int, Tensor] = {}

    def read(which: list[int], logits_MV: Tensor) -> None:
        rows.update(zip(which, logits_MV.softmax(-1).cpu()))

    inputs = Inputs([e.ids for e, _ in views], [e.segments for e, _ in views])
    masked_logits(network, inputs, [[position] for _, position in views], read)
    return torch.stack([rows[k] for k in range(len(views))])


def _best(tokenizer: Tokenizer, p_V: Tensor, top: int) -> list[Guess]:
    scores, ids = p_V.topk(min(top, len(p_V)))
    return [Guess(tokenizer.text(i), s, i) for s, i in zip(scores.tolist(), ids.tolist())]


def _original(tokenizer: Tokenizer, word: str, p_V: Tensor, spaced: bool) -> Original:
    """The probability of the word. Byte-level tokens include the space before them."""
    space = " " if spaced and tokenizer.kind == "bpe" else ""
    encoding = tokenizer.encode(space + word, specials=False)
    if len(encoding) != 1:
        return Original(word, encoding.tokens, None, None)
    score = p_V[encoding.ids[0]]
    return Original(word, encoding.tokens, float(score), int((p_V > score).sum()) + 1)
