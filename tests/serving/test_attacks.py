"""One client must not stop the server: what was once enough to, each with bounds on memory, time and descriptors.

The server is a process of its own. While a client misbehaves, /health is asked again and again from another address.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server import HEALTH, LABELS, TEXTS, ServerProcess, raw, until

QUICK = 0.25
"""Seconds in which /health is answered, whatever clients do; longer where other programs have the cores too."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Server(ServerProcess):
    """A server process, and what it uses."""

    def memory(self) -> float:
        """Megabytes that are resident."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096 / 1e6

    def peak(self) -> float:
        """The most of them since the peak was last forgotten."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))

    def cpu(self) -> float:
        """Processor seconds so far."""
        parts = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> int:
        """Open files and connections."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def connect(self, address: str = "127.0.0.2") -> socket.socket:
        """A connection of the misbehaving client, from an address of its own."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=60, source_address=(address, 0))

    def post(self, path: str, body: object, **more: object) -> httpx.Response:
        """A request of an honest client."""
        return httpx.post(self.url + path, json=body, timeout=90, **more)

    def honest(self) -> None:
        """Everybody else is served."""
        assert self.post("/embed", {"inputs": TEXTS}).status_code == 200

    @contextlib.contextmanager
    def watched(self, megabytes: float = 300) -> Iterator[None]:
        """/health stays quick, memory within so much more, and afterwards nothing is left open."""
        self.honest()
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # forget the peak
        files, start, done = self.descriptors(), self.memory(), threading.Event()
        times: list[float] = []

        def ask() -> None:
            with httpx.Client(base_url=self.url, timeout=30) as client:
                while not (times and done.wait(0.05)):
                    before = time.perf_counter()
                    assert client.get("/health").status_code == 200
                    times.append(time.perf_counter() - before)

        watcher = threading.Thread(target=ask, daemon=True)
        watcher.start()
        try:
            yield
            self.honest()
        finally:
            done.set()
            watcher.join(60)
        print(f"/health at most {max(times):.3f} s, memory {start:.0f} → {self.peak():.0f} MB at most")
        assert max(times) <= QUICK, f"/health took {max(times):.2f} s"
        assert self.peak() - start <= megabytes, f"{start:.0f} → {self.peak():.0f} MB"
        until(lambda: self.descriptors() <= files + 2)


@pytest.fixture
def start(folders) -> Iterator[object]:
    """start(*options) → a server; all are stopped."""
    with contextlib.ExitStack() as stack:

        def make(*options: str, names: tuple[str, ...] = ("words", "qa", "labels"), files: int | None = None) -> Server:
            return stack.enter_context(Server({name: folders[name] for name in names}, *options, files=files))

        yield make


@pytest.fixture(scope="module")
def server(folders) -> Iterator[Server]:
    """A server with the default limits."""
    made = Server({name: folders[name] for name in ("words", "qa", "labels")})
    yield made
    assert not made.stop()


def test_copies_of_a_long_context(server):
    """64 questions about 1.9 MB are refused by their count; a client that leaves is not worked for."""
    body = json.dumps({"question": ["where ?"] * 64, "context": "the cat eats " * 145_000, "model": "qa"}).encode()
    with server.watched(1000):
        before = server.cpu()
        assert httpx.post(
            server.url + "/answer", content=body, headers={"content-type": "application/json"}, timeout=90
        ).status_code
        assert server.cpu() - before < 30
        with server.connect() as client:
            client.sendall(raw("/answer", {"question": "where ?", "context": "the cat eats " * 20_000, "model": "qa"}))
            time.sleep(1)
        time.sleep(1)
        before = server.cpu()
        time.sleep(3)
        assert server.cpu() - before < 1.5, "it goes on for a client that has left"


def test_clients_that_never_read(start):
    """More than there are places: they lose them in time, nobody else is refused, and SIGTERM is not held up."""
    server = start("--queue", "64")

    def deaf() -> socket.socket:
        client = server.connect()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(raw("/v1/embeddings", {"input": ["a"] * 2000}))
        return client

    with server.watched(900):
        clients = [deaf() for _ in range(100)]
        until(lambda: server.post("/embed", {"inputs": "a"}).status_code == 200)
        for client in clients:
            client.close()
    clients = [deaf() for _ in range(60)]
    time.sleep(2)
    assert not server.stop()


@pytest.mark.parametrize(
    "body",
    [
        b'{"text": [' + b"1," * 660_000 + b"1]}",
        b'{"text": [' + b"[]," * 440_000 + b"[]]}",
        b'{"text": [[' + b"1," * 660_000 + b"1]]}",
        b"{" + b",".join(b'"%d": 1' % i for i in range(120_000)) + b"}",
        b'{"text": ' + b'{"a": ' * 100 + b"1" + b"}" * 100 + b"}",
    ],
)
def test_a_body_of_wrong_items(server, body):
    with server.watched():
        for path in ("/classify", "/predict", "/v1/embeddings", "/"):
            answer = httpx.post(
                server.url + path, content=body, headers={"content-type": "application/json"}, timeout=60
            )
            assert 400 <= answer.status_code < 500 and len(answer.content) < 500


@pytest.mark.parametrize(
    "more",
    [b"G", b"GET / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n", raw("/embed", {"inputs": "a"})[:-9]],
)
def test_slow_senders_on_few_descriptors(start, more):
    """400 connections from one address, of 256 descriptors; each is closed in time, and others get in throughout."""
    server = start(files=256)
    with server.watched():
        clients = []
        for _ in range(400):
            with contextlib.suppress(OSError):
                client = server.connect()
                client.sendall(HEALTH)
                if client.recv(4096).startswith(b"HTTP/1.1 200"):
                    client.sendall(more)
                    clients.append(client)
        assert 50 <= len(clients) <= 100
        server.honest()
        begin = time.monotonic()
        for client in clients:
            with contextlib.suppress(OSError):
                while client.recv(4096):
                    pass
        assert time.monotonic() - begin < 35


def test_a_worker_that_hangs_is_replaced_and_holds_up_nothing(start):
    server = start("--workers", "2", names=("words",))
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    before = children.read_text().split()
    os.kill(int(before[-1]), signal.SIGSTOP)
    until(lambda: before[-1] not in children.read_text().split() and len(children.read_text().split()) == len(before))
    assert not server.stop()


def test_attributions(server):
    """Forty at once, of the longest text: one is computed, the rest are told to come again."""
    text = " ".join(TEXTS[:5])
    with server.watched(), contextlib.ExitStack() as stack:
        body = {"model": "labels", "text": text, "label": LABELS[0]}
        clients = [stack.enter_context(server.connect()) for _ in range(40)]
        for client in clients:
            client.sendall(raw("/playground/attribution", body))
        statuses = [int(client.recv(1 << 16).split()[1]) for client in clients]
        assert set(statuses) <= {200, 429} and 200 in statuses


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed_all", {"inputs": "cat " * 65_000}),
        ("/playground/context", {"word": "a", "texts": ["a " * 60] * 50}),
        ("/playground/fill", {"text": "[MASK] " * 60}),
    ],
)
def test_large_answers(server, path, body):
    """Refused, or within the limit."""
    with server.watched(600):
        answer = server.post(path, body)
        assert answer.status_code == 413 or (answer.status_code == 200 and len(answer.content) < 45_000_000)


def test_ever_new_lengths(server):
    """Memory does not grow with the number of lengths that were seen."""
    for number in range(100):
        server.post("/embed", {"inputs": ["cat " * (number % 60)] * (1 + number % 7)})
    early = server.memory()
    for number in range(1500):
        server.post("/embed", {"inputs": ["cat " * (number * 7 % 900), "dog " * (number * 13 % 500)]})
    print(f"{early:.0f} → {server.memory():.0f} MB")
    assert server.memory() < 1.1 * early + 30


def test_tiny_chunks(server):
    """A body of a byte per chunk is given up before it has taken much time."""
    with server.watched(), server.connect() as client:
        client.sendall(b"POST /embed HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(400):
                client.sendall(b"1\r\n \r\n" * 10_000)
