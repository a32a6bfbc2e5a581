"""Masked tokens: predicted from their left context, their right context or both; and pseudo-likelihoods of texts.

Legend: M masked tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.engine import Inputs, masked_logits, token_log_probs
from everybert.model.heads import Network
from everybert.text.tokenizer import Encoding, Tokenizer
from everybert.text.windows import TextWindow, cover

Result = TypeVar("Result")


@dataclass(frozen=True)
class Candidate:
    """A token for a masked position."""

    token: str
    """As text; a token that continues a word keeps WordPiece's ##."""
    score: float
    """Its probability, among the whole vocabulary."""
    id: int = -1
    """Its id in the vocabulary."""


@dataclass(frozen=True)
class Original:
    """The word that the mask replaced."""

    word: str
    pieces: list[str]
    score: float | None
    """Its probability. None if it has several tokens, because one mask stands for one token."""
    rank: int | None
    """1 for the most probable token."""
    seen: float | None
    """Its probability where it is not hidden: the model sees the word."""


@dataclass(frozen=True)
class MaskedToken:
    """The candidates for one masked token."""

    both: list[Candidate]
    left: list[Candidate]
    """From the text before it alone."""
    right: list[Candidate]
    """From the text after it alone."""
    original: Original | None = None


def fill_sides(
    network: Network,
    tokenizer: Tokenizer,
    text: str,
    pair: str | None = None,
    originals: Sequence[str | None] = (),
    top: int = 8,
    *,
    size: int,
) -> list[MaskedToken]:
    """The candidates for each [MASK] of a text or pair of at most `size` tokens.

    `originals` are the words that the masks replaced, if known.
    """
    mask = mask_id(tokenizer)
    if network.config.causal:
        raise EverybertError("a causal model reads one side of a mask only: use fill")
    encoding = tokenizer.encode(text, pair)
    if len(encoding) > size:
        raise EverybertError(f"the text has {len(encoding)} tokens, the model reads {size}; shorten it")
    at = [i for i, token in enumerate(encoding.ids) if token == mask]
    if not at:
        raise EverybertError("the text has no [MASK]; put [MASK] where a word is missing, or click a word")
    texts: Any = (text,) if pair is None else (text, pair)
    halves, places = [], []
    for i in at:
        n, (start, end) = encoding.sequence[i] or 0, encoding.offsets[i]
        before, after = (*texts[:n], texts[n][:end]), (texts[n][start:], *texts[n + 1 :])
        for half in (before, after):
            halves.append(tokenizer.encode(*half))
            masks = [k for k, token in enumerate(halves[-1].ids) if token == mask]
            places.append(masks[-1:] if half is before else masks[:1])

    def read(p_MV: Tensor) -> list[tuple[list[Candidate], Tensor]]:
        return list(zip(best(tokenizer, p_MV, top), p_MV[:, : tokenizer.size].cpu()))

    both, *sides = at_masks(network, [encoding, *halves], [at, *places], size, read)
    results = []
    for m, (candidates, p_V) in enumerate(both):
        word = originals[m] if m < len(originals) else None
        original = _original(network, tokenizer, encoding, at[m], word, p_V) if word else None
        ((left, _),), ((right, _),) = sides[2 * m : 2 * m + 2]
        results.append(MaskedToken(candidates, left, right, original))
    return results


def at_masks(
    network: Network,
    encodings: Sequence[Encoding],
    masks: Sequence[Sequence[int]],
    size: int,
    read: Callable[[Tensor], Sequence[Result]],
) -> list[list[Result]]:
    """The results of `read`, one per row of the probabilities (M, V) at the given masked tokens of each text or pair.

    In a text of more than `size` tokens, a token is predicted in the window that owns it.
    """
    every = [(t, window) for t, encoding in enumerate(encodings) for window in windows_of(encoding, size)]
    windows = [(t, window) for t, window in every if any(map(window.owns, masks[t]))]
    places = [[i - window.shift for i in masks[t] if window.owns(i)] for t, window in windows]
    results: dict[int, Sequence[Result]] = {}

    def split(indices: list[int], logits_MV: Tensor) -> None:
        rows = iter(read(logits_MV.softmax(-1)))
        results.update((k, [next(rows) for _ in places[k]]) for k in indices)

    segments = [encodings[t].segments[: len(window.ids)] for t, window in windows]
    masked_logits(network, Inputs([window.ids for _, window in windows], segments), places, split)
    values = (value for k in range(len(windows)) for value in results[k])
    return [[next(values) for _ in places_of_text] for places_of_text in masks]


def check_sides(causal: bool | str, encoding: Encoding, masks: Sequence[int]) -> None:
    """Refuse, for a causal model, a mask with text on the side that the model does not read."""
    reverse = causal == "reverse"
    unread = encoding.special[: masks[0]] if reverse else encoding.special[masks[0] + 1 :]
    if causal and (len(masks) > 1 or not all(unread)):
        way, verb, side = ("right to left", "begin", "before") if reverse else ("left to right", "end", "after")
        raise EverybertError(f"this model reads {way}: one [MASK] must {verb} the text; leave out what comes {side} it")


def continued(
    network: Network, tokenizer: Tokenizer, encoding: Encoding, words: int, seed: int | None, window: int
) -> str:
    """A text with up to `words` more words, token by token; see `Model.generate`."""
    if words < 1:
        raise EverybertError(f"words is the number of words to add and at least 1, not {words}")
    reverse = network.config.causal == "reverse"
    inner = [i for i, special in enumerate(encoding.special) if not special] or [len(encoding) - 1 if reverse else 0]
    ids = encoding.ids[inner[0] :] if reverse else encoding.ids[: inner[-1] + 1]
    begun, chance = 0, torch.Generator().manual_seed(seed or 0)
    continues, end = tokenizer.continues_word(), tokenizer.cls_id if reverse else tokenizer.sep_id
    never = [i for i in tokenizer.special_ids if i != end]
    logits: list[Tensor] = []
    while len(ids) < window:
        place = -1 if reverse else len(ids)
        masked_logits(network, Inputs([ids]), [[place]], lambda _, logits_MV: logits.append(logits_MV.cpu()))
        p_V = logits.pop()[0, : tokenizer.size].softmax(-1)
        p_V[never] = 0.0
        token = int(p_V.argmax() if seed is None else torch.multinomial(p_V, 1, generator=chance))
        if token == end or (not reverse and not continues[token] and begun == words):
            break
        ids = [token, *ids] if reverse else [*ids, token]
        begun += not continues[token]
        if reverse and begun == words:
            break
    return tokenizer.decode(ids)


def best(tokenizer: Tokenizer, p_MV: Tensor, top: int) -> list[list[Candidate]]:
    """The most probable tokens of each distribution."""
    scores, ids = p_MV[:, : tokenizer.size].topk(min(top, tokenizer.size, p_MV.shape[1]))
    rows = zip(scores.tolist(), ids.tolist())
    return [[Candidate(tokenizer.text(i), s, i) for s, i in zip(*row)] for row in rows]


def _original(network: Network, tokenizer: Tokenizer, encoding: Encoding, i: int, word: str, p_V: Tensor) -> Original:
    """The probability of the word that token i hides. Byte-level tokens include the space before them."""
    space = " " if encoding.offsets[i][0] > 0 and tokenizer.kind == "bpe" else ""
    pieces, seen = tokenizer.encode(space + word, specials=False), []
    if len(pieces) != 1:
        return Original(word, pieces.tokens, None, None, None)
    token, score = pieces.ids[0], p_V[pieces.ids[0]]
    shown = Inputs([[*encoding.ids[:i], token, *encoding.ids[i + 1 :]]], [encoding.segments])
    masked_logits(network, shown, [[i]], lambda _, logits_MV: seen.append(float(logits_MV.softmax(-1)[0, token])))
    return Original(word, pieces.tokens, float(score), int((p_V > score).sum()) + 1, *seen)


def mask_id(tokenizer: Tokenizer) -> int:
    """The id of the mask token; an error if the vocabulary has none."""
    if tokenizer.mask_id is None:
        raise EverybertError("this model's vocabulary has no mask token; use a model that was trained with one")
    return tokenizer.mask_id


def pseudo_likelihoods(
    network: Network, tokenizer: Tokenizer, encodings: Sequence[Encoding], size: int
) -> list[np.ndarray]:
    """Per text, ln P(token | the others) of each token that is not special: float64 (n), in order.

    PLL(w) = Σ ln P(wᵢ | the others) (Salazar et al. 2020, eq. 1). A token is masked in the window that owns it.
    """
    mask = 0 if network.config.causal else mask_id(tokenizer)
    each = [(encoding.special, windows_of(encoding, size)) for encoding in encodings]
    flat = [(special, window) for special, windows in each for window in windows]
    places = [[i - w.shift for i in range(w.own_start, w.own_stop) if not special[i]] for special, w in flat]
    values = iter(token_log_probs(network, [window.ids for _, window in flat], places, mask))
    return [np.concatenate([next(values) for _ in windows]) for _, windows in each]


def windows_of(encoding: Encoding, size: int) -> list[TextWindow]:
    """A text in windows of at most `size` tokens (see `cover`), or a pair, which must fit into one."""
    if not len(encoding):
        raise EverybertError("the text is empty, and this tokenizer adds no special tokens; give some text")
    if len(encoding) > size and 1 in encoding.sequence:
        raise EverybertError(f"the pair has {len(encoding):,} tokens, the model reads {size:,}; shorten it")
    special = encoding.special
    lead = special.index(False) if False in special else len(special)
    tail = special[::-1].index(False) if False in special else 0
    return cover(encoding.ids, lead, tail, size)
