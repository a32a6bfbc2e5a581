"""What `Model` shows of its inside: traces, neighbours and attributions, under the adapter in use.

Each is one text in one window; what is longer is refused with the count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from everybert.errors import EverybertError
from everybert.inference import task_use
from everybert.inference.results import Candidate
from everybert.inside import attribution as attributing
from everybert.inside import neighbours as neighbouring
from everybert.inside.attention import Attention
from everybert.inside.attention import attention as run_attention
from everybert.inside.attribution import Attribution
from everybert.inside.masked import fill_sides
from everybert.inside.neighbours import Neighbours
from everybert.inside.trace import Trace
from everybert.inside.trace import trace as run_trace
from everybert.text.tokenizer import Encoding

if TYPE_CHECKING:
    from everybert.inference.model import Model


def one_window(model: Model, text: str, pair: str | None = None) -> Encoding:
    """A text or pair as tokens that fit the window."""
    encoding = model.tokenizer.encode(text, pair)
    if not len(encoding):
        raise EverybertError("the text is empty, and this tokenizer adds no special tokens; give some text")
    if len(encoding) > model.window:
        raise EverybertError(
            f"the text has {len(encoding):,} tokens, the model reads {model.window:,} at once; give a shorter text"
        )
    return encoding


def trace(model: Model, text: str, pair: str | None = None, **options: Any) -> Trace:
    """See Model.trace."""
    encoding = one_window(model, text, pair)
    return run_trace(model.network, encoding, text, pair, global_tokens=global_tokens(model, encoding), **options)


def attention(model: Model, text: str, pair: str | None = None) -> Attention:
    """See Model.attention."""
    encoding = one_window(model, text, pair)
    return run_attention(
        model.network, encoding, global_tokens(model, encoding), model.tokenizer.spelt(encoding.tokens)
    )


def global_tokens(model: Model, encoding: Encoding, task: str | None = None) -> list[int] | None:
    """Longformer's global tokens, as its task reads them: [CLS] and a question; none for an encoder alone."""
    heads = model.network.heads
    if not model.config.global_attention or not any(name in heads for name in ("classify", "choose", "answer")):
        return None
    asked = (task or _task(model)) == "answer"
    return list(range(1 + sum(s == 0 for s in encoding.sequence))) if asked else [0]


def fill_pair(model: Model, text: str, pair: str, top: int) -> list[list[Candidate]]:
    """See Model.fill; the pair must fit one window."""
    if top < 1:
        raise EverybertError(f"top is the number of candidates and at least 1, not {top}")
    blanks = fill_sides(model.network, model.tokenizer, text, pair, top=top, size=model.window)
    return [[Candidate(guess.token, guess.score, guess.id) for guess in blank.both] for blank in blanks]


def neighbours(model: Model, word: str, texts: Sequence[str], top: int = 5) -> Neighbours:
    """See Model.neighbours."""
    texts = [texts] if isinstance(texts, str) else list(texts)
    return neighbouring.neighbours(model.network, model.tokenizer, word, texts, top, model.window)


def attribution(
    model: Model,
    text: str,
    pair: str | None = None,
    *,
    label: str | None = None,
    task: str | None = None,
    method: str = "integrated",
    adapter: str | None = None,
) -> Attribution:
    """See Model.attribution."""
    adapter = adapter or task_use.chosen(model, task or "classify", pair is not None)
    if adapter in model.views:
        return attribution(model.views[adapter], text, pair, label=label, task=task, method=method)
    with task_use.using(model, adapter):
        name = task or _task(model)
        encoding = one_window(model, text, pair)
        target, named = (
            _answer(model, encoding, text, pair) if name == "answer" else _label(model, name, text, pair, label)
        )
        return attributing.attribute(
            model.network,
            model.tokenizer,
            encoding,
            "answer" if name == "answer" else "classify",
            target,
            named,
            text=text,
            pair=pair,
            method=method,  # type: ignore[arg-type]
            global_tokens=global_tokens(model, encoding, name),
        )


def _task(model: Model) -> str:
    """The task that the model's heads are for."""
    if "answer" in model.network.heads and "classify" not in model.network.heads:
        return "answer"
    extras = task_use._extras(model).get("task") or {}
    regresses = extras.get("task") == "regress" or model.problem_type == "regression"
    return "regress" if regresses else "classify"


def _label(model: Model, name: str, text: str, pair: str | None, label: str | None) -> tuple[attributing.Target, str]:
    """The log-odds of a label, the most probable unless named; or the number that is predicted."""
    settled = task_use.settle(model, name)
    if name == "regress":
        return attributing.log_odds(0, multi=True), "the number predicted, as the head gives it"
    if label is None:
        label = model.classify([text if pair is None else (text, pair)])[0].label
    if label not in settled.labels:
        raise EverybertError(f"there is no label {label!r}; the model's labels are {', '.join(settled.labels)}")
    target = attributing.log_odds(settled.labels.index(label), settled.multi, settled.temperature)
    return target, f"log-odds of {label}"


def _answer(model: Model, encoding: Encoding, question: str, context: str | None) -> tuple[attributing.Target, str]:
    """The log-probability of the best answer's first and last token."""
    if context is None:
        raise EverybertError("an answer is explained with its context: give the question, and pair=the context")
    best = next((a for a in model.answer(question, context, top=2) if a.text), None)
    if best is None:
        raise EverybertError("the model finds no answer in this text, so there is nothing to explain")
    inside = [
        i
        for i, ((a, b), s) in enumerate(zip(encoding.offsets, encoding.sequence))
        if s == 1 and a < best.end and b > best.start
    ]
    return attributing.log_span(inside[0], inside[-1]), f"log-probability of “{best.text}”"


@dataclass(frozen=True)
class AnswerTokens:
    """A context's tokens with the probability that an answer begins, or ends, there."""

    tokens: list[str]
    offsets: list[tuple[int, int]]
    start: np.ndarray
    end: np.ndarray
    """float (n) each; what is left to 1 is no answer's, at [CLS]."""


def answer_tokens(model: Model, question: str, context: str) -> AnswerTokens:
    """Where an answer may begin and end: each token as the window that owns it sees it, one softmax over all."""
    task = task_use.settle(model, "answer")
    features = task.encode(model.tokenizer, model.config, [(question, context)])
    logits = task.run(model.network, features)
    (passage,) = features.back
    own = np.concatenate(
        [logits[s][lead + w.own_start - w.start : lead + w.own_stop - w.start] for s, lead, w in passage.places]
    )
    none = np.min([logits[s][0] for s, _, _ in passage.places], axis=0)  # [CLS], as the weakest window has it
    p_n2 = np.exp(log_softmax(np.concatenate((none[None], own))))[1:]
    encoding = model.tokenizer.encode(context, specials=False)
    return AnswerTokens(encoding.tokens, encoding.offsets, p_n2[:, 0], p_n2[:, 1])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the first axis."""
    shifted = logits - logits.max(0)
    return shifted - np.log(np.exp(shifted).sum(0))
