"""What the server takes and what it turns away: the limits, the refusals, and the account of one request."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from everybert.text.tokenizer import Encoding, Tokenizer


@dataclass(frozen=True)
class Limits:
    """How much one request, and all together, may ask for."""

    body: int = 2_000_000
    """Bytes of a request's body."""
    inputs: int = 1024
    """Texts of a request."""
    text_tokens: int = 65_536
    """Tokens of a text."""
    request_tokens: int = 262_144
    """Tokens of a request, every window of long texts counted."""
    queue: int = 256
    """Requests taken at a time, waiting ones included; more are answered 429."""
    queue_bytes: int = 64_000_000
    """Bytes of their bodies together."""
    seconds: float = 60.0
    """Time until a request is given up."""
    body_seconds: float = 10.0
    """Time in which a head or a body must have arrived, and in which each piece of an answer must be read."""
    threads: int = 64
    """Requests that are tokenized, or wait for the model, at a time."""
    wait: float = 0.002
    """Seconds that a batch with room in it waits for requests that are on their way."""
    inline: int = 128
    """Tokens up to which the event loop computes a batch by itself, on an idle CPU; 0 is never."""
    budget: int | None = None
    """Tokens of a batch; None is the device's own measure."""


class Refusal(Exception):
    """An answer other than the one asked for: a status, the reason, and what to do about it."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers or {}


def too_much(asked: int, limit: int, what: str) -> Refusal:
    """413 for a request that asks for more than a limit."""
    return Refusal(413, f"{asked:,} {what} where the limit is {limit:,}; send less at a time")


KINDS = {
    400: "bad_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    415: "unsupported_media_type",
    422: "validation",
    429: "overloaded",
    503: "unavailable",
}


def error_body(path: str, status: int, message: str) -> dict[str, Any]:
    """A refusal as JSON: in OpenAI's form under /v1, else in TEI's."""
    kind = KINDS.get(status, "error")
    if path.startswith("/v1/"):
        return {"error": {"message": message, "type": kind, "param": None, "code": str(status)}}
    return {"error": message, "error_type": kind}


@dataclass(eq=False)
class Call:
    """A request on its way: until when it is wanted, and what it has used."""

    limits: Limits
    deadline: float = math.inf
    """By time.monotonic."""
    gone: bool = False
    """The client has left, or the time is over: nobody waits for the answer."""
    tokens: int = 0
    """Tokens of its texts, special ones included."""
    cut: int = 0
    """Tokens left out because truncation was asked for."""
    body: bytes = field(default=b"", repr=False)

    def check(self) -> None:
        """Stop where nobody waits any more."""
        if self.gone or time.monotonic() > self.deadline:
            raise self.late()

    def late(self) -> Refusal:
        """The time is over: what to tell those who still wait."""
        self.gone = True
        return Refusal(503, f"no answer within {self.limits.seconds:g} s; try again later", {"Retry-After": "1"})

    def read(self, lengths: Sequence[int]) -> None:
        """Count texts of so many tokens, and refuse what is too long."""
        longest = max(lengths, default=0)
        if longest > self.limits.text_tokens:
            raise too_much(longest, self.limits.text_tokens, "tokens in a text")
        self.tokens += sum(lengths)
        if self.tokens > self.limits.request_tokens:
            raise too_much(self.tokens, self.limits.request_tokens, "tokens in a request")


CALL: ContextVar[Call | None] = ContextVar("call", default=None)
"""The request that the current thread works for."""


class CountingTokenizer(Tokenizer):
    """A tokenizer that counts what each request reads, and keeps the limits."""

    def __init__(self, base: Tokenizer) -> None:
        self.__dict__ = base.__dict__

    def encode_batch(self, texts: Sequence[str | tuple[str, str]], specials: bool = True) -> list[Encoding]:
        """As Tokenizer's."""
        found = super().encode_batch(texts, specials)
        if (call := CALL.get()) is not None:
            call.read([len(encoding) for encoding in found])
        return found

    def ids_batch(self, texts: Sequence[str | tuple[str, str]], specials: bool = True) -> list[list[int]]:
        """As Tokenizer's."""
        found = super().ids_batch(texts, specials)
        if (call := CALL.get()) is not None:
            call.read([len(ids) for ids in found])
        return found
