"""Limits on requests and connections: every error is JSON with a reason, and costs the server little."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import time

import pytest
import server as own
from server import CLIENT, HEALTH, connect, post, raw

from everybert.errors import EverybertError
from everybert.inference.model import load
from everybert.serving.app import Service, create_app
from everybert.serving.limits import HEAD, OPEN, PIPELINED, HttpError, Limits, RateLimiter, RequestContext, Usage

SMALL = Limits(body=20_000, inputs=4, text_tokens=500, request_tokens=1000, body_seconds=2.0)


@pytest.fixture(scope="module")
def tight(folders):
    with own.running({name: folders[name] for name in ("words", "labels")}, SMALL, keys=["secret", "other"]) as (
        url,
        _,
    ):
        yield url


KEY = {"Authorization": "Bearer secret"}


def test_the_key_is_asked_for_but_health_is_open(tight):
    assert CLIENT.get(f"{tight}/health").status_code == 200
    assert CLIENT.get(f"{tight}/ready").json() == {"ready": True}  # no details
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-API-Key": ""}, {"Authorization": "secret"}):
        answer = post(tight, "/embed", {"inputs": "a"}, headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        for path in ("/metrics", "/info", "/v1/models", "/v1/models/words", "/nothing"):
            assert CLIENT.get(tight + path, headers=headers).status_code == 401, path
    for path in OPEN:
        assert CLIENT.get(tight + path).status_code == 200, path
    right = [{"Authorization": f"{word} secret"} for word in ("Bearer", "bearer", "BEARER")]
    right += [{"Authorization": "Bearer other"}, {"X-API-Key": "secret"}]
    right += [{"Authorization": "Bearer wrong", "X-API-Key": "secret"}]  # judged by the right one
    for headers in right:
        assert post(tight, "/embed", {"inputs": "a"}, headers=headers).status_code == 200, headers
    assert b"everybert_requests_total" in CLIENT.get(f"{tight}/metrics", headers=KEY).content


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/embed", {"inputs": ["a"] * 5}, "texts in a request"),
        ("/embed", {"inputs": "cat " * 600}, "tokens in a text"),
        ("/embed", {"inputs": ["cat " * 400] * 3}, "tokens in a request"),
        ("/embed", {"inputs": "x" * 30_000}, "bytes of body"),
        ("/predict", {"inputs": ["cat " * 490, "dog " * 490], "model": "labels"}, "windows of long pairs"),
    ],
)
def test_too_much_is_413(tight, path, body, word):
    answer = post(tight, path, body, headers=KEY)
    assert answer.status_code == 413, answer.text
    assert word in answer.json()["error"] and answer.json()["error_type"] == "too_large"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/fill", {"text": "[MASK] " * 2000, "top": 1000}),
        ("/tokens", {"text": "cat " * 60_000, "vectors": True}),
        ("/embed_all", {"inputs": ["cat " * 50_000] * 2}),
        ("/v1/embeddings", {"input": ["a"] * 1500}),
        ("/attention", {"text": "cat " * 200}),
        ("/answer", {"question": ["a"] * 2000, "context": "a", "top": 1000, "model": "qa"}),
        ("/choose", {"prompt": "cat " * 200, "endings": ["cat " * 10] * 2000, "model": "choice"}),
    ],
)
def test_large_responses_are_refused_before_anything_is_computed(wide, path, body):
    url, service = wide
    before = service.metrics.batch_tokens._sum.get()
    answer = post(url, path, body)
    error = answer.json()["error"]
    assert answer.status_code == (400 if path.startswith("/v1/") else 413), answer.text  # as OpenAI's clients expect
    assert "numbers in a response" in str(error) or path == "/choose"
    assert service.metrics.batch_tokens._sum.get() == before


@pytest.fixture(scope="module")
def wide(folders):
    with own.running({name: folders[name] for name in ("words", "qa", "choice")}, Limits(numbers=40_000)) as found:
        yield found


def test_a_body_without_a_length_is_counted_as_it_comes(tight):
    def endless():
        for _ in range(100):
            yield b" " * 1000

    answer = CLIENT.post(f"{tight}/embed", content=endless(), headers=KEY | {"content-type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 400),
        (b'{"inputs": NaN}', 400),
        (b'{"inputs": Infinity}', 400),
        (b'{"inputs": -1e99999}', 422),
        (b'{"inputs": ' + b"9" * 10_000 + b"}", 400),
        (b'{"inputs": ' + b"[" * 9000 + b"]" * 9000 + b"}", 400),
        (b'{"inputs": "\xff\xfe"}', 400),
        (b'{"inputs": "\\ud800"}', 400),
        (b'{"inputs": 1}', 422),
        (b'{"inputs": null}', 422),
        (b"[]", 422),
        (b'"inputs"', 422),
        (b'{"inputs": []}', 422),
        (b'{"inputs": {"a": "b"}}', 422),
        (b'{"inputs": "a", "normalize": "perhaps"}', 422),
        (b'{"inputs": "a", "model": 7}', 422),
        (b'{"inputs": "a", "model": "nobody"}', 404),
    ],
)
def test_bad_json_is_said_to_be_so(tight, body, status):
    answer = CLIENT.post(f"{tight}/embed", content=body, headers=KEY | {"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert len(answer.json()["error"]) < 400


def test_other_forms_of_body(tight):
    squeezed = gzip.compress(json.dumps({"inputs": "a" * 10_000_000}).encode())
    headers = KEY | {"content-type": "application/json", "content-encoding": "gzip"}
    assert CLIENT.post(f"{tight}/embed", content=squeezed, headers=headers).status_code == 415
    answer = CLIENT.post(f"{tight}/embed", content=b'{"inputs": "a"}', headers=KEY | {"content-type": "text/plain"})
    assert answer.status_code == 422


def test_unknown_paths_and_methods(tight):
    assert post(tight, "/nothing", {}, headers=KEY).status_code == 404
    assert CLIENT.get(f"{tight}/embed", headers=KEY).status_code == 405
    assert "error" in CLIENT.get(f"{tight}/embed", headers=KEY).json()
    assert CLIENT.get(f"{tight}/health/").status_code == 401  # no redirect, which would repeat the Host
    text = CLIENT.get(f"{tight}/metrics", headers=KEY).text
    assert "/nothing" not in text  # or anyone could fill the memory with names


def test_a_body_that_does_not_come_is_408(tight):
    with connect(tight) as client:
        head = "POST /embed HTTP/1.1\r\nhost: localhost\r\nx-api-key: secret\r\ncontent-type: application/json\r\n"
        client.sendall(f'{head}content-length: 100\r\n\r\n{{"inputs": '.encode())
        start = time.monotonic()
        ((status, _),) = answers(client, 2)  # then the connection is closed, and not only after as long again
        assert status == 408 and time.monotonic() - start < 3.8


def test_a_connection_that_says_nothing_is_closed(tight):
    with connect(tight) as silent, connect(tight) as slow:
        slow.sendall(b"POST /embed HT")
        start = time.monotonic()
        for client in (silent, slow):
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(100) == b""
        assert time.monotonic() - start < 9  # by default it would be ten


def test_a_request_over_its_time_is_503(folders):
    """The answer comes while the model is still at it, and nobody works for the request afterwards."""
    with own.running({"words": folders["words"]}, Limits(seconds=0.3)) as (url, service):
        with own.held(service, "words"):
            answer = post(url, "/embed", {"inputs": "a"})
            assert answer.status_code == 503 and "retry-after" in answer.headers
        own.until(lambda: not service.batcher.queue)


def test_tokens_per_minute(folders):
    """Of each key; what is over is 429 with the time to wait, and no other client is kept from asking."""
    with own.running({"words": folders["words"]}, Limits(rate=100), keys=["one", "two"]) as (url, _):

        def ask(key, text):
            return post(url, "/embed", {"inputs": text}, headers={"Authorization": f"Bearer {key}"})

        assert ask("one", "cat " * 130).status_code == 200  # 132 tokens: overdrawn once
        answer = ask("one", "a")
        assert answer.status_code == 429 and "100 tokens a minute" in answer.json()["error"]
        assert 10 <= int(answer.headers["retry-after"]) <= 21
        assert ask("two", "a").status_code == 200


def test_rates_recover_and_only_the_latest_clients_are_remembered(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("everybert.serving.limits.time.monotonic", lambda: now[0])
    monkeypatch.setattr("everybert.serving.limits.CLIENTS", 3)
    rates = RateLimiter(60)
    rates.charge("a", 70)
    with pytest.raises(HttpError, match="60 tokens a minute") as refused:
        rates.check("a")
    assert refused.value.headers == {"Retry-After": "11"}
    now[0] = 11.0
    rates.check("a")
    for name in "bcd":
        rates.charge(name, 1)
    assert list(rates.buckets) == ["b", "c", "d"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1", 200),
        ("192.168.7.7:80", 200),
        ("[::1]:8000", 200),
        ("evil.example", 400),
        ("localhost.evil.example:80", 400),
        ("127.0.0.1.evil.example", 400),
        ("", 400),
        ("[::1", 400),
        (None, 400),
        ("localhost\r\nhost: evil.example", 400),
    ],
)
def test_foreign_names_in_the_host_header_are_refused_and_never_repeated(url, host, status):
    line = "" if host is None else f"host: {host}\r\n"
    with connect(url) as client:
        client.sendall(f"GET /docs HTTP/1.1\r\n{line}connection: close\r\n\r\n".encode())
        (found,) = answers(client, 1)
    assert found[0] == status and b"evil" not in found[1]


def test_named_hosts_are_allowed(folders):
    service = Service()
    app = create_app(service, hosts=["Bert.example"])
    assert ask(app, "/nothing", http_version="1.1", host=b"bert.example:80")[0] == 404
    assert ask(app, "/nothing", http_version="1.1", host=b"other.example")[0] == 400
    assert ask(create_app(service, hosts=["*"]), "/nothing", http_version="1.1", host=b"other.example")[0] == 404


def test_without_the_playground_there_is_the_api_alone():
    app = create_app(Service(), with_playground=False)
    assert ask(app, "/fill", b"")[0] == 422
    for method, path in (("GET", "/docs"), ("GET", "/playground/web/app.js"), ("POST", "/playground/attribution")):
        assert ask(app, path, method=method)[0] == 404


def test_one_address_cannot_take_every_connection(folders):
    """Half of them at most: here 4 of 8. More are closed at once; when some leave, others come in."""
    with own.running({"words": folders["words"]}, Limits(connections=8)) as (url, _):
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(connect(url)) for _ in range(4)]
            for client in held:
                client.sendall(HEALTH)
                assert answers(client, 1)[0][0] == 200
            with connect(url) as fifth:
                assert ended(fifth)

        def again() -> bool:
            with connect(url) as client, contextlib.suppress(ConnectionError):
                client.sendall(HEALTH)
                return answers(client, 1) != []
            return False

        own.until(again)


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────


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
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nlong: " + b"x" * 2 * HEAD + b"\r\n\r\n"
    with connect(url) as client:
        with contextlib.suppress(ConnectionError):  # it may be closed before all is sent
            for start in range(0, len(head), piece):
                client.sendall(head[start : start + piece])
        assert [status for status, _ in answers(client, 2)] in ([400], [])
        assert ended(client)
    assert CLIENT.get(f"{url}/health").status_code == 200


def test_a_long_head_within_the_limit_is_read(url):
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nlong: " + b"x" * (HEAD // 2) + b"\r\n\r\n"
    with connect(url) as client:
        for start in range(0, len(head), 500):
            client.sendall(head[start : start + 500])
        assert [status for status, _ in answers(client, 1)] == [200]


def test_a_head_that_begins_behind_a_long_body_is_not_taken_for_long(url):
    """Again and again: what is counted of one head is not counted for the next."""
    data = raw("/embed", {"inputs": "a " * HEAD, "truncate": True})
    with connect(url) as client:
        client.sendall(data[:10])
        for _ in range(3):
            client.sendall(data[10:] + data[:10])
            assert [status for status, _ in answers(client, 1)] == [200]


def test_requests_in_one_packet_are_answered_in_their_order(url):
    texts = ["a", "the cat", "mary eats", "john smith lives in london"]
    with connect(url) as client:
        client.sendall(b"".join(raw("/embed", {"inputs": text}) for text in texts))
        found = answers(client, len(texts))
    alone = [own.post(url, "/embed", {"inputs": text}).json()[0] for text in texts]
    assert [status for status, _ in found] == [200] * len(texts)
    for (_, body), vector in zip(found, alone):
        assert json.loads(body)[0] == pytest.approx(vector, abs=1e-5)


def test_too_many_requests_in_one_packet_end_the_connection(url):
    with connect(url) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(raw("/embed", {"inputs": "a"}) * 50 * PIPELINED)
        assert len(answers(client, 50 * PIPELINED)) <= PIPELINED + 2
        assert ended(client)
    assert own.post(url, "/embed", {"inputs": "a"}).status_code == 200


def test_a_client_that_leaves_is_noticed_though_it_had_asked_for_more(folders):
    with own.running({"words": folders["words"]}) as (url, service), own.held(service, "words"):
        batcher, loaded = service.batcher, service.registry.entries["words"].loaded
        with contextlib.ExitStack() as others, connect(url) as client:
            for number in range(len(batcher._threads)):  # keep every thread busy
                others.enter_context(connect(url)).sendall(raw("/embed", {"inputs": ["the cat sees a red dog ."] * 20}))
                own.until(lambda count=number + 1: loaded.running == count and not batcher.queue)
            client.sendall(raw("/embed", {"inputs": "a " * 100}) * 3)
            own.until(lambda: len(batcher.queue) == 1)
            (waiting,) = batcher.queue
            assert not waiting.job.context.gone
            client.close()
            own.until(lambda: waiting.job.context.gone)


@pytest.mark.parametrize("keys", [[], ["secret"]])
def test_trailers_without_end_are_refused(folders, keys):
    head = b"POST /embed HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with own.running({"words": folders["words"]}, keys=keys) as (url, _), connect(url) as client:
        client.sendall(head + b"0\r\n")
        with pytest.raises(ConnectionError):  # long before they have taken 20 MB
            for _ in range(20_000):
                client.sendall(b"a: " + b"x" * 1000 + b"\r\n")


@pytest.mark.parametrize(
    "start", [b"G", b"\r\n", b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n"]
)
def test_a_slow_second_request_is_closed(tight, start):
    """One byte of the next request; an empty line; a body that never comes: on a connection that is kept alive."""
    with connect(tight) as client:
        client.sendall(HEALTH)
        assert [status for status, _ in answers(client, 1)] == [200]
        client.sendall(start)
        begin = time.monotonic()
        answers(client, 2)
        assert time.monotonic() - begin < 9  # by default it would be ten


def test_a_client_that_would_rather_speak_http2_is_answered(url):
    """As Java's does, which offers it with its first request."""
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA")
    with connect(url) as client:
        for _ in range(3):
            client.sendall(raw("/embed", {"inputs": "a"}, *offer))
            assert [status for status, _ in answers(client, 1)] == [200]


def test_who_asks_whether_to_go_on_is_told_so(url):
    data = raw("/embed", {"inputs": "a"}, "expect: 100-continue")
    cut = data.index(b"\r\n\r\n") + 4
    with connect(url) as client:
        client.sendall(data[:cut])
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")
        client.sendall(data[cut:])
        assert [status for status, _ in answers(client, 1)] == [200]


def test_one_client_holds_at_most_half_of_the_bytes():
    usage, limits = Usage(), Limits(queue_bytes=1000)
    first, second, other = (RequestContext(limits, usage, client) for client in ("a", "a", "b"))
    first.hold(400)
    with pytest.raises(HttpError, match="too many requests"):
        second.hold(101)
    other.hold(500)
    with pytest.raises(HttpError):
        RequestContext(limits, usage, "c").hold(101)
    for context in (first, second, other):
        context.release()
    assert usage == Usage()


def test_requests_at_once_do_not_exceed_the_rate(folders):
    """The tokens of each are counted only later; its body counts at once."""
    requests = [("/embed", {"inputs": "the cat eats " * 200})] * 24
    with own.running({"words": folders["words"]}, Limits(rate=1000)) as (url, _):
        statuses = [answer.status_code for answer in own.post_all(url, requests, clients=24)]
    assert set(statuses) == {200, 429} and statuses.count(200) <= 4


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def app(folders):
    service = Service()
    service.registry.add("words", load(folders["words"], device="cpu"))
    return create_app(service)


def ask(app, path, body=b"{}", method="POST", host=b"localhost", **more):
    """(status, body) of a request to the application, without a server."""
    sent = []
    headers = [(b"content-type", b"application/json"), (b"host", host)]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b"", **more}

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_other_paths_have_the_same_form_of_error(app):
    status, body = ask(app, "/v1/nothing")
    assert status == 404 and body["error"]["code"] == "model_not_found"
    assert ask(app, "/bert/embed", root_path="/bert")[0] == 422  # mounted in another application


@pytest.mark.parametrize(
    ("error", "status"), [(HttpError(413, "much"), 413), (EverybertError("unfit"), 422), (KeyError("secret"), 500)]
)
def test_an_error_in_an_endpoint_becomes_json(app, caplog, error, status):
    @app.get("/fail")
    async def fail():
        raise error

    found = ask(app, "/fail", method="GET")
    assert found[0] == status and found[1]["error_type"]
    assert "secret" not in str(found)
    assert ("secret" in caplog.text) == (status == 500), "the log says why, and only then"


@pytest.mark.parametrize("limit", [{"seconds": float("nan")}, {"seconds": 0.0}, {"queue": 0}, {"rate": -1}])
def test_a_limit_that_is_not_positive_is_refused(limit):
    with pytest.raises(EverybertError, match=f"the limit {next(iter(limit))} must be positive"):
        Limits(**limit)
