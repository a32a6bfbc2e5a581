"""Tagging: one label per word, for entities (BIO, BIOES) or parts of speech.

Training and prediction see the same words: raw text is split as the training words were (words.py), words are joined
by single spaces and tokenized, and a word's label is on its first piece. A word that the tokenizer drops becomes the
unknown token, so that every word has a label. In a long text a word's label comes from the window that owns its
first piece.

Legend: n words of a text, T tokens of a sequence or batch, E examples, C labels.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from torch import Tensor

from everybert.files import as_type
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.losses import IGNORE, cross_entropy
from everybert.model.ragged import Ragged
from everybert.tasks import dataset, metrics
from everybert.tasks import words as wording
from everybert.tasks.dataset import Examples, View
from everybert.tasks.features import Encoded, Features, TaskTargets, make_features
from everybert.tasks.task import DIGITS, Task
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


class TaggedText(NamedTuple):
    """Maps tokens back to a text."""

    text: str
    words: list[Word]
    at: np.ndarray
    """(n, 2) index of the sequence, and position in it, of each word's first piece; without words that were cut."""


@dataclass(frozen=True, kw_only=True)
class Tag(Task):
    """One label per word."""

    scheme: Literal["BIO", "BIOES", "plain"] = "BIO"
    """BIO, BIOES, or plain for labels without entities."""
    decoding: Literal["constrained", "greedy"] = "constrained"
    """constrained: the best tag sequence that the scheme allows (Viterbi); greedy: the best tag of each word."""
    splitter: Splitter = field(default_factory=Splitter)

    name = "tag"
    head = "tag"
    metrics = ("f1", "precision", "recall", "accuracy", "f1_macro")
    saved = ("labels", "scheme")
    chunk = 256
    view = View(
        sequences=lambda words: [" ".join(words)],
        labels=lambda tags: (t[2:] if t[1:2] == "-" else t for t in tags if t != "O" and t[:2] not in ("I-", "E-")),
        target=" ".join,
        least=4,  # "Why ?" may well occur twice
    )

    read = staticmethod(dataset.read_tagged)
    input_reader = staticmethod(dataset.text_reader)

    @classmethod
    def fit(cls, examples: Examples, labels: Sequence[str] | None = None) -> dict[str, Any]:
        """Scheme, label order and word splitting come from the training sentences."""
        counts = Counter(t for tags in examples.targets for t in tags)
        if labels is None:
            dataset.check_labels(counts, counts.total(), examples.where)
            scheme, kinds = wording.find_scheme(counts), sorted({t[2:] for t in counts if t != "O"})
            by_kind = ["O", *(f"{p}-{k}" for k in kinds for p in ("BI" if scheme == "BIO" else "BIES"))]
            labels = dataset.order_labels(counts) if scheme == "plain" else by_kind
        dataset.label_ids(sorted(counts), labels, examples.where)
        splitter = wording.learn_splitter(examples.inputs)
        return {"labels": tuple(labels), "scheme": wording.find_scheme(labels), "splitter": splitter}

    def known_metrics(self) -> tuple[str, ...]:
        """Plain labels have no entities to score."""
        return ("accuracy", "f1_macro") if self.scheme == "plain" else self.metrics

    @classmethod
    def from_state(cls, state: Mapping[str, Any], config: EncoderConfig) -> Self:
        """From the saved values, or from a folder's labels alone: the scheme then follows from their prefixes."""
        scheme = state.get("scheme") or wording.find_scheme(state["labels"])
        # A folder from elsewhere may be of IOB1 or break its rules: its tags are read leniently.
        decoding = state.get("decode", "constrained" if "scheme" in state else "greedy")
        return replace(
            super().from_state({**state, "scheme": scheme}, config),
            decoding=as_type(decoding, Literal["constrained", "greedy"]),
            splitter=Splitter.from_state(state["words"]) if "words" in state else Splitter(),
        )

    def state(self) -> dict[str, Any]:
        """JSON values for the model folder; the labels are in config.json too."""
        return super().state() | {"decode": self.decoding, "words": self.splitter.state()}

    # Words to sequences.

    def encode(self, tokenizer: Tokenizer, config: EncoderConfig, inputs: Sequence[Words]) -> Features:
        """Windows of pieces, each an example of its own; `origins` has a TaggedText per input."""
        split = [(t, self.splitter.split(t)) if isinstance(t, str) else _joined(t) for t in inputs]
        joined = [" ".join(w.text for w in words) for _, words in split]
        lead = tokenizer.build([-1])[0].index(-1)  # special tokens before the text
        sequences: list[list[Encoded]] = []
        origins: list[TaggedText] = []
        lost: list[int] = []
        for (text, words), encoding in zip(split, tokenizer.encode_batch(joined, specials=False)):
            ids, owner = _pieces(words, encoding, tokenizer)
            first = np.diff(owner, prepend=-1) > 0
            spans, cut = self.window.cover(len(ids), self.window.size - tokenizer.single_special)
            at = []
            for w in spans:
                owned = np.arange(w.own_start, w.own_stop)
                at += [(len(sequences), lead + i - w.start) for i in owned[first[owned]].tolist()]
                sequences.append([Encoded(*tokenizer.build(ids[w.start : w.stop]))])
            origins.append(TaggedText(text, words, np.array(at, dtype=np.int64).reshape(-1, 2)))
            lost.append(cut)
        return make_features(sequences, config, self.window.size, lost, origins)

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """Sequences, with tag_T."""
        features = self.encode(tokenizer, config, examples.inputs)
        tag_T = [np.full(len(ids), IGNORE, dtype=np.int64) for ids in features.ids]
        for text, tags in zip(features.origins, examples.targets):
            for (sequence, at), label in zip(text.at, dataset.label_ids(tags, self.labels, examples.where)):
                tag_T[sequence][at] = label
        return features.with_targets(tag_T=tag_T)

    # Training.

    def share(self, features: Features, example_E: np.ndarray) -> float:
        """The number of labelled tokens."""
        return float(sum((features.targets["tag_T"][i] >= 0).sum() for i in example_E))

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """Cross-entropy of the labelled tokens."""
        tag_T = batch.targets_as(TaskTargets).tag_T
        assert tag_T is not None
        labelled = (tag_T >= 0).float().sum().clamp(min=1e-6)  # a batch may contain no word at all
        return cross_entropy(self.logits(network, batch), tag_T) / labelled

    # Prediction.

    def tags(self, outputs: list[np.ndarray], text: TaggedText) -> tuple[list[str], np.ndarray]:
        """The tags of a text's words, and their probabilities; words beyond a cut have none."""
        if not len(text.at):
            return [], np.zeros(0)
        p_nC = metrics.softmax(np.stack([outputs[sequence][at] for sequence, at in text.at]))
        constrained = self.decoding == "constrained" and self.scheme != "plain"
        path = viterbi(np.log(np.maximum(p_nC, 1e-30)), self.labels) if constrained else p_nC.argmax(1)
        return [self.labels[i] for i in path], p_nC[np.arange(len(path)), path]

    def decode(self, outputs: list[np.ndarray], features: Features, inputs: Sequence[Words]) -> Iterator[list[Span]]:
        """The spans of each text: entities, or one per word for plain labels but O.

        A list of words is used as it is; offsets are those of the words joined by spaces.
        """
        if cut := sum(features.cut):
            log.warning("%d tokens beyond the window were cut off and not tagged", cut)
        for text in features.origins:
            tags, p_n = self.tags(outputs, text)
            plain = [Entity(tag, i, i + 1) for i, tag in enumerate(tags) if tag != "O"]
            entities = plain if self.scheme == "plain" else wording.entities(tags)
            spans = []
            for label, first, stop in entities:
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
        every = [self.tags(outputs, text)[0] for text in features.origins]
        guess = [tags + [self.labels[0]] * (len(gold) - len(tags)) for tags, gold in zip(every, examples.targets)]
        if self.scheme != "plain":
            return entity_scores(examples.targets, guess)
        flat = [[tag for tags in side for tag in tags] for side in (examples.targets, guess)]
        return metrics.classification_scores(flat[0], flat[1], self.labels)


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


def transitions(labels: Sequence[str]) -> np.ndarray:
    """(C + 1, C + 1) whether a tag (row) may be followed by another (column); the last is the sentence's edge.

    If the labels have E- or S-, an entity must be closed; in BIO it ends by itself.
    """
    pairs = [*map(split_tag, labels), ("O", "")]
    closing = any(prefix in "ES" for prefix, _ in pairs)

    def may(before: tuple[str, str], after: tuple[str, str]) -> bool:
        opened = before[0] in "BI"
        if after[0] in "IE":
            return opened and before[1] == after[1]
        return not (closing and opened)

    return np.array([[may(a, b) for b in pairs] for a in pairs])


def viterbi(scores_nC: np.ndarray, labels: Sequence[str]) -> np.ndarray:
    """(n,) the best-scoring path that the scheme allows; greedy if it allows none."""
    allowed, greedy = transitions(labels), scores_nC.argmax(1)
    if allowed[[-1, *greedy], [*greedy, -1]].all():
        return greedy
    wall = np.where(allowed, 0.0, -np.inf)
    back = np.zeros(scores_nC.shape, dtype=np.int64)
    best_C = scores_nC[0] + wall[-1, :-1]
    for i in range(1, len(scores_nC)):
        reach_CC = best_C[:, None] + wall[:-1, :-1]
        back[i] = reach_CC.argmax(0)
        best_C = reach_CC.max(0) + scores_nC[i]
    best_C = best_C + wall[:-1, -1]
    if not np.isfinite(best_C.max()):
        return greedy
    path = [int(best_C.argmax())]
    for row in back[:0:-1]:
        path.append(int(row[path[-1]]))
    return np.array(path[::-1])


def entity_scores(gold: Sequence[Sequence[str]], guess: Sequence[Sequence[str]]) -> dict[str, float]:
    """precision, recall, f1 over all entities; f1_macro over labels; f1 of each label as "f1/LABEL"; word accuracy."""
    hits, guessed, true = Counter[str](), Counter[str](), Counter[str]()
    for gold_tags, guess_tags in zip(gold, guess, strict=True):
        a, b = set(wording.entities(gold_tags)), set(wording.entities(guess_tags))
        true.update(e.label for e in a)
        guessed.update(e.label for e in b)
        hits.update(e.label for e in a & b)
    right = [x == y for sides in zip(gold, guess) for x, y in zip(*sides, strict=True)]
    overall = map(float, metrics.ratios(hits.total(), guessed.total(), true.total()))
    each = {k: float(metrics.ratios(hits[k], guessed[k], true[k])[2]) for k in sorted(true | guessed)}
    return {
        **dict(zip(("precision", "recall", "f1"), overall)),
        "f1_macro": float(np.mean(list(each.values()))) if each else 0.0,
        "accuracy": float(np.mean(right)),
        **{f"f1/{k}": value for k, value in each.items()},
    }
