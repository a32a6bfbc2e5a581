"""Evaluation on held-out text: masked tokens, sentence pairs, pseudo-perplexity.

The masks are the same for every recipe and every evaluation (15 % of the tokens, 80/10/10, seed 0), so that figures
can be compared.

Legend: T tokens in the batch, H hidden, M masked positions, V vocabulary, B sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from everybert.corpus.examples import ExampleConfig, Kind
from everybert.corpus.masking import MaskingConfig
from everybert.corpus.packs import PackStream
from everybert.corpus.shards import Corpus, Layout
from everybert.errors import EverybertError
from everybert.model import engine
from everybert.model.engine import token_log_probs
from everybert.model.heads import Network
from everybert.model.losses import cross_entropy, targets_of
from everybert.model.ragged import Ragged
from everybert.training.data import to_item

if TYPE_CHECKING:
    from everybert.inference.model import Model

SLICE = 4096
"""Masked positions whose logits are held at once."""
PACK = 16_384
"""Tokens per batch when a corpus is scored."""


def score_corpus(
    model: Model,
    corpus: str | Path,
    kind: Kind = "full",
    length: int | None = None,
    tokens: int = 1_000_000,
    split: str = "heldout",
    progress: Callable[[Sequence[Ragged]], Iterable[Ragged]] = iter,
) -> dict[str, float]:
    """Accuracy and loss of a model at masked tokens (and sentence pairs, with kind="pairs") of a corpus.

    Examples are made as in pre-training. Their kind matters: half of the pairs are two unrelated texts, and a masked
    token in a long text has more context. `progress` may wrap the batches to show how far they are.
    """
    opened = Corpus.open(corpus, split)
    opened.check_tokenizer(model.tokenizer.digest)
    longest = model.config.max_positions if model.config.positions != "rotary" else (length or 512)
    length = min(512, longest) if length is None else length
    if length > longest:
        raise EverybertError(f"length {length} is more than the model's {longest} positions: give at most those")
    layout, examples = Layout.of(model.tokenizer), ExampleConfig(kind=kind, length=length)
    packs = masked_packs(masked_stream(opened, layout, examples, max(PACK, length)), -(-tokens // PACK))
    seen = sum(len(pack.tokens_T) for pack in packs)
    masked = sum(len(targets_of(pack).mask_index_M) for pack in packs)
    return {**evaluate_packs(model.network, progress(packs)), "length": length, "tokens": seen, "masked": masked}


def masked_stream(corpus: Corpus, layout: Layout, examples: ExampleConfig, capacity: int) -> PackStream:
    """The packs of a split under fixed masks."""
    return PackStream(corpus, layout, examples, MaskingConfig(), seed=0, capacity=capacity)


def masked_packs(stream: PackStream, most: int) -> list[Ragged]:
    """The first `most` packs of a stream, at most one epoch."""
    packs = islice(stream.packs(epochs=1), most)
    return [to_item(pack, n, stream, fill=False).batch for n, pack in enumerate(packs)]


def heldout_packs(
    corpus: Corpus, layout: Layout, examples: ExampleConfig, capacity: int, most: int, note: Callable[[str], None]
) -> list[Ragged]:
    """Packs of the held-out split. Text that has no pairs is evaluated as full sentences, which `note` is told."""
    try:
        stream = masked_stream(corpus, layout, examples, capacity)
    except EverybertError as reason:
        if not examples.paired:
            raise
        stream = masked_stream(corpus, layout, replace(examples, kind="full"), capacity)
        note(f"note: the held-out text is evaluated as full sentences, without pairs: {reason}")
    return masked_packs(stream, most)


@torch.no_grad()
def evaluate_packs(network: Network, packs: Iterable[Ragged]) -> dict[str, float]:
    """Held-out loss, accuracy and perplexity at masked tokens, and the accuracy on sentence pairs if there are any.

    The logits are computed in slices, never for all masked positions of a pack at once.
    """
    device = network.encoder.embeddings.token.weight.device
    was_training = network.training
    network.eval()
    loss = right = pairs_right = torch.zeros((), device=device, dtype=torch.float64)
    masked = pairs = 0
    for pack in packs:
        batch = pack.to(device)
        x_TH, targets = network.encoder(batch), targets_of(batch)
        for index_M, label_M in zip(targets.mask_index_M.split(SLICE), targets.mask_label_M.split(SLICE)):
            logits_MV = network.mlm_logits(x_TH, index_M)
            loss = loss + cross_entropy(logits_MV, label_M).double()
            right = right + (logits_MV.argmax(-1) == label_M).sum()
            masked += len(label_M)
        labels_B, host_B = targets.pair_label_B, targets_of(pack).pair_label_B
        if "nsp" in network.heads and labels_B is not None and host_B is not None:
            guess_B = network.sequence_logits(x_TH, batch, "nsp").argmax(-1)
            pairs_right = pairs_right + ((guess_B == labels_B) & (labels_B >= 0)).sum()
            pairs += int((host_B >= 0).sum())
    network.train(was_training)
    mean = float(loss) / max(1, masked)
    figures = {"heldout_loss": mean, "accuracy": float(right) / max(1, masked), "perplexity": math.exp(min(mean, 80.0))}
    if pairs:
        figures["pair_accuracy"] = float(pairs_right) / pairs
    return figures


def pseudo_perplexity(network: Network, sentences: Sequence[Sequence[int]], mask_id: int, tokens: int = PACK) -> float:
    """exp of the mean −ln P of each inner token given the others of its sentence (Salazar et al. 2020, eq. 2).

    Sentences have a special token at both ends. Batches run one by one in the training loop's own thread, without
    recorded graphs: sharded layers gather their weights as they run.
    """

    def run(network: Network, inputs: engine.Inputs, read: engine.Read) -> None:
        device = network.encoder.embeddings.token.weight.device
        for which in engine.plan([len(ids) for ids in inputs.ids], tokens):
            batch = inputs.batch(which).to(device)
            read(which, batch, network.encoder(batch))

    was_training = network.training
    network.eval()
    with torch.no_grad():
        found = token_log_probs(network, sentences, [range(1, len(s) - 1) for s in sentences], mask_id, run=run)
    network.train(was_training)
    values = np.concatenate(found)
    return math.exp(min(-values.sum() / max(1, len(values)), 80.0))


def sample_sentences(corpus: Corpus, layout: Layout, most: int = 32, longest: int = 64) -> list[list[int]]:
    """Sentences spread over the split, truncated to a length, with their special tokens."""
    chosen = np.unique(np.linspace(0, corpus.sentences - 1, most).astype(np.int64))
    out = []
    for s in chosen:
        start, stop = (int(x) for x in corpus.sentence_offsets[s : s + 2])
        ids = corpus.tokens(start, min(stop, start + longest - 2)).astype(int).tolist()
        if ids:
            out.append([layout.cls_id, *ids, layout.sep_id])
    return out
