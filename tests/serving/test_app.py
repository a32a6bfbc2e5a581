"""The server as a whole: overload, slow and vanishing clients, folders that disappear, signals, and processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import server as own
from server import TEXTS, connect, post, raw
from typer.testing import CliRunner

import everybert
from everybert.cli.main import app
from everybert.serving.app import Service
from everybert.serving.limits import Limits


def in_flight(service: Service) -> float | None:
    """The requests accepted and not answered yet."""
    return service.metrics.registry.get_sample_value("everybert_in_flight")


def count(service: Service, status: int) -> float:
    """Requests that were answered so."""
    rows = service.metrics.requests.collect()[0].samples
    return sum(row.value for row in rows if row.name.endswith("_total") and row.labels["status"] == str(status))


def test_overload_is_429_and_passes(folders):
    """Eight times what fits: eight are answered, the rest are told when to come again; then all is as before."""
    limits = Limits(queue=8)
    with own.running({"words": folders["words"]}, limits) as (url, service), ThreadPoolExecutor(1) as pool:
        expected = post(url, "/embed", {"inputs": TEXTS}).json()
        with own.held(service, "words"):
            coming = pool.submit(own.post_all, url, [("/embed", {"inputs": TEXTS})] * 64, clients=64)
            own.until(lambda: coming.done() or count(service, 429) == 56)
        answers = coming.result(60)
        statuses = [answer.status_code for answer in answers]
        assert (statuses.count(200), statuses.count(429)) == (8, 56)
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error_type"] == "overloaded"
            else:
                np.testing.assert_allclose(answer.json(), expected, atol=1e-5)
        assert post(url, "/embed", {"inputs": TEXTS}).status_code == 200
        assert not service.batcher.queue


def test_bytes_in_the_queue_are_bounded(folders):
    with own.running({"words": folders["words"]}, Limits(queue_bytes=6000)) as (url, _):
        assert post(url, "/embed", {"inputs": "a " * 1000}).status_code == 200
        assert post(url, "/embed", {"inputs": "a " * 2000}).status_code == 429


def test_clients_that_leave_are_not_worked_for(folders):
    """Twenty clients leave while every thread is busy with another: it does these ones' work, and the next one's."""
    with own.running({"words": folders["words"]}, Limits()) as (url, service), ThreadPoolExecutor(64) as pool:
        done, batcher = service.metrics.batch_tokens._sum, service.batcher
        threads = len(service.batcher._threads)
        loaded = service.registry.entries["words"].loaded
        warm = done.get()
        assert post(url, "/embed", {"inputs": "a"}).status_code == 200
        each = done.get() - warm
        with own.held(service, "words"):
            first = []
            for count_of in range(1, threads + 1):
                first.append(pool.submit(post, url, "/embed", {"inputs": "a"}))
                own.until(lambda n=count_of: in_flight(service) == loaded.running == n and not batcher.queue)
            for _ in range(20):
                with connect(url) as client:
                    client.sendall(raw("/embed", {"inputs": ["the cat eats"] * 3}))
            own.until(lambda: len(batcher.queue) + count(service, 499) == 20)
            own.until(lambda: all(piece.job.context.gone for piece in batcher.queue))
        assert all(job.result(60).status_code == 200 for job in first)
        assert post(url, "/embed", {"inputs": "a"}).status_code == 200
        own.until(lambda: in_flight(service) == 0)
        assert done.get() == warm + (2 + threads) * each


@pytest.mark.parametrize("inputs", [["the cat eats"] * 400, ["the cat eats " * 400] * 4])
def test_long_requests_keep_nobody_waiting(folders, inputs):
    """Many batches, or texts of many windows, for several clients: another is answered in between."""
    with own.running({"words": folders["words"]}, Limits(budget=64)) as (url, service), contextlib.ExitStack() as stack:
        own.slow_down(service, "words", 0.1)
        for _ in range(4):
            stack.enter_context(connect(url)).sendall(raw("/embed", {"inputs": inputs}))
        own.until(lambda: in_flight(service) == 4 and service.batcher.queue)
        start = time.monotonic()
        assert post(url, "/embed", {"inputs": "a"}).status_code == 200
        assert time.monotonic() - start < 3 and in_flight(service) == 4


def test_half_sent_bodies_do_not_block_others(folders):
    """More of them than there are places in the queue."""
    with own.running({"words": folders["words"]}, Limits(queue=8, body_seconds=4.0)) as (url, service):
        clients = [connect(url) for _ in range(16)]
        for client in clients:
            client.sendall(raw("/embed", {"inputs": "the cat eats"})[:-10])
        time.sleep(0.5)  # the server has read them
        assert in_flight(service) == 0 and post(url, "/embed", {"inputs": "a"}).status_code == 200
        assert count(service, 408) == 0  # the answer came before any of them was given up
        for client in clients:
            assert client.recv(100).startswith(b"HTTP/1.1 408")
            client.close()


def test_slow_readers_hold_little_and_lose_their_place(folders):
    """Large answers nobody reads: the place in the queue is free again, others are served."""
    limits = Limits(queue=8, body_seconds=2.0)
    with own.running({"words": folders["words"]}, limits) as (url, service):
        clients = [connect(url) for _ in range(8)]
        for client in clients:
            client.setsockopt(own.socket.SOL_SOCKET, own.socket.SO_RCVBUF, 4096)
            client.sendall(raw("/v1/embeddings", {"input": ["a"] * 1000}))
        own.until(lambda: post(url, "/embed", {"inputs": "a"}).status_code == 200)
        own.until(lambda: in_flight(service) == 0)
        for client in clients:
            client.close()


def test_a_text_longer_than_the_batch_budget(folders):
    """It is read in windows, each of which is larger than the budget: no endless loop, the same vector."""
    text = "the cat eats " * 200
    with own.running({"words": folders["words"]}, Limits(budget=8)) as (url, _):
        found = post(url, "/embed", {"inputs": text, "normalize": False}).json()
    np.testing.assert_allclose(found, everybert.load(folders["words"], device="cpu").embed([text]), atol=1e-5)


def test_a_folder_that_is_overwritten_and_disappears_is_served_on(folders, tmp_path):
    """A file that shrinks under a memory map kills a process; the server has its weights in its own memory."""
    folder = Path(shutil.copytree(folders["words"], tmp_path / "gone"))
    with own.running({"gone": folder}) as (url, _):
        expected = post(url, "/embed", {"inputs": TEXTS}).json()
        for end in (lambda: (folder / "model.safetensors").write_bytes(b""), lambda: shutil.rmtree(folder)):
            end()
            np.testing.assert_allclose(post(url, "/embed", {"inputs": TEXTS}).json(), expected, atol=1e-6)
        assert post(url, "/fill", {"text": "a [MASK]"}).status_code == 200


def test_a_failure_inside_is_500_without_details_and_the_next_request_works(folders):
    with own.running({"words": folders["words"]}) as (url, service):
        encoder = service.registry.entries["words"].model.network.encoder
        forward = encoder.forward
        encoder.forward = lambda *a, **k: 1 / 0
        answer = post(url, "/embed", {"inputs": "a"})
        assert answer.status_code == 500 and "division" not in answer.text
        encoder.forward = forward
        assert post(url, "/embed", {"inputs": "a"}).status_code == 200
        assert service.metrics.failures._value.get() == 1


START = """
import sys, time
from pathlib import Path
sys.path[:0] = {path!r}
import server as own
from everybert.serving import app

made = app.ServerSettings.create_app

def create_app(settings):
    found = made(settings)
    own._before(found.state.service, "words", lambda: own.until(lambda: not Path({shut!r}).exists()))
    return found

app.ServerSettings.create_app = create_app
settings = app.ServerSettings(["words=" + {folder!r}], device="cpu")
app.serve(settings, "127.0.0.1", 0, lambda port, service: print(port, flush=True))
"""


def refused(url: str) -> bool:
    """Whether nobody listens there any more."""
    try:
        connect(url).close()
    except ConnectionRefusedError:
        return True
    return False


def test_sigterm_under_load_answers_every_request_it_took(folders, tmp_path):
    """32 clients, then SIGTERM: what was taken is answered whole, nothing is 5xx, and the process ends by itself."""
    shut = tmp_path / "shut"  # while it is there, the model does not go on
    code = START.format(path=sys.path[:], folder=str(folders["words"]), shut=str(shut))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(200, process.kill)  # whatever happens, the test ends
    timer.start()
    url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
    answered, broken = [], []

    async def client(http: httpx.AsyncClient) -> None:
        while True:
            try:
                answer = await http.post("/embed", json={"inputs": TEXTS})
                answered.append((answer.status_code, len(answer.json())))
            except httpx.TransportError as error:
                broken.append(error)
                return

    async def that(condition: Callable[[], object]) -> None:
        await asyncio.to_thread(own.until, lambda: broken or process.poll() is not None or condition())
        assert not broken and process.poll() is None

    async def storm() -> None:
        bounds = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=bounds, verify=False) as http:
            clients = [asyncio.create_task(client(http)) for _ in range(32)]
            await that(lambda: len(answered) >= 64)
            shut.touch()
            await that(lambda: "everybert_in_flight 32.0" in own.CLIENT.get(f"{url}/metrics").text)
            before = len(answered)
            process.send_signal(signal.SIGTERM)
            await that(lambda: refused(url))
            await asyncio.sleep(0.5)  # a server that does not wait for them has ended by now
            assert len(answered) == before
            shut.unlink()
            _, running = await asyncio.wait(clients, timeout=60)
            assert not running
            assert len(answered) >= before + 32  # those in its hands were answered after the signal

    asyncio.run(storm())
    assert {status for status, _ in answered} == {200}
    assert {count for _, count in answered} == {len(TEXTS)}
    for error in broken:  # the listening socket is closed, or a connection that was idle: nothing half-answered
        assert isinstance(error, httpx.ConnectError | httpx.ReadError | httpx.RemoteProtocolError), error
        assert "incomplete" not in str(error)
    assert process.wait(60) == 0
    timer.cancel()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_command_serves_and_ends(folders, workers):
    """On the loopback; SIGINT ends it quietly."""
    with own.ServerProcess({"m": folders["words"]}, "--workers", str(workers), "--access-log") as server:
        assert server.line.startswith(f"serving m on {server.url}") and f"page: {server.url}/" in server.line
        assert server.process.stdout.readline() == "  m: bert, 2 layers of width 32\n"
        assert post(server.url, "/embed", {"inputs": "a"}).status_code == 200
        errors = server.stop(signal.SIGINT, within=60)
    logged = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    (one,) = [line for line in logged if line["path"] == "/embed"]
    assert (one["method"], one["status"], one["client"]) == ("POST", 200, "127.0.0.1") and 0 < one["seconds"] < 60


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="there is no device that is always full")
def test_an_access_log_that_cannot_be_written_stops_nothing(folders):
    with FULL.open("w", encoding="utf-8") as full:
        server = own.ServerProcess({"m": folders["words"]}, "--access-log", stderr=full)
    with server:
        assert [post(server.url, "/embed", {"inputs": "a"}).status_code for _ in range(3)] == [200] * 3
        server.stop(within=60)


def test_what_cannot_be_served_is_one_line(folders):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options, why in (
            (["--port", str(port)], f"port {port} is in use; give another port"),
            (["--port", "0", "--revision", "v2"], "which has no revisions"),
        ):
            done = CliRunner().invoke(app, ["serve", "--model", str(folders["words"]), *options])
            assert done.exit_code == 2 and not done.stdout
            assert why in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_api_reference_needs_nothing_but_this_server(url):
    page = own.CLIENT.get(url + "/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for path in re.findall(r'(?:href|src)="(playground/web/[^"]+)"', page.text):
        assert own.CLIENT.get(f"{url}/{path}").status_code == 200
    assert own.CLIENT.get(url + "/redoc").status_code == 404
