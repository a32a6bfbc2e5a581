"""The playground: its page, and the endpoints that only the page uses.

Large arrays are sent as base64 of little-endian numbers: thumbnails as uint8, attention weights as uint16 (1 is 65535),
vectors as float32. The attention of a text is kept for a while, so that the page can ask for one head after another.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import Field

from everybert.inside.attention import quantised
from everybert.inside.masked import fill_sides
from everybert.inside.steps import Part, needed, part_value, story
from everybert.inside.trace import Trace
from everybert.serving.batcher import Job, once
from everybert.serving.limits import HttpError, RequestContext, too_large
from everybert.serving.models import Served
from everybert.serving.routes import JsonRoute, add_endpoint
from everybert.serving.schemas import BaseRequest

if TYPE_CHECKING:
    from everybert.serving.app import Service

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
CHARACTERS = 20_000
"""Characters per text; the other endpoints take more."""
LINES = 50
"""Texts to compare with each other."""
STEP_TOKENS = 128
"""Tokens for which every intermediate value is shown."""
KEPT = 256 << 20
"""Bytes of attention weights and traces that are kept."""


class TextRequest(BaseRequest):
    """A text or a pair, and what the panels ask about it."""

    text: str
    pair: str | None = None
    originals: list[str | None] = Field(default=[], max_length=512, description="fill: the words behind [MASK]")
    top: int = Field(default=8, ge=1, le=50)
    layer: int = Field(default=0, ge=0)
    head: int = Field(default=0, ge=0)
    source: int = Field(default=0, ge=0, description="attention/link: from this token")
    target: int = Field(default=0, ge=0, description="attention/link: to this token")
    step: int = Field(default=0, ge=0)
    task: str | None = None
    label: str | None = None
    method: Literal["integrated", "gradient"] = "integrated"


class ContextRequest(BaseRequest):
    """A word in several texts."""

    word: str
    texts: list[str] = Field(min_length=1, max_length=LINES)
    top: int = Field(default=6, ge=1, le=50)


class SimilarRequest(BaseRequest):
    """Texts to compare."""

    texts: list[str] = Field(min_length=1)


class AnswerRequest(BaseRequest):
    """A question about a context."""

    question: str
    context: str
    top: int = Field(default=3, ge=1, le=20)


def router(service: Service) -> APIRouter:
    """The page and its endpoints."""
    routes = APIRouter(route_class=JsonRoute, include_in_schema=False)
    cache = Cache(KEPT)
    add_files(routes)

    @routes.get("/playground/models")
    async def models(request: Request) -> list[dict[str, Any]]:
        """The served models; only clients on this machine see the paths of folders."""
        local = request.client is not None and request.client.host in ("127.0.0.1", "::1", "testclient")
        return [describe(served, local) for served in service.registry.entries.values()]

    def add(path: str, task: str, kind: type[BaseRequest], compute: Callable[[Served, Any], Any]) -> None:
        def handler(context: RequestContext, body: Any) -> Job:
            chosen = getattr(body, "task", None) or task
            return once(context, chosen, texts_of(body), lambda model: compute(context.served, body))

        handler.__annotations__["body"] = kind
        add_endpoint(routes, service, f"/playground/{path}", handler)

    add("fill", "fill", TextRequest, fill)
    add("tokens", "tokens", TextRequest, lambda served, body: tokens(service, served, body))
    add("attention", "attention", TextRequest, lambda served, body: attention(cache, served, body))
    add("attention/head", "attention", TextRequest, lambda served, body: head(cache, served, body))
    add("attention/link", "attention", TextRequest, lambda served, body: link(cache, served, body))
    add("context", "tokens", ContextRequest, context)
    add("answer", "answer", AnswerRequest, answer_question)
    add("attribution", "classify", TextRequest, attribution)
    add("similar", "embed", SimilarRequest, similar)
    add("step", "tokens", TextRequest, lambda served, body: step(cache, served, body))
    return routes


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────


def assets() -> dict[str, bytes]:
    """The files of the page and of the attention viewer, by name."""
    packages = ("everybert.inside", "everybert.serving")
    found = {file.name: file for package in packages for file in (files(package) / "web").iterdir()}
    return {name: file.read_bytes() for name, file in found.items() if name.rpartition(".")[2] in TYPES}


def add_files(routes: APIRouter) -> None:
    """Serve the files, compressed once, with a policy that allows nothing from other hosts."""
    held = {name: (data, gzip.compress(data, mtime=0)) for name, data in assets().items()}

    def send(name: str, request: Request) -> Response:
        if name not in held:
            raise HttpError(404, "there is no such file")
        data, packed = held[name]
        tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        headers |= {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        if name.endswith(".html"):
            headers["Content-Security-Policy"] = POLICY
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            data, headers["Content-Encoding"] = packed, "gzip"
        return Response(data, media_type=TYPES[name.rpartition(".")[2]] + "; charset=utf-8", headers=headers)

    @routes.get("/")
    async def index(request: Request) -> Response:
        """The playground."""
        return send("index.html", request)

    @routes.get("/docs")
    async def docs(request: Request) -> Response:
        """The API reference, made from /openapi.json by a script of the page."""
        return send("docs.html", request)

    @routes.get("/playground/web/{name}")
    async def file(name: str, request: Request) -> Response:
        """A file of the page."""
        return send(name, request)


# ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────────


class Cache:
    """The latest results, up to a number of bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.entries: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Any, compute: Callable[[], tuple[Any, int]]) -> Any:
        """The result under a key; a missing one is computed, with its size."""
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


def texts_of(body: Any) -> tuple[str, ...]:
    """The texts of a request; 413 where they are too long or too many for the page."""
    lines = getattr(body, "texts", [])
    one = [getattr(body, name, None) for name in ("text", "pair", "question", "context", "word")]
    found = (*filter(None, one), *lines)
    longest = max(map(len, found), default=0)
    if longest > CHARACTERS:
        raise too_large(longest, CHARACTERS, "characters in a text")
    if len(lines) > LINES:
        raise too_large(len(lines), LINES, "lines")
    return found


def packed(values: np.ndarray) -> str:
    """base64 of an array's little-endian bytes."""
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


# ── the answers ──────────────────────────────────────────────────────────────────────────────────────────────


def describe(served: Served, local: bool) -> dict[str, Any]:
    """A model for the model picker: its size, its tasks and its folder."""
    model, config = served.model, served.model.config
    name, _, adapter = served.name.partition(":")
    return {
        "name": served.name,
        "model": name,
        "adapter": adapter or None,
        "folder": str(served.folder) if local and served.folder is not None else name,
        "family": config.family,
        "layers": len(config.layer_order),
        "heads": config.heads,
        "hidden": config.hidden_size,
        "vocabulary": model.tokenizer.size,
        "window": model.window,
        "lowercase": model.tokenizer.lowercase,
        "tasks": served.tasks,
        "regression": served.one_output,
        "trained": served.trained,
        "limit": CHARACTERS,
        "lines": LINES,
    }


def fill(served: Served, body: TextRequest) -> dict[str, Any]:
    """Each masked token predicted from both sides, from the left and from the right."""
    model = served.model
    pair = body.pair or None
    masks = fill_sides(model.network, model.tokenizer, body.text, pair, body.originals, body.top, model.window)
    return {"blanks": [asdict(mask) for mask in masks]}


def tokens(service: Service, served: Served, body: TextRequest) -> dict[str, Any]:
    """The tokens of the text, of the text in lower case, and of the text in the vocabularies of other models."""
    pair = body.pair or None
    own = served.model.tokenizer
    others = []
    digests = {own.digest}
    for entry in service.registry.entries.values():
        tokenizer = entry.model.tokenizer
        if tokenizer.digest not in digests:
            digests.add(tokenizer.digest)
            others.append({"name": entry.name, "lowercase": tokenizer.lowercase, **pieces(tokenizer, body.text, pair)})
    lowered = pieces(own, body.text.lower(), pair and pair.lower())
    return {**pieces(own, body.text, pair), "lowered": lowered, "others": others, "kind": own.kind}


def pieces(tokenizer: Any, text: str, pair: str | None) -> dict[str, Any]:
    """The tokens of a text with their properties."""
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


def _attention(cache: Cache, served: Served, body: TextRequest) -> dict[str, Any]:
    def compute() -> tuple[Any, int]:
        found = served.model.attention(body.text, body.pair or None)
        weights = quantised(found.weights)
        return {
            "tokens": found.labels,
            "texts": found.texts,
            "small": found.thumbnails(),
            "weights": weights,
        }, weights.nbytes

    return cache.get((served.name, "attention", body.text, body.pair or None), compute)


def attention(cache: Cache, served: Served, body: TextRequest) -> dict[str, Any]:
    """The tokens of a text, and a thumbnail of each head."""
    found = _attention(cache, served, body)
    layers, heads = found["weights"].shape[:2]
    size = found["small"].shape[-1]
    sizes = {"layers": layers, "heads": heads, "size": size}
    return {"tokens": found["tokens"], "texts": found["texts"], **sizes, "thumbnails": packed(found["small"])}


def head(cache: Cache, served: Served, body: TextRequest) -> dict[str, Any]:
    """The weights of one head, exact to 1e-5."""
    weights = _attention(cache, served, body)["weights"]
    if body.layer >= weights.shape[0] or body.head >= weights.shape[1]:
        raise HttpError(422, f"there is no layer {body.layer} with a head {body.head} in this model")
    return {"weights": packed(weights[body.layer, body.head])}


def link(cache: Cache, served: Served, body: TextRequest) -> dict[str, Any]:
    """One weight in every head."""
    weights = _attention(cache, served, body)["weights"]
    n = weights.shape[-1]
    if body.source >= n or body.target >= n:
        raise HttpError(422, f"the text has {n} tokens; there is no link from {body.source} to {body.target}")
    return {"weights": (weights[:, :, body.source, body.target].astype(np.float64) / 65535).ravel().round(5).tolist()}


def context(served: Served, body: ContextRequest) -> dict[str, Any]:
    """The vectors of a word, compared in every layer."""
    found = served.model.neighbours(body.word, body.texts, body.top)
    return {**asdict(found), "similarity": found.similarity.astype(float).round(5).tolist()}


def answer_question(served: Served, body: AnswerRequest) -> dict[str, Any]:
    """The best answers, and the probability that an answer starts or ends at each token."""
    best: list[Any] = served.model.answer(body.question, body.context, top=body.top)
    each = served.model.answer_tokens(body.question, body.context)
    return {
        "answers": [asdict(answer) for answer in best],
        "tokens": each.tokens,
        "offsets": each.offsets,
        "start": each.start.astype(float).round(6).tolist(),
        "end": each.end.astype(float).round(6).tolist(),
    }


def attribution(served: Served, body: TextRequest) -> dict[str, Any]:
    """The contribution of each token to a prediction."""
    found = served.model.attribution(body.text, body.pair or None, label=body.label, task=body.task, method=body.method)
    return {
        **{name: value for name, value in asdict(found).items() if name not in ("text", "pair")},
        "scores": found.scores.round(6).tolist(),
        "gap": found.gap,
    }


def similar(served: Served, body: SimilarRequest) -> dict[str, Any]:
    """Cosines between texts."""
    vectors = served.model.embed(body.texts)
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return {"cosine": (unit @ unit.T).astype(float).round(5).tolist()}


def step(cache: Cache, served: Served, body: TextRequest) -> dict[str, Any]:
    """One step of the forward pass with its arrays, and the titles of all steps."""
    model, pair = served.model, body.pair or None

    def compute() -> tuple[Trace, int]:
        encoding = model.one_window(body.text, pair)
        if len(encoding) > STEP_TOKENS:
            raise too_large(len(encoding), STEP_TOKENS, "tokens, each with every number shown,")
        found = model.trace(body.text, pair, keep=needed(body.layer))
        return found, sum(value.nbytes for value in found.values.values())

    trace = cache.get((served.name, body.layer, body.text, pair), compute)
    steps = story(trace, body.layer, body.head)
    chosen = steps[min(body.step, len(steps) - 1)]
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
    """An array of a step; of a distribution over the vocabulary, the most probable tokens."""
    value = part_value(trace, part)
    shown = {"label": part.label, "kind": part.kind, "shape": list(value.shape), "name": part.name}
    if part.kind == "vocabulary":
        return shown | {"top": [[[t, round(p, 6)] for t, p in row] for row in trace.vocabulary(model.tokenizer, 6)]}
    finite = np.where(np.isfinite(value), value, -1e9)
    return shown | {"data": packed(finite.astype("<f4"))}
