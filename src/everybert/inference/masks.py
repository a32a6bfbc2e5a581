"""Blanks and how well they are foreseen: fill and score.

Legend: M masked positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.inference.results import Candidate, Score, TokenScore
from everybert.model.engine import Inputs, encode
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding, Tokenizer
from everybert.text.windows import Piece, cover

MOST_SCORED = 4096
"""Tokens of a text that `score` takes: each costs a pass through the encoder."""


def pieces_of(encoding: Encoding, size: int) -> list[Piece]:
    """A text in windows; see `cover`."""
    special = encoding.special
    lead = special.index(False) if False in special else len(special)
    tail = special[::-1].index(False) if False in special else 0
    return cover(encoding.ids, lead, tail, size)


def fill(network: Network, tokenizer: Tokenizer, text: str, top: int, size: int) -> list[list[Candidate]]:
    """For each blank of a text, the most probable tokens."""
    return fill_all(network, tokenizer, [text], top, size)[0]


def fill_all(
    network: Network, tokenizer: Tokenizer, texts: Sequence[str], top: int, size: int
) -> list[list[list[Candidate]]]:
    """For each text, for each of its blanks, the most probable tokens; the texts share batches.

    In a long text a blank is seen in the window that owns it.
    """
    mask = mask_id(tokenizer)
    if top < 1:
        raise EverybertError(f"top is the number of candidates and at least 1, not {top}")
    sequences: list[Sequence[int]] = []
    places: list[list[int]] = []
    owners: list[list[tuple[int, int]]] = []  # of each sequence's places: (text, which of its blanks)
    found: list[list[list[Candidate]]] = []
    for t, encoding in enumerate(tokenizer.encode_batch(texts)):
        blanks = [i for i, token in enumerate(encoding.ids) if token == mask]
        if not blanks:
            which = f"text {t}" if len(texts) > 1 else "the text"
            raise EverybertError(f"{which} has no [MASK]; put [MASK] where a word is missing")
        found.append([[] for _ in blanks])
        for piece in pieces_of(encoding, size):
            own = [(k, i) for k, i in enumerate(blanks) if piece.owns(i)]
            if own:
                sequences.append(piece.ids)
                places.append([piece.index(i) for _, i in own])
                owners.append([(t, k) for k, _ in own])

    def read(which: list[int], logits_MV: Tensor) -> None:
        known_MV = logits_MV.softmax(-1)[:, : tokenizer.size]
        scores, ids = known_MV.topk(min(top, known_MV.shape[1]))
        at = [owner for k in which for owner in owners[k]]
        for (t, k), row_scores, row_ids in zip(at, scores.tolist(), ids.tolist()):
            found[t][k] = [Candidate(_spelt(tokenizer, i), s, i) for i, s in zip(row_ids, row_scores)]

    _predict(network, sequences, places, read)
    return found


def score(network: Network, tokenizer: Tokenizer, text: str, size: int) -> Score:
    """Each token masked in turn: Σ ln P(tokenᵢ | the others) (Salazar et al. 2020, eq. 1)."""
    encoding = tokenizer.encode(text)
    mask = mask_id(tokenizer)
    scored = [i for i, special in enumerate(encoding.special) if not special]
    if len(scored) > MOST_SCORED:
        raise EverybertError(
            f"the text has {len(scored)} tokens, and each costs a pass through the model; "
            f"score at most {MOST_SCORED} at a time"
        )
    sequences: list[list[int]] = []
    places: list[list[int]] = []
    for piece in pieces_of(encoding, size):
        for i in scored:
            if piece.owns(i):
                ids = list(piece.ids)
                ids[piece.index(i)] = mask
                sequences.append(ids)
                places.append([piece.index(i)])
    values = [0.0] * len(scored)

    def read(which: list[int], logits_MV: Tensor) -> None:
        gold_M = torch.tensor([encoding.ids[scored[k]] for k in which], device=logits_MV.device)
        chosen_M = logits_MV.log_softmax(-1).gather(1, gold_M[:, None])[:, 0]
        for k, value in zip(which, chosen_M.tolist()):
            values[k] = value

    _predict(network, sequences, places, read)
    tokens = [TokenScore(encoding.tokens[i], v, *encoding.offsets[i]) for i, v in zip(scored, values)]
    return Score(sum(values), tokens)


def mask_id(tokenizer: Tokenizer) -> int:
    """The id of the mask token; a vocabulary without one is an error."""
    if tokenizer.mask_id is None:
        raise EverybertError("this model's vocabulary has no mask token; use a model that was trained with one")
    return tokenizer.mask_id


def _predict(
    network: Network,
    sequences: Sequence[Sequence[int]],
    places: list[list[int]],
    read: Callable[[list[int], Tensor], None],
) -> None:
    """Hand `read`, batch after batch, which sequences it holds and the fp32 logits (M, V) at their places."""

    def predict(which: list[int], batch: Ragged, x_TH: Tensor) -> None:
        first = batch.offsets_B1.tolist()
        index_M = torch.tensor([first[b] + place for b, k in enumerate(which) for place in places[k]])
        read(which, network.mlm_logits(x_TH, index_M.to(x_TH.device)).float())

    encode(network, Inputs(sequences), predict)


def _spelt(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; one that is nothing but white space as the vocabulary spells it."""
    return tokenizer.decode([token], skip_special=False).strip() or tokenizer.token(token)
