"""Tagging: one label a word, for entities (BIO, BIOES) or parts of speech.

What is trained is what is predicted: words are joined by single spaces and tokenized, a word's label stands on its
first piece, and raw text is split into words as the training words were (words.py). A word that the tokenizer drops
is given the unknown token, so that every word has a label. Long texts are read in windows: a word's label comes
from the window that owns its first piece, in training and in prediction.

Legend: n words of a text, C labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.features import head_logits
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.tasks import columns as col
from everybert.tasks import metrics, schemes
from everybert.tasks.features import BUDGET, Encoded, Features, Reading, constant, lay, run
from everybert.tasks.records import Examples
from everybert.tasks.sentences import read as read
from everybert.tasks.words import Splitter, Word, learn_splitter
from everybert.text.tokenizer import Encoding, Tokenizer
from everybert.text.windows import windows

CHUNK = 256
Words = str | Sequence[str]
"""A raw text, or its words."""


@dataclass(frozen=True)
class Span:
    """text[start:end] bears this label."""

    text: str
    label: str
    start: int
    end: int
    score: float
    """The mean probability of its words' tags."""


class Place(NamedTuple):
    """Where the words that a window owns stand: token positions in its sequence, and the words' numbers."""

    sequence: int
    at: np.ndarray
    """Of first pieces."""
    word: np.ndarray
    inner_at: np.ndarray
    """Of later pieces."""
    inner_word: np.ndarray


@dataclass(frozen=True)
class Tag:
    """How words are tagged."""

    labels: tuple[str, ...]
    reading: Reading
    scheme: str = "BIO"
    """BIO, BIOES, or plain for labels without entities."""
    decode: str = "constrained"
    """constrained: the best tag sequence that the scheme allows (Viterbi); greedy: each word's best tag."""
    pieces: str = "first"
    """Which pieces of a word learn its label: first, or all. The first is always the one that predicts."""
    splitter: Splitter = field(default_factory=Splitter)
    weights: tuple[float, ...] | None = None
    metric: str = "f1"

    name = "tag"
    head = "tag"

    @property
    def outputs(self) -> int:
        """One for each label."""
        return len(self.labels)

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """Windows of pieces (each a training example of its own); tag_T is −100 where nothing is to be learnt."""
        features = word_features(tokenizer, config, examples.inputs, self.reading)
        tag_T = np.full(len(features.tokens_N), -100, dtype=np.int64)
        for places, tags in zip(features.back, examples.targets):
            gold = np.asarray(col.label_ids(list(tags), self.labels, examples.where), dtype=np.int64)
            for place in places:
                start = features.starts_S1[place.sequence]
                tag_T[start + place.at] = gold[place.word]
                if self.pieces == "all":
                    tag_T[start + place.inner_at] = self._inner[gold[place.inner_word]]
        return features.labelled(tag_T=tag_T)

    @property
    def _inner(self) -> np.ndarray:
        """For each label, the one that a word's later pieces bear: I- for B-, else the same."""
        number = {label: i for i, label in enumerate(self.labels)}
        return np.array([number.get(f"I-{n[2:]}", i) if n[:2] == "B-" else i for n, i in number.items()])

    def share(self, features: Features, which: np.ndarray) -> float:
        """The number of labelled words, or the sum of their labels' weights."""
        parts = [features.labels["tag_T"][features.starts_S1[i] : features.starts_S1[i + 1]] for i in which]
        tags = np.concatenate(parts)
        tags = tags[tags >= 0]
        return float(len(tags) if self.weights is None else np.asarray(self.weights)[tags].sum())

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """Cross-entropy of the labelled pieces."""
        logits_TC = head_logits(network, batch, self.head).float()
        weight_C = None if self.weights is None else constant(self.weights, logits_TC.device)
        total = F.cross_entropy(logits_TC, batch.extra["tag_T"], weight_C, ignore_index=-100, reduction="sum")
        count = (batch.extra["tag_T"] >= 0).float()
        if weight_C is not None:
            count = count * weight_C[batch.extra["tag_T"].clamp(min=0)]
        return total / count.sum().clamp(min=1e-6)  # a batch may hold no word at all

    def logits(self, network: Network, features: Features, budget: int = BUDGET) -> list[np.ndarray]:
        """(n, C) for each text."""
        out = run(network, features, lambda batch: head_logits(network, batch, self.head), budget)
        texts = []
        for places in features.back:
            words = sum(len(place.word) for place in places)
            text = np.zeros((words, len(self.labels)))
            for place in places:
                text[place.word] = out[place.sequence][place.at]
            texts.append(text)
        return texts

    def choose_tags(self, logits_nC: np.ndarray) -> tuple[list[str], np.ndarray]:
        """(tags, their probabilities) of a text's words."""
        if not len(logits_nC):
            return [], np.zeros(0)
        p_nC = metrics.softmax(logits_nC)
        obey = self.decode == "constrained" and self.scheme != "plain"
        path = schemes.viterbi(np.log(np.maximum(p_nC, 1e-30)), self.labels) if obey else p_nC.argmax(1)
        return [self.labels[i] for i in path], p_nC[np.arange(len(path)), path]

    def evaluate(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """Entity precision, recall and f1 as conlleval has them, and word accuracy; of plain labels accuracy, f1."""
        guess = [self.choose_tags(logits)[0] for logits in self.logits(network, features)]
        if self.scheme != "plain":
            return schemes.entity_scores(examples.targets, guess)
        number = {label: i for i, label in enumerate(self.labels)}
        flat = [np.array([number[t] for tags in side for t in tags]) for side in (examples.targets, guess)]
        return metrics.classification_scores(flat[0], flat[1], len(self.labels))

    def tuned(self, network: Network, features: Features, examples: Examples) -> Tag:
        """As it is."""
        return self

    def spans(self, text: str, words: Sequence[Word], tags: Sequence[str], sure: np.ndarray) -> list[Span]:
        """Entities, or one span a word for plain labels, with their places in the text."""
        if self.scheme == "plain":
            found = [schemes.Entity(tag, i, i + 1) for i, tag in enumerate(tags)]
        else:
            found = schemes.entities(tags)
        return [
            Span(
                text[words[e.start].start : words[e.stop - 1].end],
                e.label,
                words[e.start].start,
                words[e.stop - 1].end,
                float(sure[e.start : e.stop].mean()),
            )
            for e in found
        ]

    def state(self) -> dict[str, Any]:
        """What the model folder keeps; the labels are in config.json too."""
        return {
            "task": self.name,
            "labels": list(self.labels),
            "window": self.reading.state(),
            "scheme": self.scheme,
            "decode": self.decode,
            "words": self.splitter.state(),
        }


# ── words to sequences ───────────────────────────────────────────────────────────────────────────────────────


def word_features(
    tokenizer: Tokenizer, config: EncoderConfig, texts: Sequence[Sequence[str]], reading: Reading
) -> Features:
    """Texts as lists of words → windows of pieces; `back` has, for each text, the places of its words."""
    encodings = tokenizer.encode_batch([" ".join(words) for words in texts], specials=False)
    lead = _lead(tokenizer)
    room = reading.size - tokenizer.single_special
    sequences: list[list[Encoded]] = []
    back: list[list[Place]] = []
    for words, encoding in zip(texts, encodings):
        ids, owner = _pieces(words, encoding, tokenizer)
        first = np.diff(owner, prepend=-1) > 0
        places = []
        for w in windows(len(ids), room, min(reading.overlap, room - 1)):
            owned = np.arange(w.own_start, w.own_stop)
            one, more = owned[first[owned]], owned[~first[owned]]
            shift = lead - w.start
            places.append(Place(len(sequences), one + shift, owner[one], more + shift, owner[more]))
            sequences.append([Encoded(*tokenizer.build(ids[w.start : w.stop]))])
        back.append(places)
    return lay(sequences, config, reading, back)


def _lead(tokenizer: Tokenizer) -> int:
    """How many special tokens stand before the text."""
    return tokenizer.build([-1])[0].index(-1)


def _pieces(words: Sequence[str], encoding: Encoding, tokenizer: Tokenizer) -> tuple[list[int], np.ndarray]:
    """The ids of a text's pieces, and the number of the word that each belongs to."""
    ends = np.cumsum([len(w) + 1 for w in words]) - 1  # in the joined text, without the space
    starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
    owner = np.minimum(np.searchsorted(ends, starts, side="right"), max(len(words) - 1, 0))
    ids = encoding.ids
    missing = np.setdiff1d(np.arange(len(words)), owner)
    if len(missing):
        unknown = tokenizer.unk_id if tokenizer.unk_id is not None else tokenizer.mask_id
        at = np.searchsorted(owner, missing)
        ids = np.insert(np.asarray(ids, dtype=np.int64), at, unknown or 0).tolist()
        owner = np.insert(owner, at, missing)
    return ids, owner


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────


def begin(
    examples: Examples,
    config: EncoderConfig,
    *,
    reading: Reading | None = None,
    labels: Sequence[str] | None = None,
    class_weights: str | Sequence[float] | None = None,
    metric: str | None = None,
    decode: str = "constrained",
    pieces: str = "first",
) -> Tag:
    """Settle scheme, label order and word splitting by the training sentences."""
    counts = Counter(t for tags in examples.targets for t in tags)
    col.check_labels(counts, sum(counts.values()), examples.where)
    scheme = schemes.find_scheme(examples.targets)
    order = tuple(labels) if labels is not None else tuple(_order(counts, scheme))
    col.label_ids(sorted(counts), order, examples.where)
    if decode not in ("constrained", "greedy") or pieces not in ("first", "all"):
        raise EverybertError("tag: decode is constrained or greedy, pieces is first or all")
    weights = None
    if class_weights == "balanced":
        weights = tuple(sum(counts.values()) / (len(order) * max(counts[n], 1)) for n in order)
    elif class_weights is not None:
        weights = tuple(float(w) for w in class_weights)
    known = ("accuracy", "f1_macro") if scheme == "plain" else ("f1", "precision", "recall", "accuracy", "f1_macro")
    if metric is not None and metric not in known:
        raise EverybertError(f"these tags are judged by one of {', '.join(known)}, not {metric!r}")
    return Tag(
        labels=order,
        reading=reading or Reading.of(config),
        scheme=scheme,
        decode=decode,
        pieces=pieces,
        splitter=learn_splitter(examples.inputs),
        weights=weights,
        metric=metric or known[0],
    )


def _order(counts: Counter[str], scheme: str) -> list[str]:
    """O first, then each entity's tags together, as a reader of the confusion matrix would have them."""
    if scheme == "plain":
        return col.order_labels(counts)
    kinds = sorted({t[2:] for t in counts if t != "O"})
    prefixes = "BI" if scheme == "BIO" else "BIES"
    return ["O", *(f"{p}-{k}" for k in kinds for p in prefixes)]


def of(state: Mapping[str, Any], config: EncoderConfig) -> Tag:
    """From what `state` gave, or from a folder's labels alone: the scheme is then read off them."""
    labels = tuple(state["labels"])
    prefixed = schemes.has_prefixes(labels)
    guess = "plain" if not prefixed else "BIOES" if any(n[0] in "ESLU" for n in labels if n != "O") else "BIO"
    if guess == "BIO" and not any(n.startswith("B-") for n in labels):
        guess = "IOB1"
    scheme = state.get("scheme", guess)
    return Tag(
        labels=labels,
        reading=Reading.from_state(state.get("window"), config),
        scheme=scheme,
        decode=state.get("decode", "greedy" if scheme == "IOB1" else "constrained"),
        splitter=Splitter.of(state["words"]) if "words" in state else Splitter(),
    )


# ── prediction ───────────────────────────────────────────────────────────────────────────────────────────────


def predict(
    network: Network, tokenizer: Tokenizer, task: Tag, texts: Sequence[Words], budget: int = BUDGET
) -> Iterator[list[Span]]:
    """The spans of each text. A list of words is taken as it is; its places are those of the words joined by spaces."""
    for text, words, tags, sure in predict_tags(network, tokenizer, task, texts, budget):
        yield task.spans(text, words, tags, sure)


def predict_tags(
    network: Network, tokenizer: Tokenizer, task: Tag, texts: Sequence[Words], budget: int = BUDGET
) -> Iterator[tuple[str, list[Word], list[str], np.ndarray]]:
    """(text, words, tags, their probabilities) of each text."""
    for start in range(0, len(texts), CHUNK):
        split = [
            (t, task.splitter.split(t)) if isinstance(t, str) else _joined(t) for t in texts[start : start + CHUNK]
        ]
        features = word_features(tokenizer, network.config, [[w.text for w in ws] for _, ws in split], task.reading)
        for (text, words), logits in zip(split, task.logits(network, features, budget)):
            yield text, words, *task.choose_tags(logits)


def _joined(words: Sequence[str]) -> tuple[str, list[Word]]:
    ends = np.cumsum([len(w) + 1 for w in words]) - 1
    return " ".join(words), [Word(w, int(e) - len(w), int(e)) for w, e in zip(words, ends)]
