"""Every link of the lectures opens the playground with its example filled in, and a result."""

from __future__ import annotations

import re

import doc_notebooks as notebooks
import pytest
import server as own
from pages import ready

from everybert.store import hub

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LINK = re.compile(r"\(http://127\.0\.0\.1:8000/(#[^)]+)\)")
LINKS = [link for page in notebooks.lectures() for link in LINK.findall(page.read_text("utf-8"))]


@pytest.fixture(scope="module")
def lecture_url():
    names = ("everybert-classic", "everybert-small")
    with own.running({name: hub.resolve(name) for name in names}) as (url, _):
        yield url


@pytest.mark.parametrize("link", LINKS)
def test_a_link_shows_its_example(link: str, new_page, lecture_url: str):
    page = new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{lecture_url}/{link}")
    ready(page)
    assert not wrong and page.locator(".result [role=alert]").count() == 0
    assert re.search(r"model=([\w-]+)", link)[1] in page.evaluate("location.hash"), "the model that the link names"
