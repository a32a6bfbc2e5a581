"""Where in the stack a task's information lives: one linear probe a layer, the encoder frozen (Tenney et al. 2019).

The probe is softmax regression on standardised vectors, W·x + b with a little weight decay, fitted by L-BFGS: it has
one optimum, so that scores differ by the layer and not by luck.

Legend: N words or texts, H hidden, C labels, L layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.inside.probe_heads import sentence_of
from everybert.model.heads import Network
from everybert.model.pooling import pool
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Tokenizer

DECAY = 1e-3
BUDGET = 2048
ROUNDS = 60


@dataclass(frozen=True)
class LayerProbe:
    """How well a linear probe reads the labels off each layer; layer 0 is the embeddings."""

    scores: list[float]
    """Accuracy on held-out examples, layer by layer."""
    majority: float
    """Accuracy of always saying the commonest label."""
    labels: list[str]
    train: int
    dev: int

    @property
    def best(self) -> int:
        """The layer that is read best."""
        return int(np.argmax(self.scores))


Progress = Callable[[int], None]


def probe_layers(
    network: Network,
    tokenizer: Tokenizer,
    train: tuple[Sequence, Sequence],
    dev: tuple[Sequence, Sequence],
    most: int = 20_000,
    progress: Progress | None = None,
) -> LayerProbe:
    """Probe every layer. Inputs are texts with a label each, or lists of words with lists of labels.

    `most` caps the training words or texts (the first ones are taken), so that memory stays small. `progress` is told
    of texts read.
    """
    x_train, y_train = _features(network, tokenizer, *train, most, progress)
    x_dev, y_dev = _features(network, tokenizer, *dev, most, progress)
    labels = sorted(set(y_train))
    if len(labels) < 2:
        raise EverybertError("the training examples have fewer than two labels; there is nothing to tell apart")
    number = {label: i for i, label in enumerate(labels)}
    gold_train = torch.tensor([number[y] for y in y_train])
    gold_dev = torch.tensor([number.get(y, -1) for y in y_dev])
    scores = [fit(a, gold_train, b, gold_dev, len(labels)) for a, b in zip(x_train, x_dev)]
    common = Counter(y_train).most_common(1)[0][0]
    return LayerProbe(scores, sum(y == common for y in y_dev) / len(y_dev), labels, len(y_train), len(y_dev))


@torch.inference_mode()
def _features(
    network: Network,
    tokenizer: Tokenizer,
    inputs: Sequence,
    targets: Sequence,
    most: int,
    progress: Progress | None,
) -> tuple[list[Tensor], list[str]]:
    """(N, H) for each of the L + 1 layers: a text's mean, or each word's first piece; and the N labels."""
    device = network.encoder.embeddings.token.weight.device
    layers: list[list[Tensor]] = [[] for _ in range(len(network.config.layer_order) + 1)]
    labels: list[str] = []
    for group in _groups(tokenizer, inputs, targets, network.config.max_positions):
        batch = Ragged.of([ids for ids, _, _ in group], device=device)
        states: list[Tensor] = []
        network.encoder(batch, states)
        places = [torch.tensor(at) + o for (_, at, _), o in zip(group, batch.offsets_B1.tolist()) if at is not None]
        for layer, x_TH in zip(layers, states):
            x_NH = x_TH[torch.cat(places).to(device)] if places else pool(x_TH, batch, "mean")
            layer.append(x_NH.float().cpu())
        labels += [label for _, _, own in group for label in own]
        if progress is not None:
            progress(len(group))
        if len(labels) >= most:
            break
    if not labels:
        raise EverybertError("there is no labelled text to read; check the file")
    return [torch.cat(layer)[:most] for layer in layers], labels[:most]


Reading = tuple[list[int], list[int] | None, list[str]]
"""A text's ids; for words, where their first pieces stand; and the labels."""


def _groups(tokenizer: Tokenizer, inputs: Sequence, targets: Sequence, size: int) -> Iterator[list[Reading]]:
    """Texts that are read together; those without a label that fits the window are left out."""
    group: list[Reading] = []
    total = 0
    for given, target in zip(inputs, targets):
        reading = _reading(tokenizer, given, target, size)
        if not reading[2]:
            continue
        if group and total + len(reading[0]) > BUDGET:
            yield group
            group, total = [], 0
        group.append(reading)
        total += len(reading[0])
    if group:
        yield group


def _reading(tokenizer: Tokenizer, given: str | Sequence[str], target: str | Sequence[str], size: int) -> Reading:
    """Ids cut to the window; for words, where their first pieces stand; and the labels that are left."""
    if isinstance(given, str):
        return tokenizer.encode(given).ids[:size], None, [str(target)]
    sentence = sentence_of(tokenizer, [{"form": word} for word in given])
    owner_n = sentence.owner_n[:size]
    first = np.flatnonzero((np.diff(owner_n, prepend=-1) != 0) & (owner_n >= 0))
    return sentence.encoding.ids[:size], first.tolist(), [str(target[owner_n[i]]) for i in first]


def fit(x_NH: Tensor, y_N: Tensor, x_dev: Tensor, y_dev: Tensor, labels: int) -> float:
    """Accuracy on held-out vectors of the best linear map."""
    mean_H, scale_H = x_NH.mean(0), x_NH.std(0).clamp(min=1e-6)
    x_NH, x_dev = (x_NH - mean_H) / scale_H, (x_dev - mean_H) / scale_H
    weight_CH = torch.zeros(labels, x_NH.shape[1], requires_grad=True)
    bias_C = torch.zeros(labels, requires_grad=True)
    solver = torch.optim.LBFGS([weight_CH, bias_C], max_iter=ROUNDS, history_size=10, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        value = F.cross_entropy(F.linear(x_NH, weight_CH, bias_C), y_N) + DECAY * weight_CH.square().sum()
        value.backward()
        return value

    solver.step(loss)  # type: ignore[arg-type]
    with torch.no_grad():
        guess = F.linear(x_dev, weight_CH, bias_C).argmax(-1)
    return float((guess == y_dev).float().mean())
