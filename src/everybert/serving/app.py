"""The application and the server: models, the queue before them, and the endpoints, in one process or several."""

import asyncio
import errno
import gc
import json
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from http.client import HTTPConnection
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException

from everybert import __version__
from everybert.errors import EverybertError
from everybert.serving import playground, routes
from everybert.serving.batcher import Batcher
from everybert.serving.limits import GRACE, Limits, LimitsMiddleware, Protocol, error_response
from everybert.serving.metrics import Metrics
from everybert.serving.models import ModelRegistry, open_models

SETTINGS_VARIABLE = "EVERYBERT_SERVE"
"""The environment variable by which worker processes get their settings."""


class Service:
    """What the endpoints share: limits, metrics, models and the batcher."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.registry = ModelRegistry(self.limits)
        self.batcher = Batcher(self.metrics)

    def start(self) -> None:
        """Warm the models up, and start the batcher: a thread per core on the CPU, at least two; else one."""
        models = {served.model for served in self.registry.entries.values()}
        for model in models:
            model.embed(["warm up"], pooling="mean")
            model.network.encoder.register_forward_pre_hook(lambda *_: self.batcher.check())
        gc.collect()
        gc.freeze()  # what is here now stays: the collector need not look through it again
        self.batcher.start(max(2, torch.get_num_threads()) if all(m.device.type == "cpu" for m in models) else 1)

    def close(self) -> None:
        """Answer what was accepted, then stop."""
        self.batcher.close()
        gc.unfreeze()


def create_app(
    service: Service, keys: Sequence[str] = (), hosts: Sequence[str] = (), with_playground: bool = True
) -> FastAPI:
    """The ASGI application over a service. With keys, clients must send one; `hosts` are the names it is asked by."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        await asyncio.to_thread(service.start)
        files, most = os.sysconf("SC_OPEN_MAX") if hasattr(os, "sysconf") else -1, service.limits.connections
        yield {"limits": service.limits, "connections": min(most, files - 64) if files > 0 else most}
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="everybert",
        version=__version__,
        description="Encoders of the BERT family over HTTP.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load their scripts from another host
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the Host header
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
        return JSONResponse({"ready": service.batcher.alive}, 200 if service.batcher.alive else 503)

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4")

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, error)

    app.add_exception_handler(HTTPException, failed)
    routes.add_routes(app, service)
    if with_playground:
        playground.add_playground(app, service)
    app.add_middleware(LimitsMiddleware, service=service, keys=keys, hosts=hosts)
    return app


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ServerSettings:
    """What `everybert serve` was asked for."""

    models: list[str]
    adapters: list[str] = field(default_factory=list)
    device: str | None = None
    dtype: str | None = None
    keys: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    playground: bool = True
    limits: Limits = field(default_factory=Limits)
    workers: int = 1
    """Processes that share the port, the cores and the weights."""
    allow_pickle: bool = False
    revision: str | None = None
    """A branch, tag or commit of the models of the hub."""
    access_log: bool = False
    """Write a line of JSON per request to standard error."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise EverybertError(f"a server needs at least one worker, not {self.workers}")

    def create_app(self) -> FastAPI:
        """Load the models, and make the application of a process; all of them share the cores and the rate."""
        torch.set_num_threads(max(1, torch.get_num_threads() // self.workers))
        rate = self.limits.rate and max(1, self.limits.rate // self.workers)
        service = Service(replace(self.limits, rate=rate))
        how = {name: getattr(self, name) for name in ("device", "dtype", "allow_pickle", "revision")}
        open_models(service.registry, self.models, self.adapters, self.workers > 1, **how)
        service.metrics.access_log = self.access_log
        return create_app(service, self.keys, self.hosts, self.playground)


def worker_app() -> FastAPI:
    """The application of one of several worker processes."""
    settings = json.loads(os.environ[SETTINGS_VARIABLE])
    return ServerSettings(**settings | {"limits": Limits(**settings["limits"])}).create_app()


def options() -> dict[str, Any]:
    """uvicorn's settings."""
    return {
        "http": Protocol,
        "ws": "none",
        "log_level": "error",
        "access_log": False,
        "server_header": False,
        "proxy_headers": "FORWARDED_ALLOW_IPS" in os.environ,  # else any client could claim another address
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": GRACE,
    }


def serve(settings: ServerSettings, host: str, port: int, started: Callable[[int, Service], None]) -> None:
    """Serve until SIGTERM or SIGINT; `started` is called with the port and the service once requests are answered.

    Several workers are processes that share the port, and the weights in the page cache.
    """
    with listen(host, port) as listening:
        port = listening.getsockname()[1]
        app = settings.create_app()  # by the supervisor of workers too: what is wrong is said once, at the start

        def announce() -> None:
            """Wait for the first answer; workers listen anew."""
            while True:
                with suppress(OSError), closing(HTTPConnection(host, port, timeout=600)) as connection:
                    connection.request("GET", "/ready")
                    connection.getresponse()
                    return started(port, app.state.service)
                time.sleep(0.1)

        threading.Thread(target=announce, daemon=True).start()
        if settings.workers == 1:
            main = threading.current_thread() is threading.main_thread()  # other threads get no signals
            for number in (signal.SIGINT, signal.SIGTERM) if main else ():
                signal.signal(number, signal.SIG_IGN)  # uvicorn stops at one, then raises it again: to exit with 0
            uvicorn.Server(uvicorn.Config(app, **options())).run(sockets=[listening])
            if app.state.service.batcher.alive:
                os._exit(0)  # a long computation: ending Python under it would crash
            return
    os.environ[SETTINGS_VARIABLE] = json.dumps(asdict(settings))
    # Seconds until a process that hangs is replaced; its supervisor waits for it, also before it stops.
    more = options() | {"workers": settings.workers, "timeout_worker_healthcheck": 20}
    uvicorn.run("everybert.serving.app:worker_app", factory=True, host=host, port=port, **more)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        why = f"port {port} is in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error)).lower()
        raise EverybertError(f"cannot listen on {host}: {why}; give another port (0: a free one) or host") from None
