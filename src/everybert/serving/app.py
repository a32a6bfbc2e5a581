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
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from everybert import __version__
from everybert.errors import EverybertError
from everybert.serving import compatible, playground, routes
from everybert.serving.gate import Gate, Receive, Scope, Send, refusal_of
from everybert.serving.limits import Refusal, error_body
from everybert.serving.protocol import Protocol
from everybert.serving.reference import add_reference
from everybert.serving.service import Service
from everybert.serving.strict import StrictRoute

log = logging.getLogger("everybert.serving")


def create_app(service: Service, key: str | None = None) -> FastAPI:
    """The ASGI application over a service whose shelf has its models."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(service.start)
        yield
        await asyncio.to_thread(service.close)

    app = App(
        title="everybert",
        version=__version__,
        description="Encoders of the BERT family over HTTP.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load their scripts from another host
        redoc_url=None,
    )
    app.state.service = service
    _health(app, service)
    posts: dict[str, StrictRoute] = {}
    for router in (compatible.router(service), routes.router(service), playground.router(service)):
        app.include_router(router)
        posts |= {r.path: r for r in router.routes if isinstance(r, StrictRoute) and r.dependant.body_params}
    add_reference(app)
    _errors(app)
    app.gate = Gate(super(App, app).__call__, service, posts, key)
    return app


class App(FastAPI):
    """FastAPI behind the gate."""

    gate: Gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        await self.gate(scope, receive, send)


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


def _errors(app: FastAPI) -> None:
    """The errors that FastAPI catches, in the gate's form."""

    async def refused(request: Request, error: Exception) -> Response:
        refusal = refusal_of(error)
        body = error_body(request.url.path, refusal.status, refusal.message)
        return JSONResponse(body, refusal.status, refusal.headers)

    for kind in (Refusal, EverybertError, HTTPException, Exception):
        app.add_exception_handler(kind, refused)


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────


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
