"""A server over tiny models, and Chromium in front of it. Every page is watched: for errors, for requests outside.

Screenshots go to build/screenshots (or $EVERYBERT_SCREENSHOTS), where CI keeps them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import server as own
from pages import FLAGS, SIZES, chromium, own_address, ready

from everybert.inference.model import Model, load
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return own.make_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def models(folders):
    return {name: load(folder, device="cpu") for name, folder in folders.items()}


@pytest.fixture(scope="session")
def served(folders, models):
    """(address, service): the tiny models, and a random one of BERT-base's size."""
    with own.running(folders) as (url, service):
        config = EncoderConfig(vocab_size=models["words"].config.vocab_size, init_range=0.08)
        service.shelf.add("base", Model(Network(config, {"mlm": None}), models["words"].tokenizer))
        yield url, service


@pytest.fixture(scope="session")
def url(served):
    return served[0]


@pytest.fixture(scope="session")
def shots():
    folder = Path(os.environ.get("EVERYBERT_SCREENSHOTS", "build/screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = chromium()
    if path is None:
        pytest.fail("there is no Chromium: install it (Debian: apt-get install chromium), or name it in $CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def open_page(browser, url):
    """open_page(hash, size, scheme) → a page with its first result drawn; at the end nothing may have gone wrong."""
    opened, wrong = [], []

    def open_(at="", size="laptop", scheme="light", wait=True, **more):
        context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, accept_downloads=True, **more)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda m: wrong.append(f"console: {m.text}") if m.type == "error" else None)
        page.on("request", lambda r: wrong.append(f"outside: {r.url}") if not own_address(r.url, url) else None)
        opened.append(context)
        page.goto(url + "/" + at)
        if wait:
            ready(page)
        return page

    open_.wrong = wrong
    yield open_
    for context in opened:
        context.close()
    assert not wrong, wrong
