"""The answers that only the playground's page needs (the rest it asks of the public endpoints).

What is large travels as base64 of little-endian numbers: thumbnails as uint8, weights as uint16 of 65535ths, vectors
as float32. A head's weights are sent when the head is looked at; the text's attention is kept meanwhile.
"""

from __future__ import annotations

import base64
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field

from everybert.inference import looking
from everybert.inside.attention import quantised
from everybert.inside.masked import fill_sides
from everybert.inside.steps import Part, needed, part_value, story
from everybert.inside.trace import Trace
from everybert.serving.limits import Refusal, too_much
from everybert.serving.page import add_page
from everybert.serving.schemas import Asked
from everybert.serving.service import Service
from everybert.serving.shelf import Served, is_regression
from everybert.serving.strict import StrictRoute

CHARACTERS = 20_000
"""Of a text on the page; the endpoints and the command line take more."""
LINES = 50
"""Texts that are compared with each other."""
STEP_TOKENS = 128
"""Tokens whose every number is shown."""
KEPT = 256 << 20
"""Bytes of attention and traces kept, for those who look at one text for a while."""


class TextIn(Asked):
    """A text, or a pair."""

    text: str
    pair: str | None = None


class FillIn(TextIn):
    """A text with blanks, and the words that stood there where the page knows them."""

    originals: list[str | None] = Field(default=[], max_length=512)
    top: int = Field(default=8, ge=1, le=50)


class HeadIn(TextIn):
    """One head of a text's attention."""

    layer: int = Field(ge=0)
    head: int = Field(ge=0)


class LinkIn(TextIn):
    """One link of a text's attention, in all heads."""

    source: int = Field(ge=0)
    target: int = Field(ge=0)


class StepIn(HeadIn):
    """One step of the forward pass, through one layer and head."""

    layer: int = Field(default=0, ge=0)
    head: int = Field(default=0, ge=0)
    step: int = Field(default=0, ge=0)


class ContextIn(Asked):
    """A word in several texts."""

    word: str
    texts: list[str] = Field(min_length=1, max_length=LINES)
    top: int = Field(default=6, ge=1, le=50)


class SimilarIn(Asked):
    """Texts to compare."""

    texts: list[str] = Field(min_length=1)


class AttributionIn(TextIn):
    """A prediction to explain."""

    task: str | None = None
    label: str | None = None
    method: str = "integrated"


class AnswerIn(Asked):
    """A question about a context."""

    question: str
    context: str
    top: int = Field(default=3, ge=1, le=20)


def router(service: Service) -> APIRouter:
    """The page and its endpoints."""
    routes = APIRouter(route_class=StrictRoute, include_in_schema=False)
    kept = Kept(KEPT)
    add_page(routes)

    def endpoint(path: str, body: type, work: Callable[[Served, Any], Any]) -> None:
        async def answer(given: Any, request: Request) -> Response:
            short(given)
            return await service.answer(request, given.model, lambda served, call: work(served, given))

        answer.__annotations__["given"] = body
        routes.post(f"/playground/{path}")(answer)

    @routes.get("/playground/models")
    async def models(request: Request) -> list[dict[str, Any]]:
        """What is served, for the picker; where folders lie is told to this machine alone."""
        here = request.client is not None and request.client.host in ("127.0.0.1", "::1", "testclient")
        return [described(served, here) for served in service.shelf.entries.values()]

    endpoint("fill", FillIn, fill)
    endpoint("tokens", TextIn, lambda served, given: tokens(service, served, given))
    endpoint("attention", TextIn, lambda served, given: attention(kept, served, given))
    endpoint("attention/head", HeadIn, lambda served, given: head(kept, served, given))
    endpoint("attention/link", LinkIn, lambda served, given: link(kept, served, given))
    endpoint("context", ContextIn, context)
    endpoint("answer", AnswerIn, answer_question)
    endpoint("attribution", AttributionIn, attribution)
    endpoint("similar", SimilarIn, similar)
    endpoint("step", StepIn, lambda served, given: step(kept, served, given))
    return routes


# ── what is kept between requests ────────────────────────────────────────────────────────────────────────────


class Kept:
    """The latest results, up to a number of bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.entries: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Any, compute: Callable[[], tuple[Any, int]]) -> Any:
        """The result under a key; `compute` gives it, and its size, where it is not there."""
        with self.lock:
            if key in self.entries:
                self.entries.move_to_end(key)
                return self.entries[key][0]
        value, size = compute()
        with self.lock:
            self.entries[key] = (value, size)
            while sum(size for _, size in self.entries.values()) > self.most and len(self.entries) > 1:
                self.entries.popitem(last=False)
        return value


def short(given: Any) -> None:
    """Refuse texts that are too long for the page, with the count; and too many of them."""
    texts = [value for value in vars(given).values() if isinstance(value, str)]
    lines = getattr(given, "texts", [])
    longest = max(map(len, [*texts, *lines]), default=0)
    if longest > CHARACTERS:
        raise too_much(longest, CHARACTERS, "characters in a text")
    if len(lines) > LINES:
        raise too_much(len(lines), LINES, "lines")


def packed(values: np.ndarray) -> str:
    """base64 of an array's little-endian bytes."""
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


# ── the answers ──────────────────────────────────────────────────────────────────────────────────────────────


def described(served: Served, here: bool) -> dict[str, Any]:
    """A model for the picker: its size, what it can do, and where it lies."""
    model, config = served.model, served.model.config
    name, _, adapter = served.name.partition(":")
    task = (model.extras.get("task") or {}).get("task")
    return {
        "name": served.name,
        "model": name,
        "adapter": adapter or None,
        "folder": str(model.folder) if here and model.folder is not None else name,
        "family": config.family,
        "layers": len(config.layer_order),
        "heads": config.heads,
        "hidden": config.hidden_size,
        "vocabulary": model.tokenizer.size,
        "window": model.window,
        "lowercase": model.tokenizer.lowercase,
        "tasks": served.tasks,
        "regression": "classify" in model.network.heads and is_regression(model),
        "trained": task,
        "limit": CHARACTERS,
        "lines": LINES,
    }


def fill(served: Served, given: FillIn) -> dict[str, Any]:
    """Each blank from both sides, from the left and from the right."""
    model = served.model
    pair = given.pair or None
    blanks = fill_sides(model.network, model.tokenizer, given.text, pair, given.originals, given.top, model.window)
    return {"blanks": [asdict(blank) for blank in blanks]}


def tokens(service: Service, served: Served, given: TextIn) -> dict[str, Any]:
    """The text as this model's pieces; lower-cased, where it minds case; and as other models' pieces."""
    pair = given.pair or None
    own = served.model.tokenizer
    others = []
    digests = {own.digest}
    for entry in service.shelf.entries.values():
        tokenizer = entry.model.tokenizer
        if tokenizer.digest not in digests:
            digests.add(tokenizer.digest)
            others.append({"name": entry.name, "lowercase": tokenizer.lowercase, **pieces(tokenizer, given.text, pair)})
    lowered = pieces(own, given.text.lower(), pair and pair.lower())
    return {**pieces(own, given.text, pair), "lowered": lowered, "others": others, "kind": own.kind}


def pieces(tokenizer: Any, text: str, pair: str | None) -> dict[str, Any]:
    """A text's tokens with all that belongs to them."""
    encoding = tokenizer.encode(text, pair)
    return {
        "tokens": encoding.tokens,
        "ids": encoding.ids,
        "segments": encoding.segments,
        "offsets": encoding.offsets,
        "special": encoding.special,
        "texts": encoding.sequence,
        "unknown": [i == tokenizer.unk_id and not s for i, s in zip(encoding.ids, encoding.special)],
    }


def _attention(kept: Kept, served: Served, given: TextIn) -> dict[str, Any]:
    def compute() -> tuple[Any, int]:
        found = served.model.attention(given.text, given.pair or None)
        weights = quantised(found.weights)
        return {
            "tokens": found.labels,
            "texts": found.texts,
            "small": found.thumbnails(),
            "weights": weights,
        }, weights.nbytes

    return kept.get((served.name, "attention", given.text, given.pair or None), compute)


def attention(kept: Kept, served: Served, given: TextIn) -> dict[str, Any]:
    """A text's tokens and all heads as thumbnails."""
    found = _attention(kept, served, given)
    layers, heads = found["weights"].shape[:2]
    size = found["small"].shape[-1]
    sizes = {"layers": layers, "heads": heads, "size": size}
    return {"tokens": found["tokens"], "texts": found["texts"], **sizes, "thumbnails": packed(found["small"])}


def head(kept: Kept, served: Served, given: HeadIn) -> dict[str, Any]:
    """One head's weights, exact to 1e-5."""
    weights = _attention(kept, served, given)["weights"]
    if given.layer >= weights.shape[0] or given.head >= weights.shape[1]:
        raise Refusal(422, f"there is no layer {given.layer} with a head {given.head} in this model")
    return {"weights": packed(weights[given.layer, given.head])}


def link(kept: Kept, served: Served, given: LinkIn) -> dict[str, Any]:
    """How strong one link is in every head."""
    weights = _attention(kept, served, given)["weights"]
    n = weights.shape[-1]
    if given.source >= n or given.target >= n:
        raise Refusal(422, f"the text has {n} tokens; there is no link from {given.source} to {given.target}")
    return {"weights": (weights[:, :, given.source, given.target].astype(np.float64) / 65535).ravel().round(5).tolist()}


def context(served: Served, given: ContextIn) -> dict[str, Any]:
    """A word's vectors compared layer by layer."""
    found = served.model.neighbours(given.word, given.texts, given.top)
    return {**asdict(found), "similarity": found.similarity.astype(float).round(5).tolist()}


def answer_question(served: Served, given: AnswerIn) -> dict[str, Any]:
    """The best answers, and where in the passage one may begin and end."""
    best = served.model.answer(given.question, given.context, top=given.top)
    each = looking.answer_tokens(served.model, given.question, given.context)
    return {
        "answers": [asdict(answer) for answer in best],
        "tokens": each.tokens,
        "offsets": each.offsets,
        "start": each.start.astype(float).round(6).tolist(),
        "end": each.end.astype(float).round(6).tolist(),
    }


def attribution(served: Served, given: AttributionIn) -> dict[str, Any]:
    """Which pieces speak for a prediction."""
    found = served.model.attribution(
        given.text, given.pair or None, label=given.label, task=given.task, method=given.method
    )
    return {
        **{name: value for name, value in asdict(found).items() if name not in ("text", "pair")},
        "scores": found.scores.round(6).tolist(),
        "gap": found.gap,
    }


def similar(served: Served, given: SimilarIn) -> dict[str, Any]:
    """Cosines between texts."""
    vectors = served.model.embed(given.texts)
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return {"cosine": (unit @ unit.T).astype(float).round(5).tolist()}


def step(kept: Kept, served: Served, given: StepIn) -> dict[str, Any]:
    """One step of the forward pass with its arrays; and the list of all."""
    model, pair = served.model, given.pair or None

    def compute() -> tuple[Trace, int]:
        encoding = looking.one_window(model, given.text, pair)
        if len(encoding) > STEP_TOKENS:
            raise too_much(len(encoding), STEP_TOKENS, "tokens, each with every number shown,")
        found = looking.trace(model, given.text, pair, keep=needed(given.layer))
        return found, sum(value.nbytes for value in found.values.values())

    trace = kept.get((served.name, given.layer, given.text, pair), compute)
    steps = story(trace, given.layer, given.head)
    chosen = steps[min(given.step, len(steps) - 1)]
    return {
        "tokens": trace.tokens,
        "ids": trace.ids,
        "gap": trace.gap,
        "titles": [(one.group, one.title) for one in steps],
        "title": chosen.title,
        "equation": chosen.equation,
        "words": chosen.words,
        "parts": [_part(model, trace, part) for part in chosen.parts],
    }


def _part(model: Any, trace: Trace, part: Part) -> dict[str, Any]:
    """An array of a step for the page; of a distribution over the vocabulary, its top."""
    value = part_value(trace, part)
    shown = {"label": part.label, "kind": part.kind, "shape": list(value.shape), "name": part.name}
    if part.kind == "vocabulary":
        return shown | {"top": [[[t, round(p, 6)] for t, p in row] for row in trace.vocabulary(model.tokenizer, 6)]}
    finite = np.where(np.isfinite(value), value, -1e9)
    return shown | {"data": packed(finite.astype("<f4"))}
