"""Bodies that are JSON and nothing else, read and checked once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from everybert.serving.limits import Refusal

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class StrictRoute(APIRoute):
    """A route whose body is JSON: no NaN, no endless nesting, no bytes that are not UTF-8.

    An endpoint of a body and the request, which gives a Response, is called at once: FastAPI's general way through
    dependencies and answers takes as long as all the rest, and describes it in the documentation all the same.
    """

    def get_route_handler(self) -> Handler:
        """As APIRoute's, which serves the endpoints without a body."""
        fields = self.dependant.body_params
        if not fields:
            return super().get_route_handler()
        endpoint, name = self.endpoint, fields[0].name
        body: type[BaseModel] = fields[0].field_info.annotation  # type: ignore[assignment]
        request_name = self.dependant.request_param_name or "request"

        async def strict(request: Request) -> Response:
            given = await _json(request)
            try:
                checked = body.model_validate(given)
            except ValidationError as error:
                told = error.errors(include_url=False, include_input=False, include_context=False)
                raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in told]) from None
            return await endpoint(**{name: checked, request_name: request})

        return strict


async def _json(request: Request) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind.startswith("application/") and kind.endswith(("/json", "+json"))):
        raise Refusal(422, "the body: send it as JSON, with the header content-type: application/json")
    raw = await request.body()
    if not raw:
        raise Refusal(422, "the body is empty; send JSON")
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}"[:300]) from None
