"""Linear probes: what a logistic regression reads from each layer of a frozen encoder (Tenney et al. 2019).

    python contrib/probe_layers.py tag --train en-train.conllu --dev en-dev.conllu --model ./my-model
    python contrib/probe_layers.py classify --train train.tsv --dev dev.tsv

Prints, per layer, the accuracy on the held-out examples: of words (tag) by their first token, of texts (classify) by
the mean over their tokens. Layer 0 is the embeddings.

Legend: L layers, n tokens of a text, N words or texts, H hidden.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from everybert.errors import EverybertError
from everybert.inference.model import load
from everybert.inside.probes import sentence_of
from everybert.model.engine import Inputs, encode_layers
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.tasks import TASKS
from everybert.text.tokenizer import Tokenizer

CHUNK = 256
"""Sentences that are encoded at a time."""
DECAY = 1e-3
"""Weight decay of a probe."""
ITERATIONS = 60


@dataclass(frozen=True)
class LayerProbe:
    """The accuracy of a linear probe on each layer. Layer 0 is the embeddings."""

    scores: list[float]
    """Accuracy on held-out examples, per layer."""
    majority: float
    """Accuracy of always predicting the most frequent label."""
    labels: list[str]
    train: int
    dev: int

    @property
    def best(self) -> int:
        """The layer with the highest accuracy."""
        return int(np.argmax(self.scores))


def probe_layers(
    network: Network,
    tokenizer: Tokenizer,
    train: tuple[Sequence, Sequence],
    dev: tuple[Sequence, Sequence],
    most: int = 20_000,
) -> LayerProbe:
    """Probe every layer. Inputs are texts with a label each, or lists of words with lists of labels.

    `most` limits the number of words or texts (the first are taken) and with it the memory.
    """
    x_train, y_train = _features(network, tokenizer, *train, most)
    x_dev, y_dev = _features(network, tokenizer, *dev, most)
    labels = sorted(set(y_train))
    if len(labels) < 2:
        raise EverybertError("the training examples have fewer than two labels; there is nothing to tell apart")
    scores = [fit(a, y_train, b, y_dev) for a, b in zip(x_train, x_dev)]
    common = Counter(y_train).most_common(1)[0][0]
    return LayerProbe(scores, sum(y == common for y in y_dev) / len(y_dev), labels, len(y_train), len(y_dev))


def _features(
    network: Network, tokenizer: Tokenizer, inputs: Sequence, targets: Sequence, most: int
) -> tuple[list[np.ndarray], list[str]]:
    """(N, H) for each of the L + 1 layers: the mean of each text, or the first token of each word; and N labels."""
    layers: list[list[np.ndarray]] = [[] for _ in range(len(network.config.layer_order) + 1)]
    labels: list[str] = []
    rows_left = iter(zip(inputs, targets))
    while chunk := list(islice(rows_left, CHUNK)):
        read = [reading(tokenizer, x, y, network.config.max_positions) for x, y in chunk]
        read = [reading for reading in read if reading[2]]
        rows: dict[int, list[np.ndarray]] = {}

        def keep(which: list[int], batch: Ragged, states: list[Tensor], read: list = read, rows: dict = rows) -> None:
            for i, *own in zip(which, *map(batch.split, states)):
                at = read[i][1]
                found = [x_nH.float().mean(0, keepdim=True) if at is None else x_nH[at].float() for x_nH in own]
                rows[i] = [x.cpu().numpy() for x in found]

        if read:
            encode_layers(network, Inputs([ids for ids, _, _ in read]), keep)
        for layer, vectors in zip(layers, zip(*(rows[i] for i in range(len(read))))):
            layer += vectors
        labels += [label for _, _, own in read for label in own]
        if len(labels) >= most:
            break
    if not labels:
        raise EverybertError("there is no labelled text to read; check the file")
    return [np.concatenate(layer)[:most] for layer in layers], labels[:most]


def reading(
    tokenizer: Tokenizer, given: str | Sequence[str], target: str | Sequence[str], size: int
) -> tuple[list[int], list[int] | None, list[str]]:
    """Ids cut to the window; the first token of each word, or None for a text; and the labels."""
    if isinstance(given, str):
        return tokenizer.encode(given).ids[:size], None, [str(target)]
    sentence = sentence_of(tokenizer, given)
    owner_n = sentence.owner_n[:size]
    first = np.flatnonzero((np.diff(owner_n, prepend=-1) != 0) & (owner_n >= 0))
    return sentence.encoding.ids[:size], first.tolist(), [str(target[owner_n[i]]) for i in first]


def fit(x_NH: np.ndarray, y_N: Sequence, x_dev: np.ndarray, y_dev: Sequence) -> float:
    """Accuracy on held-out vectors of a logistic regression on standardised vectors, which has one optimum."""
    shared = 2 if len(set(y_N)) == 2 else 1  # scikit-learn has one weight vector for two classes
    classifier = LogisticRegression(C=shared / (2 * DECAY * len(x_NH)), max_iter=ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return float(make_pipeline(StandardScaler(), classifier).fit(x_NH, y_N).score(x_dev, y_dev))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("classify", "tag"))
    parser.add_argument("--train", required=True)
    parser.add_argument("--dev", required=True)
    parser.add_argument("--column", help="the label column; in CoNLL-U: upos if not given")
    parser.add_argument("--most", type=int, default=20_000, help="words or texts to read of each file")
    parser.add_argument("--model", default="everybert-small")
    args = parser.parse_args()
    columns = {"label": args.column} if args.column else None
    data = [TASKS[args.task].read(path, columns) for path in (args.train, args.dev)]
    if args.task == "classify" and any(not isinstance(x, str) for examples in data for x in examples.inputs[:1]):
        raise EverybertError("layers are probed on single texts, not on pairs; give a file with one text per row")
    model = load(args.model)
    first, second = ((examples.inputs, examples.targets) for examples in data)
    found = probe_layers(model.network, model.tokenizer, first, second, args.most)
    for layer, score in enumerate(found.scores):
        print(f"layer {layer:2}  {score:.4f}" + ("  best" if layer == found.best else ""))
    print(f"majority  {found.majority:.4f}  ({len(found.labels)} labels, {found.train:,} and {found.dev:,} examples)")


if __name__ == "__main__":
    main()
