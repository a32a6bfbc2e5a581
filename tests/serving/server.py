"""A server in this process or in one of its own, on a free port, over tiny random models; and clients for it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import tiny_bert
import uvicorn

from everybert.inference.model import load
from everybert.serving.app import Service, create_app, options
from everybert.serving.limits import Limits

LABELS = ["bad", "fine", "good"]
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
TEXTS = [
    "the cat sees a red dog .",
    "john smith lives in london",
    "good food , bad song !",
    "mary eats",
    "where does acme works ? in paris and london , one two three four five six seven eight nine ten",
    "a",
    "",
]
CLIENT = httpx.Client(timeout=60, verify=False)  # no TLS here, and its certificates take a while to read


def make_folders(root: Path) -> dict[str, Path]:
    """Tiny models of every task, as folders."""
    return {
        "words": tiny_bert.save(root / "words", "ForPreTraining", seed=1),
        "labels": tiny_bert.save(root / "labels", "ForSequenceClassification", seed=2, labels=LABELS),
        "ner": tiny_bert.save(root / "ner", "ForTokenClassification", seed=3, labels=TAGS),
        "qa": tiny_bert.save(root / "qa", "ForQuestionAnswering", seed=4),
        "ranker": tiny_bert.save(root / "ranker", "ForSequenceClassification", seed=5, labels=["score"]),
        "choice": tiny_bert.save(root / "choice", "ForMultipleChoice", seed=6),
    }


@contextmanager
def running(
    folders: dict[str, Path],
    limits: Limits | None = None,
    keys: Sequence[str] = (),
    adapters: dict[str, dict[str, str | Path]] | None = None,
    port: int = 0,
) -> Iterator[tuple[str, Service]]:
    """A server over these models: its address and its service. It is stopped afterwards."""
    service = Service(limits or Limits())
    for name, folder in folders.items():
        service.registry.add(name, load(folder, device="cpu"), (adapters or {}).get(name))
    own = {"host": "127.0.0.1", "port": port}
    # kept alive for longer than a test: no request meets a connection that is being closed
    own |= options() | {"timeout_keep_alive": 60}
    server = uvicorn.Server(uvicorn.Config(create_app(service, keys), **own))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    assert thread.is_alive(), "the server did not start"
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", service
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server did not stop"


class ServerProcess:
    """`everybert serve` as a user starts it; left running at the end of a `with` block, it is killed."""

    def __init__(
        self, folders: dict[str, Path], *options: str, files: int | None = None, stderr: Any = subprocess.PIPE
    ) -> None:
        models = [part for name, folder in folders.items() for part in ("--model", f"{name}={folder}")]
        command = [sys.executable, "-m", "everybert", "serve", *models, "--port", "0", "--device", "cpu", *options]
        if files:
            command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
        self.process: Any = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        self.line = self.process.stdout.readline()
        assert self.line.startswith("serving "), (self.line, self.process.communicate()[1])
        self.url: str = re.search(r"http://[\d.:]+", self.line)[0]  # type: ignore[index]
        self.port = int(self.url.rpartition(":")[2])

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)

    def stop(self, number: int = signal.SIGTERM, within: float = 10.0) -> str:
        """A signal, and a quiet end; what it wrote to stderr."""
        start = time.monotonic()
        self.process.send_signal(number)
        errors = self.process.communicate(timeout=60)[1] or ""
        assert time.monotonic() - start <= within and self.process.returncode == 0
        assert "Traceback" not in errors, errors
        return errors


def post(url: str, path: str, body: object, **more: object) -> httpx.Response:
    """One request."""
    return CLIENT.post(url + path, json=body, **more)  # type: ignore[arg-type]


def post_all(url: str, requests: list[tuple[str, object]], clients: int = 16) -> list[httpx.Response]:
    """Requests from so many clients at once; answers in their order."""

    async def go() -> list[httpx.Response]:
        bounds = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=bounds, verify=False) as client:
            return await asyncio.gather(*(client.post(path, json=body) for path, body in requests))

    return asyncio.run(go())


HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def raw(path: str, body: object, *headers: str) -> bytes:
    """A request as bytes."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data


def connect(url: str) -> socket.socket:
    """A bare connection."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread or process is about to do; fails rather than wait for ever."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def slow_down(service: Service, name: str, seconds: float) -> None:
    """Let every batch of a model take at least so long."""
    _before(service, name, lambda: time.sleep(seconds))


@contextmanager
def held(service: Service, name: str) -> Iterator[threading.Event]:
    """Let every batch of a model wait until the event is set, or the block is left: no test need race the clock."""
    opened = threading.Event()
    _before(service, name, lambda: opened.wait(120))
    try:
        yield opened
    finally:
        opened.set()


def _before(service: Service, name: str, wait: Callable[[], object]) -> None:
    encoder: Any = service.registry.entries[name].model.network.encoder
    forward = encoder.forward

    def later(*args: object, **more: object) -> object:
        wait()
        return forward(*args, **more)

    encoder.forward = later
