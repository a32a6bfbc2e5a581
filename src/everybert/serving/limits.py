"""Limits on requests: sizes and deadlines that FastAPI and uvicorn do not have.

Three layers, from the socket inwards. `Protocol` bounds a connection: the size of the head, the time in which a request
must arrive, and the time in which a response must be read. `LimitsMiddleware` bounds requests: the API key, the size of
the body, the number of requests at a time. `RequestContext` bounds the work for one request: tokens and time.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httptools
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.serving.app import Service
    from everybert.serving.models import Served

log = logging.getLogger("everybert.serving")

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEAD = 16384
"""Bytes of a request's head, and of the trailers of a chunked body."""
PIPELINED = 16
"""Requests per connection that wait for an earlier one."""
CHUNK = 65536
"""Bytes of a response written at a time: what a slow reader keeps in memory."""


@dataclass(frozen=True)
class Limits:
    """How much one request, and all requests together, may ask for."""

    body: int = 2_000_000
    """Bytes per request body."""
    inputs: int = 1024
    """Texts per request."""
    text_tokens: int = 65_536
    """Tokens per text."""
    request_tokens: int = 262_144
    """Tokens per request; long pairs count every window."""
    queue: int = 256
    """Requests accepted at a time, including those in the queue; more are answered 429."""
    queue_bytes: int = 64_000_000
    """Bytes of the bodies of these requests together."""
    seconds: float = 60.0
    """Time to compute a response; then the request is answered 503."""
    body_seconds: float = 10.0
    """Time in which a request must arrive, and in which each part of a response must be read."""
    budget: int | None = None
    """Tokens per batch. If not given: the default of the device."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise EverybertError(f"the limit {name} must be positive, not {value}")


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────

STATUSES = {
    400: ("bad_request", "The body is not JSON."),
    401: ("unauthorized", "The API key is missing or wrong."),
    404: ("not_found", "No such model."),
    405: ("method_not_allowed", "No such method."),
    408: ("timeout", "The body did not arrive in time."),
    413: ("too_large", "The request is over a limit."),
    415: ("unsupported_media_type", "The body is compressed."),
    422: ("validation", "The body is not what this endpoint, or this model, takes."),
    429: ("overloaded", "Too many requests; Retry-After says when to try again."),
    503: ("unavailable", "No answer in time, or shutting down."),
}
"""Statuses of errors: the type in the response, and the description in the OpenAPI document."""


class HttpError(HTTPException):
    """An error response: its status, the reason with what the client can do, and headers."""


def too_large(asked: int, limit: int, what: str) -> HttpError:
    """413 for a request above a limit."""
    return HttpError(413, f"{asked:,} {what} where the limit is {limit:,}; send less at a time")


def error_response(path: str, error: Exception) -> JSONResponse:
    """An error as JSON, in OpenAI's form under /v1 and in TEI's elsewhere; it never repeats what the client sent."""
    status, message, headers = 500, "the server failed on this request; its log says why", None
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, str(error.detail), error.headers
    elif isinstance(error, EverybertError):
        status, message = 422, str(error)
    else:
        log.error("a request failed", exc_info=error)
    kind, _ = STATUSES.get(status, ("error", ""))
    body: dict[str, Any] = {"error": message, "error_type": kind}
    if path.startswith("/v1/"):
        body = {"error": {"message": message, "type": kind, "param": None, "code": str(status)}}
    return JSONResponse(body, status, headers)


# ── one request ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class RequestContext:
    """A request in progress: how long its answer is wanted, and what it has used."""

    limits: Limits
    served: Served = field(init=False)
    """What the body names."""
    deadline: float = math.inf
    """By time.monotonic."""
    gone: bool = False
    """Nobody waits for the answer: it was sent, the client has left, or the time is over."""
    tokens: int = 0
    """Tokens of its texts."""
    cut: int = 0
    """Tokens left out because the client asked for truncation."""
    body: bytes = field(default=b"", repr=False)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for the answer."""
        return not self.gone and time.monotonic() <= self.deadline

    def late(self) -> HttpError:
        """Give the request up: 503."""
        self.gone = True
        return HttpError(503, f"no answer within {self.limits.seconds:g} s; try again later", {"Retry-After": "1"})

    def count(self, lengths: Sequence[int]) -> None:
        """Count texts by their tokens; 413 above the limits."""
        longest = max(lengths, default=0)
        if longest > self.limits.text_tokens:
            raise too_large(longest, self.limits.text_tokens, "tokens in a text")
        self.tokens += sum(lengths)
        if self.tokens > self.limits.request_tokens:
            raise too_large(self.tokens, self.limits.request_tokens, "tokens in a request")


# ── all requests ─────────────────────────────────────────────────────────────────────────────────────────────


class LimitsMiddleware:
    """Checks the API key, reads the body of a POST within its size and time, and bounds the requests at a time."""

    def __init__(self, app: App, service: Service, key: str | None = None) -> None:
        self.app = app
        self.service = service
        self.limits = service.limits
        self.key = key.encode() if key else None
        self.accepted = 0
        self.bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status, body_read = time.monotonic(), 499, False

        async def read() -> Message:
            nonlocal body_read
            message = await receive()
            body_read = message["type"] != "http.request" or not message.get("more_body")
            return message

        async def write(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            body = message.get("body", b"")
            if len(body) <= CHUNK:
                return await send(message)
            for at in range(0, len(body), CHUNK):
                more = at + CHUNK < len(body) or message.get("more_body", False)
                await send({**message, "body": body[at : at + CHUNK], "more_body": more})

        try:
            self._check_key(scope)
            if scope["method"] == "POST":
                await self._post(scope, read, write)
            else:
                await self.app(scope, read, write)
        except ConnectionError:  # the client left while it sent the body
            pass
        except Exception as error:
            if not body_read:
                await _drain(receive, self.limits.body)
            if status == 499:
                await error_response(scope["path"], error)(scope, receive, write)
        finally:
            self.service.metrics.answered(scope, status, time.monotonic() - start)

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]
        if self.key is None or not (scope["method"] == "POST" or path == "/metrics" or path.startswith("/v1/")):
            return
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip() or headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(given, self.key):
            message = "the API key is missing or wrong; send Authorization: Bearer KEY"
            raise HttpError(401, message, {"WWW-Authenticate": "Bearer"})

    async def _post(self, scope: Scope, read: Receive, write: Send) -> None:
        if self.accepted >= self.limits.queue:
            raise self._overloaded()
        context = scope["context"] = RequestContext(self.limits)
        self._accept(1)
        try:
            try:
                async with asyncio.timeout(self.limits.body_seconds):
                    context.body = await self._body(scope, read)
            except TimeoutError:
                raise HttpError(408, f"the body did not arrive within {self.limits.body_seconds:g} s") from None
            self.bytes += len(context.body)
            context.deadline = time.monotonic() + self.limits.seconds
            await self.app(scope, read, write)
        finally:
            context.gone = True
            self.bytes -= len(context.body)
            self._accept(-1)

    def _accept(self, change: int) -> None:
        self.accepted += change
        self.service.metrics.in_flight.set(self.accepted)

    def _overloaded(self) -> HttpError:
        return HttpError(429, "too many requests at a time; try again later", {"Retry-After": "1"})

    async def _body(self, scope: Scope, read: Receive) -> bytes:
        headers = dict(scope["headers"])
        if headers.get(b"content-encoding", b"identity").lower() not in (b"", b"identity"):
            raise HttpError(415, "compressed bodies are not read; send plain JSON")
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self.limits.body:
            raise too_large(int(declared), self.limits.body, "bytes of body")
        body, more = bytearray(), True
        while more:
            message = await read()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.limits.body:
                raise too_large(len(body), self.limits.body, "bytes of body")
            if self.bytes + len(body) > self.limits.queue_bytes:
                raise self._overloaded()
        return bytes(body)


async def _drain(receive: Receive, most: int) -> None:
    """Read what a refused client still sends, within reason: many clients read no response before they have sent."""
    try:
        async with asyncio.timeout(1.0):
            while most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
    except TimeoutError:
        return


# ── one connection ───────────────────────────────────────────────────────────────────────────────────────────


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 connection, with bounds on heads and trailers, and deadlines for reading and writing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request."""
        super().connection_made(transport)
        self._seconds = self.app_state["limits"].body_seconds
        self._unfinished: list[Any] = []  # requests that are not answered; uvicorn knows the newest alone
        self._unparsed = 0  # bytes since the parser last finished a head, a part of a body, or a request
        self._read_clock: asyncio.TimerHandle | None = None
        self._write_clock: asyncio.TimerHandle | None = None
        self._receiving(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks, and stop working for a client that has left."""
        self._receiving(False)
        if self._write_clock is not None:
            self._write_clock.cancel()
        for cycle in self._unfinished:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
            if "context" in cycle.scope:
                cycle.scope["context"].gone = True
        super().connection_lost(exc)

    def _receiving(self, receiving: bool) -> None:
        """Start or stop the clock in which a request must arrive."""
        if receiving and self._read_clock is None:
            self._read_clock = self.loop.call_later(self._seconds, self._not_received)
        elif not receiving and self._read_clock is not None:
            self._read_clock.cancel()
            self._read_clock = None

    def _not_received(self) -> None:
        """Close the connection, unless an earlier request is in progress; a late body the middleware answers 408."""
        self._read_clock = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
        else:
            self._receiving(True)

    def pause_writing(self) -> None:
        """The client does not read: wait for it, but not for ever."""
        super().pause_writing()
        self._write_clock = self.loop.call_later(self._seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        if self._write_clock is not None:
            self._write_clock.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse some bytes."""
        self._unset_keepalive_if_required()
        self._receiving(True)
        self._unparsed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._unparsed > HEAD:
            self.send_400_response("The head of the request is too long.")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            # The parser leaves the rest to the protocol that the client offers (Java's client: HTTP/2). The server has
            # none: it reads the request again without the offer.
            kept = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
            version = self.parser.get_http_version().encode()
            first = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
            self._parse(first + b"".join(kept) + b"\r\n" + data[offer.args[0] :])

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._unparsed = 0
        self._receiving(True)

    def on_headers_complete(self) -> None:
        """The head is complete. An exception here becomes a 400, and the connection is closed."""
        self._unparsed = 0
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD:
            raise ValueError("the head is too long")
        if len(self.pipeline) >= PIPELINED:
            raise ValueError("too many requests at once")
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this is no proxy")
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._unfinished = [cycle for cycle in self._unfinished if not cycle.response_complete]
        self._unfinished.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._unparsed = 0
        self._receiving(False)
        if not self.parser.should_upgrade():
            super().on_message_complete()
