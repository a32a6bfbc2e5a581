"""What is turned away, and how: every refusal is JSON with a cause, and costs the server little."""

from __future__ import annotations

import contextlib
import gzip
import json
import time

import pytest
import server as own
from server import CLIENT, connect, post

from everybert.serving.limits import Limits

SMALL = Limits(body=20_000, inputs=4, text_tokens=500, request_tokens=1000, body_seconds=2.0)


@pytest.fixture(scope="module")
def tight(folders):
    with own.running({name: folders[name] for name in ("words", "labels")}, SMALL, key="secret") as (url, _):
        yield url


KEY = {"Authorization": "Bearer secret"}


def test_the_key_is_asked_for_but_health_is_open(tight):
    assert CLIENT.get(f"{tight}/health").status_code == 200
    assert CLIENT.get(f"{tight}/ready").json() == {"ready": True, "models": ["words", "labels"]}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-API-Key": ""}):
        answer = post(tight, "/embed", {"inputs": "a"}, headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert CLIENT.get(f"{tight}/metrics", headers=headers).status_code == 401
    assert post(tight, "/embed", {"inputs": "a"}, headers=KEY).status_code == 200
    assert post(tight, "/embed", {"inputs": "a"}, headers={"X-API-Key": "secret"}).status_code == 200
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


def test_attention_that_nobody_could_look_at_is_413(url):
    answer = post(url, "/attention", {"text": "cat " * 600})
    assert answer.status_code == 413 and "attention weights" in answer.json()["error"]


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


def test_a_field_nobody_reads_is_refused_not_passed_over(tight):
    answer = post(tight, "/classify", {"text": "a", "adapter": "praise", "model": "labels"}, headers=KEY)
    assert answer.status_code == 422 and answer.json()["error"] == "adapter: this endpoint has no such field"
    known = {"input": "a", "user": "me"}  # OpenAI's clients send more than we need
    assert post(tight, "/v1/embeddings", known, headers=KEY).status_code == 200


def test_other_forms_of_body(tight):
    squeezed = gzip.compress(json.dumps({"inputs": "a" * 10_000_000}).encode())
    headers = KEY | {"content-type": "application/json", "content-encoding": "gzip"}
    assert CLIENT.post(f"{tight}/embed", content=squeezed, headers=headers).status_code == 415
    answer = CLIENT.post(f"{tight}/embed", content=b'{"inputs": "a"}', headers=KEY | {"content-type": "text/plain"})
    assert answer.status_code == 422


def test_unknown_paths_and_methods(tight):
    assert post(tight, "/nothing", {}, headers=KEY).status_code == 404
    assert CLIENT.get(f"{tight}/embed").status_code == 405
    assert "error" in CLIENT.get(f"{tight}/embed").json()
    text = CLIENT.get(f"{tight}/metrics", headers=KEY).text
    assert "/nothing" not in text  # or anyone could fill the memory with names


def test_openais_errors_have_openais_form(tight):
    error = post(tight, "/v1/embeddings", {"input": "a", "model": "nobody"}, headers=KEY).json()["error"]
    assert error["code"] == "404" and "nobody" in error["message"]


def test_a_body_that_does_not_come_is_408(tight):
    with connect(tight) as client:
        head = "POST /embed HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\ncontent-type: application/json\r\n"
        client.sendall(f'{head}content-length: 100\r\n\r\n{{"inputs": '.encode())
        start = time.monotonic()
        assert client.recv(4096).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - start < 9  # by default it would be ten


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
    with own.running({"words": folders["words"]}, Limits(seconds=0.3, inline=0)) as (url, service):
        with own.held(service, "words"):
            answer = post(url, "/embed", {"inputs": "a"})
            assert answer.status_code == 503 and "retry-after" in answer.headers
        own.until(lambda: service.scheduler.waiting == 0)
