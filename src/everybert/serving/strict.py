"""Bodies that are JSON and nothing else, read and checked once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from everybert.serving.limits import Refusal

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class StrictRoute(APIRoute):
    """A route whose body is JSON: no NaN, no endless nesting, no bytes that are not UTF-8.

    An endpoint of a body and the request, which gives a Response, is called at once, and by the gate before FastAPI
    sees the request: its general way through middleware, routes, dependencies and answers takes as long as all the
    rest, and describes the endpoint in the documentation all the same.
    """

    def get_route_handler(self) -> Handler:
        """As APIRoute's, which serves the endpoints without a body; the others are reached through the gate alone."""
        return _nobody if self.dependant.body_params else super().get_route_handler()

    async def answer(self, request: Request) -> Response:
        """What the endpoint gives for a request whose body was read by the gate."""
        field = self.dependant.body_params[0]
        kind: type[BaseModel] = field.field_info.annotation  # type: ignore[assignment]
        body = _checked(kind, _json(request.scope["headers"], request.scope["call"].body))
        return await self.endpoint(**{field.name: body, self.dependant.request_param_name or "request": request})


async def _nobody(request: Request) -> Response:
    raise Refusal(404, "Not Found")


def _json(headers: list[tuple[bytes, bytes]], raw: bytes) -> Any:
    given = next((value for name, value in headers if name == b"content-type"), b"")
    kind = given.partition(b";")[0].strip().lower()
    if not (kind.startswith(b"application/") and kind.endswith((b"/json", b"+json"))):
        raise Refusal(422, "the body: send it as JSON, with the header content-type: application/json")
    if not raw:
        raise Refusal(422, "the body is empty; send JSON")
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}"[:300]) from None


def _checked(kind: type[BaseModel], given: Any) -> BaseModel:
    """The body as what the endpoint takes; or which field is wrong, and why, without what was sent."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        why = "this endpoint has no such field" if first["type"] == "extra_forbidden" else first["msg"][:200]
        raise Refusal(422, f"{where[:80] or 'the body'}: {why}") from None
