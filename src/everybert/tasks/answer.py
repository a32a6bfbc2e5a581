"""Extractive question answering (SQuAD): the span of the context with the highest start + end score.

Every window over the context contains the question. Windows overlap, and a span counts only in the window that owns
its first token, which has the most context around it. No answer (SQuAD 2.0) is the span at [CLS]: it is predicted if
its score exceeds that of the best span by more than a threshold that is tuned on the held-out data.

Legend: S sequences (windows), in a batch B with T tokens; n tokens of one window, m tokens of a context, k spans,
K points of an attribution.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.tasks import dataset, metrics
from everybert.tasks.dataset import Examples, View, plain
from everybert.tasks.features import Encoded, Features, TaskTargets, make_features
from everybert.tasks.task import DIGITS, Explained, Task
from everybert.text.tokenizer import Encoding, Tokenizer
from everybert.text.windows import Window

BEST = 20
"""The number of spans of a context over which probabilities are normalised."""


@dataclass(frozen=True)
class Answer:
    """context[start:end], or an empty text if there is no answer."""

    text: str
    start: int
    end: int
    score: float
    """Its probability among the best spans (and no answer, if the model knows that)."""
    cut: int = 0
    """Tokens of the question that did not fit half of the window, and of the context if truncation was asked for."""


class Passage(NamedTuple):
    """Maps tokens back to a context."""

    offsets: np.ndarray
    """(m, 2) characters of each token."""
    words: np.ndarray
    """(m) the number of each token's word."""
    places: list[tuple[int, int, Window]]
    """Per window: the index of its sequence, where the context begins in it, and the tokens it covers."""


class Candidates(NamedTuple):
    """The best spans of a context, best first, and the score of no answer."""

    spans: np.ndarray
    """(k, 2) start and end, in characters."""
    scores: np.ndarray
    """(k) start + end logits."""
    null: float

    @property
    def gap(self) -> float:
        """The score of no answer minus that of the best span; above the threshold, there is no answer."""
        return self.null - float(self.scores[0]) if len(self.scores) else float("inf")


@dataclass(frozen=True, kw_only=True)
class AnswerQuestions(Task):
    """The span of a context that answers a question."""

    no_answer: bool = False
    """Whether some questions have no answer (SQuAD 2.0)."""
    threshold: float = 0.0
    """No answer if its score exceeds that of the best span by more than this."""
    longest: int = 30
    """Tokens of the longest answer."""

    name = "answer"
    head = "answer"
    metrics = ("f1", "exact")
    graph_outputs = ("start_logits", "end_logits")
    window_size = 384
    saved = ("no_answer", "threshold", "longest")
    outputs = 2
    chunk = 64
    view = View(target=lambda golds: str(sorted({plain(gold.text) for gold in golds})), contexts=True)

    read = staticmethod(dataset.read_questions)
    input_reader = staticmethod(dataset.question_reader)

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise EverybertError(f"longest must be at least 1 token, not {self.longest}")

    @classmethod
    def fit(cls, examples: Examples, longest: int = 30) -> dict[str, Any]:
        """Questions may have no answer if some training questions have none."""
        return {"no_answer": any(not golds for golds in examples.targets), "longest": longest}

    def known_metrics(self) -> tuple[str, ...]:
        """With no answer, also the scores at the best threshold."""
        return ("best_f1", "best_exact", *self.metrics) if self.no_answer else self.metrics

    # Questions to sequences.

    def encode(self, tokenizer: Tokenizer, config: EncoderConfig, inputs: Sequence[Sequence[str]]) -> Features:
        """Windows of contexts, each after its question and an example of its own; `origins` has a Passage per input.

        A question takes at most half of the window. Longformer's global tokens are those before the first separator.
        """
        questions = tokenizer.ids_batch([pair[0] for pair in inputs], specials=False)
        contexts = tokenizer.encode_batch([pair[1] for pair in inputs], specials=False)
        before = tokenizer.build([-1], [-2])[0].index(-2) - 1  # special tokens before the context
        room = self.window.size - tokenizer.pair_special
        sequences: list[list[Encoded]] = []
        origins: list[Passage] = []
        lost: list[int] = []
        for question, context in zip(questions, contexts):
            shortened = question[: room // 2]
            spans, cut = self.window.cover(len(context.ids), room - len(shortened))
            lost.append(len(question) - len(shortened) + cut)
            places = []
            for w in spans:
                places.append((len(sequences), before + len(shortened), w))
                ids, segments = tokenizer.build(shortened, context.ids[w.start : w.stop])
                sequences.append([Encoded(ids, segments, range(1 + len(shortened)))])
            words = np.array([-1 if w is None else w for w in context.words], dtype=np.int64)
            origins.append(Passage(np.asarray(context.offsets, dtype=np.int64).reshape(-1, 2), words, places))
        return make_features(sequences, config, self.window.size, lost, origins)

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """Sequences, with start_B and end_B: 0 ([CLS]) if the answer is not in the window."""
        features = self.encode(tokenizer, config, examples.inputs)
        start_B, end_B = (np.zeros(len(features.lengths_S), dtype=np.int64) for _ in range(2))
        for passage, golds in zip(features.origins, examples.targets):
            if not golds:
                continue
            begin, stop = golds[0].start, golds[0].start + len(golds[0].text)
            first = int(np.searchsorted(passage.offsets[:, 0], begin, side="right")) - 1
            last = int(np.searchsorted(passage.offsets[:, 1], stop, side="left"))
            for sequence, lead, window in passage.places:
                if window.start <= first <= last < window.stop:
                    start_B[sequence] = lead + first - window.start
                    end_B[sequence] = lead + last - window.start
        return features.with_targets(start_B=start_B, end_B=end_B)

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """The mean of −log p(start) and −log p(end)."""
        targets = batch.targets_as(TaskTargets)
        assert targets.start_B is not None and targets.end_B is not None
        return span_loss(self.logits(network, batch), batch, targets.start_B, targets.end_B)

    # Prediction.

    def decode(
        self, outputs: list[np.ndarray], features: Features, inputs: Sequence[Sequence[str]], top: int = 1
    ) -> Iterator[list[Answer]]:
        """The `top` best answers to each (question, context); no answer comes first if it wins, else after the best."""
        for pair, passage, cut in zip(inputs, features.origins, features.cut):
            best = best_spans(passage, outputs, self.longest, max(BEST, top))
            p = metrics.softmax(np.append(best.scores, best.null) if self.no_answer else best.scores)
            answers = [Answer(pair[1][a:b], int(a), int(b), float(q), cut) for (a, b), q in zip(best.spans, p)]
            if self.no_answer:
                at = 0 if best.gap > self.threshold else 1 + sum(answer.score > p[-1] for answer in answers[1:])
                answers.insert(at, Answer("", 0, 0, float(p[-1]), cut))
            yield answers[:top] or [Answer("", 0, 0, 1.0, cut)]

    def token_probabilities(self, outputs: list[np.ndarray], features: Features) -> Iterator[np.ndarray]:
        """(m, 2) of each input: the probabilities that an answer begins and ends at each token of the context."""
        for passage in features.origins:
            windows = [(outputs[s], lead - w.start, w) for s, lead, w in passage.places]
            owned = [x_n2[shift + w.own_start : shift + w.own_stop] for x_n2, shift, w in windows]
            null = np.min([x_n2[0] for x_n2, _, _ in windows], axis=0)  # [CLS], in the window where it is lowest
            yield torch.from_numpy(np.concatenate((null[None], *owned))).softmax(0).numpy()[1:]

    def explained(self, predict: Callable[..., Any], encoding: Encoding, label: str | None) -> Explained:
        """The log-probability of the best answer's first and last token, ln p(start) + ln p(end)."""
        if 1 not in encoding.sequence:
            raise EverybertError("an answer is explained with its context: give the question, and pair=the context")
        answers = next(predict(top=2))
        best = next((answer for answer in answers if answer.text), None)
        if best is None:
            raise EverybertError("the model finds no answer in this text, so there is nothing to explain")
        places = enumerate(zip(encoding.offsets, encoding.sequence))
        inside = [i for i, ((a, b), text) in places if text == 1 and a < best.end and b > best.start]

        def log_span(logits_Kn2: Tensor) -> Tensor:
            log_Kn2 = logits_Kn2.log_softmax(1)
            return log_Kn2[:, inside[0], 0] + log_Kn2[:, inside[-1], 1]

        return log_span, f"log-probability of “{best.text}”"

    @classmethod
    def global_tokens(cls, encoding: Encoding) -> list[int]:
        """[CLS] and the question."""
        return list(range(1 + encoding.sequence.count(0)))

    def as_columns(self, prediction: list[Answer], scores: bool = False) -> dict[str, Any]:
        """The best answer, its position and its probability."""
        best = prediction[0]
        where = {"start": best.start, "end": best.end}
        return {"prediction": best.text, **where, "probability": round(best.score, DIGITS)}

    def score(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """exact and f1; if some questions have no answer, also best_exact and best_f1 at their best thresholds."""
        gaps, guesses, golds = zip(*self._best(network, features, examples))
        answers = ["" if self.no_answer and gap > self.threshold else guess for gap, guess in zip(gaps, guesses)]
        pairs = np.array([best_over(guess, gold, self.no_answer) for guess, gold in zip(answers, golds)])
        scores = dict(zip(("exact", "f1"), pairs.mean(0).tolist()))
        if self.no_answer:
            (_, exact), (_, f1) = thresholds(gaps, guesses, golds)
            scores |= {"best_exact": exact, "best_f1": f1}
        return scores

    def tuned(self, network: Network, features: Features, examples: Examples) -> Self:
        """With the no-answer threshold of the best F1."""
        if not self.no_answer:
            return self
        return replace(self, threshold=thresholds(*zip(*self._best(network, features, examples)))[1][0])

    def _best(self, network: Network, features: Features, examples: Examples) -> list[tuple[float, str, list[str]]]:
        """Per question: the gap, the text of the best span, and the true answers."""
        outputs = self.run(network, features)
        candidates = [best_spans(passage, outputs, self.longest, BEST) for passage in features.origins]
        texts = [text[slice(*c.spans[0])] if len(c.spans) else "" for c, (_, text) in zip(candidates, examples.inputs)]
        return [(c.gap, text, [g.text for g in gold]) for c, text, gold in zip(candidates, texts, examples.targets)]


def log_partition(logits_T: Tensor, batch: Ragged) -> Tensor:
    """(B): log Σ exp over each sequence's tokens, in the shifted form, which does not overflow."""
    at_T = batch.sequence_T
    low = torch.full((len(batch),), float("-inf"), dtype=logits_T.dtype, device=logits_T.device)
    peak_B = low.scatter_reduce(0, at_T, logits_T, "amax").detach()
    sum_B = torch.zeros_like(peak_B).index_add(0, at_T, (logits_T - peak_B[at_T]).exp())
    return peak_B + sum_B.log()


def span_loss(logits_T2: Tensor, batch: Ragged, start_B: Tensor, end_B: Tensor) -> Tensor:
    """The loss of answer: the mean of −log p(start) and −log p(end), each a softmax over the sequence's tokens.

    `start_B` and `end_B` count from the sequence's first token; positions outside the sequence do not count.
    """
    lengths_B = batch.offsets_B1.diff()
    losses = []
    for logits_T, at_B in zip(logits_T2.float().unbind(-1), (start_B, end_B)):
        inside_B = (at_B >= 0) & (at_B < lengths_B)
        index_B = batch.first_B + torch.where(inside_B, at_B, 0)
        each_B = log_partition(logits_T, batch) - logits_T[index_B]
        losses.append((each_B * inside_B).sum() / inside_B.sum().clamp(min=1))
    return (losses[0] + losses[1]) / 2


def best_spans(passage: Passage, logits: Sequence[np.ndarray], longest: int, best: int) -> Candidates:
    """The best spans of whole words, of at most `longest` tokens, that begin in a token their window owns.

    This is the official post-processing without its shortcut of looking only at the 20 best starts and ends.
    """
    change = np.diff(passage.words) != 0
    first_m, last_m = np.append(True, change), np.append(change, True)
    spans: list[np.ndarray] = []
    scores: list[np.ndarray] = []
    null = float("inf")
    for sequence, lead, w in passage.places:
        start_n, end_n = logits[sequence][:, 0], logits[sequence][:, 1]
        null = min(null, float(start_n[0] + end_n[0]))
        owned = np.arange(w.own_start - w.start, w.own_stop - w.start)
        owned = owned[first_m[w.start + owned]]
        window_ends = np.where(last_m[w.start : w.stop], end_n[lead : lead + w.stop - w.start], -np.inf)
        ends = np.append(window_ends, np.full(longest, -np.inf))
        total = np.lib.stride_tricks.sliding_window_view(ends, longest)[owned] + start_n[lead + owned][:, None]
        flat = total.ravel()
        top = np.argpartition(-flat, best)[:best] if len(flat) > best else np.arange(len(flat))
        top = top[np.isfinite(flat[top])]
        first = w.start + owned[top // longest]
        spans.append(np.stack((passage.offsets[first, 0], passage.offsets[first + top % longest, 1]), axis=1))
        scores.append(flat[top])
    all_spans, all_scores = np.concatenate(spans), np.concatenate(scores)
    order = np.argsort(-all_scores, kind="stable")[:best]
    return Candidates(all_spans[order], all_scores[order], null)


# ── SQuAD's scores, as the official 1.1 and 2.0 scripts compute them ─────────────────────────────────────────


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, without the words a, an, the, with single spaces."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def word_f1(guess: str, gold: str) -> float:
    """Harmonic mean of precision and recall over the normalised words; 0 if either has none (1.1)."""
    a, b = normalise(guess).split(), normalise(gold).split()
    same = (Counter(a) & Counter(b)).total()
    return 2 * same / (len(a) + len(b)) if same else 0.0


def best_over(guess: str, golds: Sequence[str], no_answer: bool = False) -> tuple[float, float]:
    """(exact, f1), each the best over the true answers.

    With `no_answer` (2.0), true answers without words are ignored; if none is left there is no answer, and two
    answers without words are equal.
    """
    if no_answer:
        golds = [g for g in golds if normalise(g)] or [""]
    exact = max((float(normalise(guess) == normalise(g)) for g in golds), default=0.0)
    f1 = max((word_f1(guess, g) for g in golds), default=0.0)
    return exact, exact if no_answer and golds == [""] else f1


def thresholds(
    gaps: Sequence[float], guesses: Sequence[str], golds: Sequence[Sequence[str]]
) -> list[tuple[float, float]]:
    """SQuAD 2.0's sweep: (threshold, mean score) of the best exact match and of the best F1.

    A question is answered if its gap is at most the threshold. If it is best never to answer, the threshold is below
    every gap (the script returns 0, as its gaps are probabilities).
    """
    out = []
    for scores in zip(*(best_over(guess, gold, True) for guess, gold in zip(guesses, golds))):
        total = best = float(sum(not gold for gold in golds))  # never answer: right if there is no answer
        value = min(gaps) - 1.0
        for i in sorted(range(len(gaps)), key=gaps.__getitem__):
            total += scores[i] if golds[i] else -float(bool(guesses[i]))
            if total > best:
                best, value = total, gaps[i]
        out.append((value, best / len(gaps)))
    return out
