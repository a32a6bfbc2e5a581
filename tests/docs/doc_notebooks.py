"""Pages as notebooks: the lectures and docs/notebooks, with the outputs that the pages show, written beside them.

Python blocks become cells, commands become cells with `!`, everything else stays text. The answer of an exercise is
folded, with an empty cell before it. Run `make docs-outputs` to write them; a test compares them with the pages.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import doc_pages as pages

LECTURES = pages.DOCS / "lectures"
FOLDER = LECTURES / "notebooks"
START = "import os\nimport tempfile\n\nos.chdir(tempfile.mkdtemp())  # files that the cells write go here"
TURN = "# Your answer:\n"
FOLDED = {"jupyter": {"source_hidden": True, "outputs_hidden": True}}


class Cell(NamedTuple):
    """A cell of a notebook."""

    kind: str
    source: str
    output: str | None = None


def lectures() -> list[Path]:
    """The eleven pages, in the order of the course."""
    return sorted(LECTURES.glob("[0-9][0-9]-*.md"))


def sources() -> list[Path]:
    """Every page that is a notebook too."""
    return [*lectures(), *sorted((pages.DOCS / "notebooks").glob("*.md"))]


def path_of(page: Path) -> Path:
    """Where the notebook of a page is."""
    return page.parent / ("notebooks" if page.parent == LECTURES else "") / f"{page.stem}.ipynb"


def notebook(page: Path) -> str:
    """The text of a page's notebook."""
    text = page.read_text("utf-8")
    lines, cells, at = text.splitlines(), [Cell("code", START)], 0
    for block in pages.blocks(text):
        first, last = block.lines  # the fences are the lines before and after
        cells.append(Cell("markdown", "\n".join(lines[at : first - 1])))
        cells.append(cell_of(block) or Cell("markdown", "\n".join(lines[first - 1 : last + 1])))
        at = 1 + (block.output_lines[1] if block.output is not None else last)
    cells = arranged([*cells, Cell("markdown", "\n".join(lines[at:]))], moved=page.parent == LECTURES)
    turn = next((n for n, cell in enumerate(cells) if cell.source == TURN.strip()), len(cells))
    body = {
        "cells": [_json(cell, f"{page.stem}-{n}", folded=n > turn) for n, cell in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(body, ensure_ascii=False, indent=1) + "\n"


def cell_of(block: pages.Block) -> Cell | None:
    """A block as a cell of code, with its output; None for what is only shown."""
    if "source" in block.directives:
        return None
    if block.language == "python":
        return Cell("code", block.text, block.output)
    words = list(pages.commands(block.text)) if block.language in pages.SHELLS else []
    if not words or any(command[:2] == ["everybert", "serve"] for command in words):
        return None
    return Cell("code", "\n".join(f"!{shlex.join(command)}" for command in words), block.output)


def arranged(cells: list[Cell], moved: bool) -> list[Cell]:
    """Neighbouring texts in one cell, a cell for the reader's answer, links from a folder below if it is `moved`."""
    found: list[Cell] = []
    for kind, source, output in cells:
        if kind == "markdown":
            source = re.sub(r"^\s*<!-- test: .*-->\n?", "", source, flags=re.MULTILINE)
            source = re.sub(r"\]\((\d\d-[\w-]+)\.md", r"](\1.ipynb", source)
            source = re.sub(r"\]\((index\.md|\.\./)", r"](../\1", source) if moved else source
            before, answer, after = source.partition('<details markdown="1">\n<summary>Answer</summary>')
            if answer:
                found += [Cell("markdown", before), Cell("code", TURN)]
                source = f"**Answer** (unfold the cell below)\n{after}"
            source = source.replace("</details>", "")
        found.append(Cell(kind, source, output))
    merged: list[Cell] = []
    for kind, source, output in found:
        if kind == "markdown" and merged and merged[-1].kind == "markdown":
            merged[-1] = Cell(kind, f"{merged[-1].source}\n{source}")
        elif kind == "code" or source.strip():
            merged.append(Cell(kind, source, output))
    return [
        Cell(kind, re.sub(r"\n{3,}", "\n\n", source.strip("\n")) if kind == "markdown" else source.strip("\n"), output)
        for kind, source, output in merged
    ]


def _json(cell: Cell, name: str, folded: bool) -> dict[str, Any]:
    """One cell in the format of Jupyter (nbformat 4.5)."""
    kind, source, output = cell
    made: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": source.splitlines(keepends=True)}
    if kind == "code":
        shown = [] if output is None else [f"{line}\n" for line in output.splitlines()]
        streams = [{"name": "stdout", "output_type": "stream", "text": shown}] if shown else []
        made |= {"execution_count": None, "metadata": FOLDED if folded else {}, "outputs": streams}
    return made


def write() -> None:
    """Write every notebook."""
    for page in sources():
        path_of(page).write_text(notebook(page), encoding="utf-8")
