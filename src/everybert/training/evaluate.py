"""Evaluation on held-out text: masked tokens, sentence pairs, pseudo-perplexity.

The masks are the same for every recipe and every evaluation (15 % of the tokens, 80/10/10, seed 0), so that figures
can be compared.

Legend: T tokens in the batch, H hidden, M masked positions, V vocabulary, B sequences.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from everybert.corpus.examples import ExampleConfig, ExampleKind
from everybert.corpus.packs import PackStream
from everybert.corpus.shards import Corpus, ExampleLayout
from everybert.errors import EverybertError
from everybert.model.engine import device_of, token_log_probs
from everybert.model.heads import Network
from everybert.model.losses import PretrainTargets, cross_entropy
from everybert.model.ragged import Ragged
from everybert.training.data import to_item

if TYPE_CHECKING:
    from everybert.inference.model import Model

SLICE = 4096
"""Masked positions whose logits are held at once."""
PACK, TOKENS = 16_384, 16 * 16_384
"""Tokens per batch, and of an evaluation."""
FEW = 100
"""With fewer masked tokens than this, an accuracy is uncertain by up to 10 points."""
log = logging.getLogger("everybert")


def score_corpus(
    model: "Model",
    corpus: str | Path,
    kind: ExampleKind | None = None,
    length: int | None = None,
    tokens: int = TOKENS,
    split: str = "heldout",
    progress: Callable[[int], None] = lambda packs: None,
) -> dict[str, float]:
    """Accuracy and loss of a model at masked tokens (and sentence pairs) of a corpus, as pre-training evaluates it.

    The kind of examples matters: half of the pairs are two unrelated texts, and a masked token in a long text has
    more context. By default it is pairs if the model has a head for them. `progress` gets the number of packs done.
    """
    opened = Corpus.open(corpus, split)
    opened.check_tokenizer(model.tokenizer.digest)
    longest = model.config.max_positions if model.config.positions != "rotary" else (length or 512)
    length = min(512, longest) if length is None else length
    if length > longest:
        raise EverybertError(f"length {length} is more than the model's {longest} positions: give at most those")
    examples = ExampleConfig(kind=kind or ("pairs" if "nsp" in model.network.heads else "full"), length=length)
    causal, layout = model.config.causal, ExampleLayout.of(model.tokenizer)
    packs = heldout_packs(opened, layout, examples, tokens, log.warning, strict=kind is not None, causal=causal)
    total, masked = sum(len(pack.tokens_T) for pack in packs), count_masked(packs)
    return {**evaluate_packs(model.network, packs, progress), "length": length, "tokens": total, "masked": masked}


def heldout_packs(
    corpus: Corpus,
    layout: ExampleLayout,
    examples: ExampleConfig,
    tokens: int,
    note: Callable[[str], None],
    strict: bool = False,
    causal: bool | str = False,
) -> list[Ragged]:
    """Packs of so many tokens, at most one epoch, under fixed masks; for causal models every token is predicted.

    Text without pairs is evaluated as full sentences, unless `strict`. `note` is called then, and for too little text.
    """
    capacity = max(PACK, examples.length)
    try:
        stream = PackStream(corpus, layout, examples, capacity=capacity, causal=causal)
    except EverybertError as reason:
        if strict or not examples.paired:
            raise
        stream = PackStream(corpus, layout, replace(examples, kind="full"), capacity=capacity, causal=causal)
        note(f"note: the held-out text is evaluated as full sentences, without pairs: {reason}")
    arrays = islice(stream.packs(epochs=1), -(-tokens // PACK))
    packs = [to_item(pack, stream, fill=False).batch for pack in arrays]
    if (masked := count_masked(packs)) < FEW:
        note(
            f"note: the held-out text is too small to trust its figures ({masked} masked tokens): hold out more of the "
            "corpus (everybert corpus build --heldout)"
        )
    return packs


def count_masked(packs: Iterable[Ragged]) -> int:
    """Number of masked tokens."""
    return sum(len(pack.targets_as(PretrainTargets).mask_index_M) for pack in packs)


@torch.no_grad()
def evaluate_packs(
    network: Network, packs: Iterable[Ragged], progress: Callable[[int], None] = lambda packs: None
) -> dict[str, float]:
    """Held-out loss, accuracy and perplexity at masked tokens, and the accuracy on sentence pairs if there are any.

    The logits are computed in slices, never for all masked positions of a pack at once.
    """
    device = device_of(network.encoder)
    loss = right = pairs_right = pairs = torch.zeros((), device=device, dtype=torch.float64)
    masked = 0
    for done, pack in enumerate(packs, 1):
        batch = pack.to(device)
        x_TH, targets = network.encoder(batch), batch.targets_as(PretrainTargets)
        for index_M, label_M in zip(targets.mask_index_M.split(SLICE), targets.mask_label_M.split(SLICE)):
            logits_MV = network.mlm_logits(x_TH, index_M)
            loss = loss + cross_entropy(logits_MV, label_M).double()
            right = right + (logits_MV.argmax(-1) == label_M).sum()
            masked += len(label_M)
        if "nsp" in network.heads and targets.pair_label_B is not None:
            guess_B = network.sequence_logits(x_TH, batch, "nsp").argmax(-1)
            pairs_right = pairs_right + (guess_B == targets.pair_label_B).sum()
            pairs = pairs + (targets.pair_label_B >= 0).sum()
        progress(done)
    mean = float(loss) / max(1, masked)
    figures = {"heldout_loss": mean, "accuracy": float(right) / max(1, masked), "perplexity": math.exp(min(mean, 80.0))}
    if pairs:
        figures["pair_accuracy"] = float(pairs_right / pairs)
    return figures


def pseudo_perplexity(network: Network, sentences: Sequence[Sequence[int]], mask_id: int) -> float:
    """exp of the mean −ln P of each inner token given the others of its sentence (Salazar et al. 2020, eq. 2).

    Sentences have a special token at both ends.
    """
    values = np.concatenate(token_log_probs(network, sentences, [range(1, len(s) - 1) for s in sentences], mask_id))
    return math.exp(min(-values.sum() / max(1, len(values)), 80.0))


def sample_sentences(corpus: Corpus, layout: ExampleLayout, most: int = 32, longest: int = 64) -> list[list[int]]:
    """Sentences spread over the split, truncated to a length, with their special tokens."""
    ids = []
    for s in np.unique(np.linspace(0, corpus.sentences - 1, most).astype(np.int64)):
        start, stop = corpus.sentence_offsets[s : s + 2].tolist()
        ids.append(corpus.tokens(start, min(stop, start + longest - 2)).tolist())
    return [[layout.cls_id, *each, layout.sep_id] for each in ids if each]
