"""The documentation's site: it builds without a warning, quotes code that exists, and asks nothing of other hosts."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import doc_pages as pages
import doc_reference
import hooks
import pytest

from everybert.cli.main import COMMANDS
from everybert.training import recipe

ASKS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
"""Elements for which a browser fetches something by itself, and where it is named."""


class Fetched(HTMLParser):
    """What a page makes a browser fetch, and the text of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ASKS and given.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.urls.append(given.get(ASKS[tag]) or "")


def test_the_site_builds_without_a_warning_and_asks_nothing_of_other_hosts(tmp_path: Path):
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(pages.ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    found = {str(path.relative_to(tmp_path)): path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    every_page_is_there(found)
    for name, html in found.items():
        fetched = Fetched()
        fetched.feed(html)
        assert fetched.urls and not [url for url in fetched.urls if re.match(r"(https?:)?//", url)], name
        assert not re.search(r"equation\d{4}equation", html), name
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text("utf-8")), style


def every_page_is_there(found: dict[str, str]) -> None:
    for page in pages.DOCS.rglob("*.md"):
        assert str(page.relative_to(pages.DOCS).with_suffix(".html")) in found, page
    assert all(f'id="everybert-{name}' in found["reference/cli.html"] for name in COMMANDS)
    assert all(f'id="{name}"' in found["reference/recipes.html"] for name in recipe.names())
    assert "/v1/embeddings" in found["reference/http.html"]
    assert 'id="modelfill"' in found["reference/python.html"]
    attention = found["lectures/04-attention.html"]
    assert "weights = torch.softmax(scores, dim=-1)" in re.sub(r"<[^>]+>", "", attention) and "<msqrt>" in attention


@pytest.mark.parametrize("name", doc_reference.PAGES)
def test_the_reference_is_what_the_program_says(name: str):
    page = doc_reference.FOLDER / f"{name}.md"
    assert page.read_text("utf-8") == doc_reference.PAGES[name](), "run make docs-outputs"


def test_pages_render_on_a_code_host():
    """No page has what only the site's generator understands."""
    for page in [*pages.DOCS.rglob("*.md"), pages.ROOT / "README.md"]:
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"^(::: |!!! |\?\?\? |=== \"|--8<--)|\{: ?[.#]|\{%", text, re.MULTILINE), page.name
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"`[^`]*`", "", text)):
            assert re.match(r"https?:|mailto:", link) or (page.parent / link).exists(), f"{page.name}: {link}"


def test_equations_leave_code_alone():
    pytest.importorskip("latex2mathml")
    text, found = hooks.mathml("$a$ `$b$`\n```sh\necho $HOME $PATH\n```\n$$\nc\n$$\n")
    assert len(found) == 2 and "`$b$`" in text and "echo $HOME $PATH" in text
    assert 'display="block"' in found[1] and 'class="equation"' in found[1]
