"""/docs: the OpenAPI document as one page of plain HTML. It runs no script and asks nothing of other hosts."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d8dee4; --card: #f6f8fa; --back: #fff;
  --post: #1a6e3c; --get: #0b5cad; --code: #eef1f4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #a2abb6; --line: #363d47; --card: #1b2028;
  --back: #12161b; --post: #62c98a; --get: #74b3f4; --code: #252c36; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 56rem; padding: 1.5rem 1rem 4rem; background: var(--back); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
h3 { font-size: .9rem; margin: 1rem 0 .25rem; color: var(--soft); }
a { color: var(--get); } p { margin: .4rem 0; }
code, pre { font: .85rem/1.45 ui-monospace, monospace; }
pre { background: var(--code); padding: .6rem .8rem; border-radius: 6px; overflow-x: auto; margin: .25rem 0; }
details { border: 1px solid var(--line); border-radius: 8px; margin: .5rem 0; background: var(--card); }
summary { padding: .5rem .8rem; cursor: pointer; display: flex; gap: .7rem; align-items: baseline; flex-wrap: wrap; }
summary:focus-visible, a:focus-visible { outline: 2px solid var(--get); outline-offset: 2px; }
summary b { min-width: 2.8rem; font-size: .8rem; } .post { color: var(--post); } .get { color: var(--get); }
summary span { color: var(--soft); flex: 1 1 20rem; font-size: .9rem; }
summary::after { content: "+"; color: var(--soft); } details[open] > summary::after { content: "–"; }
.body { padding: 0 .9rem .9rem; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td, th { text-align: left; vertical-align: top; padding: .25rem .5rem .25rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); }
""".strip()
POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src 'sha256-{}'"


def add_reference(app: FastAPI) -> None:
    """Serve the page at /docs; it is made once, when it is first asked for."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    headers = {"Content-Security-Policy": POLICY.format(digest), "X-Content-Type-Options": "nosniff"}
    made: list[str] = []

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        if not made:
            made.append(page(app.openapi(), str(request.base_url).rstrip("/")))
        return HTMLResponse(made[0], headers=headers)


def page(document: dict[str, Any], address: str) -> str:
    """An OpenAPI document as HTML, its endpoints by tag."""
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            tag = told.get("tags", ["other"])[0]
            groups.setdefault(tag, []).append(_endpoint(document, path, method, told, address))
    body = "".join(f"<section><h2>{escape(tag)}</h2>{''.join(parts)}</section>" for tag, parts in groups.items())
    about = document["info"]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(about['title'])}: the HTTP API</title><style>{STYLE}</style>"
        f"<main><h1>{escape(about['title'])} {escape(about['version'])}</h1>"
        f"<p>{escape(about.get('description', ''))} <a href='/'>Playground</a> · "
        f"<a href='/openapi.json'>openapi.json</a></p>{body}</main></html>"
    )


def _endpoint(document: dict[str, Any], path: str, method: str, told: dict[str, Any], address: str) -> str:
    """One endpoint: what it does, how it is called, what it answers."""
    asked = _schema(document, told.get("requestBody", {}))
    answered = _schema(document, told.get("responses", {}).get("200", {}))
    given = next(iter(asked.get("examples", [])), None)
    call = f"curl {address}{path}"
    if given is not None:
        given = {name: value for name, value in given.items() if name != "model"}  # the first model served answers
        call += f" \\\n  -H 'content-type: application/json' \\\n  -d '{json.dumps(given, ensure_ascii=False)}'"
    parts = [_titled("Request", f"<pre>{escape(call)}</pre>"), _titled("Fields", _fields(document, asked))]
    for answer in answered.get("examples", [])[:1]:
        shown = json.dumps(answer, ensure_ascii=False, indent=2)
        parts.append(_titled("Answer", f"<pre>{escape(shown)}</pre>"))
    parts.append(_titled("Statuses", _statuses(told.get("responses", {}))))
    words = escape(told.get("description", ""))
    return (
        f"<details id='{escape(method + path.replace('/', '-'))}'><summary><b class='{escape(method)}'>"
        f"{escape(method.upper())}</b><code>{escape(path)}</code><span>{words}</span></summary>"
        f"<div class='body'>{''.join(parts)}</div></details>"
    )


def _titled(title: str, content: str) -> str:
    return f"<h3>{title}</h3>{content}" if content else ""


def _schema(document: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a request's body or an answer, its reference followed."""
    found = part.get("content", {}).get("application/json", {}).get("schema", {})
    return _follow(document, found)


def _follow(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"][name] if name else schema


def _fields(document: dict[str, Any], schema: dict[str, Any]) -> str:
    required = set(schema.get("required", []))
    rows = [
        (f"<code>{escape(name)}</code>", escape(_kind(document, told)), _note(told, name in required))
        for name, told in schema.get("properties", {}).items()
    ]
    return _table(("name", "type", ""), rows)


def _note(told: dict[str, Any], required: bool) -> str:
    """What is said of a field, and what it is where it is left out."""
    words = [escape(told["description"])] if "description" in told else []
    if required:
        words.append("Required.")
    elif told.get("default") is not None:
        words.append(f"Default: <code>{escape(json.dumps(told['default']))}</code>.")
    return " ".join(words)


def _kind(document: dict[str, Any], told: dict[str, Any]) -> str:
    """A type in words: string, list of integer, "float" or "base64"."""
    if options := told.get("anyOf"):
        return " or ".join(dict.fromkeys(_kind(document, x) for x in options if x.get("type") != "null"))
    if "enum" in told or "const" in told:
        return " or ".join(json.dumps(value) for value in told.get("enum", [told.get("const")]))
    if told.get("type") == "array":
        return f"list of {_kind(document, told.get('items', {}))}"
    return str(_follow(document, told).get("type", "any"))


def _statuses(responses: dict[str, Any]) -> str:
    rows = [(f"<code>{status}</code>", escape(told.get("description", ""))) for status, told in responses.items()]
    return _table(("status", "meaning"), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def cells(kind: str, row: tuple[str, ...]) -> Iterator[str]:
        return (f"<{kind}>{cell}</{kind}>" for cell in row)

    if not rows:
        return ""
    lines = "".join(f"<tr>{''.join(cells('td', row))}</tr>" for row in rows)
    return f"<table><tr>{''.join(cells('th', head))}</tr>{lines}</table>"
