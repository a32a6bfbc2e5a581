"""What the site's pages are made of besides their own text: code quoted from the source, equations, generated pages.

- A ```source block names a function or class (`everybert.model.attention:watched`) and is replaced by its code as it
  stands in src/. Two more lines, `from: …` and `to: …`, keep the part between the first lines that begin so.
- `$…$` and `$$…$$` become MathML, which browsers draw without a script.
- reference/cli.md, recipes.md and http.md are made from the commands, the recipes and the server themselves;
  CONTRIBUTING.md and CHANGELOG.md come from the project's folder.
"""

from __future__ import annotations

import ast
import re
import textwrap
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = re.compile(r"^```source\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.DOTALL)


# ── code as it stands ────────────────────────────────────────────────────────────────────────────────────────


def quote(reference: str) -> tuple[str, str]:
    """(path from the root, code) of a ```source block's text."""
    name, *limits = reference.strip().splitlines()
    module, _, inner = name.strip().partition(":")
    path = ROOT.joinpath("src", *module.split(".")).with_suffix(".py")
    text = path.read_text("utf-8")
    node: Any = ast.parse(text)
    for part in filter(None, inner.split(".")):
        node = next((n for n in node.body if _names(n) == part), None)
        if node is None:
            raise ValueError(f"{name}: {path.name} has no {inner}")
    lines = text.splitlines()
    if inner:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        lines = lines[first - 1 : node.end_lineno]
    for limit in limits:
        which, _, start = limit.partition(":")
        at = next((i for i, line in enumerate(lines) if line.strip().startswith(start.strip())), None)
        if at is None or which not in ("from", "to"):
            raise ValueError(f"{name}: no line begins with {start.strip()!r}")
        lines = lines[at:] if which == "from" else lines[: at + 1]
    return str(path.relative_to(ROOT)), textwrap.dedent("\n".join(lines))


def _names(node: ast.AST) -> str | None:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return getattr(target, "id", None)
    return getattr(node, "name", None)


def _quoted(match: re.Match[str]) -> str:
    path, code = quote(match[1])
    return f'<p class="quoted">{path}</p>\n\n```python\n{code}\n```'


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
    """Put quoted code and placeholders of equations into a page."""
    markdown = re.sub(r"^( *)```output$", r"\1``` { .text .output .no-copy }", markdown, flags=re.MULTILINE)
    markdown, page.meta["equations"] = mathml(SOURCE.sub(_quoted, markdown))
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
        "Made from the commands themselves; `everybert COMMAND --help` says the same. Errors are one line, with exit "
        "code 2. `--json` prints results for machines.",
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

    from everybert.cli.options import parameter_rows

    context = typer.Context(command, info_name=f"everybert {name}")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join(["everybert", name, *(_metavar(p) for p in arguments), "[OPTIONS]"])
    out = [f"### everybert {name}", "", _prose(command.help), "", "```text", usage, "```", ""]
    rows = [row for section in parameter_rows(command, context).values() for row in section if "--help" not in row[0]]
    if rows:
        out += ["| | |", "|---|---|", *(f"| {_code(flags)} | {_cell(text)} |" for flags, text in rows)]
    examples = [line.strip() for line in (command.epilog or "").splitlines() if "everybert " in line]
    if examples:
        out += ["", "```text", *examples, "```"]
    return [*out, ""]


def _metavar(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _prose(text: str | None) -> str:
    """One line, whose brackets are no links."""
    return " ".join((text or "").split()).replace("][", "]&#91;")


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>".replace("|", "&#124;").replace("[", "&#91;")


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|")


def recipes() -> str:
    """Every recipe that comes with the library, as its file has it."""
    from everybert.training import recipe

    out = [
        "# Recipes",
        "",
        "A recipe is one TOML file: the model, the examples, the masking, the batch, the optimiser, the schedule. "
        "`everybert pretrain --list` lists those that come with the library, `--show` prints one, `--set` changes a "
        "line. Copy one to make your own.",
        "",
    ]
    for name in recipe.names():
        out += [f"## {name}", "", "```toml", recipe.text(name).rstrip(), "```", ""]
    return "\n".join(out)


def http() -> str:
    """Every endpoint, with an example of what goes in and comes out."""
    import json

    from everybert.serving.app import Service, create_app

    document = create_app(Service()).openapi()
    out = [
        "# HTTP",
        "",
        "What `everybert serve` answers. Bodies are JSON. The running server shows the same, to try out, at `/docs`; "
        "clients that speak OpenAI's or TEI's embedding interface work as they are. Every endpoint takes `model` where "
        "several are served. Errors are JSON with a cause: 401 (the key), 413 (too large), 422 (what is wrong with the "
        "request), 429 (too busy: try again), 503 (ending).",
        "",
    ]
    shapes = document["components"]["schemas"]

    def example(content: Any) -> str | None:
        name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
        examples = shapes.get(name, {}).get("examples")
        return json.dumps(examples[0], ensure_ascii=False) if examples else None

    for path, methods in document["paths"].items():
        if path.startswith("/playground") or path == "/":
            continue
        for method, about in methods.items():
            out += [f"## {method.upper()} {path}", "", _prose(about.get("description")), ""]
            if body := example(about.get("requestBody", {}).get("content", {})):
                out += ["```json", body, "```", ""]
            if answer := example(about["responses"]["200"].get("content", {})):
                out += ["answers", "", "```json", answer, "```", ""]
    return "\n".join(out)
