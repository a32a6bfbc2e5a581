"""Our own endpoints: fill, classify, tag, answer, next, choose, tokens, attention."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from everybert.inference import masks
from everybert.serving import schemas as s
from everybert.serving.limits import Call, Refusal, too_much
from everybert.serving.service import Service
from everybert.serving.shelf import Served, is_regression
from everybert.serving.strict import StrictRoute

MOST_WEIGHTS = 1_000_000
"""Attention weights of an answer: as JSON each takes some eight bytes."""
FAILURES: dict[int | str, dict[str, Any]] = {
    400: {"model": s.Failure, "description": "The body is not JSON."},
    401: {"model": s.Failure, "description": "The API key is missing or wrong."},
    404: {"model": s.Failure, "description": "No such model."},
    408: {"model": s.Failure, "description": "The body did not arrive in time."},
    413: {"model": s.Failure, "description": "The request is over a limit."},
    415: {"model": s.Failure, "description": "The body is compressed."},
    422: {"model": s.Failure, "description": "The body is not what this endpoint, or this model, takes."},
    429: {"model": s.Failure, "description": "Too many requests; Retry-After says when to come again."},
    503: {"model": s.Failure, "description": "No answer in time, or shutting down."},
}


def router(service: Service) -> APIRouter:
    """The endpoints over a service."""
    routes = APIRouter(route_class=StrictRoute, tags=["everybert"], responses=FAILURES)

    @routes.post("/fill", response_model=s.Filled)
    async def fill(body: s.FillIn, request: Request) -> Response:
        """Guess the words behind [MASK], each with its probability."""
        texts = listed(body.text, service)

        def work(served: Served, call: Call) -> Any:
            model = served.model
            found = masks.fill_all(model.network, model.tokenizer, texts, body.top, model.window)
            return answer(served, call, [[[asdict(c) for c in blank] for blank in blanks] for blanks in found])

        return await service.answer(request, body.model, work)

    @routes.post("/classify", response_model=s.Classified)
    async def classify(body: s.ClassifyIn, request: Request) -> Response:
        """Label texts or pairs of texts, of any length; a model that predicts a number gives it as `value`."""
        texts: list[Any] = listed(body.text, service)

        def work(served: Served, call: Call) -> Any:
            inputs = pairs(served, call, texts)
            if is_regression(served.model):
                return answer(served, call, [{"value": value} for value in served.model.regress(inputs)])
            return answer(served, call, [asdict(p) for p in served.model.classify(inputs)])

        return await service.answer(request, body.model, work)

    @routes.post("/tag", response_model=s.Tagged)
    async def tag(body: s.TagIn, request: Request) -> Response:
        """Find and label the spans of texts of any length."""
        texts = listed(body.text, service)

        def work(served: Served, call: Call) -> Any:
            return answer(served, call, [[asdict(span) for span in spans] for spans in served.model.tag(texts)])

        return await service.answer(request, body.model, work)

    @routes.post("/answer", response_model=s.Answered)
    async def answers(body: s.AnswerIn, request: Request) -> Response:
        """Answer questions by pieces of a text of any length."""
        questions, contexts = listed(body.question, service), listed(body.context, service)
        contexts = contexts * len(questions) if len(contexts) == 1 else contexts

        def work(served: Served, call: Call) -> Any:
            found = served.model.answer(questions, contexts, top=body.top)
            return answer(served, call, [[asdict(one) for one in best] for best in found])

        return await service.answer(request, body.model, work)

    @routes.post("/next", response_model=s.Next)
    async def next_sentence(body: s.NextIn, request: Request) -> Response:
        """How likely the second text follows the first."""

        def work(served: Served, call: Call) -> Any:
            probability = served.model.next_sentence(body.first, body.second)
            return {"model": served.name, "probability": probability, "tokens": call.tokens}

        return await service.answer(request, body.model, work)

    @routes.post("/choose", response_model=s.Chosen)
    async def choose(body: s.ChooseIn, request: Request) -> Response:
        """Choose the ending that fits a prompt best."""
        endings = listed(body.endings, service)

        def work(served: Served, call: Call) -> Any:
            chosen = served.model.choose(body.prompt, endings)
            call.cut = chosen.cut
            return {"model": served.name, **asdict(chosen), "tokens": call.tokens}

        return await service.answer(request, body.model, work)

    @routes.post("/tokens", response_model=s.Tokens)
    async def tokens(body: s.TokensIn, request: Request) -> Response:
        """Show a text's tokens, where they stand in it, and (asked for) their vectors after a layer."""

        def work(served: Served, call: Call) -> Any:
            found = served.model.tokens(body.text, layer=body.layer, pair=body.pair)
            rows = rounded(found.vectors) if body.vectors else [None] * len(found)
            each = zip(found.tokens, found.ids, found.offsets, found.segments, rows)
            results = [
                {"token": token, "id": i, "start": start, "end": end, "segment": segment, "vector": row}
                for token, i, (start, end), segment, row in each
            ]
            return answer(served, call, results) | {"layer": found.layer}

        return await service.answer(request, body.model, work)

    @routes.post("/attention", response_model=s.AttentionOut)
    async def attention(body: s.AttentionIn, request: Request) -> Response:
        """What every head of every layer attends to in a short text: weights[layer][head][from][to]."""

        def work(served: Served, call: Call) -> Any:
            config = served.model.config
            count = len(config.layer_order)
            layers = list(range(count)) if body.layer is None else [body.layer]
            if layers[-1] >= count:
                raise Refusal(422, f"there is no layer {layers[-1]}: the layers are 0 … {count - 1}")
            n = len(served.model.tokenizer.encode(body.text, body.pair))
            if (size := len(layers) * config.heads * n * n) > MOST_WEIGHTS:
                raise too_much(size, MOST_WEIGHTS, "attention weights")
            found = served.model.attention(body.text, pair=body.pair)
            call.tokens = n
            shown = {"token": found.tokens, "layers": layers, "weights": rounded(found.weights[layers])}
            return {"model": served.name, **shown, "tokens": call.tokens}

        return await service.answer(request, body.model, work)

    return routes


def listed(texts: Any, service: Service) -> list[Any]:
    """One text, or a list of at most as many as the limits allow, as a list."""
    found = [texts] if isinstance(texts, str) else list(texts)
    if not found:
        raise Refusal(422, "there is no text; give one or more")
    if len(found) > service.limits.inputs:
        raise too_much(len(found), service.limits.inputs, "texts in a request")
    return found


def pairs(served: Served, call: Call, texts: list[Any]) -> list[Any]:
    """Texts and pairs as the tasks take them; windows of long pairs multiply, so they are counted beforehand."""
    out = [text if isinstance(text, str) else tuple(text) for text in texts]
    tokenizer, window = served.model.tokenizer, served.model.window
    long = [pair for pair in out if isinstance(pair, tuple) and len(pair[0]) + len(pair[1]) > window // 4]
    if long:
        before, lengths = call.tokens, []
        for first, second in long:
            a, b = tokenizer.ids_batch([first, second], specials=False)
            lengths.append(pair_tokens(len(a), len(b), window, tokenizer.pair_special))
        call.tokens = before
        if (total := sum(lengths)) > call.limits.request_tokens:
            raise too_much(total, call.limits.request_tokens, "tokens in the windows of long pairs")
    return out


def pair_tokens(a: int, b: int, window: int, special: int) -> int:
    """About how many tokens are read for a pair of so many tokens each."""
    room = window - special
    if a + b <= room:
        return a + b + special
    short = min(a, b, room // 2)
    overlap = min(128, window // 4)

    def count(n: int, size: int) -> int:
        return 1 if n <= size else -(-n // max(size - min(overlap, size // 2), 1))

    return count(max(a, b), room - short) * count(min(a, b), short) * window


def answer(served: Served, call: Call, results: list[Any]) -> dict[str, Any]:
    """The form of our own answers."""
    return {"model": served.name, "results": results, "tokens": call.tokens}


def rounded(values: np.ndarray) -> list[Any]:
    """Numbers for JSON, with no more digits than fp32 has to say."""
    return np.round(values.astype(np.float64), 8).tolist()
