"""The page that `model.attention(...)` shows: alone from a file, and in a notebook's frame."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.browser


@pytest.fixture
def offline(new_page):
    """A page without a network, and what it did wrong."""
    wrong: list = []
    page = new_page(offline=True)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: wrong.append(r.url) if r.url.startswith("http") else None)
    yield page
    assert wrong == []


def test_a_file_of_its_own(offline, models, tmp_path, shots):
    found = models["words"].attention("the cat </script> sleeps & a red dog", "it's cold")
    (tmp_path / "a.html").write_text(found.html(), encoding="utf-8")
    offline.goto(f"file://{tmp_path / 'a.html'}")
    offline.wait_for_selector("html[data-ready=true]", state="attached")
    assert offline.locator(".av-cell").count() == 8
    offline.get_by_role("gridcell", name="Layer 1, head 2").click()
    offline.wait_for_selector(".av[aria-busy=false]")
    offline.locator(".av-stage").focus()
    offline.keyboard.press("ArrowDown")
    weights = found.weights[0, 1, 0]
    best = int(np.argmax(weights))
    assert f"“{found.tokens[best]}” {weights[best]:.3f}" in offline.locator(".av-readout").inner_text()
    offline.screenshot(path=shots / "attention-file.png", full_page=True)


def test_in_a_frame(offline, models, shots):
    offline.set_content("<body><h1>A notebook</h1>" + models["words"].attention("the cat sleeps")._repr_html_())
    frame = offline.frame_locator("iframe")
    frame.locator("html[data-ready=true]").wait_for(state="attached")
    frame.locator(".av[aria-busy=false]").wait_for()
    assert frame.locator(".av-title").inner_text() == "Layer 2, head 1"
    offline.screenshot(path=shots / "notebook.png", full_page=True)
