"""Hooks of the documentation site: equations, generated pages.

- `$…$` and `$$…$$` become MathML, which browsers render without a script.
- reference/cli.md, recipes.md and http.md are generated from the commands, the recipes and the server;
  CONTRIBUTING.md and CHANGELOG.md are copied from the project folder.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.DOTALL)


# ── equations ────────────────────────────────────────────────────────────────────────────────────────────────


def mathml(text: str) -> tuple[str, list[str]]:
    """The text with a placeholder for each equation, and the equations as MathML."""
    from latex2mathml.converter import convert

    found: list[str] = []

    def keep(match: re.Match[str]) -> str:
        block, inline = match.groups()
        drawn = convert((block or inline).strip(), display="block" if block else "inline")
        found.append(f'<div class="equation">{drawn}</div>' if block else drawn)
        return f"equation{len(found) - 1:04}equation"

    parts = CODE.split(text)
    parts[::2] = [MATH.sub(keep, part) for part in parts[::2]]
    return "".join(parts), found


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put placeholders of equations into a page."""
    markdown = re.sub(r"^( *)```output$", r"\1``` { .text .output .no-copy }", markdown, flags=re.MULTILINE)
    markdown, page.meta["equations"] = mathml(markdown)
    return markdown


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Put the equations in."""
    for number, drawn in enumerate(page.meta.pop("equations", [])):
        mark = f"equation{number:04}equation"
        html = html.replace(f"<p>{mark}</p>", drawn).replace(mark, drawn)
    return html


# ── pages made from the program ──────────────────────────────────────────────────────────────────────────────


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for name, text in (("cli", cli()), ("recipes", recipes()), ("http", http())):
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        files.append(File.generated(config, name.lower(), content=(ROOT / name).read_text("utf-8")))
    return files


def cli() -> str:
    """Every command, its arguments, options and examples."""
    import typer

    from everybert.cli.main import COMMANDS, app

    group: Any = typer.main.get_command(app)
    out = [
        "# Command line",
        "",
        "Generated from the commands; `everybert COMMAND --help` prints the same. Errors are one line, with exit code "
        "2. `--json` prints machine-readable results.",
        "",
    ]
    panel = ""
    for name, (_, _, where) in COMMANDS.items():
        if where != panel:
            panel = where
            out += [f"## {panel}", ""]
        context = typer.Context(group, info_name="everybert")
        command = group.resolve_command(context, [name])[1]
        inner = getattr(command, "commands", None)
        for path, one in [(f"{name} {k}", v) for k, v in inner.items()] if inner else [(name, command)]:
            out += _command(path, one)
    return "\n".join(out)


def _command(name: str, command: Any) -> list[str]:
    import typer

    from everybert.cli.options import EXAMPLES, parameter_rows

    context = typer.Context(command, info_name=f"everybert {name}")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join(["everybert", name, *(_metavar(p) for p in arguments), "[OPTIONS]"])
    out = [f"### everybert {name}", "", _prose(command.help), "", "```text", usage, "```", ""]
    rows = [row for section in parameter_rows(command, context).values() for row in section if "--help" not in row[0]]
    if rows:
        out += ["| | |", "|---|---|", *(f"| {_code(flags)} | {_cell(text)} |" for flags, text in rows)]
    out += ["", "```text", EXAMPLES[name].rstrip(), "```"]
    return [*out, ""]


def _metavar(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _prose(text: str | None) -> str:
    """One line, in which brackets are not links."""
    return " ".join((text or "").split()).replace("][", "]&#91;")


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>".replace("|", "&#124;").replace("[", "&#91;")


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|")


def recipes() -> str:
    """The text of every bundled recipe."""
    from everybert.training import recipe

    out = [
        "# Recipes",
        "",
        "A recipe is one TOML file: the model, the examples, the masking, the batch, the optimiser, the schedule. "
        "`everybert pretrain --list` lists the bundled recipes, `--show` prints one, `--set` changes a setting. Copy "
        "one to write your own.",
        "",
    ]
    for name in recipe.names():
        out += [f"## {name}", "", "```toml", recipe.text(name).rstrip(), "```", ""]
    return "\n".join(out)


def http() -> str:
    """Every endpoint, with an example of a request and a response."""
    import json

    from everybert.serving.app import Service, create_app

    document = create_app(Service()).openapi()
    out = [
        "# HTTP",
        "",
        "The endpoints of `everybert serve`. Bodies are JSON. The running server has an interactive page at `/docs`; "
        "clients of OpenAI's or TEI's embedding API work unchanged. If several models are served, `model` selects one. "
        "Errors are JSON with the cause: 401 (API key), 413 (too large), 422 (invalid request), 429 (too busy: try "
        "again), 503 (shutting down).",
        "",
    ]

    def example(content: Any) -> str | None:
        shown = content.get("application/json", {}).get("example")
        return None if shown is None else json.dumps(shown, ensure_ascii=False)

    for path, methods in document["paths"].items():
        if path.startswith("/playground") or path == "/":
            continue
        for method, about in methods.items():
            out += [f"## {method.upper()} {path}", "", _prose(about.get("description")), ""]
            if body := example(about.get("requestBody", {}).get("content", {})):
                out += ["```json", body, "```", ""]
            if answer := example(about["responses"]["200"].get("content", {})):
                out += ["returns", "", "```json", answer, "```", ""]
    return "\n".join(out)
