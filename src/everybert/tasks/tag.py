"""Tagging: one label per word, for entities (BIO, BIOES) or parts of speech.

Training and prediction see the same words: raw text is split as the training words were (words.py), words are joined
by single spaces and tokenized, and a word's label is on its first piece. A word that the tokenizer drops becomes the
unknown token, so that every word has a label. In a long text a word's label comes from the window that owns its
first piece.

Legend: n words of a text, C labels.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.tasks import dataset, metrics
from everybert.tasks import words as wording
from everybert.tasks.dataset import Examples
from everybert.tasks.task import (
    DIGITS,
    Encoded,
    Features,
    Task,
    constant,
    label_weights,
    lay,
    targets_of,
)
from everybert.tasks.words import Entity, Splitter, Word, split_tag
from everybert.text.tokenizer import Encoding, Tokenizer

log = logging.getLogger("everybert")
Words = str | Sequence[str]
"""A raw text, or its words."""


@dataclass(frozen=True)
class Span:
    """text[start:end] has this label."""

    text: str
    label: str
    start: int
    end: int
    score: float
    """The mean probability of its words' tags."""


class Place(NamedTuple):
    """Where the words that a window owns are: token positions in its sequence, and the words' numbers."""

    sequence: int
    at: np.ndarray
    """Of first pieces."""
    word: np.ndarray
    inner_at: np.ndarray
    """Of later pieces."""
    inner_word: np.ndarray


@dataclass(frozen=True)
class TaggedText:
    """What leads from tokens back to a text: its words and where they are."""

    text: str
    words: list[Word]
    places: list[Place]


@dataclass(frozen=True, kw_only=True)
class Tag(Task):
    """One label per word."""

    scheme: str = "BIO"
    """BIO, BIOES, or plain for labels without entities."""
    decoding: str = "constrained"
    """constrained: the best tag sequence that the scheme allows (Viterbi); greedy: the best tag of each word."""
    pieces: str = "first"
    """Which pieces of a word are trained on its label: first, or all. Prediction reads the first."""
    splitter: Splitter = field(default_factory=Splitter)
    weights: tuple[float, ...] | None = None

    name = "tag"
    head = "tag"
    metrics = ("f1", "precision", "recall", "accuracy", "f1_macro")
    saved = {"labels": tuple, "scheme": str}
    labelled = True
    chunk = 256

    read = staticmethod(dataset.read_tagged)
    input_reader = staticmethod(dataset.text_reader)

    @classmethod
    def fit(
        cls,
        examples: Examples,
        labels: Sequence[str] | None = None,
        class_weights: str | Sequence[float] | None = None,
        decode: str = "constrained",
        pieces: str = "first",
    ) -> dict[str, Any]:
        """Scheme, label order and word splitting come from the training sentences."""
        counts = Counter(t for tags in examples.targets for t in tags)
        dataset.check_labels(counts, counts.total(), examples.where)
        scheme = wording.find_scheme(examples.targets)
        order = tuple(labels) if labels is not None else tuple(_order(counts, scheme))
        dataset.label_ids(sorted(counts), order, examples.where)
        if decode not in ("constrained", "greedy") or pieces not in ("first", "all"):
            raise EverybertError("tag: decode is constrained or greedy, pieces is first or all")
        return {
            "labels": order,
            "scheme": scheme,
            "decoding": decode,
            "pieces": pieces,
            "splitter": wording.learn_splitter(examples.inputs),
            "weights": label_weights(class_weights, order, counts, counts.total()),
        }

    def known_metrics(self) -> tuple[str, ...]:
        """Plain labels have no entities to score."""
        return ("accuracy", "f1_macro") if self.scheme == "plain" else self.metrics

    @classmethod
    def from_state(cls, state: Mapping[str, Any], config: EncoderConfig) -> Self:
        """From the saved values, or from a folder's labels alone: the scheme then follows from their prefixes."""
        labels = state["labels"]
        if "scheme" in state:
            scheme = state["scheme"]
        elif not wording.has_prefixes(labels):
            scheme = "plain"
        elif any(n[0] in "ESLU" for n in labels if n != "O"):
            scheme = "BIOES"
        else:
            scheme = "BIO" if any(n.startswith("B-") for n in labels) else "IOB1"
        return replace(
            super().from_state({**state, "scheme": scheme}, config),
            decoding=state.get("decode", "greedy" if scheme == "IOB1" else "constrained"),
            splitter=Splitter.from_state(state["words"]) if "words" in state else Splitter(),
        )

    def state(self) -> dict[str, Any]:
        """JSON values for the model folder; the labels are in config.json too."""
        return super().state() | {"decode": self.decoding, "words": self.splitter.state()}

    def read_options(self) -> dict[str, Any]:
        """The scheme, if the labels are of one that is written."""
        return {"scheme": self.scheme} if self.scheme in ("BIO", "BIOES") else {}

    # Words to sequences.

    def encode(self, tokenizer: Tokenizer, config: EncoderConfig, inputs: Sequence[Words]) -> Features:
        """Windows of pieces, each an example of its own; `back` has a TaggedText per input."""
        split = [(t, self.splitter.split(t)) if isinstance(t, str) else _joined(t) for t in inputs]
        joined = [" ".join(w.text for w in words) for _, words in split]
        lead = tokenizer.build([-1])[0].index(-1)  # special tokens before the text
        sequences: list[list[Encoded]] = []
        back: list[TaggedText] = []
        lost: list[int] = []
        for (text, words), encoding in zip(split, tokenizer.encode_batch(joined, specials=False)):
            ids, owner = _pieces(words, encoding, tokenizer)
            first = np.diff(owner, prepend=-1) > 0
            spans, cut = self.window.cover(len(ids), self.window.size - tokenizer.single_special)
            places = []
            for w in spans:
                owned = np.arange(w.own_start, w.own_stop)
                one, more = owned[first[owned]], owned[~first[owned]]
                shift = lead - w.start
                places.append(Place(len(sequences), one + shift, owner[one], more + shift, owner[more]))
                sequences.append([Encoded(*tokenizer.build(ids[w.start : w.stop]))])
            back.append(TaggedText(text, words, places))
            lost.append(cut)
        return lay(sequences, config, self.window.size, lost, back)

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """Sequences, with tag_T."""
        features = self.encode(tokenizer, config, examples.inputs)
        number = {label: i for i, label in enumerate(self.labels)}
        inner = np.array([number.get(f"I-{n[2:]}", i) if n[:2] == "B-" else i for n, i in number.items()])
        tag_T = [np.full(len(ids), -100, dtype=np.int64) for ids in features.ids]
        for text, tags in zip(features.back, examples.targets):
            gold = np.asarray(dataset.label_ids(list(tags), self.labels, examples.where), dtype=np.int64)
            for place in text.places:
                tag_T[place.sequence][place.at] = gold[place.word]
                if self.pieces == "all":  # later pieces of B- are I-
                    tag_T[place.sequence][place.inner_at] = inner[gold[place.inner_word]]
        return features.with_targets(tag_T=tag_T)

    # Training.

    def share(self, features: Features, which: np.ndarray) -> float:
        """The number of labelled tokens, or the sum of their labels' weights."""
        tags = np.concatenate([features.targets["tag_T"][i] for i in which])
        tags = tags[tags >= 0]
        return float(len(tags) if self.weights is None else np.asarray(self.weights)[tags].sum())

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """Cross-entropy of the labelled tokens."""
        tag_T = targets_of(batch).tag_T
        assert tag_T is not None
        logits_TC = self.logits(network, batch).float()
        weight_C = None if self.weights is None else constant(self.weights, logits_TC.device)
        total = F.cross_entropy(logits_TC, tag_T, weight_C, ignore_index=-100, reduction="sum")
        count = (tag_T >= 0).float()
        if weight_C is not None:
            count = count * weight_C[tag_T.clamp(min=0)]
        return total / count.sum().clamp(min=1e-6)  # a batch may contain no word at all

    # Prediction.

    def tags(self, outputs: list[np.ndarray], text: TaggedText) -> tuple[list[str], np.ndarray]:
        """The tags of a text's words, and their probabilities; words beyond a cut have none."""
        size = sum(len(place.word) for place in text.places)
        if not size:
            return [], np.zeros(0)
        logits_nC = np.zeros((size, len(self.labels)))
        for place in text.places:
            logits_nC[place.word] = outputs[place.sequence][place.at]
        p_nC = metrics.softmax(logits_nC)
        constrained = self.decoding == "constrained" and self.scheme != "plain"
        path = viterbi(np.log(np.maximum(p_nC, 1e-30)), self.labels) if constrained else p_nC.argmax(1)
        return [self.labels[i] for i in path], p_nC[np.arange(len(path)), path]

    def decode(self, outputs: list[np.ndarray], features: Features, inputs: Sequence[Words]) -> Iterator[list[Span]]:
        """The spans of each text: entities, or one per word for plain labels.

        A list of words is used as it is; offsets are those of the words joined by spaces.
        """
        if cut := sum(features.cut):
            log.warning("%d tokens beyond the window were cut off and not tagged", cut)
        for text in features.back:
            tags, p_n = self.tags(outputs, text)
            if self.scheme == "plain":
                found = [Entity(tag, i, i + 1) for i, tag in enumerate(tags)]
            else:
                found = wording.entities(tags)
            spans = []
            for label, first, stop in found:
                start, end = text.words[first].start, text.words[stop - 1].end
                spans.append(Span(text.text[start:end], label, start, end, float(p_n[first:stop].mean())))
            yield spans

    def as_columns(self, prediction: list[Span], scores: bool = False) -> dict[str, Any]:
        """The spans."""
        return {"prediction": [asdict(span) | {"score": round(span.score, DIGITS)} for span in prediction]}

    def score(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """Entity precision, recall and f1 as conlleval has them, and word accuracy; for plain labels accuracy and f1.

        Words beyond a cut count as predicted with the first label (O).
        """
        outputs = self.run(network, features)
        guess = []
        for text, gold in zip(features.back, examples.targets):
            tags = self.tags(outputs, text)[0]
            guess.append(tags + [self.labels[0]] * (len(gold) - len(tags)))
        if self.scheme != "plain":
            return entity_scores(examples.targets, guess)
        number = {label: i for i, label in enumerate(self.labels)}
        flat = [np.array([number[t] for tags in side for t in tags]) for side in (examples.targets, guess)]
        return metrics.classification_scores(flat[0], flat[1], len(self.labels))


def _order(counts: Counter[str], scheme: str) -> list[str]:
    """O first, then the tags of each entity together."""
    if scheme == "plain":
        return dataset.order_labels(counts)
    kinds = sorted({t[2:] for t in counts if t != "O"})
    return ["O", *(f"{p}-{k}" for k in kinds for p in ("BI" if scheme == "BIO" else "BIES"))]


def _joined(words: Sequence[str]) -> tuple[str, list[Word]]:
    ends = np.cumsum([len(w) + 1 for w in words]) - 1
    return " ".join(words), [Word(w, int(e) - len(w), int(e)) for w, e in zip(words, ends)]


def _pieces(words: Sequence[Word], encoding: Encoding, tokenizer: Tokenizer) -> tuple[list[int], np.ndarray]:
    """The ids of a text's pieces, and the number of the word that each belongs to."""
    ends = np.cumsum([len(w.text) + 1 for w in words]) - 1  # in the joined text, without the space
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


# ── decoding and entity scores ───────────────────────────────────────────────────────────────────────────────


def transitions(labels: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which tag may follow which: bool (C, C), row before column; and which may begin, and end, a sentence: (C,).

    If the labels have E- or S-, an entity must be closed; in BIO it ends by itself.
    """
    closing = any(split_tag(t)[0] in "ES" for t in labels if t != "O")

    def may(before: tuple[str, str], after: tuple[str, str]) -> bool:
        opened = before[0] in "BI"
        if after[0] in "IE":
            return opened and before[1] == after[1]
        return not (closing and opened)

    pairs, outside = [split_tag(t) for t in labels], ("O", "")
    follow = np.array([[may(a, b) for b in pairs] for a in pairs], dtype=bool)
    first = np.array([may(outside, b) for b in pairs], dtype=bool)
    last = np.array([may(a, outside) for a in pairs], dtype=bool)
    return follow, first, last


def viterbi(scores_nC: np.ndarray, labels: Sequence[str]) -> np.ndarray:
    """(n,) the best-scoring path that the scheme allows; greedy if it allows none."""
    scores = np.asarray(scores_nC, dtype=float)
    greedy = scores.argmax(1)
    if not len(scores):
        return greedy
    follow, first, last = transitions(labels)
    if first[greedy[0]] and last[greedy[-1]] and follow[greedy[:-1], greedy[1:]].all():
        return greedy  # the best path of all is allowed
    wall = np.where(follow, 0.0, -np.inf)
    back = np.zeros(scores.shape, dtype=np.int64)
    best_C = scores[0] + np.where(first, 0.0, -np.inf)
    columns = np.arange(scores.shape[1])
    for i in range(1, len(scores)):
        reach_CC = best_C[:, None] + wall
        back[i] = reach_CC.argmax(0)
        best_C = reach_CC[back[i], columns] + scores[i]
    best_C = best_C + np.where(last, 0.0, -np.inf)
    if not np.isfinite(best_C.max()):
        return greedy
    path = np.empty(len(scores), dtype=np.int64)
    path[-1] = best_C.argmax()
    for i in range(len(scores) - 1, 0, -1):
        path[i - 1] = back[i, path[i]]
    return path


def entity_scores(gold: Sequence[Sequence[str]], guess: Sequence[Sequence[str]]) -> dict[str, float]:
    """precision, recall, f1 over all entities; f1_macro over labels; f1 of each label as "f1/LABEL"; word accuracy."""
    hits, guessed, true = Counter[str](), Counter[str](), Counter[str]()
    right = words = 0
    for gold_tags, guess_tags in zip(gold, guess, strict=True):
        if len(gold_tags) != len(guess_tags):
            raise EverybertError(f"a sentence of {len(gold_tags)} words has {len(guess_tags)} predicted tags")
        a, b = set(wording.entities(gold_tags)), set(wording.entities(guess_tags))
        true.update(e.label for e in a)
        guessed.update(e.label for e in b)
        hits.update(e.label for e in a & b)
        right += sum(x == y for x, y in zip(gold_tags, guess_tags))
        words += len(gold_tags)
    precision, recall, f1 = metrics.ratios(hits.total(), guessed.total(), true.total())
    each = {k: float(metrics.ratios(hits[k], guessed[k], true[k])[2]) for k in sorted(true | guessed)}
    return {
        "precision": float(precision),
        "recall": float(recall),
        "f1": float(f1),
        "f1_macro": float(np.mean(list(each.values()))) if each else 0.0,
        "accuracy": right / max(words, 1),
        **{f"f1/{k}": value for k, value in each.items()},
    }
