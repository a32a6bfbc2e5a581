"""One word in several sentences: how its vectors part, layer by layer, and which words they come to lie near.

A word's vector is the mean of its pieces'. "static" is the token table, before any context; "embeddings" adds the
position; then the layers. The words compared with are read alone, as a text of one word, and taken at the same layer.
They are those near the word itself, and near its companions, in the static table: with some hundred candidates
instead of the whole vocabulary, the answer takes a moment and says the same.

Legend: k occurrences, L layers, H hidden, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.inside.blanks import spelt
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding, Tokenizer

NEAR_WORD, NEAR_COMPANION, MOST = 300, 40, 1200
"""Candidates from around the word, from around each word beside it, and in all."""


@dataclass(frozen=True)
class Occurrence:
    """Where the word stands: texts[text][start:end]."""

    text: int
    start: int
    end: int
    tokens: list[str]


@dataclass(frozen=True)
class Near:
    """A word and its cosine."""

    word: str
    cosine: float


@dataclass(frozen=True)
class Neighbours:
    """A word's occurrences compared at every level: static, embeddings, then each layer."""

    word: str
    texts: list[str]
    occurrences: list[Occurrence]
    levels: list[str]
    similarity: np.ndarray = field(repr=False)
    """float32 (levels, k, k): cosines between the occurrences."""
    nearest: list[list[list[Near]]] = field(repr=False)
    """`nearest[level][occurrence]`: the closest words, best first."""


@torch.inference_mode()
def neighbours(
    network: Network, tokenizer: Tokenizer, word: str, texts: Sequence[str], top: int = 5, size: int | None = None
) -> Neighbours:
    """Find the word in the texts (whatever its case) and compare its vectors with each other and with other words."""
    word = word.strip()
    if not word or not texts:
        raise EverybertError("neighbours compares a word in texts that hold it; give the word, then the texts")
    size = size or network.config.max_positions
    encodings = tokenizer.encode_batch(list(texts))
    found = [(o, e) for i, (text, e) in enumerate(zip(texts, encodings)) for o in _occurrences(word, i, text, e)]
    for i, encoding in enumerate(encodings):
        if len(encoding) > size:
            raise EverybertError(f"text {i + 1} has {len(encoding)} tokens, the model reads {size}; give a shorter one")
        if not any(o.text == i for o, _ in found):
            raise EverybertError(f"{word!r} does not occur in text {i + 1}; each text must hold the word")
    places = [_places(o, e) for o, e in found]
    table_VE = network.encoder.embeddings.token.weight.float()
    own = [table_VE[[encodings[o.text].ids[i] for i in at]].mean(0) for (o, _), at in zip(found, places)]
    states = _states(network, [e.ids for e in encodings])
    vectors = [
        [states[o.text][level][at].mean(0) for (o, _), at in zip(found, places)] for level in range(len(states[0]))
    ]
    candidates = _candidates(tokenizer, table_VE, word, encodings, places, found)
    alone = _alone(network, tokenizer, [i for i, _ in candidates])
    levels = ["static", "embeddings", *(f"layer {i + 1}" for i in range(len(states[0]) - 1))]
    similarity, nearest = [], []
    pools = [table_VE[[i for i, _ in candidates]], *alone]
    for level_kH, pool_CH in zip([torch.stack(own), *map(torch.stack, vectors)], pools):
        unit_kH = torch.nn.functional.normalize(level_kH.float(), dim=-1)
        similarity.append((unit_kH @ unit_kH.T).cpu().numpy())
        cosine_kC = (unit_kH @ torch.nn.functional.normalize(pool_CH.float(), dim=-1).T).cpu()
        best = cosine_kC.topk(min(top, len(candidates)))
        nearest.append(
            [
                [Near(candidates[c][1], v) for v, c in zip(row, at)]
                for row, at in zip(best.values.tolist(), best.indices.tolist())
            ]
        )
    return Neighbours(word, list(texts), [o for o, _ in found], levels, np.stack(similarity), nearest)


def _occurrences(word: str, number: int, text: str, encoding: Encoding) -> list[Occurrence]:
    pattern = rf"(?<!\w){re.escape(word)}(?!\w)"
    spans = [(m.start(), m.end()) for m in re.finditer(pattern, text, re.IGNORECASE)]
    out = []
    for start, end in spans:
        found = Occurrence(number, start, end, [])
        pieces = [encoding.tokens[i] for i in _places(found, encoding)]
        if pieces:
            out.append(Occurrence(number, start, end, pieces))
    return out


def _places(occurrence: Occurrence, encoding: Encoding) -> list[int]:
    """The tokens that overlap an occurrence."""
    return [
        i
        for i, ((a, b), special) in enumerate(zip(encoding.offsets, encoding.special))
        if not special and a < occurrence.end and b > occurrence.start
    ]


def _states(network: Network, sequences: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """For each sequence, its L + 1 hidden states (n, H)."""
    batch = Ragged.of(sequences, device=network.encoder.embeddings.token.weight.device)
    network.encoder.check(batch)
    states: list[Tensor] = []
    network.encoder(batch, states)
    return [list(one) for one in zip(*(batch.split(x_TH) for x_TH in states))]


def _candidates(
    tokenizer: Tokenizer,
    table_VE: Tensor,
    word: str,
    encodings: Sequence[Encoding],
    places: Sequence[list[int]],
    found: Sequence[tuple[Occurrence, Encoding]],
) -> list[tuple[int, str]]:
    """(id, word): whole words of the vocabulary that lie near the word, or near a word beside it, in the table."""
    begins = ~tokenizer.continues_word()
    unit_VE = torch.nn.functional.normalize(table_VE[: tokenizer.size], dim=-1)
    own = torch.stack([unit_VE[encodings[o.text].ids[i]] for (o, _), at in zip(found, places) for i in at]).mean(0)
    beside = sorted({t for e in encodings for t, s in zip(e.ids, e.special) if not s and begins[t]})
    order = [(unit_VE @ own).topk(min(NEAR_WORD, len(unit_VE))).indices.tolist()]
    order += (unit_VE[beside] @ unit_VE.T).topk(min(NEAR_COMPANION, len(unit_VE))).indices.tolist() if beside else []
    names: dict[str, int] = {}
    for i in (i for near in order for i in near):
        if len(names) >= MOST:
            break
        name = spelt(tokenizer, i) if begins[i] and i not in tokenizer.special_ids else ""
        if len(name) > 1 and name.isalpha() and not _kin(name.lower(), word.lower()):
            names.setdefault(name, i)
    return [(i, name) for name, i in names.items()]


def _kin(name: str, word: str) -> bool:
    """The word itself or a form of it (bank: banks, banking): such are near in every context, and say nothing of it."""
    return name.startswith(word) or (len(name) > 2 and word.startswith(name))


def _alone(network: Network, tokenizer: Tokenizer, ids: Sequence[int]) -> list[Tensor]:
    """(C, H) at each of the L + 1 levels: every word read as a text of its own."""
    if not ids:
        return [network.encoder.embeddings.token.weight.new_zeros(0, network.config.hidden_size)] * (
            len(network.config.layer_order) + 1
        )
    sequences = [tokenizer.build([i])[0] for i in ids]
    at = sequences[0].index(ids[0])
    states = _states(network, sequences)
    return [torch.stack([one[level][at] for one in states]) for level in range(len(states[0]))]
