"""Bodies that are JSON and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from everybert.serving.limits import Refusal


class StrictRequest(Request):
    """A request whose JSON is JSON: no NaN, no endless nesting, no bytes that are not UTF-8."""

    async def json(self) -> Any:
        """The body."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise Refusal(400, f"the body is not JSON: {error}"[:300]) from None


class StrictRoute(APIRoute):
    """A route that reads its body so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As APIRoute's."""
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return strict
