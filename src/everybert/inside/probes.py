"""Probes: what attention heads know of syntax, and what a linear classifier reads from each layer.

Head probes (Clark et al. 2019): how often the strongest link of a head joins a word and its syntactic head. Attention
between tokens becomes attention between words: weights towards the tokens of a word are summed, weights from them are
averaged, and special tokens are left out. A head is right about a word if the word attends most to its syntactic head
or, in the other direction, if the syntactic head attends most to the word. The baseline of a relation is its best
fixed offset, such as "the head is the next word".

Layer probes (Tenney et al. 2019): the accuracy of a logistic regression on the frozen encoder's vectors, per layer.

Legend: L layers, A heads, W words of a sentence, n its tokens, N words or texts, H hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.engine import Inputs, device_of, encode_layers, run_batches
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding, Tokenizer

PUBLISHED = {"obj": 86.8, "det": 94.3, "nmod:poss": 80.5, "aux:pass": 82.5}
"""The best heads of BERT-base on the Penn Treebank (Clark et al. 2019, table 1: dobj, det, poss, auxpass)."""
SENTENCES = {
    "obj": "direct objects attend to their verbs",
    "det": "determiners attend to their nouns",
    "nmod:poss": "possessives attend to their nouns",
    "aux:pass": "passive auxiliaries attend to their verbs",
}
OFFSETS = 5
"""Fixed offsets that are tried as baselines: −5 … 5."""
CHUNK = 256
"""Sentences or texts between two progress reports."""
DECAY = 1e-3
"""Weight decay of a layer probe."""
ITERATIONS = 60

Tree = Sequence[Mapping[str, str]]
"""The words of a sentence with the CoNLL-U fields form, head, deprel."""
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence as tokens."""

    encoding: Encoding
    owner_n: np.ndarray
    """The word of each token; −1 for special tokens."""
    present_W: np.ndarray
    """Whether a word has tokens."""


def sentence_of(tokenizer: Tokenizer, words: Sequence[str]) -> Sentence:
    """Encode the words, joined by spaces, and find the word of each token."""
    encoding = tokenizer.encode(" ".join(words))
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    starts = np.array([a for a, _ in encoding.offsets])
    owner_n = np.minimum(np.searchsorted(ends, starts, side="right"), len(words) - 1)
    owner_n[np.array(encoding.special)] = -1
    return Sentence(encoding, owner_n, np.isin(np.arange(len(words)), owner_n))


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


# ── heads ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Relation:
    """How well heads follow one dependency relation."""

    name: str
    count: int
    right: np.ndarray = field(repr=False)
    """float (2, L, A): the share of words for which a head is right, from dependent to head and back."""
    offset: int
    """The best fixed offset from a word to its head."""
    baseline: float
    """The share of words for which that offset is right."""

    @property
    def best(self) -> tuple[int, int, bool, float]:
        """(layer, head, whether it attends from the dependent to its head, share right) of the best head."""
        back, layer, head = np.unravel_index(int(self.right.argmax()), self.right.shape)
        return int(layer), int(head), back == 0, float(self.right.max())


@dataclass(frozen=True)
class HeadProbe:
    """The result for a treebank."""

    relations: dict[str, Relation]
    """By name, the most frequent first; "all" is all of them together."""
    sentences: int
    words: int
    skipped: int
    """Sentences longer than the model's window."""

    def rows(self, least: int = 1) -> list[dict[str, object]]:
        """A row per relation: the best head, its accuracy, the baseline, and the published value if there is one."""
        out: list[dict[str, object]] = []
        for r in self.relations.values():
            layer, head, forward, accuracy = r.best
            row = {"relation": r.name, "count": r.count, "layer": layer, "head": head}
            row["direction"] = "to its head" if forward else "from its head"
            row |= {"accuracy": accuracy, "offset": r.offset, "baseline": r.baseline}
            out.append(row | {"published": PUBLISHED.get(r.name)})
        return [row for row in out if row["count"] >= least]  # type: ignore[operator]


def probe_heads(
    network: Network, tokenizer: Tokenizer, trees: Iterable[Tree], progress: Progress | None = None
) -> HeadProbe:
    """Measure every head on every relation. `progress` is called with the number of sentences so far."""
    shape = (2, len(network.config.layer_order), network.config.heads)
    hits: dict[str, np.ndarray] = {}
    gaps: dict[str, np.ndarray] = {}
    sentences = words = skipped = 0
    for chunk in _chunks(trees):
        encoded = [(tree, sentence_of(tokenizer, [word["form"] for word in tree])) for tree in chunk]
        fitting = [(tree, s) for tree, s in encoded if len(s.encoding) <= network.config.max_positions]
        skipped += len(encoded) - len(fitting)
        sentences += len(fitting)
        for (tree, sentence), links in zip(fitting, _strongest_links(network, [s for _, s in fitting])):
            words += len(tree)
            for child, parent, name in arcs(tree, sentence):
                right = np.stack((links[:, :, child] == parent, links[:, :, parent] == child))
                for key in ("all", name):
                    hits.setdefault(key, np.zeros(shape))
                    hits[key] += right
                    gap = gaps.setdefault(key, np.zeros(2 * OFFSETS + 2))
                    gap[parent - child + OFFSETS if abs(parent - child) <= OFFSETS else -1] += 1
        if progress is not None:
            progress(sentences + skipped)
    if not hits:
        raise EverybertError("no sentence has a word with a syntactic head; give a CoNLL-U file with HEAD and DEPREL")
    counts = {name: int(gap.sum()) for name, gap in gaps.items()}
    found = {}
    for name in sorted(hits, key=lambda name: -counts[name]):
        offset = int(gaps[name][:-1].argmax()) - OFFSETS
        baseline = float(gaps[name][:-1].max()) / counts[name]
        found[name] = Relation(name, counts[name], hits[name] / counts[name], offset, baseline)
    return HeadProbe(found, sentences, words, skipped)


def arcs(tree: Tree, sentence: Sentence) -> Iterator[tuple[int, int, str]]:
    """(dependent, head, relation), counted from 0, without roots and words that have no tokens."""
    for child, word in enumerate(tree):
        head = word["head"]
        if not head.isdigit():
            raise EverybertError(f"the word {word['form']!r} has the head {head!r}, which is no number; fix the file")
        parent = int(head) - 1
        if 0 <= parent < len(tree) and sentence.present_W[child] and sentence.present_W[parent]:
            yield child, parent, word["deprel"]


def _strongest_links(network: Network, sentences: Sequence[Sentence]) -> list[np.ndarray]:
    """Per sentence (L, A, W): the word to which each word attends most, in every head."""
    out: list[list[np.ndarray]] = [[] for _ in sentences]

    def work(which: list[int], batch: Ragged) -> None:
        turn = 0

        def watch(name: str, weights_Ann: Tensor) -> None:
            nonlocal turn
            if name.endswith("attention.weights"):  # called per layer and sequence, in order
                i = which[turn % len(which)]
                out[i].append(strongest(weights_Ann.float().cpu().numpy(), sentences[i]))
                turn += 1

        network.encoder(batch.to(device_of(network.encoder)), watch=watch)

    run_batches(network, Inputs([s.encoding.ids for s in sentences]), work)
    return [np.stack(layers) for layers in out]


def strongest(weights_Ann: np.ndarray, sentence: Sentence) -> np.ndarray:
    """(A, W): the other word to which each word attends most."""
    words = len(sentence.present_W)
    member_nW = (sentence.owner_n[:, None] == np.arange(words)).astype(np.float32)
    mean_Wn = (member_nW / np.maximum(member_nW.sum(0), 1)).T
    between_AWW = mean_Wn @ weights_Ann @ member_nW
    between_AWW[:, :, ~sentence.present_W] = -1
    between_AWW[:, np.arange(words), np.arange(words)] = -2
    return between_AWW.argmax(-1)


# ── layers ──────────────────────────────────────────────────────────────────────────────────────────────────


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
    progress: Progress | None = None,
) -> LayerProbe:
    """Probe every layer. Inputs are texts with a label each, or lists of words with lists of labels.

    `most` limits the number of words or texts (the first are taken) and with it the memory. `progress` is called with
    the number of texts of each chunk.
    """
    x_train, y_train = _features(network, tokenizer, *train, most, progress)
    x_dev, y_dev = _features(network, tokenizer, *dev, most, progress)
    labels = sorted(set(y_train))
    if len(labels) < 2:
        raise EverybertError("the training examples have fewer than two labels; there is nothing to tell apart")
    scores = [fit(a, y_train, b, y_dev) for a, b in zip(x_train, x_dev)]
    common = Counter(y_train).most_common(1)[0][0]
    return LayerProbe(scores, sum(y == common for y in y_dev) / len(y_dev), labels, len(y_train), len(y_dev))


def _features(
    network: Network, tokenizer: Tokenizer, inputs: Sequence, targets: Sequence, most: int, progress: Progress | None
) -> tuple[list[np.ndarray], list[str]]:
    """(N, H) for each of the L + 1 layers: the mean of each text, or the first token of each word; and N labels."""
    layers: list[list[np.ndarray]] = [[] for _ in range(len(network.config.layer_order) + 1)]
    labels: list[str] = []
    for chunk in _chunks(zip(inputs, targets)):
        read = [_reading(tokenizer, x, y, network.config.max_positions) for x, y in chunk]
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
        if progress is not None:
            progress(len(chunk))
        if len(labels) >= most:
            break
    if not labels:
        raise EverybertError("there is no labelled text to read; check the file")
    return [np.concatenate(layer)[:most] for layer in layers], labels[:most]


def _reading(
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
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    shared = 2 if len(set(y_N)) == 2 else 1  # scikit-learn has one weight vector for two classes
    classifier = LogisticRegression(C=shared / (2 * DECAY * len(x_NH)), max_iter=ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return float(make_pipeline(StandardScaler(), classifier).fit(x_NH, y_N).score(x_dev, y_dev))


# ── pictures ────────────────────────────────────────────────────────────────────────────────────────────────

INK, QUIET, ACCENT = "#1d2129", "#667085", "#3450c4"


def _axes(width: float, height: float, title: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure  # not pyplot: no display, no global state
    except ImportError as error:
        raise EverybertError("pictures need matplotlib: pip install 'everybert[viz]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise EverybertError(f"{path} could not be written ({error}); name a .png, .svg or .pdf file") from None


def draw_heads(relation: Relation, path: Path, title: str = "") -> None:
    """Layers × heads: the share of words for which each head is right, in its better direction."""
    right_LA = relation.right.max(0) * 100
    layers, heads = right_LA.shape
    title = title or f"{relation.name}: % right ({relation.count:,} words)"
    figure, axes = _axes(1.6 + 0.52 * heads, 1.5 + 0.42 * layers, title)
    image = axes.imshow(right_LA, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for (layer, head), value in np.ndenumerate(right_LA):
        colour = "white" if value > 60 else INK
        axes.text(head, layer, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))
    figure.colorbar(image, ax=axes, label="% right", shrink=0.85)
    _save(figure, path)


def draw_layers(probe: LayerProbe, path: Path, title: str = "") -> None:
    """Accuracy per layer, and of the most frequent label."""
    figure, axes = _axes(5.6, 3.2, title or "Accuracy of a linear probe on each layer")
    scores = [100 * score for score in probe.scores]
    axes.plot(scores, color=ACCENT, marker="o", markersize=4)
    axes.axhline(100 * probe.majority, color=QUIET, linewidth=1, linestyle=":")
    axes.text(0, 100 * probe.majority, " most frequent label", color=QUIET, fontsize=8, va="bottom")
    place = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
    axes.annotate(f"{scores[probe.best]:.1f}", (probe.best, scores[probe.best]), fontsize=9, color=INK, **place)
    axes.set_xticks(range(len(scores)), ["emb.", *map(str, range(1, len(scores)))])
    axes.set(xlabel="layer", ylabel="accuracy, %", ylim=(0, 105), yticks=range(0, 101, 20))
    _save(figure, path)
