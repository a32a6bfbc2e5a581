"""The playground: its page, and the endpoints that only the page uses.

Large arrays are sent as base64 of little-endian numbers: thumbnails as uint8, attention weights as uint16 (1 is 65535),
vectors as float32. The latest weights and traces are kept, so that the page can ask for one head after another.

Legend: n tokens of the text, H hidden, M masked tokens, V vocabulary.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from fastapi import FastAPI, Request, Response
from pydantic import Field
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles

from everybert.corpus.examples import ExampleKind
from everybert.corpus.masking import Strategy
from everybert.corpus.show import text_examples
from everybert.inside.attention import quantised, without_heads
from everybert.inside.masked import best, fill_sides
from everybert.inside.trace import Part, Trace, explain_steps, needed, part_value
from everybert.serving.batcher import Job, alone
from everybert.serving.limits import HttpError, RequestContext, check_limit
from everybert.serving.models import Served
from everybert.serving.routes import Json, add_endpoint, count_masks
from everybert.serving.schemas import Second

if TYPE_CHECKING:
    from everybert.serving.app import Service

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
"""Nothing from other hosts."""
HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
CHARACTERS = 20_000
"""Characters per request; the other endpoints take more."""
LINES = 50
"""Texts that show a word."""
STEP_TOKENS = 128
"""Tokens of a text that is traced, or whose prediction is explained."""
MOST_WEIGHTS = 40_000_000
"""Attention weights: 144 heads and 512 tokens."""
MASKS = 32
"""Masked tokens, each of which is predicted from three texts."""
OCCURRENCES = 200
"""Occurrences of a word, each of which is compared with all others."""
GRADIENTS = 0.4
"""Share of the memory for requests that gradients need, about: room for one such request of a client, two in all."""
KEPT = 2
"""Texts whose attention weights, and whose traces, are kept."""


Top = Annotated[int, Field(ge=1, le=50)]
Index = Annotated[int, Field(ge=0)]
HeadList = Annotated[list[tuple[Index, Index]], Field(max_length=1024)]
"""(layer, head) each."""
Lines = Annotated[list[str], Field(min_length=1, max_length=LINES)]
Phrases = Annotated[Sequence[str], Field(max_length=LINES)]
Length = Annotated[int, Field(ge=8, le=128)]
Rate = Annotated[float, Field(ge=0.01, le=0.8)]
Originals = Annotated[Sequence[str | None], Field(max_length=512)]
"""The words behind [MASK]."""


class Files(StaticFiles):
    """Files that browsers revalidate, and load again only if they have changed."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """The response with a file."""
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


def add_playground(app: FastAPI, service: "Service") -> None:
    """Serve the page and its endpoints."""
    page, web = Playground(service), Files(packages=[("everybert.serving", "web"), ("everybert.inside", "web")])

    def add_page(path: str, name: str) -> None:
        @app.get(path, include_in_schema=False)
        async def send(request: Request) -> Response:
            response = await web.get_response(name, request.scope)
            response.headers["Content-Security-Policy"] = POLICY
            return response

    def add(path: str, task: str, compute: Callable[..., Any], memory: float = 0) -> None:
        @wraps(compute)  # the parameters of `compute` are the fields of the body
        def handler(request: RequestContext, **body: Any) -> Job:
            request.hold(int(memory * service.limits.queue_bytes))
            job = alone(request, body.get("task") or task, texts_of(body), lambda _: compute(request.served, **body))
            job.long = True
            return job

        add_endpoint(app, service, f"/playground/{path}", handler, include_in_schema=False)

    add_page("/", "index.html")
    add_page("/docs", "docs.html")
    app.mount("/playground/web", GZipMiddleware(web))
    add("fill", "fill", page.fill)
    add("tokens", "tokens", page.tokens)
    add("examples", "tokens", page.examples)
    add("attention", "attention", page.thumbnails)
    add("attention/head", "attention", page.head)
    add("attention/link", "attention", page.link)
    add("attention/off", "attention", page.switched_off)
    add("context", "tokens", page.context)
    add("answer", "answer", page.answer)
    add("attribution", "classify", page.attribution, GRADIENTS)
    add("step", "tokens", page.step)


def texts_of(body: dict[str, Any]) -> tuple[str, ...]:
    """The texts of a request; 413 where they are too long for the page."""
    named = [body.get(name) for name in ("text", "pair", "question", "context", "word")]
    texts = (*filter(None, named), *body.get("texts", []), *body.get("collocations", []))
    check_limit(sum(map(len, texts)), CHARACTERS, "characters")
    return texts


def packed(values: np.ndarray) -> str:
    """base64 of an array's little-endian bytes."""
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


class Playground:
    """What the panels show: each method answers one endpoint."""

    def __init__(self, service: "Service") -> None:
        self.service = service
        self.weights = lru_cache(KEPT)(attention_weights)
        self.traces = lru_cache(KEPT)(trace)

    def fill(self, served: Served, text: str, pair: Second = None, originals: Originals = (), top: Top = 8) -> Json:
        """Each masked token predicted from both sides, from the left and from the right."""
        model = served.model
        check_limit(count_masks(model, [text, pair or ""]), MASKS, "masked tokens")
        masks = fill_sides(model.network, model.tokenizer, text, pair, originals, top, size=model.window)
        return {"blanks": [asdict(mask) for mask in masks]}

    def tokens(self, served: Served, text: str, pair: Second = None) -> Json:
        """The tokens of the text, of the text in lower case, and of the text in the vocabularies of other models."""
        tokenizer = served.model.tokenizer
        others, digests = [], {tokenizer.digest}
        for entry in self.service.registry.entries.values():
            other = entry.model.tokenizer
            if other.digest not in digests:
                digests.add(other.digest)
                others.append({"name": entry.name, **pieces(other, text, pair)})
        lowered = pieces(tokenizer, text.lower(), pair and pair.lower())
        return {**pieces(tokenizer, text, pair), "lowered": lowered, "others": others}

    def examples(
        self,
        served: Served,
        text: str,
        kind: ExampleKind = "pairs",
        strategy: Strategy = "token",
        rate: Rate = 0.15,
        static: bool = False,
        length: Length = 32,
        collocations: Phrases = (),
        seed: Index = 0,
    ) -> Json:
        """Training examples of a text, with the masks of two epochs."""
        tokenizer = served.model.tokenizer
        return {"examples": text_examples(text, tokenizer, kind, strategy, rate, static, length, collocations, seed)}

    def thumbnails(self, served: Served, text: str, pair: Second = None) -> Json:
        """The tokens of a text, and a thumbnail of each head."""
        return self.weights(served, text, pair)[0]

    def head(self, served: Served, text: str, pair: Second = None, layer: Index = 0, head: Index = 0) -> Json:
        """The weights of one head, exact to 1e-5."""
        _, weights = self.weights(served, text, pair)
        if layer >= weights.shape[0] or head >= weights.shape[1]:
            raise HttpError(422, f"there is no layer {layer} with a head {head} in this model")
        return {"weights": packed(weights[layer, head])}

    def link(self, served: Served, text: str, pair: Second = None, source: Index = 0, target: Index = 0) -> Json:
        """The weight from one token to another in every head."""
        _, weights = self.weights(served, text, pair)
        n = weights.shape[-1]
        if source >= n or target >= n:
            raise HttpError(422, f"the text has {n} tokens; there is no link from {source} to {target}")
        return {"weights": (weights[:, :, source, target].astype(np.float64) / 65535).ravel().round(5).tolist()}

    def switched_off(self, served: Served, text: str, heads: HeadList, pair: Second = None, top: Top = 5) -> Json:
        """How the vector of each token, and what stands at each [MASK], changes without some heads."""
        model, mask = served.model, served.model.tokenizer.mask_id
        encoding = model.one_window(text, pair)
        whole_nH, without_nH = (without_heads(model.network, encoding, off).float() for off in ([], heads))
        cosine_n = torch.cosine_similarity(whole_nH, without_nH, dim=-1)
        shown: Json = {"cosine": [round(value, 5) for value in cosine_n.tolist()]}
        at = [i for i, token in enumerate(encoding.ids) if token == mask]
        if at and "mlm" in served.heads:
            shown["masks"] = at
            for name, x_nH in (("whole", whole_nH), ("without", without_nH)):
                p_MV = model.network.mlm_logits(x_nH[at]).softmax(-1)
                shown[name] = [[(c.token, c.score) for c in row] for row in best(model.tokenizer, p_MV, top)]
        return shown

    def context(self, served: Served, word: str, texts: Lines, top: Top = 6) -> Json:
        """The vectors of a word, compared in every layer."""
        if word:
            check_limit(sum(text.lower().count(word.lower()) for text in texts), OCCURRENCES, "occurrences of the word")
        neighbours = served.model.neighbours(word, texts, top)
        return {**asdict(neighbours), "similarity": neighbours.similarity.astype(float).round(5).tolist()}

    def answer(self, served: Served, question: str, context: str, top: Top = 3) -> Json:
        """The best answers, and the probability that an answer starts or ends at each token."""
        best: list[Any] = served.model.answer(question, context, top=top)
        encoding, p_n2 = served.model.answer_tokens(question, context)
        start, end = p_n2.T.astype(float).round(6).tolist()
        shown = {"tokens": encoding.tokens, "offsets": encoding.offsets, "start": start, "end": end}
        return {"answers": [asdict(answer) for answer in best], **shown}

    def attribution(
        self, served: Served, text: str, pair: Second = None, task: str | None = None, label: str | None = None
    ) -> Json:
        """The contribution of each token to a prediction."""
        check_short(served, text, pair)
        attribution = served.model.attribution(text, pair, label=label, task=task)
        shown = {name: value for name, value in asdict(attribution).items() if name not in ("text", "pair")}
        return {**shown, "scores": attribution.scores.round(6).tolist(), "gap": attribution.gap}

    def step(
        self, served: Served, text: str, pair: Second = None, layer: Index = 0, head: Index = 0, step: Index = 0
    ) -> Json:
        """One step of the forward pass with its arrays, and the titles of all steps."""
        trace = self.traces(served, text, pair, layer)
        steps = explain_steps(trace, layer, head)
        chosen = steps[min(step, len(steps) - 1)]
        return {
            "tokens": trace.tokens,
            "ids": trace.ids,
            "gap": trace.gap,
            "titles": [(explained.group, explained.title) for explained in steps],
            "title": chosen.title,
            "equation": chosen.equation,
            "words": chosen.words,
            "parts": [_part(served.model, trace, part) for part in chosen.parts],
        }


def pieces(tokenizer: Any, text: str, pair: str | None) -> Json:
    """The tokens of a text with their properties."""
    encoding = tokenizer.encode(text, pair)
    unknown = [i == tokenizer.unk_id and not special for i, special in zip(encoding.ids, encoding.special)]
    about = {"kind": tokenizer.kind, "lowercase": tokenizer.lowercase, "vocabulary": tokenizer.size}
    columns = {name: getattr(encoding, name) for name in ("tokens", "ids", "segments", "offsets", "special")}
    return {**about, **columns, "texts": encoding.sequence, "unknown": unknown}


def attention_weights(served: Served, text: str, pair: str | None) -> tuple[Json, np.ndarray]:
    """The tokens of a text with a thumbnail of each head, and all weights."""
    model = served.model
    count = len(model.config.layer_order) * model.config.heads * len(model.one_window(text, pair)) ** 2
    check_limit(count, MOST_WEIGHTS, "attention weights")
    attention = model.attention(text, pair)
    return attention.overview(), quantised(attention.weights)


def check_short(served: Served, text: str, pair: str | None) -> None:
    """413 for a text with more tokens than are explained one by one."""
    check_limit(len(served.model.one_window(text, pair)), STEP_TOKENS, "tokens, each of which is explained,")


def trace(served: Served, text: str, pair: str | None, layer: int) -> Trace:
    """The intermediate values of the forward pass that the steps through a layer show."""
    check_short(served, text, pair)
    return served.model.trace(text, pair, keep=needed(layer))


def _part(model: Any, trace: Trace, part: Part) -> Json:
    """An array of a step; of a distribution over the vocabulary, the most probable tokens."""
    value = part_value(trace, part)
    shown = {"label": part.label, "kind": part.kind, "shape": list(value.shape), "name": part.name}
    if part.kind == "vocabulary":
        return shown | {"top": [[[t, round(p, 6)] for t, p in row] for row in trace.vocabulary(model.tokenizer, 6)]}
    return shown | {"data": packed(np.where(np.isfinite(value), value, -1e9).astype("<f4"))}
