"""Bare connections: heads that have no end, requests in one packet, and clients that leave."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
import server as own
from server import CLIENT, connect

from everybert.serving.limits import Limits
from everybert.serving.protocol import HEAD, PIPELINED


def request(body: object, *headers: str) -> bytes:
    """A request for vectors as bytes."""
    data = json.dumps(body).encode()
    lines = ["POST /embed HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data


def answers(client: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """So many answers, in their order: status and body; fewer where the connection ends."""
    found, data = [], b""
    while len(found) < count:
        head, end, rest = data.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]) if end else 0
        if end and len(rest) >= size:
            found.append((int(head.split()[1]), rest[:size]))
            data = rest[size:]
            continue
        try:
            piece = client.recv(1 << 16)
        except ConnectionResetError:
            piece = b""
        if not piece:
            return found
        data += piece
    return found


def ended(client: socket.socket) -> bool:
    """Whether the server has closed it."""
    with contextlib.suppress(ConnectionResetError):
        return client.recv(100) == b""
    return True


@pytest.mark.parametrize("piece", [1000, 10_000_000])
def test_a_head_without_end_is_refused(url, piece):
    """Whether it comes bit by bit, or whole and at once."""
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * 2 * HEAD + b"\r\n\r\n"
    with connect(url) as client:
        with contextlib.suppress(ConnectionError):  # it may be closed before all is sent
            for start in range(0, len(head), piece):
                client.sendall(head[start : start + piece])
        assert [status for status, _ in answers(client, 2)] in ([400], [])
        assert ended(client)
    assert CLIENT.get(f"{url}/health").status_code == 200


def test_a_long_head_within_the_limit_is_read(url):
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * (HEAD // 2) + b"\r\n\r\n"
    with connect(url) as client:
        for start in range(0, len(head), 500):
            client.sendall(head[start : start + 500])
        assert [status for status, _ in answers(client, 1)] == [200]


def test_a_head_that_begins_behind_a_long_body_is_not_taken_for_long(url):
    """Again and again: what is counted of one head is not counted for the next."""
    data = request({"inputs": "a " * HEAD, "truncate": True})
    with connect(url) as client:
        client.sendall(data[:10])
        for _ in range(3):
            client.sendall(data[10:] + data[:10])
            assert [status for status, _ in answers(client, 1)] == [200]


def test_requests_in_one_packet_are_answered_in_their_order(url):
    texts = ["a", "the cat", "mary eats", "john smith lives in london"]
    with connect(url) as client:
        client.sendall(b"".join(request({"inputs": text}) for text in texts))
        found = answers(client, len(texts))
    alone = [own.post(url, "/embed", {"inputs": text}).json()[0] for text in texts]
    assert [status for status, _ in found] == [200] * len(texts)
    for (_, body), vector in zip(found, alone):
        assert json.loads(body)[0] == pytest.approx(vector, abs=1e-5)


def test_too_many_requests_in_one_packet_end_the_connection(url):
    with connect(url) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(request({"inputs": "a"}) * 50 * PIPELINED)
        assert len(answers(client, 50 * PIPELINED)) <= PIPELINED + 2
        assert ended(client)
    assert own.post(url, "/embed", {"inputs": "a"}).status_code == 200


def test_a_client_that_leaves_is_noticed_though_it_had_asked_for_more(folders):
    with own.running({"words": folders["words"]}, Limits(inline=0)) as (url, service), own.held(service, "words"):
        queue, trunk = service.scheduler._queue, service.shelf.entries["words"].direct.trunk
        with contextlib.ExitStack() as others, connect(url) as client:
            for number in range(len(service.scheduler._threads)):  # every thread that runs the model has something
                others.enter_context(connect(url)).sendall(request({"inputs": ["the cat sees a red dog ."] * 20}))
                own.until(lambda count=number + 1: trunk.running == count and not queue)
            client.sendall(request({"inputs": "a " * 100}) * 3)
            own.until(lambda: any(len(ticket.texts) == 1 for ticket in queue))
            (waiting,) = [ticket for ticket in queue if len(ticket.texts) == 1]
            assert not waiting.call.gone
            client.close()
            own.until(lambda: waiting.call.gone)


def test_a_client_that_would_rather_speak_http2_is_answered(url):
    """As Java's does, which offers it with its first request."""
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA")
    with connect(url) as client:
        for _ in range(3):
            client.sendall(request({"inputs": "a"}, *offer))
            assert [status for status, _ in answers(client, 1)] == [200]


def test_who_asks_whether_to_go_on_is_told_so(url):
    data = request({"inputs": "a"}, "expect: 100-continue")
    cut = data.index(b"\r\n\r\n") + 4
    with connect(url) as client:
        client.sendall(data[:cut])
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")
        client.sendall(data[cut:])
        assert [status for status, _ in answers(client, 1)] == [200]
