"""A connection: HTTP/1.1 by httptools, whose parser is C; and bounds on what it takes in before it answers."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = 16384
"""Bytes of a request's head."""
PIPELINED = 16
"""Requests of a connection that wait for the one before them: each takes memory, and hardly anybody sends any."""


class Protocol(HttpToolsProtocol):
    """As uvicorn's; but a first request must begin in time, heads are bounded, and it says when its client is gone."""

    seconds = 10.0
    """Until the first request must have begun."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._clock = self.loop.call_later(self.seconds, self._silent)
        self._head: int | None = None  # bytes of a head that is not whole yet, from its second read on
        self._open: list[Any] = []  # requests that are not answered; uvicorn knows the newest alone

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop it; and let nobody work for a client that is gone."""
        self._clock.cancel()
        for cycle in self._open:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
            if "call" in cycle.scope:
                cycle.scope["call"].gone = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse some more, unless a head has no end."""
        self._unset_keepalive_if_required()
        self._begun = False
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._head is None or self._begun:  # in the read in which it began, what came before it is not its own
            return
        self._head += len(data)
        if self._head > HEAD:
            self.send_400_response("The head of the request is too long.")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            # The parser leaves the rest to another protocol that was offered (by Java's client: HTTP/2). There is
            # none here: the request is read again without the offer.
            kept = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
            version = self.parser.get_http_version().encode()
            first = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
            self._parse(first + b"".join(kept) + b"\r\n" + data[offer.args[0] :])

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._head, self._begun = 0, True

    def on_headers_complete(self) -> None:
        """It is whole. What is raised here becomes a 400, and the connection is closed."""
        self._head = None
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD:
            raise ValueError("the head is too long")
        if len(self.pipeline) >= PIPELINED:
            raise ValueError("too many requests at once")
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this is no proxy")
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._open = [cycle for cycle in self._open if not cycle.response_complete]
        self._open.append(self.cycle)

    def on_message_complete(self) -> None:
        """The body is whole."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()
