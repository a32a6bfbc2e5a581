"""The endpoints of others: OpenAI's /v1/embeddings and /v1/models, TEI's /embed, /predict and /rerank."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from everybert.inference.embedding import Embedded
from everybert.serving import schemas as s
from everybert.serving.limits import Call, Refusal
from everybert.serving.routes import FAILURES, listed, pairs, rounded
from everybert.serving.service import Service
from everybert.serving.shelf import Served, is_regression
from everybert.serving.strict import StrictRoute
from everybert.tasks.metrics import sigmoid


def router(service: Service) -> APIRouter:
    """The endpoints over a service."""
    routes = APIRouter(route_class=StrictRoute, responses=FAILURES)

    @routes.get("/v1/models", tags=["OpenAI"])
    async def models() -> dict[str, Any]:
        """What is served, and what each model can do."""
        return {
            "object": "list",
            "data": [
                {"id": e.name, "object": "model", "created": 0, "owned_by": "everybert", "tasks": e.tasks}
                for e in service.shelf.entries.values()
            ],
        }

    @routes.post("/v1/embeddings", tags=["OpenAI"], response_model=s.Embeddings)
    async def embeddings(body: s.EmbeddingsIn, request: Request) -> Response:
        """Turn texts, or lists of token ids, into vectors."""
        inputs = listed(_sequences(body.input), service)

        def form(served: Served, call: Call, found: Embedded) -> Any:
            width = found.vectors.shape[1]
            if body.dimensions not in (None, width):
                raise Refusal(422, f"dimensions is {body.dimensions}, this model's vectors have {width}; leave it out")
            call.cut = sum(found.cut)
            plain = body.encoding_format == "float"
            rows = rounded(found.vectors) if plain else [_base64(v) for v in found.vectors]
            data = [
                {"object": "embedding", "index": i, "embedding": row, "cut": cut}
                for i, (row, cut) in enumerate(zip(rows, found.cut))
            ]
            used = sum(found.tokens)
            usage = {"prompt_tokens": used, "total_tokens": used}
            return {"object": "list", "model": served.name, "data": data, "usage": usage}

        def work(served: Served, call: Call) -> Any:
            texts = [x if isinstance(x, str) else _text(served, x) for x in inputs]
            return form(served, call, served.model.embedded(texts, long=body.long))

        if all(isinstance(x, str) for x in inputs):
            return await service.embedded(request, body.model, inputs, {"long": body.long}, form)
        return await service.answer(request, body.model, work)

    @routes.post("/embed", tags=["TEI"], response_model=list[list[float]])
    async def embed(body: s.EmbedIn, request: Request) -> Response:
        """Turn texts into vectors; the x-cut-tokens header says how many tokens were cut where `truncate` is on."""
        texts = listed(body.inputs, service)

        def form(served: Served, call: Call, found: Embedded) -> Any:
            call.cut = sum(found.cut)
            return rounded(found.vectors)

        how = {"normalize": body.normalize, "long": "cut" if body.truncate else "window"}
        return await service.embedded(request, body.model, texts, how, form)

    @routes.post("/predict", tags=["TEI"], response_model=list[s.LabelScore] | list[list[s.LabelScore]])
    async def predict(body: s.PredictIn, request: Request) -> Response:
        """Score every label of a text or pair, best first; of a list of them, a list of such lists."""
        many = isinstance(body.inputs, list) and not all(isinstance(x, str) for x in body.inputs)
        texts = _predicted(body.inputs, service)

        def work(served: Served, call: Call) -> Any:
            found = _scores(served, call, pairs(served, call, texts), body.raw_scores)
            return found if many else found[0]

        return await service.answer(request, body.model, work)

    @routes.post("/rerank", tags=["TEI"], response_model=list[s.Rank])
    async def rerank(body: s.RerankIn, request: Request) -> Response:
        """Order texts by how well they fit a query: by a cross-encoder's score, or by the vectors' cosine."""
        texts = listed(body.texts, service)

        def work(served: Served, call: Call) -> Any:
            if is_regression(served.model):
                inputs = pairs(served, call, [[body.query, text] for text in texts])
                raw = np.asarray(served.model.regress(inputs))
                scores = raw if body.raw_scores else sigmoid(raw)
            else:
                vectors = served.model.embed([body.query, *texts], normalize=True)
                scores = vectors[1:] @ vectors[0]
            order = np.argsort(-scores, kind="stable").tolist()
            shown = (lambda i: {"text": texts[i]}) if body.return_text else (lambda i: {})
            return [{"index": i, "score": float(scores[i]), **shown(i)} for i in order]

        return await service.answer(request, body.model, work)

    return routes


def _sequences(given: Any) -> Any:
    """OpenAI's input as texts, or as lists of ids: one such list may come bare."""
    bare = isinstance(given, list) and len(given) > 0 and all(isinstance(x, int) for x in given)
    return [given] if bare else given


def _text(served: Served, ids: list[int]) -> str:
    """Ids that a client made with this model's tokenizer, as text."""
    return served.model.tokenizer.decode(ids)


def _base64(vector: np.ndarray) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _predicted(inputs: Any, service: Service) -> list[Any]:
    """TEI's three forms: a text; a pair, or one text in a list; a list of lists of one or two texts."""
    if isinstance(inputs, str):
        return [inputs]
    if inputs and all(isinstance(x, str) for x in inputs):
        if len(inputs) > 2:
            raise Refusal(422, 'a list of texts is a pair here; give a batch as [["text"], ["text"], …]')
        return [inputs[0] if len(inputs) == 1 else inputs]
    return [x[0] if len(x) == 1 else x for x in listed(inputs, service)]


def _scores(served: Served, call: Call, texts: list[Any], raw: bool) -> list[list[dict[str, Any]]]:
    """Every label's score for every text, best first."""
    model = served.model
    if is_regression(model):
        values = np.asarray(model.regress(texts))
        label = (model.labels or ["LABEL_0"])[0]
        own = model.problem_type == "regression" or (model.extras.get("task") or {}).get("task") == "regress"
        return [[{"score": float(v if raw or own else sigmoid(v)), "label": label}] for v in values]
    out = []
    for found in model.classify(texts):
        call.cut += found.cut
        scores = {name: float(np.log(max(p, 1e-30))) if raw else p for name, p in found.scores.items()}
        out.append([{"score": p, "label": name} for name, p in sorted(scores.items(), key=lambda item: -item[1])])
    return out
