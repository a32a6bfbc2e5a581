"""The playground's page: its files, compressed once, under a policy that lets nothing in from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from everybert.serving.limits import Refusal

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)


def assets() -> dict[str, bytes]:
    """The page's files by name: its own, and the attention viewer's."""
    found: dict[str, bytes] = {}
    for package in ("everybert.inside", "everybert.serving"):
        folder = files(package) / "web"
        for file in folder.iterdir():
            if file.name.rpartition(".")[2] in TYPES:
                found[file.name] = file.read_bytes()
    return found


def add_page(routes: APIRouter) -> None:
    """The files, compressed once."""
    held = {name: (data, gzip.compress(data, mtime=0), _tag(data)) for name, data in assets().items()}

    def send(name: str, request: Request) -> Response:
        if name not in held:
            raise Refusal(404, "there is no such file")
        data, packed, tag = held[name]
        headers = {"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        headers |= {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        if name.endswith(".html"):
            headers["Content-Security-Policy"] = POLICY
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            data, headers["Content-Encoding"] = packed, "gzip"
        return Response(data, media_type=TYPES[name.rpartition(".")[2]] + "; charset=utf-8", headers=headers)

    @routes.get("/")
    async def index(request: Request) -> Response:
        """The page."""
        return send("index.html", request)

    @routes.get("/playground/web/{name}")
    async def file(name: str, request: Request) -> Response:
        """A file of the page."""
        return send(name, request)


def _tag(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:16]}"'
