"""A server over small trained models, and Chromium in front of it: one of each a worker.

Every page is watched: for errors, for requests outside. Nothing waits without a deadline, and nothing sleeps: the page
says itself when it is done (see pages.ready). Screenshots go to build/screenshots (or $EVERYBERT_SCREENSHOTS), where
CI keeps them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import server as own
import tiny_model
import world
from filelock import FileLock
from pages import FLAGS, SIZES, chromium, own_address, ready

from everybert.inference.model import Model, load
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.text.tokenizer import Tokenizer

DEADLINE = 45_000
"""Milliseconds that a page may take for anything, on a machine that does much else."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory, worker_id):
    """Models by name, as folders: made once, by the worker that comes first."""
    root = tmp_path_factory.getbasetemp()
    root = root if worker_id == "master" else root.parent
    with FileLock(root / "world.lock", timeout=540):
        if not (root / "world" / "done").exists():
            world.make_world(root / "world")
            tiny_model.save(root / "world" / "ranker", {"classify": 1}, ["score"], seed=5, problem_type="regression")
            (root / "world" / "done").touch()
    return {name: root / "world" / name for name in ("words", "labels", "names", "answers", "ranker")}


@pytest.fixture(scope="session")
def models(folders):
    return {name: load(folder, device="cpu") for name, folder in folders.items()}


@pytest.fixture(scope="session")
def served(folders):
    """(address, service)."""
    with own.running(folders) as (url, service):
        yield url, service


@pytest.fixture(scope="session")
def url(served):
    return served[0]


@pytest.fixture(scope="session")
def base(served, folders):
    """A random model of BERT-base's size, served beside the others; made by those who need it."""
    tokenizer = Tokenizer.load(folders["words"].with_name("vocabulary"))  # which names no window
    config = EncoderConfig(vocab_size=tokenizer.size, init_range=0.08)
    served[1].registry.add("base", Model(Network(config, {"mlm": None}), tokenizer))
    return "base"


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
        found = playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=120_000)
        yield found
        found.close()


@pytest.fixture
def new_page(browser):
    """new_page(size, scheme) → an empty page with its deadline; closed afterwards."""
    opened = []

    def new(size="laptop", scheme="light", **more):
        settings = {"viewport": SIZES[size], "color_scheme": scheme, "reduced_motion": "reduce", **more}
        context = browser.new_context(**settings)
        opened.append(context)
        page = context.new_page()
        page.set_default_timeout(DEADLINE)
        return page

    yield new
    for context in opened:
        context.close()


@pytest.fixture
def open_page(new_page, url):
    """open_page(hash, size, scheme) → a page with its first result drawn; at the end nothing may have gone wrong."""
    wrong = []

    def open_(at="", size="laptop", scheme="light", **more):
        page = new_page(size, scheme, accept_downloads=True, **more)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda m: wrong.append(f"console: {m.text}") if m.type == "error" else None)
        page.on("request", lambda r: wrong.append(f"outside: {r.url}") if not own_address(r.url, url) else None)
        page.goto(url + "/" + at)
        ready(page)
        return page

    open_.wrong = wrong
    yield open_
    assert not wrong, wrong
