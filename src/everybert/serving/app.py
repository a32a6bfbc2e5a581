"""The application and the server: models, the queue before them, and the endpoints, in one process or several."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from everybert import __version__
from everybert.errors import EverybertError
from everybert.serving import playground, routes
from everybert.serving.batcher import Batcher
from everybert.serving.limits import Limits, LimitsMiddleware, Protocol, error_response
from everybert.serving.metrics import Metrics
from everybert.serving.models import ModelRegistry, open_models, split_name

SETTINGS = "EVERYBERT_SERVE"
"""The environment variable by which worker processes get their settings."""


class Service:
    """What the endpoints share: limits, metrics, models and the batcher."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.registry = ModelRegistry(self.limits)
        self.batcher = Batcher(self.metrics)
        self.ready = False

    def start(self) -> None:
        """Warm the models up, and start the batcher: a thread per core on the CPU, one on an accelerator."""
        models = {served.model for served in self.registry.entries.values()}
        for model in models:
            model.embed(["warm up"])
        gc.collect()
        gc.freeze()  # what is here now stays: the collector need not look through it again
        self.batcher.start(torch.get_num_threads() if all(m.device.type == "cpu" for m in models) else 1)
        self.ready = True

    def close(self) -> None:
        """Answer what was accepted, then stop."""
        self.ready = False
        self.batcher.close()
        gc.unfreeze()


def create_app(service: Service, key: str | None = None) -> FastAPI:
    """The ASGI application over a service; with a key, clients must send it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        await asyncio.to_thread(service.start)
        yield {"limits": service.limits}  # for Protocol
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

    @app.get("/health", tags=["operation"])
    async def health() -> JSONResponse:
        """200 while the server works; 503 after a thread of it has died: restart it."""
        alive = service.batcher.alive
        return JSONResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)

    @app.get("/ready", tags=["operation"])
    async def ready() -> JSONResponse:
        """200 when the models are loaded and requests are accepted."""
        return JSONResponse(
            {"ready": service.ready, "models": list(service.registry.entries)}, 200 if service.ready else 503
        )

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, error)

    for kind in (EverybertError, HTTPException):
        app.add_exception_handler(kind, failed)
    app.include_router(routes.router(service))
    app.include_router(playground.router(service))
    app.add_middleware(LimitsMiddleware, service=service, key=key)
    return app


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Settings:
    """What `everybert serve` was asked for."""

    models: list[str]
    adapters: list[str] = field(default_factory=list)
    device: str | None = None
    dtype: str | None = None
    key: str | None = None
    limits: Limits = field(default_factory=Limits)
    workers: int = 1

    @property
    def names(self) -> list[str]:
        """The names of the models."""
        return [split_name(entry)[0] for entry in self.models]

    def create_app(self) -> FastAPI:
        """Load the models, and make the application."""
        service = Service(self.limits)
        open_models(service.registry, self.models, self.adapters, self.device, self.dtype, self.workers > 1)
        return create_app(service, self.key)


def worker_app() -> FastAPI:
    """The application of one of several worker processes, which share the cores."""
    given = json.loads(os.environ[SETTINGS])
    settings = Settings(**{**given, "limits": Limits(**given["limits"])})
    torch.set_num_threads(max(1, torch.get_num_threads() // settings.workers))
    return settings.create_app()


def _options(limits: Limits) -> dict[str, Any]:
    return {
        "http": Protocol,
        "ws": "none",
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": int(limits.seconds + limits.body_seconds) + 1,
    }


def serve(app: FastAPI, host: str, port: int, started: Callable[[int], None]) -> None:
    """Serve in this process until SIGTERM or SIGINT; `started` is called with the port."""
    server = _Server(uvicorn.Config(app, host=host, port=port, **_options(app.state.service.limits)))
    server.service, server.listening = app.state.service, started
    server.run()


def serve_workers(settings: Settings, host: str, port: int, started: Callable[[int], None]) -> None:
    """Serve in several processes on one port; each loads the models, and they share the weights in the page cache."""
    if port == 0:
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
    os.environ[SETTINGS] = json.dumps(asdict(settings))
    threading.Thread(target=_announce, args=(host, port, started), daemon=True).start()
    more = _options(settings.limits) | {"workers": settings.workers, "timeout_worker_healthcheck": 600}
    uvicorn.run("everybert.serving.app:worker_app", factory=True, host=host, port=port, **more)


def _announce(host: str, port: int, started: Callable[[int], None]) -> None:
    """Call `started` when the first worker process listens."""
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return started(port)


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it listens, and exits with status 0 on a signal."""

    service: Service
    listening: Callable[[int], None]

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Finish what was accepted, then stop; a second signal stops at once."""
        self.service.ready = False
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        if self.started and self.servers:
            self.listening(self.servers[0].sockets[0].getsockname()[1])
