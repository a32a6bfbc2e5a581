"""Who may ask, and for how much: keys, hosts, sizes, rates and deadlines that FastAPI and uvicorn do not have.

Three layers, from the socket inwards. `Protocol` bounds a connection: the size of the head, the time in which a request
must arrive, the time in which a response must be read, and the connections of one address. `LimitsMiddleware` bounds
requests: the Host, the API key, the rate, the size of the body, the number of requests at a time. `RequestContext`
bounds the work for one request: tokens, the size of the response, and time.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httptools
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.serving.app import Service
    from everybert.serving.models import Served

log = logging.getLogger("everybert.serving")

HEAD = 16384
"""Bytes of a request's head, and of the trailers of a chunked body."""
TINY_PARTS = 4096
"""Parts of a body that may be smaller than sixteen bytes; each sixteen bytes of body allow one more."""
PIPELINED = 4
"""Requests per connection that wait for an earlier one."""
CHUNK = 65536
"""Bytes of a response written at a time: what a slow reader keeps in memory."""
NUMBER = 12
"""Bytes of a number in a response, about."""
GRACE = 5
"""Seconds in which accepted requests are answered after a signal to stop."""
OPEN = ("/", "/docs", "/openapi.json", "/health", "/ready")
"""Paths that need no API key, with the files of the page; they are the same on every server."""
CLIENTS = 10_000
"""Clients whose rate is remembered."""


@dataclass(frozen=True)
class Limits:
    """Upper bounds for one request, and for all requests together."""

    body: int = 2_000_000
    """Bytes per request body."""
    inputs: int = 2048
    """Texts per request."""
    text_tokens: int = 65_536
    """Tokens per text."""
    request_tokens: int = 262_144
    """Tokens per request; long pairs count every window."""
    numbers: int = 2_500_000
    """Numbers per response, at about twelve bytes each; a label, token or span counts as four."""
    queue: int = 256
    """Requests accepted at a time, including those in the queue; more are answered 429."""
    queue_bytes: int = 256_000_000
    """Bytes of all bodies and responses that are received, computed or sent; one client may hold half of them."""
    rate: int | None = None
    """Tokens per minute for each API key, or for each client address where there is no key; above, 429."""
    connections: int = 1024
    """Connections at a time; one client address may hold half of them."""
    seconds: float = 60.0
    """Time to compute a response; then the request is answered 503."""
    body_seconds: float = 10.0
    """Time in which a request must arrive, and in which each part of a response must be read."""
    budget: int | None = None
    """Tokens per batch. If not given: the default of the device."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise EverybertError(f"the limit {name} must be positive, not {value}")


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────

STATUSES = {
    400: ("bad_request", "The body is not JSON, or the Host is not served here."),
    401: ("unauthorized", "The API key is missing or wrong."),
    404: ("not_found", "No such model."),
    405: ("method_not_allowed", "No such method."),
    408: ("timeout", "The body did not arrive in time."),
    413: ("too_large", "The request is over a limit."),
    415: ("unsupported_media_type", "The body is compressed."),
    422: ("validation", "The body is not what this endpoint, or this model, takes."),
    429: ("overloaded", "Too many requests or tokens; Retry-After says when to try again."),
    503: ("unavailable", "No answer in time, or shutting down."),
}
"""Statuses of errors: the type in the response, and the description in the OpenAPI document."""
OPENAI_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


class HttpError(HTTPException):
    """An error response: its status, the reason with what the client can do, and headers."""


def check_limit(count: int, limit: int, what: str) -> None:
    """413 for a request above a limit."""
    if count > limit:
        raise HttpError(413, f"{count:,} {what} where the limit is {limit:,}; send less at a time")


def overloaded(message: str = "too many requests at a time; try again later", seconds: float = 1) -> HttpError:
    """429 for a client that should come again."""
    return HttpError(429, message, {"Retry-After": str(math.ceil(seconds))})


def error_response(path: str, error: Exception) -> JSONResponse:
    """An error as JSON, in OpenAI's form under /v1 and in TEI's elsewhere; it never repeats what the client sent."""
    status, message, headers = 500, "the server failed on this request; its log says why", None
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, str(error.detail), error.headers
    elif isinstance(error, EverybertError):
        status, message = 422, str(error)
    else:
        log.error("a request failed", exc_info=error)
    if not path.startswith("/v1/"):
        return JSONResponse({"error": message, "error_type": STATUSES.get(status, ("error",))[0]}, status, headers)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"message": message, "type": kind, "param": None, "code": OPENAI_CODES.get(status)}
    return JSONResponse({"error": body}, 400 if status in (413, 422) else status, headers)


# ── one request ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Usage:
    """The resources in use by all requests together."""

    requests: "set[RequestContext]" = field(default_factory=set)
    """In progress."""
    clients: Counter[str] = field(default_factory=Counter)
    """Bytes held by each client."""


@dataclass(eq=False)
class RequestContext:
    """A request in progress: whether its answer is still wanted, and the resources it uses."""

    limits: Limits
    usage: Usage = field(default_factory=Usage)
    client: str = ""
    """An API key, or an address."""
    served: "Served" = field(init=False)
    """What the body names."""
    gone: bool = False
    """Nobody waits for the answer: it was sent, the client has left, or the time is over."""
    tokens: int = 0
    """Tokens of its texts."""
    cut: int = 0
    """Tokens left out because the client asked for truncation."""
    body: bytes | None = field(default=None, repr=False)
    """None until it has arrived."""
    held: int = 0
    """Bytes of its body and of its response."""

    def late(self) -> HttpError:
        """Give up the request, and return the error for it (503)."""
        self.gone = True
        return HttpError(503, f"no answer within {self.limits.seconds:g} s; try again later", {"Retry-After": "1"})

    def accept(self) -> None:
        """Its body has arrived: it is in progress until its response begins; 429 where too many are."""
        if len(self.usage.requests) >= self.limits.queue:
            raise overloaded()
        self.usage.requests.add(self)

    def reserve(self, numbers: int) -> None:
        """Make room for the response before it is computed; 413 above the limit."""
        check_limit(numbers, self.limits.numbers, "numbers in a response")
        self.hold(NUMBER * numbers)

    def hold(self, size: int) -> None:
        """Hold so many bytes until the request has ended; 429 where all requests together hold too many."""
        held, most = self.usage.clients, self.limits.queue_bytes
        if held.total() + size > most or held[self.client] + size > most // 2:
            raise overloaded()
        held[self.client] += size
        self.held += size

    def release(self) -> None:
        """The request has ended: give back what it held."""
        self.usage.requests.discard(self)
        self.gone = True
        self.usage.clients[self.client] -= self.held
        self.usage.clients += Counter()  # drops those that hold nothing


# ── all requests ─────────────────────────────────────────────────────────────────────────────────────────────


class RateLimiter:
    """Tokens per minute for each client: a bucket that fills at the rate, and may be overdrawn by one request."""

    def __init__(self, rate: int | None) -> None:
        self.rate = rate or 1 << 60
        self.buckets: dict[str, tuple[float, float]] = {}  # client → (tokens, at this time), the latest last

    def _level(self, client: str) -> float:
        level, then = self.buckets.get(client, (self.rate, 0.0))
        return min(self.rate, level + (time.monotonic() - then) * self.rate / 60)

    def check(self, client: str) -> None:
        """429 for a client that has used its tokens."""
        if (level := self._level(client)) <= 0:
            message = f"more than {self.rate:,} tokens a minute; try again later"
            raise overloaded(message, 1 - 60 * level / self.rate)

    def charge(self, client: str, tokens: int) -> None:
        """Count the tokens of a request; of many clients, the latest are remembered."""
        level = self._level(client) - tokens
        self.buckets.pop(client, None)
        self.buckets[client] = (level, time.monotonic())
        if len(self.buckets) > CLIENTS:
            del self.buckets[next(iter(self.buckets))]


class LimitsMiddleware:
    """Checks the Host, the API key and the rate, reads the body of a POST, and bounds the requests at a time."""

    def __init__(self, app: ASGIApp, service: "Service", keys: Sequence[str] = (), hosts: Sequence[str] = ()) -> None:
        self.app = app
        self.service = service
        self.limits = service.limits
        self.keys = [sha256(key.encode()).hexdigest() for key in keys]
        self.hosts = {"localhost", *(host.lower() for host in hosts)}
        self.usage = Usage()
        service.metrics.in_flight.set_function(lambda: len(self.usage.requests))
        self.rates = RateLimiter(service.limits.rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status = time.monotonic(), 499
        context = scope["context"] = RequestContext(self.limits, self.usage)
        if "connection" in scope:
            scope["connection"].context = context

        async def write(message: Message) -> None:
            nonlocal status
            self.usage.requests.discard(context)  # its response begins
            status = message.get("status", status)
            body = message.get("body", b"")
            if len(body) <= CHUNK:
                return await send(message)
            for at in range(0, len(body), CHUNK):
                more = at + CHUNK < len(body) or message.get("more_body", False)
                await send({**message, "body": body[at : at + CHUNK], "more_body": more})

        try:
            self._check_host(scope)
            context.client = self._identify(scope)
            if scope["method"] == "POST":
                await self._post(scope, receive, write)
            else:  # uvicorn sends no body to HEAD
                inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope  # which learns its route
                await self.app(inner, receive, write)
        except (ClientDisconnect, asyncio.CancelledError):  # the client left while it sent the body; the server stops
            pass
        except Exception as error:
            if scope["method"] == "POST" and context.body is None:
                await _drain(Request(scope, receive), self.limits.body)
            if status == 499:
                await error_response(scope["path"], error)(scope, receive, write)
        finally:
            self.service.metrics.answered(scope, status, time.monotonic() - start)

    def _check_host(self, scope: Scope) -> None:
        """Refuse foreign names in the Host header: a page of another site may have its name resolved to this server.

        Addresses are no names, and need no permission.
        """
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if "*" in self.hosts or (not hosts and scope.get("http_version") == "1.0"):
            return
        with contextlib.suppress(ValueError):  # not one header; neither a name nor an address
            (host,) = hosts
            name = urlsplit(f"//{host}").hostname or ""
            if name in self.hosts or ipaddress.ip_address(name):
                return
        raise HttpError(400, "this server has no such name; name it in allowed_hosts when the server is started")

    def _identify(self, scope: Scope) -> str:
        """Who asks: an API key, or an address; 401 without a right key where one is needed."""
        address = (scope.get("client") or ("",))[0]
        if not self.keys:
            return address
        headers = dict(scope["headers"])
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        offered = (token.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b""))
        digests = [sha256(text).hexdigest() for text in offered]
        if right := [key for key in self.keys for text in digests if hmac.compare_digest(key, text)]:
            return right[0]
        path = scope["path"]
        if scope["method"] in ("GET", "HEAD") and (path in OPEN or path.startswith("/playground/web/")):
            return address
        message = "the API key is missing or wrong; send Authorization: Bearer KEY"
        raise HttpError(401, message, {"WWW-Authenticate": "Bearer"})

    async def _post(self, scope: Scope, receive: Receive, write: Send) -> None:
        context: RequestContext = scope["context"]
        guess = 0
        try:
            try:
                async with asyncio.timeout(self.limits.body_seconds):
                    context.body = await self._body(scope, context, receive)
            except TimeoutError:
                message = f"the body did not arrive within {self.limits.body_seconds:g} s"
                raise HttpError(408, message, {"Connection": "close"}) from None
            self.rates.check(context.client)
            guess = len(context.body) // 8
            self.rates.charge(context.client, guess)  # before the tokens are counted: many may come at once
            context.accept()
            await self.app(scope, receive, write)
        finally:
            context.release()
            self.rates.charge(context.client, max(1, context.tokens) - guess)

    async def _body(self, scope: Scope, context: RequestContext, receive: Receive) -> bytes:
        headers = dict(scope["headers"])
        if headers.get(b"content-encoding", b"identity").lower() not in (b"", b"identity"):
            raise HttpError(415, "compressed bodies are not read; send plain JSON")
        if (declared := headers.get(b"content-length", b"")).isdigit():
            check_limit(int(declared), self.limits.body, "bytes of body")
        body = bytearray()
        async for part in Request(scope, receive).stream():
            context.hold(len(part))
            body += part
            check_limit(len(body), self.limits.body, "bytes of body")
        return bytes(body)


async def _drain(request: Request, most: int) -> None:
    """Read what a refused client still sends, within reason: many clients read no response before they have sent."""
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(1.0):
            async for part in request.stream():
                most -= len(part)
                if most <= 0:
                    return


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 connection, with bounds on heads and trailers, and deadlines for reading and writing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request; close a connection that is one too many."""
        super().connection_made(transport)
        self.context: RequestContext | None = None  # of the request in progress
        self._unparsed = 0  # bytes since the parser last finished a head, a part of a body, or a request
        self._parts = TINY_PARTS  # how many more this body may have
        self._arriving = True  # a request is arriving, or expected
        self._read_at = self._written_at = time.monotonic()  # the last time at which nothing was expected of the client
        self._check_time()
        address, most = (self.client or ("",))[0], self.app_state["connections"]
        same = sum((getattr(other, "client", None) or ("",))[0] == address for other in self.connections)
        if len(self.connections) > most or same > max(1, most // 2):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop working for a client that has left."""
        self._clock.cancel()
        if self.context is not None:
            self.context.gone = True
        super().connection_lost(exc)

    def _check_time(self) -> None:
        """Close the connection of a client that does not send its request, or does not read the response, in time.

        While a request is in progress, the next one may wait; a late body the middleware answers 408.
        """
        now, seconds = time.monotonic(), self.app_state["limits"].body_seconds
        if not self._arriving or not (self.cycle is None or self.cycle.response_complete):
            self._read_at = now
        if not self.transport.get_write_buffer_size():
            self._written_at = now
        if now - min(self._read_at, self._written_at) > seconds:
            self.transport.abort()
        self._clock = self.loop.call_later(seconds / 10, self._check_time)

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        self._written_at = time.monotonic()

    def data_received(self, data: bytes) -> None:
        """Parse some bytes."""
        self._unset_keepalive_if_required()
        self._arriving = True
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
            headers = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
            version = self.parser.get_http_version().encode()
            first = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
            self._parse(first + b"".join(headers) + b"\r\n" + data[offer.args[0] :])

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._unparsed, self._parts, self._arriving = 0, TINY_PARTS, True

    def on_headers_complete(self) -> None:
        """The head is complete. An exception here becomes a 400, and the connection is closed."""
        self._unparsed = 0
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD:
            raise ValueError("the head is too long")
        if len(self.pipeline) >= PIPELINED:
            raise ValueError("too many requests at once")
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this is no proxy")
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self.cycle.scope["connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_body(self, body: bytes) -> None:
        """A part of the body. Many tiny parts take much time: as an exception, this becomes a 400."""
        self._unparsed = 0
        self._parts += len(body) // 16 - 1
        if self._parts < 0:
            raise ValueError("the parts of the body are too small")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._unparsed = 0
        self._arriving = False
        if not self.parser.should_upgrade():
            super().on_message_complete()
