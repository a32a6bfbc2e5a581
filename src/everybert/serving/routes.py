"""The endpoints: everybert's own, OpenAI's /v1, those of text-embeddings-inference (TEI), and Hugging Face's.

A handler makes a `Job` for the batcher; `add_endpoint` makes an HTTP endpoint of it, whose body has the handler's
parameters as its fields.
"""

import asyncio
import base64
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import from_json

from everybert import __version__
from everybert.inference.model import Candidate, Model
from everybert.serving import schemas as s
from everybert.serving.batcher import Job, alone
from everybert.serving.limits import STATUSES, HttpError, RequestContext, check_limit
from everybert.serving.models import LARGE, Served, count_tokens
from everybert.store.hub import BUNDLED
from everybert.tasks.answer import Answer
from everybert.tasks.metrics import sigmoid
from everybert.tasks.rank import relevance
from everybert.tasks.tag import Span
from everybert.text.tokenizer import MASK

if TYPE_CHECKING:
    from everybert.serving.app import Service

Handler = Callable[..., Job]
Json = dict[str, Any]

ITEM = 4
"""Numbers that a label, token or span of a response counts as."""
FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": s.Failure, "description": text} for status, (_, text) in STATUSES.items() if status != 405
}


class JsonRoute(APIRoute):
    """A route whose endpoint reads the body itself: its body parameter only describes the endpoint in /openapi.json."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Call the endpoint with the request."""
        return partial(self.endpoint, None) if self.dependant.body_params else super().get_route_handler()


def validated(kind: Any, http: Request) -> Any:
    """The body as a pydantic model. It must be strict JSON: no NaN, no deep nesting, only UTF-8.

    An error names the field and the reason, but not the value.
    """
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (content_type.startswith("application/") and content_type.endswith(("/json", "+json"))):
        raise HttpError(422, "the body: send it as JSON, with the header content-type: application/json")
    request: RequestContext = http.scope["context"]
    if not request.body:
        raise HttpError(422, "the body is empty; send JSON")
    try:
        content = from_json(request.body, allow_inf_nan=False)
        check_lengths(content, request.limits.inputs)  # before validation, which looks at every item in several ways
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = "this endpoint has no such field" if first["type"] == "extra_forbidden" else first["msg"][:200]
        raise HttpError(422, f"{where[:80] or 'the body'}: {why}") from None
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}"[:300]) from None


def check_lengths(content: Any, most: int) -> None:
    """413 for a body with a list of more than `most` items, or with more items in nested lists than a few for each."""
    level, total = [content], 0
    while level := [x for x in level if isinstance(x, list | dict)]:
        total += sum(map(len, level))
        check_limit(max(map(len, level)), most, "texts in a request")
        check_limit(total, 4 * most + 64, "items in a request")
        level = [x for value in level for x in (value.values() if isinstance(value, dict) else value)]


def body_of(handler: Handler, strict: bool) -> type[BaseModel]:
    """The body of a handler's requests: a field for the model, and for each parameter behind the RequestContext.

    Unknown fields are refused if `strict`; else they are ignored, as clients of OpenAI and TEI expect.
    """
    _, *parameters = signature(handler, eval_str=True).parameters.values()
    fields: Json = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters}
    fields |= {"__config__": ConfigDict(extra="forbid" if strict else "ignore"), "__doc__": handler.__doc__}
    name = handler.__name__.title().replace("_", "") + "Request"
    return create_model(name, model=(s.ModelName, None), **fields)


def add_endpoint(
    app: FastAPI, service: "Service", path: str, handler: Handler, strict: bool = False, **options: Any
) -> None:
    """Serve a handler at a path; its parameters and docstring describe the endpoint."""

    kind = body_of(handler, strict)

    def prepared(http: Request, request: RequestContext) -> Job:
        fields = dict(validated(kind, http))
        name = fields.pop("model")
        request.served = service.registry.get(http.path_params.get("model") or name)
        job = handler(request, **fields)
        job.sizes = count_tokens(request.served.model, job.inputs, request)
        return job

    async def endpoint(body: Any, http: Request) -> Response:
        request: RequestContext = http.scope["context"]
        large = len(request.body or b"") > LARGE  # its work is done in threads: the event loop answers others meanwhile
        try:
            async with asyncio.timeout(service.limits.seconds):
                job = await asyncio.to_thread(prepared, http, request) if large else prepared(http, request)
                request.reserve(job.numbers())
                response = job.response = asyncio.get_running_loop().create_future()
                await asyncio.to_thread(service.batcher.submit, job) if large else service.batcher.submit(job)
                content = await response
        except TimeoutError:
            raise request.late() from None
        service.metrics.tokens.labels(request.served.loaded.name).inc(request.tokens)
        headers = {"x-tokens": str(request.tokens), "x-cut-tokens": str(request.cut)}
        return Response(content, media_type="application/json", headers=headers)

    endpoint.__annotations__["body"] = kind
    app.post(path, name=handler.__name__, description=handler.__doc__, **options)(endpoint)


def add_routes(app: FastAPI, service: "Service") -> None:
    """Serve all endpoints that need a model, except those of the playground.

    On the application itself: FastAPI builds the routes of an APIRouter at the first request, which takes a while.
    """
    app.router.route_class, app.router.responses = JsonRoute, FAILURES

    @app.get("/v1/models", tags=["OpenAI"])
    async def models(http: Request) -> Json:
        """List the models, with the tasks and the sizes of each."""
        return {"object": "list", "data": [describe(served, http) for served in service.registry.entries.values()]}

    @app.get("/v1/models/{model}", tags=["OpenAI"])
    async def model(model: str, http: Request) -> Json:
        """One model."""
        return describe(service.registry.get(model), http)

    @app.get("/info", tags=["TEI"])
    async def info() -> Json:
        """The first model and the limits, as TEI's clients ask for them."""
        served, limits = service.registry.get(None), service.limits
        return {
            "model_id": served.name,
            "model_dtype": str(next(served.model.network.parameters()).dtype).removeprefix("torch."),
            "model_type": {"classifier" if served.outputs > 1 else "reranker" if served.outputs else "embedding": {}},
            "max_concurrent_requests": limits.queue,
            "max_input_length": limits.text_tokens,
            "max_batch_tokens": served.loaded.budget,
            "max_client_batch_size": limits.inputs,
            "version": __version__,
        }

    examples = json.loads((files("everybert.serving") / "examples.json").read_text("utf-8"))
    labels = list[Json] | list[list[Json]]
    for path, group, handler, response in (
        ("/v1/embeddings", "OpenAI", embeddings, Json),
        ("/embed", "TEI", embed, list[list[float]]),
        ("/embed_all", "TEI", embed_all, list[list[list[float]]]),
        ("/embed_sparse", "TEI", embed_sparse, list[list[Json]]),
        ("/similarity", "TEI", similarity, list[float]),
        ("/tokenize", "TEI", tokenize, list[list[Json]]),
        ("/predict", "TEI", predict, labels),
        ("/rerank", "TEI", rerank, list[Json]),
        ("/fill", "everybert", fill, s.Results[list[list[Candidate]]]),
        ("/classify", "everybert", classify, s.Results[Json]),
        ("/tag", "everybert", tag, s.Results[list[Span]]),
        ("/answer", "everybert", answer, s.Results[list[Answer]]),
        ("/next", "everybert", next_sentence, Json),
        ("/choose", "everybert", choose, Json),
        ("/tokens", "everybert", tokens, Json),
        ("/attention", "everybert", attention, Json),
        ("/", "Hugging Face", pipeline, Any),
    ):
        shown = {name: {"content": {"application/json": {"example": body}}} for name, body in examples[path].items()}
        more = {"responses": {200: shown["response"]}, "openapi_extra": {"requestBody": shown["request"]}}
        strict = group in ("everybert", "Hugging Face")
        add_endpoint(app, service, path, handler, strict, tags=[group], response_model=response, **more)
    add_endpoint(app, service, "/models/{model}", pipeline, True, include_in_schema=False)


def describe(served: Served, http: Request) -> Json:
    """A model as OpenAI's clients and the playground read it. Only local clients see the path of its folder."""
    model, config = served.model, served.model.config
    name, _, adapter = served.name.partition(":")
    local = http.client is not None and http.client.host in ("127.0.0.1", "::1")
    path = served.folder if served.folder and served.folder.parent != BUNDLED else None  # those load by their names
    return {
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "everybert",
        "tasks": served.tasks,
        "model": name,
        "adapter": adapter or None,
        "folder": str(path) if path and local else name,
        "family": config.family,
        "layers": len(config.layer_order),
        "heads": config.heads,
        "hidden": config.hidden_size,
        "vocabulary": model.tokenizer.size,
        "window": model.window,
        "lowercase": model.tokenizer.lowercase,
        "causal": config.causal,
        "regression": served.outputs == 1,
        "trained": served.trained,
        "defaults": dict(model.bundle.defaults),
    }


def as_list(texts: Any) -> list[Any]:
    """One text or a list as a list; pairs as tuples. `check_lengths` has limited their number."""
    inputs = [texts] if isinstance(texts, str) else [tuple(x) if isinstance(x, list) else x for x in texts]
    if not inputs:
        raise HttpError(422, "there is no text; give one or more")
    return inputs


def rounded(values: np.ndarray) -> list[Any]:
    """Numbers for JSON, with as many digits as float32 has; row by row, as `json_bytes` makes JSON."""
    if values.ndim > 1:
        return [rounded(part) for part in values]
    return np.round(values.astype(np.float64), 8).tolist()


def count_masks(model: Model, texts: Sequence[str]) -> int:
    """The masked tokens of texts."""
    return sum(text.count(mask) for text in texts for mask in {MASK, model.tokenizer.mask_token or MASK})


# ── embeddings ───────────────────────────────────────────────────────────────────────────────────────────────


def embed_job(
    request: RequestContext,
    texts: list[str],
    finish: Callable[..., Any],
    normalize: bool | None,
    long: Any = "window",
    dimensions: int | None = None,
    prompt: str | None = None,
) -> Job:
    """Embed texts; `finish` makes the response from the vectors (N, H), and the tokens read and cut per text."""
    model = request.served.model
    width = model.pooling.width(model.config.hidden_size)
    numbers = len(texts) * min(dimensions or width, width)

    def run(model: Model, texts: list[str]) -> Sequence[Any]:
        embedded = model.embedded(texts, normalize=normalize, long=long, prompt=prompt, dimensions=dimensions)
        return list(zip(embedded.vectors, embedded.tokens, embedded.cut))

    def finish_rows(rows: list[Any]) -> Any:
        vectors, read, cut = zip(*rows)
        request.cut = sum(cut)
        request.tokens = sum(read) + request.cut
        return finish(np.stack(vectors), read, cut)

    return Job(request, "embed", texts, run, finish_rows, (normalize, long, prompt, dimensions), lambda: numbers)


def embeddings(
    request: RequestContext,
    input: s.TextsNotIds,
    encoding_format: Literal["float", "base64"] = "float",
    dimensions: s.Dimensions = None,
    long: s.Long = "window",
) -> Job:
    """Embed texts: vectors of length 1, as OpenAI's are."""

    def finish(vectors: np.ndarray, read: Sequence[int], cut: Sequence[int]) -> Json:
        shown = rounded(vectors)
        if encoding_format == "base64":  # little-endian float32, as OpenAI's clients read it
            shown = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        rows = enumerate(zip(shown, cut))
        data = [{"object": "embedding", "index": i, "embedding": row, "cut": lost} for i, (row, lost) in rows]
        usage = {"prompt_tokens": sum(read), "total_tokens": sum(read)}
        return {"object": "list", "model": request.served.name, "data": data, "usage": usage}

    return embed_job(request, as_list(input), finish, True, long, dimensions)


def embed(
    request: RequestContext,
    inputs: s.Texts,
    normalize: bool | None = True,
    truncate: s.Truncate = False,
    dimensions: s.Dimensions = None,
    prompt_name: s.PromptName = None,
    truncation_direction: s.Side = "right",
) -> Job:
    """Embed texts. The x-cut-tokens header counts the tokens that `truncate` left out."""
    long = "cut" if truncate else "window"
    return embed_job(request, as_list(inputs), lambda v, *_: rounded(v), normalize, long, dimensions, prompt_name)


def embed_all(request: RequestContext, inputs: s.Texts) -> Job:
    """The vector of every token of each text, special tokens included."""
    texts, width = as_list(inputs), request.served.model.config.hidden_size

    def run(model: Model, texts: list[str]) -> Sequence[Any]:
        return [rounded(model.tokens(text).vectors) for text in texts]

    return Job(request, "tokens", texts, run, list, "vectors", numbers=lambda: request.tokens * width)


def embed_sparse(
    request: RequestContext,
    inputs: s.Texts,
    truncate: s.Truncate = False,
    prompt_name: s.PromptName = None,
    top: s.Top | None = None,
    truncation_direction: s.Side = "right",
) -> Job:
    """A sparse vector over the vocabulary per text, by a SPLADE model; `top` keeps the largest weights."""
    model, texts, long = request.served.model, as_list(inputs), "cut" if truncate else "window"

    def run(model: Model, texts: list[str]) -> Sequence[Any]:
        vectors = model.sparse(texts, top, long, prompt=prompt_name)  # type: ignore[arg-type]
        return [[{"index": i, "value": w} for i, w in zip(x.indices.tolist(), rounded(x.weights))] for x in vectors]

    numbers = 2 * len(texts) * (top or model.config.vocab_size)
    return Job(request, "embed", texts, run, list, (long, prompt_name, top), numbers=lambda: numbers)


def similarity(request: RequestContext, inputs: s.SimilarityInputs) -> Job:
    """The cosine between a text and each of several others."""
    texts = [inputs.source_sentence, *inputs.sentences]
    return embed_job(request, texts, lambda vectors, *_: rounded(vectors[1:] @ vectors[0]), True)


def tokenize(request: RequestContext, inputs: s.Texts, add_special_tokens: bool = True) -> Job:
    """The tokens of texts."""

    def run(model: Model, texts: list[str]) -> Sequence[Any]:
        encodings = model.tokenizer.encode_batch(texts, add_special_tokens)
        each = [zip(x.ids, x.tokens, x.special, x.offsets) for x in encodings]
        return [[{"id": i, "text": t, "special": s, "start": a, "stop": b} for i, t, s, (a, b) in x] for x in each]

    texts = as_list(inputs)
    return Job(request, "tokens", texts, run, list, add_special_tokens, numbers=lambda: ITEM * request.tokens)


# ── predictions ──────────────────────────────────────────────────────────────────────────────────────────────


def reply(request: RequestContext, **shown: Any) -> Json:
    """A response of our own endpoints."""
    return {"model": request.served.name, **shown, "tokens": request.tokens}


def results(request: RequestContext) -> Callable[[list[Any]], Json]:
    """Makes the response with one result per input."""
    return lambda rows: reply(request, results=rows)


def fill(request: RequestContext, text: s.Texts, top: s.Top = 5) -> Job:
    """Predict the tokens behind [MASK], each with its probability."""
    texts = as_list(text)
    numbers = ITEM * top * count_masks(request.served.model, texts)
    return Job(request, "fill", texts, partial(Model.fill_batch, top=top), results(request), top, lambda: numbers)


def classify(request: RequestContext, text: str | list[str | s.Pair]) -> Job:
    """Classify texts or pairs of any length; a model that predicts a number returns it as `value`."""
    texts, finish = as_list(text), results(request)
    numbers = ITEM * len(texts) * max(request.served.outputs, 1)
    if request.served.outputs != 1:
        return Job(request, "classify", texts, Model.classify, finish, numbers=lambda: numbers)
    values = lambda predicted: finish([{"value": x} for x in predicted])  # noqa: E731
    return Job(request, "regress", texts, Model.regress, values, numbers=lambda: numbers)


def tag(request: RequestContext, text: s.Texts) -> Job:
    """Find and label spans in texts of any length."""
    return Job(request, "tag", as_list(text), Model.tag, results(request), numbers=lambda: ITEM * request.tokens)


def answer(request: RequestContext, question: s.Texts, context: s.Texts, top: s.Top = 1) -> Job:
    """Answer questions by parts of a context of any length."""
    questions, contexts = as_list(question), as_list(context)
    contexts = contexts * len(questions) if len(contexts) == 1 else contexts
    if len(contexts) != len(questions):
        counts = f"{len(questions)} questions but {len(contexts)} contexts"
        raise HttpError(422, f"{counts}; give one for each, or one for all")

    def run(model: Model, pairs: list[Any]) -> Sequence[Any]:
        return model.answer([q for q, _ in pairs], [c for _, c in pairs], top=top)

    pairs = list(zip(questions, contexts))
    return Job(request, "answer", pairs, run, results(request), top, numbers=lambda: ITEM * top * len(pairs))


def next_sentence(request: RequestContext, first: str, second: str) -> Job:
    """The probability that the second text follows the first."""
    texts = (first, second)
    return alone(request, "next", texts, lambda model: reply(request, probability=model.next_sentence(*texts)))


def choose(request: RequestContext, prompt: str, endings: s.SomeTexts) -> Job:
    """Choose the best ending of a prompt."""

    def compute(model: Model) -> Json:
        chosen = model.choose(prompt, endings)
        request.cut = chosen.cut
        return reply(request, **asdict(chosen))

    return alone(request, "choose", (prompt, *endings), compute)


def tokens(
    request: RequestContext, text: str, pair: str | None = None, layer: s.HiddenLayer = None, vectors: bool = False
) -> Job:
    """The tokens of a text, their positions and, on request, their vectors after a layer."""
    width = request.served.model.config.hidden_size if vectors else 0

    def compute(model: Model) -> Json:
        token_vectors = model.tokens(text, layer=layer, pair=pair)
        rows = token_vectors.rows(rounded(token_vectors.vectors) if vectors else [None] * len(token_vectors.tokens))
        return reply(request, results=rows, layer=token_vectors.layer)

    return alone(request, "tokens", (text, pair), compute, lambda: (ITEM + width) * request.tokens)


def attention(request: RequestContext, text: str, pair: str | None = None, layer: s.AttentionLayer = None) -> Job:
    """The attention weights of every head of every layer for a short text: weights[layer][head][from][to]."""
    config = request.served.model.config
    count = len(config.layer_order)
    layers = list(range(count)) if layer is None else [layer]
    if layers[-1] >= count:
        raise HttpError(422, f"there is no layer {layers[-1]}: the layers are 0 … {count - 1}")

    def compute(model: Model) -> Json:
        result = model.attention(text, pair=pair)
        return reply(request, token=result.tokens, layers=layers, weights=rounded(result.weights[layers]))

    return alone(request, "attention", (text, pair), compute, lambda: count * config.heads * request.tokens**2)


# ── compatible endpoints: the job of an endpoint above, with the response in the form of another API ─────────────


def label_scores(request: RequestContext, prediction: Any, raw: bool = False) -> list[Json]:
    """Every label with its score, best first; raw scores are logits, or logarithms of probabilities."""
    served = request.served
    if served.outputs == 1:
        squash = served.bounded and not raw
        return [{"score": float(sigmoid(prediction) if squash else prediction), "label": served.label}]
    request.cut += prediction.cut
    scores = {name: float(np.log(max(p, 1e-30))) if raw else p for name, p in prediction.scores.items()}
    return [{"score": p, "label": name} for name, p in sorted(scores.items(), key=lambda item: -item[1])]


def predict(request: RequestContext, inputs: s.Texts | list[s.TextOrPair], raw_scores: bool = False) -> Job:
    """Score every label of a text or pair, best first; for a list of [text] and [text, text], one such list each."""
    items: list[Any] = as_list(inputs)
    many = isinstance(items[0], tuple)
    if not many and len(items) > 2:
        raise HttpError(422, 'a list of texts is a pair here; give a batch as [["text"], ["text"], …]')
    texts: list[Any] = [x[0] if len(x) == 1 else x for x in (items if many else [tuple(items)])]
    job = classify(request, texts)

    def finish(predictions: list[Any]) -> list[Any]:
        each = [label_scores(request, prediction, raw_scores) for prediction in predictions]
        return each if many else each[0]

    job.finish = finish
    return job


def rerank(
    request: RequestContext, query: str, texts: list[str], raw_scores: bool = False, return_text: bool = False
) -> Job:
    """Sort texts by relevance to a query: by a cross-encoder's or ColBERT's score, or the embeddings' cosine."""
    if not query.strip() or not texts:
        raise HttpError(422, "there is nothing to rank: give a query and one text or more")

    def row(i: int, score: float) -> Json:
        return {"index": i, "score": score} | ({"text": texts[i]} if return_text else {})

    def ranked(scores: np.ndarray) -> list[Json]:
        return [row(i, float(scores[i])) for i in np.argsort(-scores, kind="stable").tolist()]

    if request.served.model.pooling.multi:
        return alone(request, "rank", (query, *texts), lambda m: [row(r.index, r.score) for r in m.rank(query, texts)])
    if request.served.outputs != 1:
        return embed_job(request, [query, *texts], lambda vectors, *_: ranked(vectors[1:] @ vectors[0]), True)
    pairs: list[Any] = [(query, text) for text in texts]
    job = classify(request, pairs)
    config = None if request.served.adapter else request.served.model.raw_config
    job.finish = lambda logits: ranked(np.array(logits) if raw_scores else relevance(np.array(logits), config))
    return job


def pipeline(
    request: RequestContext,
    inputs: s.Texts | s.QuestionInputs | s.SimilarityInputs,
    parameters: s.PipelineParameters | None = None,
    normalize: bool | None = None,
    truncate: s.Truncate = False,
    dimensions: s.Dimensions = None,
) -> Job:
    """What Hugging Face's InferenceClient asks for: the task is that of the inputs, or of the model's head.

    Question answering for {question, context}, similarity for {source_sentence, sentences}; else the model tags or
    classifies if it was trained to, fills [MASK] if there is one, or embeds. POST /models/NAME asks another model.
    """
    heads, top = request.served.heads, parameters.top_k if parameters else None
    several = isinstance(inputs, list)
    if isinstance(inputs, s.SimilarityInputs):
        return similarity(request, inputs)
    if isinstance(inputs, s.QuestionInputs):
        job, best = answer(request, inputs.question, inputs.context, top or 1), slice(top) if top else 0
        form: Callable[[str, Any], Any] = lambda _, spans: renamed(spans, text="answer")[best]  # noqa: E731
    elif "tag" in heads:
        job, form = tag(request, inputs), lambda _, spans: renamed(spans, label="entity_group", text="word")
    elif "classify" in heads:
        job, form = classify(request, as_list(inputs)), lambda _, prediction: label_scores(request, prediction)[:top]
        several = True
    elif "mlm" in heads and count_masks(request.served.model, as_list(inputs)):
        job, form = fill(request, inputs, top or 5), filled
    else:
        return embed(request, inputs, normalize, truncate, dimensions)

    def finish(predictions: list[Any]) -> Any:
        each = [form(text, prediction) for text, prediction in zip(job.inputs, predictions)]
        return each if several else each[0]

    job.finish = finish
    return job


def renamed(results: Sequence[Any], **names: str) -> list[Json]:
    """Results with Hugging Face's names of their fields."""
    return [{names.get(key, key): value for key, value in asdict(result).items() if key != "cut"} for result in results]


def filled(text: str, masks: list[list[Candidate]]) -> list[Any]:
    """The candidates for each masked token, or for the only one; each with the text that has it in its place."""
    rows = []
    for number, candidates in enumerate(masks, 1):
        *before, rest = text.split(MASK, number) if MASK in text else (text, "")
        parts = [(c, MASK.join(before) + c.token + rest) for c in candidates]
        rows.append([{"score": c.score, "token": c.id, "token_str": c.token, "sequence": whole} for c, whole in parts])
    return rows[0] if len(rows) == 1 else rows
