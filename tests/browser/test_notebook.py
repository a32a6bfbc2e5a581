"""The page that `model.attention(...)` shows: alone from a file, and in a notebook's frame."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.browser


def watched(browser, **more):
    context = browser.new_context(viewport={"width": 1100, "height": 800}, offline=True, **more)
    page = context.new_page()
    wrong: list = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: wrong.append(r.url) if r.url.startswith("http") else None)
    return context, page, wrong


def test_a_file_of_its_own(browser, models, tmp_path, shots):
    found = models["words"].attention("the cat </script> sees & a red dog", "it's food")
    (tmp_path / "a.html").write_text(found.html(), encoding="utf-8")
    context, page, wrong = watched(browser)
    page.goto(f"file://{tmp_path / 'a.html'}")
    page.wait_for_selector("html[data-ready=true]")
    assert page.locator(".av-cell").count() == 4
    page.get_by_role("gridcell", name="Layer 0, head 1").click()
    page.locator(".av-stage").focus()
    page.keyboard.press("ArrowDown")
    weights = found.weights[0, 1, 0]
    best = int(np.argmax(weights))
    assert f"“{found.tokens[best]}” {weights[best]:.3f}" in page.locator(".av-readout").inner_text()
    page.screenshot(path=shots / "notebook.png", full_page=True)
    assert wrong == []
    context.close()


def test_in_a_frame(browser, models):
    context, page, wrong = watched(browser)
    page.set_content("<body><h1>A notebook</h1>" + models["words"].attention("the cat eats")._repr_html_())
    frame = page.frame_locator("iframe")
    frame.locator("html[data-ready=true]").wait_for()
    assert frame.locator(".av-title").inner_text() == "Layer 1, head 0"
    assert wrong == []
    context.close()
