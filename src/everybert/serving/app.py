"""The application: endpoints over models, limits before them, and a server that ends well.

The playground's routes and page are put on in `create_app`, after our own.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from everybert import __version__
from everybert.errors import EverybertError
from everybert.serving import compatible, playground, routes
from everybert.serving.gate import Gate
from everybert.serving.limits import Refusal, error_body
from everybert.serving.reference import add_reference
from everybert.serving.service import Service

log = logging.getLogger("everybert.serving")


def create_app(service: Service, key: str | None = None) -> FastAPI:
    """The ASGI application over a service whose shelf has its models."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(service.start)
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="everybert",
        version=__version__,
        description="Encoders of the BERT family over HTTP.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load their scripts from another host
        redoc_url=None,
    )
    app.state.service = service
    _health(app, service)
    app.include_router(compatible.router(service))
    app.include_router(routes.router(service))
    app.include_router(playground.router(service))
    add_reference(app)
    _errors(app, service)
    app.add_middleware(Gate, limits=service.limits, metrics=service.metrics, key=key)  # type: ignore[arg-type]
    return app


def _health(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["operation"])
    async def health() -> JSONResponse:
        """200 while the server works; 503 when its scheduler has died: start it anew."""
        fine = service.scheduler.alive
        return JSONResponse({"status": "ok" if fine else "dead"}, 200 if fine else 503)

    @app.get("/ready", tags=["operation"])
    async def ready() -> JSONResponse:
        """200 when the models are loaded and requests are taken."""
        return JSONResponse(
            {"ready": service.ready, "models": list(service.shelf.entries)}, 200 if service.ready else 503
        )

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


def _errors(app: FastAPI, service: Service) -> None:
    """Every error as JSON with a cause; never what was sent, which may be long or no JSON at all."""

    def send(request: Request, status: int, message: str, headers: dict[str, str] | None = None) -> Response:
        return JSONResponse(error_body(request.url.path, status, message), status, headers)

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return send(request, error.status, error.message, error.headers)

    @app.exception_handler(EverybertError)
    async def unfit(request: Request, error: EverybertError) -> Response:
        return send(request, 422, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, str | int))
        why = "this endpoint has no such field" if first["type"] == "extra_forbidden" else first["msg"][:200]
        return send(request, 422, f"{where[:80] or 'the body'}: {why}")

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        return send(request, error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return send(request, 500, "the server failed on this request; its log says why")


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────


class Protocol(H11Protocol):
    """HTTP/1.1, with a time by which a connection's first request must have begun."""

    seconds = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._clock = self.loop.call_later(self.seconds, self._silent)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop it."""
        self._clock.cancel()
        super().connection_lost(exc)

    def _silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()


def serve(app: FastAPI, host: str, port: int, started: Callable[[int], None] = lambda port: None) -> None:
    """Serve until SIGTERM or SIGINT; then answer what was taken, and end. `started` is told the port."""
    limits = app.state.service.limits
    protocol = type("TimedProtocol", (Protocol,), {"seconds": limits.body_seconds})
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(limits.seconds + limits.body_seconds) + 1,
        h11_max_incomplete_event_size=16384,
    )
    server = _Server(config)
    server.started_at, server.service = started, app.state.service
    server.run()


class _Server(uvicorn.Server):
    """Says on which port it listens, once it does; is not ready any more from the moment it is told to end."""

    started_at: Callable[[int], None]
    service: Service

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End after what was taken; at the second signal at once. (uvicorn would raise the signal again at the end.)"""
        self.service.ready = False
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        """As uvicorn's; but it tells only the connections it knows to close, and one may be opening just then."""

        async def remind() -> None:
            while True:
                await asyncio.sleep(0.1)
                for connection in list(self.server_state.connections):
                    connection.shutdown()

        reminder = asyncio.create_task(remind())
        try:
            await super().shutdown(sockets)
        finally:
            reminder.cancel()

    async def startup(self, sockets: Any = None) -> None:
        """As uvicorn's."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what is here now stays: looking through it would stop every thread for a tenth of a second
        if self.started and self.servers:
            self.started_at(self.servers[0].sockets[0].getsockname()[1])
