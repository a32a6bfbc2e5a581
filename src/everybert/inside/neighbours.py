"""One word in several texts: the similarity of its vectors at every layer, and the words nearest to them.

The vector of a word is the mean over its tokens. "static" is the token table, before any context; "embeddings" adds
the position; then come the layers. The words that it is compared with are encoded alone, as texts of one word, and
taken at the same layer. They are the nearest neighbours, in the token table, of the word and of the words beside it:
a few hundred candidates give the same result as the whole vocabulary in a fraction of the time.

Legend: k occurrences, C candidates, n tokens of a text, T of a batch, H hidden, E embedding width, V vocabulary.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from everybert.errors import EverybertError
from everybert.model.engine import Inputs, encode_layers
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding, Tokenizer

NEAR_WORD, NEAR_COMPANION, MOST = 300, 40, 1200
"""Candidates near the word, near each word beside it, and in all."""


@dataclass(frozen=True)
class Occurrence:
    """An occurrence of the word: texts[text][start:end]."""

    text: int
    start: int
    end: int
    tokens: list[str]


@dataclass(frozen=True)
class Near:
    """A word and its cosine similarity."""

    word: str
    cosine: float


@dataclass(frozen=True)
class Neighbours:
    """The occurrences of a word, compared at every level: static, embeddings, then each layer."""

    word: str
    texts: list[str]
    occurrences: list[Occurrence]
    levels: list[str]
    similarity: np.ndarray = field(repr=False)
    """float32 (levels, k, k): cosine similarities of the occurrences."""
    nearest: list[list[list[Near]]] = field(repr=False)
    """`nearest[level][occurrence]`: the most similar words, best first."""


@torch.inference_mode()
def find_neighbours(
    network: Network, tokenizer: Tokenizer, word: str, texts: Sequence[str], top: int, size: int
) -> Neighbours:
    """Compare a word's vectors in texts of at most `size` tokens, with one another and with those of other words."""
    word = word.strip()
    if not word or not texts:
        raise EverybertError("neighbours compares a word in texts that hold it; give the word, then the texts")
    encodings = tokenizer.encode_batch(list(texts))
    occurrences: list[Occurrence] = []
    places: list[list[int]] = []  # the tokens of each occurrence
    for i, (text, encoding) in enumerate(zip(texts, encodings)):
        if len(encoding) > size:
            raise EverybertError(f"text {i + 1} has {len(encoding)} tokens, the model reads {size}; shorten it")
        for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE):
            if at := _places(*match.span(), encoding):
                occurrences.append(Occurrence(i, *match.span(), [encoding.tokens[k] for k in at]))
                places.append(at)
        if not any(o.text == i for o in occurrences):
            raise EverybertError(f"{word!r} does not occur in text {i + 1}; each text must hold the word")
    tokens = [encodings[o.text].ids[k] for o, at in zip(occurrences, places) for k in at]
    table_VE = network.encoder.embeddings.token.weight.float()
    candidates = _candidates(tokenizer, table_VE, word, encodings, tokens)
    ids = [i for i, _ in candidates]
    alone = [tokenizer.build([i])[0] for i in ids]
    states: dict[int, list[Tensor]] = {}

    def read(indices: list[int], batch: Ragged, hidden: list[Tensor]) -> None:
        """Keep the vectors (n, H) of each sequence at every level: the token table, then the L + 1 hidden states."""
        levels = (batch.split(x) for x in (table_VE[batch.tokens_T], *hidden))
        states.update(zip(indices, map(list, zip(*levels))))

    encode_layers(network, Inputs([e.ids for e in encodings] + alone), read)
    at_word = alone[0].index(ids[0]) if alone else 0
    levels = ["static", "embeddings", *(f"layer {i + 1}" for i in range(len(states[0]) - 2))]
    similarity, nearest = [], []
    for level in range(len(levels)):
        word_kH = torch.stack([states[o.text][level][at].float().mean(0) for o, at in zip(occurrences, places)])
        others = [states[k][level][at_word].float() for k in range(len(texts), len(states))]
        unit_kH = normalize(word_kH, dim=-1)
        unit_CH = normalize(torch.stack(others) if others else word_kH[:0], dim=-1)
        similarity.append((unit_kH @ unit_kH.T).cpu().numpy())
        best = (unit_kH @ unit_CH.T).cpu().topk(min(top, len(ids)))
        rows = zip(best.values.tolist(), best.indices.tolist())
        nearest.append([[Near(candidates[c][1], v) for v, c in zip(*row)] for row in rows])
    return Neighbours(word, list(texts), occurrences, levels, np.stack(similarity), nearest)


def _places(start: int, end: int, encoding: Encoding) -> list[int]:
    """The tokens that overlap text[start:end]."""
    spans = zip(encoding.offsets, encoding.special)
    return [i for i, ((a, b), special) in enumerate(spans) if not special and a < end and b > start]


def _candidates(
    tokenizer: Tokenizer, table_VE: Tensor, word: str, encodings: Sequence[Encoding], tokens: list[int]
) -> list[tuple[int, str]]:
    """(id, word): whole words of the vocabulary that are near the word, or near a word beside it, in the table."""
    begins = ~tokenizer.continues_word()
    unit_VE = normalize(table_VE[: tokenizer.size], dim=-1)
    centre = unit_VE[tokens].mean(0)
    beside = sorted({t for e in encodings for t, s in zip(e.ids, e.special) if not s and begins[t]})
    order = [(unit_VE @ centre).topk(min(NEAR_WORD, len(unit_VE))).indices.tolist()]
    order += (unit_VE[beside] @ unit_VE.T).topk(min(NEAR_COMPANION, len(unit_VE))).indices.tolist() if beside else []
    names: dict[str, int] = {}
    for i in (i for near in order for i in near):
        if len(names) >= MOST:
            break
        name = tokenizer.text(i) if begins[i] and i not in tokenizer.special_ids else ""
        if len(name) > 1 and name.isalpha() and not _is_form(name.lower(), word.lower()):
            names.setdefault(name, i)
    return [(i, name) for name, i in names.items()]


def _is_form(name: str, word: str) -> bool:
    """Whether it is the word or a form of it (bank: banks, banking). Such words are near in every context."""
    return name.startswith(word) or (len(name) > 2 and word.startswith(name))
