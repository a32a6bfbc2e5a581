"""The documentation's site: it builds without a warning, quotes code that exists, and asks nothing of other hosts."""

from __future__ import annotations

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path

import doc_pages as pages
import pytest

from everybert.cli.main import COMMANDS
from everybert.training import recipe

spec = importlib.util.spec_from_file_location("doc_hooks", pages.DOCS / "hooks.py")
assert spec is not None and spec.loader is not None
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)

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


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: a warning is an error."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    out = tmp_path_factory.mktemp("site")
    config = load_config(str(pages.ROOT / "mkdocs.yml"), site_dir=str(out), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return out


def test_every_page_is_there(site: Path):
    for page in pages.DOCS.rglob("*.md"):
        assert (site / page.relative_to(pages.DOCS).with_suffix(".html")).is_file(), page
    cli = (site / "reference" / "cli.html").read_text("utf-8")
    assert all(f'id="everybert-{name}' in cli for name in COMMANDS)
    assert all(f'id="{name}"' in (site / "reference" / "recipes.html").read_text("utf-8") for name in recipe.names())
    assert "/v1/embeddings" in (site / "reference" / "http.html").read_text("utf-8")
    assert 'id="everybert.inference.model.Model.fill"' in (site / "reference" / "python.html").read_text("utf-8")


def test_nothing_is_asked_of_other_hosts(site: Path):
    for page in site.rglob("*.html"):
        fetched = Fetched()
        fetched.feed(page.read_text("utf-8"))
        assert fetched.urls and not [url for url in fetched.urls if re.match(r"(https?:)?//", url)], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text("utf-8")), style


def test_code_and_equations_are_in_the_pages(site: Path):
    attention = (site / "explained" / "attention.html").read_text("utf-8")
    text = re.sub(r"<[^>]+>", "", attention)
    assert "weights = torch.softmax(scores, dim=-1)" in text and "<msqrt>" in attention
    for page in site.rglob("*.html"):
        html = page.read_text("utf-8")
        assert not re.search(r"equation\d{4}equation|language-source", html), page


def test_quotes_are_the_code_as_it_stands():
    import inspect

    from everybert.model.heads import Pooler
    from everybert.text.windows import windows

    assert hooks.quote("everybert.text.windows:windows")[1] == inspect.getsource(windows).rstrip()
    path, code = hooks.quote("everybert.model.heads:Pooler.forward")
    assert path == "src/everybert/model/heads.py" and inspect.getsource(Pooler.forward).strip().endswith(code[-30:])
    part = hooks.quote("everybert.model.attention:watched\nfrom: scores =\nto: mixed =")[1].splitlines()
    assert part[0].startswith("scores = ") and part[-1] == "mixed = weights @ v"
    for wrong in ("everybert.text.windows:doors", "everybert.text.windows:windows\nfrom: nowhere"):
        with pytest.raises(ValueError):
            hooks.quote(wrong)


def test_equations_leave_code_alone():
    text, found = hooks.mathml("$a$ `$b$`\n```sh\necho $HOME $PATH\n```\n$$\nc\n$$\n")
    assert len(found) == 2 and "`$b$`" in text and "echo $HOME $PATH" in text
    assert 'display="block"' in found[1] and 'class="equation"' in found[1]
