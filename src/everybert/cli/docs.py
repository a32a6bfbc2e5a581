"""The docs of dataclass fields, read from their source: help shows them without importing torch."""

from __future__ import annotations

import ast
from functools import cache
from itertools import pairwise
from pathlib import Path


@cache
def field_docs(module: str, name: str) -> dict[str, str]:
    """Field → its docstring and default, of a dataclass given as "everybert.training.tuning", "Settings"."""
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(path.read_text("utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    docs: dict[str, str] = {}
    for field, doc in pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            default = field.value.value if isinstance(field.value, ast.Constant) else None
            shown = "" if default is None or default is False else f" (default: {default!s})"
            docs[field.target.id] = " ".join(str(doc.value.value).split()) + shown
    return docs
