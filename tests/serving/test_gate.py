"""Every endpoint with a body is answered by the gate, as the document shows it; all the rest is FastAPI's."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from everybert.errors import EverybertError
from everybert.inference.model import load
from everybert.serving.app import create_app
from everybert.serving.gate import refusal_of
from everybert.serving.limits import Refusal
from everybert.serving.service import Service


@pytest.fixture
def app(folders):
    service = Service()
    service.shelf.add("words", load(folders["words"], device="cpu"))
    return create_app(service)


def ask(app, path, body=b"{}", method="POST", **more):
    """(status, body) of a request to the application, without a server."""
    sent = []
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b"", **more}

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


async def nobody(scope, receive, send):
    raise AssertionError("FastAPI was asked")


def test_what_the_document_shows_is_what_the_gate_answers(app):
    shown = {path for path, methods in app.openapi()["paths"].items() if "post" in methods}
    assert shown == {path for path in app.gate.posts if not path.startswith("/playground/")}
    assert len(shown) == 12 and len(app.gate.posts) == 22
    app.gate.app = nobody
    for path in app.gate.posts:
        status, body = ask(app, path)
        assert status == 422 and "Field required" in str(body["error"])


def test_what_the_gate_does_not_know_is_left_to_fastapi(app):
    assert ask(app, "/nothing")[0] == ask(app, "/embed\n")[0] == 404
    assert ask(app, "/embed", method="PUT")[0] == 405
    status, body = ask(app, "/v1/nothing")
    assert status == 404 and body["error"]["code"] == "404"


def test_under_a_path_of_another_application(app):
    assert ask(app, "/bert/embed", root_path="/bert")[0] == 422
    assert ask(app, "/embed", root_path="")[0] == 422


@pytest.mark.parametrize(
    ("error", "status"), [(Refusal(413, "much"), 413), (EverybertError("unfit"), 422), (KeyError("secret"), 500)]
)
@pytest.mark.parametrize("way", ["the gate", "FastAPI"])
def test_an_error_has_one_form_whichever_way_it_comes(app, caplog, error, status, way):
    async def fail(body=None, request=None):
        raise error

    if way == "the gate":
        app.gate.posts["/embed"].endpoint = fail
        found = ask(app, "/embed", b'{"inputs": "a"}')
    else:
        app.get("/fail")(fail)
        found = ask(app, "/fail", method="GET")
    assert found == (status, {"error": refusal_of(error).message, "error_type": found[1]["error_type"]})
    assert "secret" not in str(found)
    assert ("secret" in caplog.text) == (status == 500), "the log says why, and only then"


def test_what_is_unforeseen_is_logged(caplog):
    with caplog.at_level(logging.ERROR):
        assert refusal_of(ZeroDivisionError("why")).status == 500
    assert "ZeroDivisionError: why" in caplog.text
