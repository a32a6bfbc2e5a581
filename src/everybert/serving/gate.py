"""The gate before every request: ASGI middleware that turns away, before any work is done, what must not come in."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from fastapi import Request
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from everybert.errors import EverybertError
from everybert.serving.limits import Call, Refusal, error_body, too_much
from everybert.serving.service import Service
from everybert.serving.strict import StrictRoute

log = logging.getLogger("everybert.serving")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CHUNK = 65536
"""Bytes of an answer handed on at a time: what a slow reader can make the server hold."""


class Gate:
    """A POST is read whole, within a size and a time; then it has a deadline, and its endpoint answers.

    `posts` are the endpoints, by path; they are called from here, which saves the way through `app`, FastAPI, which
    has all the rest. Other requests are cheap, and only need the key where there is one and they show more than
    health.
    """

    def __init__(self, app: App, service: Service, posts: Mapping[str, StrictRoute], key: str | None = None) -> None:
        self.app = app
        self.service = service
        self.posts = posts
        self.limits = service.limits
        self.metrics = service.metrics
        self.key = key.encode() if key else None
        self.taken = 0
        self.bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.monotonic()
        reader, sender = Reader(receive), Sender(send, self.limits.body_seconds)
        try:
            self._check_key(scope)
            if scope["method"] == "POST":
                await self._post(scope, reader, sender)
            else:
                await self.app(scope, reader, sender)
        except ConnectionError:  # the client left while it sent, or did not read
            pass
        except Exception as error:
            await reader.drain(self.limits.body)
            await sender.refuse(scope["path"], refusal_of(error))
        finally:
            self.metrics.answered(scope, sender.status or 499, time.monotonic() - start)

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]
        if self.key is None or not (scope["method"] == "POST" or path == "/metrics" or path.startswith("/v1/")):
            return
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip() or headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(given, self.key):
            how = {"WWW-Authenticate": "Bearer"}
            raise Refusal(401, "the API key is missing or wrong; send Authorization: Bearer KEY", how)

    async def _post(self, scope: Scope, reader: Reader, send: Sender) -> None:
        if self.taken >= self.limits.queue:
            raise self._overloaded()
        self.taken += 1
        self.metrics.in_flight.set(self.taken)
        call = scope["call"] = Call(self.limits)
        try:
            answer = await self._answer(scope, call, reader)
            await answer(scope, reader, send)
        finally:
            call.gone = True
            self.bytes -= len(call.body)
            self.taken -= 1
            self.metrics.in_flight.set(self.taken)

    async def _answer(self, scope: Scope, call: Call, reader: Reader) -> App:
        """What sends the answer: that of the endpoint, within its time; FastAPI where there is none at this path."""
        try:
            async with asyncio.timeout(self.limits.body_seconds) as clock:
                call.body = await self._body(scope, reader)
                self.bytes += len(call.body)
                route = self.posts.get(scope["path"].removeprefix(scope.get("root_path", "")))
                if route is None:
                    return self.app
                scope["route"] = route
                call.deadline = time.monotonic() + self.limits.seconds
                clock.reschedule(asyncio.get_running_loop().time() + self.limits.seconds)
                return await route.answer(Request(scope))
        except TimeoutError:
            if call.deadline < math.inf:
                raise call.late() from None
            raise Refusal(408, f"the body did not arrive within {self.limits.body_seconds:g} s") from None

    def _overloaded(self) -> Refusal:
        after = {"Retry-After": str(self.service.retry_after())}
        return Refusal(429, "too many requests at a time; try again later", after)

    async def _body(self, scope: Scope, reader: Reader) -> bytes:
        headers = dict(scope["headers"])
        if headers.get(b"content-encoding", b"identity").lower() not in (b"", b"identity"):
            raise Refusal(415, "compressed bodies are not read; send plain JSON")
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self.limits.body:
            raise too_much(int(declared), self.limits.body, "bytes of body")
        parts, size = [], 0
        while not reader.done:
            message = await reader()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.limits.body:
                raise too_much(size, self.limits.body, "bytes of body")
            if self.bytes + size > self.limits.queue_bytes:
                raise self._overloaded()
        return b"".join(parts)


class Reader:
    """A request's messages; knows when the body is whole."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.done = False

    async def __call__(self) -> Message:
        """One ASGI message."""
        message = await self.receive()
        self.done = message["type"] != "http.request" or not message.get("more_body")
        return message

    async def drain(self, most: int) -> None:
        """Read what a refused client is still sending, within reason: it may not look for an answer before."""
        if self.done:
            return
        try:
            async with asyncio.timeout(1.0):
                while most > 0 and not self.done:
                    most -= len((await self()).get("body", b""))
        except TimeoutError:
            return


class Sender:
    """Passes an answer on in pieces, so that a slow reader holds little; remembers the status."""

    def __init__(self, send: Send, seconds: float) -> None:
        self.send = send
        self.seconds = seconds
        self.status = 0

    async def __call__(self, message: Message) -> None:
        """One ASGI message."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        body = message.get("body", b"")
        if len(body) <= CHUNK:
            await self.send(message)
            return
        view = memoryview(body)
        for start in range(0, len(view), CHUNK):
            more = start + CHUNK < len(view) or message.get("more_body", False)
            try:
                async with asyncio.timeout(self.seconds):
                    await self.send({**message, "body": bytes(view[start : start + CHUNK]), "more_body": more})
            except TimeoutError:
                raise ConnectionAbortedError("the answer was not read in time") from None

    async def refuse(self, path: str, refusal: Refusal) -> None:
        """Send a refusal, unless an answer has begun."""
        if self.status:
            return
        body = to_json(error_body(path, refusal.status, refusal.message))
        headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
        pairs = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
        await self({"type": "http.response.start", "status": refusal.status, "headers": pairs})
        await self({"type": "http.response.body", "body": body})


def refusal_of(error: Exception) -> Refusal:
    """Every error as an answer with a cause; never what was sent, which may be long or no JSON at all."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, EverybertError):
        return Refusal(422, str(error))
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, str(error.detail), dict(error.headers or {}))
    log.error("a request failed", exc_info=error)
    return Refusal(500, "the server failed on this request; its log says why")
