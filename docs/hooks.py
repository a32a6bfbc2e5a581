"""Hooks of the documentation site: equations, copied pages.

- `$…$` and `$$…$$` become MathML, which browsers render without a script.
- CONTRIBUTING.md and CHANGELOG.md are copied from the project folder.
"""

from __future__ import annotations

import re
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


# ── pages of the project's folder ────────────────────────────────────────────────────────────────────────────


def on_files(files: Any, config: Any) -> Any:
    """Add the copied pages."""
    from mkdocs.structure.files import File

    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        files.append(File.generated(config, name.lower(), content=(ROOT / name).read_text("utf-8")))
    return files
