"""What the browser tests share: where Chromium is, how large a page is, what every panel shows, when it is done."""

from __future__ import annotations

import os
import shutil
from urllib.parse import urlencode

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SIZES = {"laptop": {"width": 1366, "height": 820}, "phone": {"width": 390, "height": 844}}
SENTENCE, PAIR = "The dog barks at the cat.", "Where does Mary live?"
REVIEW = "The film was wonderful."
NAMES = "John Smith lives in New York and works for Acme."
QUESTION, PASSAGE = "Where does Matt live?", "Matt lives in Canada since 2019."
FIRST, SECOND = "The man went to the store.", "He bought a gallon of milk."
LINES = ["the dog barks at the cat .", "the owl hoots at the cat .", "mary lives in paris ."]
DOCUMENTS = "The man went to the store. He bought milk.\n\nPenguins are birds. The cat sleeps in the garden."
HOLD = ["the cat sleeps", "the dog barks at the cat .", "the food of the cat was cold"]


def at(panel: str, model: str, **values: str) -> str:
    """The address of a panel."""
    return f"#{panel}?{urlencode({'model': model, **values})}"


BLANK = "The dog [MASK] at the cat."
PANELS = {
    "fill": at("fill", "words", text=BLANK, were='["barks"]'),
    "classify": at("classify", "labels", text=REVIEW),
    "names": at("names", "names", text=NAMES),
    "answer": at("answer", "answers", question=QUESTION, context=PASSAGE),
    "next": at("next", "words", first=FIRST, second=SECOND),
    "similar": at("similar", "words", texts="\n".join(LINES)),
    "tokens": at("tokens", "words", text="The cat likes qué 🐍"),
    "attention": at("attention", "words", text=SENTENCE, pair=PAIR),
    "context": at("context", "words", word="cat", texts="\n".join(HOLD)),
    "steps": at("steps", "words", text=BLANK, step="4", layer="1"),
    "examples": at("examples", "words", text=DOCUMENTS),
}
"""Every panel with something to show."""
DONE = """() => {
  const result = document.querySelector(".result");
  return result?.children.length > 0 && !("stale" in result.dataset) && !document.querySelector("[aria-busy=true]");
}"""


def some(panels, *chosen: str) -> list:
    """All panels for a test that `make test` runs on a few, and `make test-browser` on each."""
    return [panel if panel in chosen else pytest.param(panel, marks=pytest.mark.slow) for panel in panels]


def chromium() -> str | None:
    """Where Chromium is: $CHROMIUM, or on the path."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def own_address(address: str, url: str) -> bool:
    return address.startswith((url, "data:", "blob:", "file:", "about:"))


def ready(page) -> None:
    """Wait until what is drawn is of what was last typed or chosen, and nothing is under way."""
    page.wait_for_function(DONE)


def painted(page) -> None:
    """Wait until the browser has painted what it knows now."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def typed(page, label: str, text: str) -> None:
    """Write into a field, and wait for the result."""
    page.get_by_label(label, exact=True).fill(text)
    ready(page)
