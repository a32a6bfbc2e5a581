"""The pages under docs/reference, made from the program: `make docs-outputs` writes them, a test compares them.

The examples of python.md are written by hand; what follows MARK there is made from the code.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
MARK = "<!-- From here on made from the code: make docs-outputs. -->"
PUBLIC = {
    "Models": ["inference.model:load", "inference.model:Model"],
    "Results": [
        "inside.masked:Candidate",
        "inference.embedding:Sparse",
        "inference.multi:maxsim",
        "inference.model:TokenVectors",
        "inference.model:Score",
        "inference.model:TokenScore",
        "tasks.classify:Prediction",
        "tasks.tag:Span",
        "tasks.answer:Answer",
        "tasks.choose:Choice",
        "tasks.rank:Ranked",
        "inside.attention:Attention",
        "inside.trace:Trace",
        "inside.neighbours:Neighbours",
        "inside.attribution:Attribution",
    ],
    "Fine-tuning and evaluation": [
        "training.finetune:finetune",
        "training.finetune:Tuned",
        "training.tuning:FinetuneSettings",
        "evaluation.evaluate:evaluate",
        "evaluation.doctor:doctor",
    ],
    "Text": ["text.tokenizer:Tokenizer", "text.tokenizer:Encoding", "text.train_tokenizer:train_tokenizer"],
    "Pre-training": ["corpus.build:build_corpus", "training.pretrain:pretrain", "training.distil:distil"],
    "The encoder": ["model.config:EncoderConfig", "model.ragged:Ragged", "model.heads:Network"],
    "scikit-learn and other libraries": [
        "sklearn:TextClassifier",
        "sklearn:TextRegressor",
        "sklearn:TextEmbedder",
        "integrations:Embedder",
    ],
    "Errors": ["errors:EverybertError"],
}
"""What the page lists, by section."""


# ── Python ───────────────────────────────────────────────────────────────────────────────────────────────────


def python() -> str:
    """Every public name: its signature, its explanation, and its fields or methods."""
    written = (FOLDER / "python.md").read_text("utf-8").partition(MARK)[0].rstrip()
    out = [written, "", MARK, ""]
    for section, names in PUBLIC.items():
        out += [f"## {section}", ""]
        for place in names:
            module, _, name = place.partition(":")
            source = Path(str(import_module(f"everybert.{module}").__file__)).read_text("utf-8")
            node = next(n for n in ast.parse(source).body if getattr(n, "name", None) == name)
            out += _class(node, module) if isinstance(node, ast.ClassDef) else _function(node, f"everybert.{module}.")
    return "\n".join(map(_wrapped, out)).rstrip() + "\n"


def _wrapped(text: str) -> str:
    """A paragraph on lines of readable length; tables, code and texts that have lines stay."""
    one = len(text) > 120 and "\n" not in text and not text.startswith(("|", "{", "["))
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) if one else text


def _class(node: ast.ClassDef, module: str) -> list[str]:
    out = [f"### {node.name}", "", f"`everybert.{module}.{node.name}`", "", *_paragraphs(node)]
    if fields := list(_fields(node)):
        out += ["| field | |", "|---|---|", *(f"| {_code(name)} | {_cell(text)} |" for name, text in fields), ""]
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and (method.name == "__init__" or not method.name.startswith("_")):
            name = node.name if method.name == "__init__" else f"{node.name}.{method.name}"
            out += _function(method, "", name, 4)
    return out


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The fields of a dataclass: "name: type = default", and what stands below each."""
    for one, after in zip(node.body, [*node.body[1:], None]):
        if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_"):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
            if "ClassVar" not in (kind := ast.unparse(one.annotation)):
                simple = one.value is not None and not isinstance(one.value, ast.Call)
                default = f" = {ast.unparse(one.value)}" if simple and one.value is not None else ""
                yield f"{ast.unparse(one.target)}: {kind}{default}", text


def _function(node: Any, prefix: str, name: str | None = None, level: int = 3) -> list[str]:
    name = name or node.name
    decorators = {ast.unparse(d) for d in node.decorator_list}
    out = [f"{'#' * level} {name}", ""]
    if "property" not in decorators and "cached_property" not in decorators:
        out += ["```py", signature(node, prefix + name), "```", ""]
    return [*out, *_paragraphs(node)]


def signature(node: Any, name: str) -> str:
    """A function as it is called; a parameter per line where one line would be too long."""
    given = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
    given = re.sub(r"(: [^=]*?)=", r"\1 = ", given)  # as the code is formatted
    returns = (
        "" if node.returns is None or (name[0].isupper() and "." not in name) else f" -> {ast.unparse(node.returns)}"
    )
    if len(f"{name}({given}){returns}") <= 100:
        return f"{name}({given}){returns}"
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(given):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(given[start:i].strip())
            start = i + 1
    parts.append(given[start:].strip())
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _paragraphs(node: Any) -> list[str]:
    """The docstring as Markdown."""
    text = ast.get_docstring(node)
    return [text.replace("][", "]&#91;"), ""] if text else []


# ── commands, recipes, HTTP ──────────────────────────────────────────────────────────────────────────────────


def cli() -> str:
    """Every command, its arguments, options and examples."""
    import typer

    from everybert.cli.main import COMMANDS, app

    group: Any = typer.main.get_command(app)
    out = [
        "# Command line",
        "",
        "Made from the commands: each prints the same with `--help`. Errors are one line, with exit code "
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
    return "\n".join(map(_wrapped, out)).rstrip() + "\n"


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
    return "\n".join(map(_wrapped, out)).rstrip() + "\n"


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
    return "\n".join(map(_wrapped, out)).rstrip() + "\n"


PAGES = {"cli": cli, "recipes": recipes, "http": http, "python": python}


def write() -> None:
    """Write every page."""
    for name, make in PAGES.items():
        (FOLDER / f"{name}.md").write_text(make(), encoding="utf-8")
