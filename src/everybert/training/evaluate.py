"""How good a pre-trained model is on held-out text: masked words, next sentences, pseudo-perplexity.

The masks are the same for every recipe and every evaluation (15 % of the tokens, 80/10/10, seed 0), so that figures
can be compared. Logits are made a slice at a time, never for all masked positions of a pack at once.

Legend: M masked positions, V vocabulary, B sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F

from everybert.corpus.examples import ExampleConfig, Kind
from everybert.corpus.masking import MaskingConfig
from everybert.corpus.packs import PackStream
from everybert.corpus.shards import Corpus, Layout
from everybert.errors import EverybertError
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.training.data import to_item

if TYPE_CHECKING:
    from everybert.inference.model import Model

SLICE = 4096
"""Masked positions whose logits are held at once."""
PACK = 16_384
"""Tokens of a batch that a corpus is scored by."""


def score_corpus(
    model: Model,
    corpus: str | Path,
    kind: Kind = "full",
    length: int | None = None,
    tokens: int = 1_000_000,
    split: str = "heldout",
    progress: Callable[[Sequence[Ragged]], Iterable[Ragged]] = iter,
) -> dict[str, float]:
    """Masked words (and next sentences, with kind="pairs") of a corpus' split that a model gets right.

    Examples are made as in pre-training: the choice of them matters, since half of the pairs are two texts that have
    nothing to do with each other, and a masked word in a long text has more to be known by. `progress` may show how
    far the batches have come.
    """
    opened = Corpus.open(corpus, split)
    opened.check_tokenizer(model.tokenizer.digest)
    longest = model.config.max_positions if model.config.positions != "rotary" else (length or 512)
    length = min(512, longest) if length is None else length
    if length > longest:
        raise EverybertError(f"length {length} is more than the model's {longest} positions: give at most those")
    examples = ExampleConfig(kind=kind, length=length)
    packs = masked_packs(opened, Layout.of(model.tokenizer), examples, max(PACK, length), -(-tokens // PACK))
    seen = sum(len(pack.tokens_T) for pack in packs)
    masked = sum(len(pack.extra["mask_index"]) for pack in packs)
    return {**evaluate_packs(model.network, progress(packs)), "length": length, "tokens": seen, "masked": masked}


def heldout_packs(corpus: Corpus, layout: Layout, examples: ExampleConfig, capacity: int, most: int) -> list[Ragged]:
    """`masked_packs`; of plain sentences where the text is too small for pairs."""
    try:
        return masked_packs(corpus, layout, examples, capacity, most)
    except EverybertError:
        return masked_packs(corpus, layout, replace(examples, kind="full"), capacity, most)


def masked_packs(corpus: Corpus, layout: Layout, examples: ExampleConfig, capacity: int, most: int) -> list[Ragged]:
    """Up to `most` packs of a split under fixed masks."""
    stream = PackStream(corpus, layout, examples, MaskingConfig(), seed=0, capacity=capacity)
    packs = islice(stream.packs(epochs=1), most)
    return [to_item(pack, n, stream, fill=False).batch for n, pack in enumerate(packs)]


@torch.no_grad()
def evaluate_packs(network: Network, packs: Iterable[Ragged]) -> dict[str, float]:
    """Held-out loss, accuracy and perplexity of masked tokens, and NSP (or sentence-order) accuracy where pairs are."""
    device = network.encoder.embeddings.token.weight.device
    was_training = network.training
    network.eval()
    loss = right = pairs_right = torch.zeros((), device=device, dtype=torch.float64)
    masked = pairs = 0
    for pack in packs:
        batch = pack.to(device)
        x_TH = network.encoder(batch)
        for index_M, label_M in zip(batch.extra["mask_index"].split(SLICE), batch.extra["mask_label"].split(SLICE)):
            logits_MV = network.mlm_logits(x_TH, index_M).float()
            loss = loss + F.cross_entropy(logits_MV, label_M, reduction="sum").double()
            right = right + (logits_MV.argmax(-1) == label_M).sum()
            masked += len(label_M)
        labels_B = batch.extra["pair_label"]
        if "nsp" in network.heads:
            guess_B = network.sequence_logits(x_TH, batch, "nsp").argmax(-1)
            pairs_right = pairs_right + ((guess_B == labels_B) & (labels_B >= 0)).sum()
            pairs += int((pack.extra["pair_label"] >= 0).sum())
    network.train(was_training)
    mean = float(loss) / max(1, masked)
    figures = {"heldout_loss": mean, "accuracy": float(right) / max(1, masked), "perplexity": math.exp(min(mean, 80.0))}
    if pairs:
        figures["pair_accuracy"] = float(pairs_right) / pairs
    return figures


@torch.no_grad()
def pseudo_perplexity(
    network: Network, sentences: Sequence[Sequence[int]], mask_id: int, tokens: int = 16_384
) -> float:
    """exp of the mean −log p of each inner token given all others of its sentence (Salazar et al. 2020, eq. 2).

    Sentences come with their special tokens at both ends; each inner token is masked in a copy of its own.
    """
    device = network.encoder.embeddings.token.weight.device
    was_training = network.training
    network.eval()
    total, count = 0.0, 0
    for copies, labels in _masked_copies(sentences, mask_id, tokens):
        batch = Ragged.of(copies, device=device)
        index_M = torch.tensor([copy.index(mask_id, at) for copy, (at, _) in zip(copies, labels)], device=device)
        logits_MV = network.mlm_logits(network.encoder(batch), index_M + batch.first_B).float()
        label_M = torch.tensor([label for _, label in labels], device=device)
        total += float(F.cross_entropy(logits_MV, label_M, reduction="sum"))
        count += len(labels)
    network.train(was_training)
    return math.exp(min(total / max(1, count), 80.0))


def _masked_copies(
    sentences: Sequence[Sequence[int]], mask_id: int, tokens: int
) -> Iterator[tuple[list[list[int]], list[tuple[int, int]]]]:
    """Batches of at most so many tokens: (copies with one token masked, the (place, token) that was)."""
    copies: list[list[int]] = []
    hidden: list[tuple[int, int]] = []
    for sentence in sentences:
        ids = list(sentence)
        for place in range(1, len(ids) - 1):
            if copies and (len(copies) + 1) * len(ids) > tokens:
                yield copies, hidden
                copies, hidden = [], []
            copies.append([*ids[:place], mask_id, *ids[place + 1 :]])
            hidden.append((place, ids[place]))
    if copies:
        yield copies, hidden


def sample_sentences(corpus: Corpus, layout: Layout, most: int = 32, longest: int = 64) -> list[list[int]]:
    """Held-out sentences spread over the split, cut to a length, with their special tokens."""
    chosen = np.unique(np.linspace(0, corpus.sentences - 1, most).astype(np.int64))
    out = []
    for s in chosen:
        start, stop = (int(x) for x in corpus.sentence_offsets[s : s + 2])
        ids = corpus.tokens(start, min(stop, start + longest - 2)).astype(int).tolist()
        if ids:
            out.append([layout.cls_id, *ids, layout.sep_id])
    return out
