"""Extractive question answering (SQuAD): the span of the context with the highest start + end score.

The question is kept in every window over the context; windows overlap, and a span counts only in the window that
owns its first token, where it has the most context. No answer (2.0) is the span at [CLS]: it is given where its
score exceeds the best span's by more than a threshold that is tuned on the held-out data.

Legend: T tokens, B sequences (windows), n tokens of one window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.features import head_logits
from everybert.model.heads import Network, span_loss
from everybert.model.ragged import Ragged
from everybert.tasks import metrics, squad
from everybert.tasks.features import BUDGET, Encoded, Features, Reading, lay, run
from everybert.tasks.questions import Question
from everybert.tasks.questions import read as read
from everybert.tasks.records import Examples
from everybert.text.tokenizer import Tokenizer
from everybert.text.windows import Window, windows

CHUNK = 64


@dataclass(frozen=True)
class Answer:
    """context[start:end], or an empty text where there is no answer."""

    text: str
    start: int
    end: int
    score: float
    """Its probability among the best spans (and no answer, where the model knows that)."""


class Place(NamedTuple):
    """A window of a context: its sequence, where it begins there, and what it covers."""

    sequence: int
    lead: int
    window: Window


class Passage(NamedTuple):
    """What leads from tokens back to a context: (m, 2) character offsets of its m tokens, their words, its windows."""

    offsets: np.ndarray
    words: np.ndarray
    places: list[Place]


@dataclass(frozen=True)
class Candidates:
    """The best spans of a context, best first, as characters; and the score of no answer."""

    spans: np.ndarray
    """(k, 2) start and end."""
    scores: np.ndarray
    """(k) start + end logits."""
    null: float

    @property
    def gap(self) -> float:
        """No answer's score less the best span's; above the threshold, there is no answer."""
        return self.null - float(self.scores[0]) if len(self.scores) else float("inf")


@dataclass(frozen=True)
class Answering:
    """How questions are answered."""

    reading: Reading
    no_answer: bool = False
    """Whether some questions have no answer (SQuAD 2.0)."""
    threshold: float = 0.0
    """No answer where its score exceeds the best span's by more than this."""
    longest: int = 30
    """Tokens of the longest answer."""
    best: int = 20
    """How many spans are kept."""
    metric: str = "f1"

    name = "answer"
    head = "answer"
    outputs = None

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """Windows, each a training example; start_B and end_B are 0 ([CLS]) where the answer is not in it."""
        features = span_features(tokenizer, config, examples.inputs, self.reading)
        start_B = np.zeros(len(features.lengths_S), dtype=np.int64)
        end_B = np.zeros(len(features.lengths_S), dtype=np.int64)
        for passage, golds in zip(features.back, examples.targets):
            if not golds:
                continue
            begin, stop = golds[0].start, golds[0].start + len(golds[0].text)
            first = int(np.searchsorted(passage.offsets[:, 0], begin, side="right")) - 1
            last = int(np.searchsorted(passage.offsets[:, 1], stop, side="left"))
            for sequence, lead, window in passage.places:
                if window.start <= first <= last < window.stop:
                    start_B[sequence] = lead + first - window.start
                    end_B[sequence] = lead + last - window.start
        return features.labelled(start_B=start_B, end_B=end_B)

    def share(self, features: Features, which: np.ndarray) -> float:
        """The windows' number."""
        return float(len(which))

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """The mean of −log p(start) and −log p(end)."""
        logits_T2 = head_logits(network, batch, self.head)
        return span_loss(logits_T2, batch, batch.extra["start_B"], batch.extra["end_B"])

    def candidates(self, network: Network, features: Features, budget: int = BUDGET) -> list[Candidates]:
        """The best spans of each question's context."""
        out = run(network, features, lambda batch: head_logits(network, batch, self.head), budget)
        return [best_spans(passage, out, self.longest, self.best) for passage in features.back]

    def text(self, found: Candidates, context: str) -> str:
        """The answer; empty where there is none."""
        if not len(found.spans) or (self.no_answer and found.gap > self.threshold):
            return ""
        start, end = found.spans[0]
        return context[start:end]

    def evaluate(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """exact and f1; where some questions have no answer, best_exact and best_f1 at their best thresholds too."""
        found = self.candidates(network, features)
        golds = [[g.text for g in gold] for gold in examples.targets]
        guesses = [self.text(c, q.context) for c, q in zip(found, examples.inputs)]
        pairs = np.array([squad.best_over(guess, gold, self.no_answer) for guess, gold in zip(guesses, golds)])
        scores = {"exact": float(pairs[:, 0].mean()), "f1": float(pairs[:, 1].mean())}
        if self.no_answer:
            exact, f1 = self._sweep(found, examples)
            scores |= {"best_exact": exact.score, "best_f1": f1.score}
        return scores

    def _sweep(self, found: Sequence[Candidates], examples: Examples) -> tuple[squad.Threshold, squad.Threshold]:
        always = replace(self, no_answer=False)
        guesses = [always.text(c, q.context) for c, q in zip(found, examples.inputs)]
        golds = [[g.text for g in gold] for gold in examples.targets]
        pairs = [squad.best_over(guess, gold, True) for guess, gold in zip(guesses, golds)]
        gaps, answerable = [c.gap for c in found], [bool(gold) for gold in golds]
        guessed = [bool(g) for g in guesses]
        exact, f1 = (squad.best_threshold([p[i] for p in pairs], gaps, answerable, guessed) for i in (0, 1))
        return exact, f1

    def tuned(self, network: Network, features: Features, examples: Examples) -> Answering:
        """With the no-answer threshold of the best F1."""
        if not self.no_answer:
            return self
        return replace(self, threshold=self._sweep(self.candidates(network, features), examples)[1].value)

    def answers(self, found: Candidates, context: str, top: int) -> list[Answer]:
        """The best spans with their probabilities; no answer stands first where it wins, else after the best."""
        logits = np.append(found.scores, found.null) if self.no_answer else found.scores
        if not len(logits):
            return [Answer("", 0, 0, 1.0)]
        p = metrics.softmax(logits)
        spans = [Answer(context[a:b], int(a), int(b), float(q)) for (a, b), q in zip(found.spans, p)]
        if self.no_answer:
            at = 0 if found.gap > self.threshold else 1 + sum(s.score > p[-1] for s in spans[1:])
            spans.insert(at, Answer("", 0, 0, float(p[-1])))
        return spans[:top]

    def state(self) -> dict[str, Any]:
        """What the model folder keeps."""
        return {
            "task": self.name,
            "window": self.reading.state(),
            "no_answer": self.no_answer,
            "threshold": self.threshold,
            "longest": self.longest,
        }


# ── questions to sequences, and back ─────────────────────────────────────────────────────────────────────────


def span_features(
    tokenizer: Tokenizer, config: EncoderConfig, questions: Sequence[Question], reading: Reading
) -> Features:
    """Windows of the contexts, each with its question before it; `back` has a Passage for each question.

    A question takes at most half of the window. Longformer's global tokens are those before the first separator.
    """
    asked = tokenizer.ids_batch([q.question for q in questions], specials=False)
    contexts = tokenizer.encode_batch([q.context for q in questions], specials=False)
    before = tokenizer.build([-1], [-2])[0].index(-2) - 1  # special tokens before the context
    room = reading.size - tokenizer.pair_special
    sequences: list[list[Encoded]] = []
    back: list[Passage] = []
    cut = 0
    for question, context in zip(asked, contexts):
        kept = question[: room // 2]
        cut += len(question) - len(kept)
        space = room - len(kept)
        places = []
        for w in windows(len(context.ids), space, min(reading.overlap, space - 1)):
            places.append(Place(len(sequences), before + len(kept), w))
            ids, segments = tokenizer.build(kept, context.ids[w.start : w.stop])
            sequences.append([Encoded(ids, segments, range(1 + len(kept)))])
        words = np.array([-1 if w is None else w for w in context.words], dtype=np.int64)
        back.append(Passage(np.asarray(context.offsets, dtype=np.int64).reshape(-1, 2), words, places))
    features = lay(sequences, config, reading, back)
    return replace(features, cut_E=np.array([cut]) if cut else None)


def best_spans(passage: Passage, logits: Sequence[np.ndarray], longest: int, best: int) -> Candidates:
    """All spans of whole words, of at most `longest` tokens, that begin in a token their window owns; the best of them.

    This is the official post-processing without its shortcut of looking at the 20 best starts and ends alone.
    """
    change = np.diff(passage.words) != 0
    first_m, last_m = np.append(True, change), np.append(change, True)
    spans: list[np.ndarray] = []
    scores: list[np.ndarray] = []
    null = float("inf")
    for sequence, lead, w in passage.places:
        start_n, end_n = logits[sequence][:, 0], logits[sequence][:, 1]
        null = min(null, float(start_n[0] + end_n[0]))
        if w.own_stop == w.own_start:
            continue
        own = np.arange(w.own_start - w.start, w.own_stop - w.start)
        own = own[first_m[w.start + own]]
        here = np.where(last_m[w.start : w.stop], end_n[lead : lead + w.stop - w.start], -np.inf)
        ends = np.append(here, np.full(longest - 1, -np.inf))
        total = np.lib.stride_tricks.sliding_window_view(ends, longest)[own] + start_n[lead + own][:, None]
        flat = total.ravel()
        top = np.argpartition(-flat, best)[:best] if len(flat) > best else np.arange(len(flat))
        top = top[np.isfinite(flat[top])]
        first = w.start + own[top // longest]
        spans.append(np.stack((passage.offsets[first, 0], passage.offsets[first + top % longest, 1]), axis=1))
        scores.append(flat[top])
    if not spans:
        return Candidates(np.zeros((0, 2), dtype=np.int64), np.zeros(0), null)
    all_spans, all_scores = np.concatenate(spans), np.concatenate(scores)
    order = np.argsort(-all_scores, kind="stable")[:best]
    return Candidates(all_spans[order], all_scores[order], null)


# ── settings and prediction ──────────────────────────────────────────────────────────────────────────────────


def begin(
    examples: Examples,
    config: EncoderConfig,
    *,
    reading: Reading | None = None,
    metric: str | None = None,
    longest: int = 30,
) -> Answering:
    """Whether questions may have no answer is read off the training examples."""
    no_answer = any(not golds for golds in examples.targets)
    known = ("f1", "exact") + (("best_f1", "best_exact") if no_answer else ())
    if metric is not None and metric not in known:
        raise EverybertError(f"answers are judged by one of {', '.join(known)}, not {metric!r}")
    reading = reading or Reading.of(config, min(384, config.max_positions))
    return Answering(reading, no_answer, longest=longest, metric=metric or ("best_f1" if no_answer else "f1"))


def of(state: Mapping[str, Any], config: EncoderConfig) -> Answering:
    """From what `state` gave; a folder from elsewhere is taken to answer always."""
    window = state.get("window") or {"size": min(384, config.max_positions)}
    return Answering(
        reading=Reading.from_state(window, config),
        no_answer=bool(state.get("no_answer", False)),
        threshold=float(state.get("threshold", 0.0)),
        longest=int(state.get("longest", 30)),
    )


def predict(
    network: Network,
    tokenizer: Tokenizer,
    task: Answering,
    questions: Sequence[tuple[str, str]],
    top: int = 1,
    budget: int = BUDGET,
) -> Iterator[list[Answer]]:
    """The `top` best answers to each (question, context)."""
    for start in range(0, len(questions), CHUNK):
        part = [Question(question, context) for question, context in questions[start : start + CHUNK]]
        features = span_features(tokenizer, network.config, part, task.reading)
        wide = replace(task, best=max(task.best, top))
        for q, found in zip(part, wide.candidates(network, features, budget)):
            yield wide.answers(found, q.context, top)
