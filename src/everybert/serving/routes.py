"""The endpoints: everybert's own, OpenAI's /v1, and those of text-embeddings-inference (TEI).

A handler turns a validated body into a `Job` for the batcher; `add_endpoint` makes an HTTP endpoint of it.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from inspect import get_annotations
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import from_json

from everybert.inference.model import Model
from everybert.serving import schemas as s
from everybert.serving.batcher import Job, once
from everybert.serving.limits import STATUSES, HttpError, RequestContext, too_large
from everybert.serving.models import count_tokens, may_be_too_long
from everybert.tasks.metrics import sigmoid

if TYPE_CHECKING:
    from everybert.serving.app import Service

Handler = Callable[[RequestContext, Any], Job]

MOST_WEIGHTS = 1_000_000
"""Attention weights per response; each takes about eight bytes of JSON."""
FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": s.Failure, "description": text} for status, (_, text) in STATUSES.items() if status != 405
}


class JsonRoute(APIRoute):
    """A route whose body, read by the middleware, is strict JSON: no NaN, no deep nesting, only UTF-8."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Validate the body, and call the endpoint with it and the request."""
        if not self.dependant.body_params:
            return super().get_route_handler()
        kind = self.dependant.body_params[0].field_info.annotation

        async def handle(request: Request) -> Response:
            return await self.endpoint(validated(kind, request), request)

        return handle


def validated(kind: Any, request: Request) -> Any:
    """The body as a model of pydantic; an error names the field and the reason, but not the value."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (content_type.startswith("application/") and content_type.endswith(("/json", "+json"))):
        raise HttpError(422, "the body: send it as JSON, with the header content-type: application/json")
    raw = request.scope["context"].body
    if not raw:
        raise HttpError(422, "the body is empty; send JSON")
    try:
        return kind.model_validate(from_json(raw, allow_inf_nan=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = "this endpoint has no such field" if first["type"] == "extra_forbidden" else first["msg"][:200]
        raise HttpError(422, f"{where[:80] or 'the body'}: {why}") from None
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}"[:300]) from None


def add_endpoint(routes: APIRouter, service: Service, path: str, handler: Handler, **options: Any) -> None:
    """Serve a handler at a path; its annotations and docstring describe the endpoint."""

    async def endpoint(body: Any, request: Request) -> Response:
        context: RequestContext = request.scope["context"]
        context.served = served = service.registry.get(body.model)
        job = handler(context, body)
        try:
            async with asyncio.timeout(service.limits.seconds):
                if job.count:
                    await asyncio.to_thread(count_tokens, served.model, job.inputs, context, job.specials)
                body = await service.batcher.submit(job)
        except TimeoutError:
            raise context.late() from None
        service.metrics.tokens.labels(served.loaded.name).inc(context.tokens)
        headers = {"x-tokens": str(context.tokens), "x-cut-tokens": str(context.cut)}
        return Response(body, media_type="application/json", headers=headers)

    endpoint.__annotations__["body"] = get_annotations(handler, eval_str=True)["body"]
    routes.post(path, name=handler.__name__, description=handler.__doc__, **options)(endpoint)


def router(service: Service) -> APIRouter:
    """All endpoints that need a model, but for the playground's."""
    routes = APIRouter(route_class=JsonRoute, responses=FAILURES)

    @routes.get("/v1/models", tags=["OpenAI"])
    async def models() -> dict[str, Any]:
        """List the models, with the tasks of each."""
        common = {"object": "model", "created": 0, "owned_by": "everybert"}
        data = [{"id": e.name, **common, "tasks": e.tasks} for e in service.registry.entries.values()]
        return {"object": "list", "data": data}

    labels = list[s.LabelScore] | list[list[s.LabelScore]]
    for path, tag, handler, response in (
        ("/v1/embeddings", "OpenAI", embeddings, s.EmbeddingsResponse),
        ("/embed", "TEI", embed, list[list[float]]),
        ("/predict", "TEI", predict, labels),
        ("/rerank", "TEI", rerank, list[s.Rank]),
        ("/fill", "everybert", fill, s.FillResponse),
        ("/classify", "everybert", classify, s.ClassifyResponse),
        ("/tag", "everybert", tag_texts, s.TagResponse),
        ("/answer", "everybert", answer, s.AnswerResponse),
        ("/next", "everybert", next_sentence, s.NextResponse),
        ("/choose", "everybert", choose, s.ChooseResponse),
        ("/tokens", "everybert", tokens, s.TokensResponse),
        ("/attention", "everybert", attention, s.AttentionResponse),
    ):
        add_endpoint(routes, service, path, handler, tags=[tag], response_model=response)
    return routes


def as_list(texts: Any, context: RequestContext) -> list[Any]:
    """One text, or a list of at most as many as the limit, as a list; pairs as tuples."""
    found = [texts] if isinstance(texts, str) else [tuple(x) if isinstance(x, list) else x for x in texts]
    if not found:
        raise HttpError(422, "there is no text; give one or more")
    if len(found) > context.limits.inputs:
        raise too_large(len(found), context.limits.inputs, "texts in a request")
    return found


def rounded(values: np.ndarray) -> list[Any]:
    """Numbers for JSON, with as many digits as float32 has."""
    return np.round(values.astype(np.float64), 8).tolist()


# ── embeddings ───────────────────────────────────────────────────────────────────────────────────────────────


def embed_work(
    context: RequestContext, texts: list[str], finish: Callable[..., Any], normalize: bool | None, long: Any = "window"
) -> Job:
    """Embed texts; `finish` takes the vectors (N, H), the tokens of each text, and the tokens cut of each."""

    def run(model: Model, texts: list[str]) -> Sequence[Any]:
        found = model.embedded(texts, normalize=normalize, long=long)
        return list(zip(found.vectors, found.tokens, found.cut))

    def finish_rows(rows: list[Any]) -> Any:
        vectors, read, cut = zip(*rows)
        context.cut = sum(cut)
        context.tokens = sum(read) + context.cut
        return finish(np.stack(vectors), read, cut)

    return Job(context, "embed", texts, run, finish_rows, (normalize, long), may_be_too_long(texts, context.limits))


def embeddings(context: RequestContext, body: s.EmbeddingsRequest) -> Job:
    """Embed texts, or lists of token ids."""
    one = isinstance(body.input, list) and len(body.input) > 0 and all(isinstance(x, int) for x in body.input)
    given = as_list([body.input] if one else body.input, context)
    texts = [x if isinstance(x, str) else context.served.model.tokenizer.decode(x) for x in given]

    def finish(vectors: np.ndarray, read: Sequence[int], cut: Sequence[int]) -> dict[str, Any]:
        width = vectors.shape[1]
        if body.dimensions not in (None, width):
            raise HttpError(422, f"dimensions is {body.dimensions}, this model's vectors have {width}; leave it out")
        shown = rounded(vectors)
        if body.encoding_format == "base64":  # little-endian float32, as OpenAI's clients read it
            shown = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        rows = enumerate(zip(shown, cut))
        data = [{"object": "embedding", "index": i, "embedding": row, "cut": lost} for i, (row, lost) in rows]
        usage = {"prompt_tokens": sum(read), "total_tokens": sum(read)}
        return {"object": "list", "model": context.served.name, "data": data, "usage": usage}

    return embed_work(context, texts, finish, None, body.long)


def embed(context: RequestContext, body: s.EmbedRequest) -> Job:
    """Embed texts. The x-cut-tokens header counts the tokens that `truncate` left out."""
    texts = as_list(body.inputs, context)
    long = "cut" if body.truncate else "window"
    return embed_work(context, texts, lambda vectors, *_: rounded(vectors), body.normalize, long)


# ── predictions ──────────────────────────────────────────────────────────────────────────────────────────────


def predict_work(context: RequestContext, texts: list[Any], finish: Callable[[list[Any]], Any]) -> Job:
    """Run the classify head on texts and pairs: predictions, or numbers where it has one output."""
    if context.served.one_output:
        return Job(context, "regress", texts, lambda model, texts: model.regress(texts), finish)
    return Job(context, "classify", texts, lambda model, texts: model.classify(texts), finish)


def predict(context: RequestContext, body: s.PredictRequest) -> Job:
    """Score every label of a text or pair, best first; for a list, one such list per entry."""
    inputs: Any = body.inputs
    many = isinstance(inputs, list) and not all(isinstance(x, str) for x in inputs)
    if isinstance(inputs, list) and inputs and not many:
        if len(inputs) > 2:
            raise HttpError(422, 'a list of texts is a pair here; give a batch as [["text"], ["text"], …]')
        inputs = [inputs]
    texts = [x[0] if len(x) == 1 and isinstance(x, tuple) else x for x in as_list(inputs, context)]

    def scores(found: Any) -> list[dict[str, Any]]:
        if context.served.one_output:
            squash = context.served.bounded and not body.raw_scores
            return [{"score": float(sigmoid(found) if squash else found), "label": context.served.label}]
        context.cut += found.cut
        raw = {name: float(np.log(max(p, 1e-30))) if body.raw_scores else p for name, p in found.scores.items()}
        return [{"score": p, "label": name} for name, p in sorted(raw.items(), key=lambda item: -item[1])]

    return predict_work(context, texts, lambda found: list(map(scores, found)) if many else scores(found[0]))


def rerank(context: RequestContext, body: s.RerankRequest) -> Job:
    """Sort texts by relevance to a query: by a cross-encoder's score, or by the cosine of the embeddings."""
    texts = as_list(body.texts, context)

    def ranked(scores: np.ndarray) -> list[dict[str, Any]]:
        order = np.argsort(-scores, kind="stable").tolist()
        shown = [{"text": text} if body.return_text else {} for text in texts]
        return [{"index": i, "score": float(scores[i]), **shown[i]} for i in order]

    if not context.served.one_output:
        return embed_work(context, [body.query, *texts], lambda vectors, *_: ranked(vectors[1:] @ vectors[0]), True)
    pairs = [(body.query, text) for text in texts]
    squash = np.asarray if body.raw_scores else sigmoid
    return predict_work(context, pairs, lambda found: ranked(squash(np.asarray(found))))


# ── everybert's own endpoints ────────────────────────────────────────────────────────────────────────────────


def results(context: RequestContext) -> Callable[[list[Any]], dict[str, Any]]:
    """Makes the response with one result per input."""
    return lambda found: {"model": context.served.name, "results": found, "tokens": context.tokens}


def fill(context: RequestContext, body: s.FillRequest) -> Job:
    """Predict the tokens behind [MASK], each with its probability."""

    def run(model: Model, texts: list[str]) -> Sequence[Any]:
        return model.fill_batch(texts, body.top)

    return Job(context, "fill", as_list(body.text, context), run, results(context), body.top, specials=True)


def classify(context: RequestContext, body: s.ClassifyRequest) -> Job:
    """Classify texts or pairs of any length; a model that predicts a number returns it as `value`."""
    finish = results(context)
    values = (lambda found: finish([{"value": x} for x in found])) if context.served.one_output else finish
    return predict_work(context, as_list(body.text, context), values)


def tag_texts(context: RequestContext, body: s.TagRequest) -> Job:
    """Find and label spans in texts of any length."""
    texts = as_list(body.text, context)
    return Job(context, "tag", texts, lambda model, texts: model.tag(texts), results(context))


def answer(context: RequestContext, body: s.AnswerRequest) -> Job:
    """Answer questions by parts of a context of any length."""
    questions, passages = as_list(body.question, context), as_list(body.context, context)
    passages = passages * len(questions) if len(passages) == 1 else passages
    if len(passages) != len(questions):
        counts = f"{len(questions)} questions but {len(passages)} contexts"
        raise HttpError(422, f"{counts}; give one for each, or one for all")

    def run(model: Model, pairs: list[Any]) -> Sequence[Any]:
        return model.answer([q for q, _ in pairs], [c for _, c in pairs], top=body.top)

    return Job(context, "answer", list(zip(questions, passages)), run, results(context), body.top)


def next_sentence(context: RequestContext, body: s.NextRequest) -> Job:
    """The probability that the second text follows the first."""

    def compute(model: Model) -> dict[str, Any]:
        probability = model.next_sentence(body.first, body.second)
        return {"model": context.served.name, "probability": probability, "tokens": context.tokens}

    return once(context, "next", (body.first, body.second), compute)


def choose(context: RequestContext, body: s.ChooseRequest) -> Job:
    """Choose the best ending of a prompt."""
    endings = as_list(body.endings, context)

    def compute(model: Model) -> dict[str, Any]:
        chosen = model.choose(body.prompt, endings)
        context.cut = chosen.cut
        return {"model": context.served.name, **asdict(chosen), "tokens": context.tokens}

    return once(context, "choose", (body.prompt, *endings), compute)


def tokens(context: RequestContext, body: s.TokensRequest) -> Job:
    """The tokens of a text, their positions and, on request, their vectors after a layer."""

    def compute(model: Model) -> dict[str, Any]:
        found = model.tokens(body.text, layer=body.layer, pair=body.pair)
        vectors = rounded(found.vectors) if body.vectors else [None] * len(found)
        rows = zip(found.tokens, found.ids, found.offsets, found.segments, vectors)
        shown = [
            {"token": token, "id": i, "start": start, "end": end, "segment": segment, "vector": vector}
            for token, i, (start, end), segment, vector in rows
        ]
        return results(context)(shown) | {"layer": found.layer}

    return once(context, "tokens", (body.text,) if body.pair is None else (body.text, body.pair), compute)


def attention(context: RequestContext, body: s.AttentionRequest) -> Job:
    """The attention weights of every head of every layer for a short text: weights[layer][head][from][to]."""

    def compute(model: Model) -> dict[str, Any]:
        count = len(model.config.layer_order)
        layers = list(range(count)) if body.layer is None else [body.layer]
        if layers[-1] >= count:
            raise HttpError(422, f"there is no layer {layers[-1]}: the layers are 0 … {count - 1}")
        if (size := len(layers) * model.config.heads * context.tokens**2) > MOST_WEIGHTS:
            raise too_large(size, MOST_WEIGHTS, "attention weights")
        found = model.attention(body.text, pair=body.pair)
        shown = {"token": found.tokens, "layers": layers, "weights": rounded(found.weights[layers])}
        return {"model": context.served.name, **shown, "tokens": context.tokens}

    return once(context, "attention", (body.text,) if body.pair is None else (body.text, body.pair), compute)
