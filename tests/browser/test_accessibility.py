"""The keyboard alone: where focus goes, what the keys do, what is announced. (Names and contrast: test_layout.py.)"""

from __future__ import annotations

import pytest
from pages import PANELS, ready, some, typed

pytestmark = pytest.mark.browser
FOCUSED = """() => {
  const e = document.activeElement, style = getComputedStyle(e), box = e.getBoundingClientRect();
  const order = [...document.querySelectorAll("*")].indexOf(e);
  const outline = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
  const seen = box.width > 0 && box.bottom > 0 && box.top < innerHeight;
  return { order, outline, seen, name: e.className || e.id || e.tagName };
}"""


@pytest.mark.parametrize("panel", some(PANELS, "fill", "attention", "steps"))
def test_focus_follows_the_page_and_is_seen(open_page, panel):
    page = open_page(PANELS[panel])
    seen = []
    for _ in range(90):
        page.keyboard.press("Tab")
        at = page.evaluate(FOCUSED)
        if at["name"] == "BODY" or (seen and at["order"] < seen[-1]["order"]):
            break
        seen.append(at)
    assert len(seen) > 15
    assert seen[0]["name"] == "skip"
    assert [s["order"] for s in seen] == sorted(s["order"] for s in seen), "focus goes down the page"
    assert all(s["outline"] for s in seen), [s["name"] for s in seen if not s["outline"]]
    assert all(s["seen"] for s in seen), [s["name"] for s in seen if not s["seen"]]


def test_one_stop_for_all_heads(open_page):
    """The grid of heads is one tab stop; arrows move inside it."""
    page = open_page(PANELS["attention"])
    assert page.locator(".av-cell[tabindex='0']").count() == 1
    page.locator(".av-cell[tabindex='0']").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Layer 1, head 2"
    ready(page)
    assert page.locator(".av-title").inner_text() == "Layer 1, head 2"
    label = page.locator(".av-stage").get_attribute("aria-label")
    assert label.startswith("Attention of layer 1, head 2") and "link" in label


def test_results_are_announced(open_page):
    page = open_page(PANELS["fill"])
    assert page.locator(".result").get_attribute("aria-label") == "Result"
    typed(page, "Sentence", "")
    assert page.locator(".notice").inner_text() == "Sentence: type something above."
    page = open_page(PANELS["tokens"])
    typed(page, "Text", "y" * 30_000)
    assert page.locator("[role=alert].notice").count() == 1
    assert page.locator("[role=status].count").first.inner_text() == "30,000 of 20,000 characters"


def test_keys(open_page, shots, url):
    page = open_page("#fill?model=words", permissions=["clipboard-read", "clipboard-write"])
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keys")
    keys.wait_for()
    listed = keys.locator("dt").all_inner_texts()
    assert {"/", "[", "]", "m", "t", "c", "?"} <= set(listed) and len(listed) == len(set(listed))
    page.screenshot(path=shots / "keys.png")
    page.keyboard.press("]")
    page.keyboard.press("Escape")
    keys.wait_for(state="hidden")
    assert page.locator("h1").inner_text() == "Fill in the blank", "keys are the list's own while it is open"
    for key, title in (("]", "Classify"), ("[", "Fill in the blank"), ("[", "Training data"), ("[", "Step through")):
        page.keyboard.press(key)
        ready(page)
        assert page.locator("h1").inner_text() == title
    page.keyboard.press("c")
    page.wait_for_function("() => document.querySelector('.permalink').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == page.url
    page.keyboard.press("t")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 27)"
    page.keyboard.press("m")
    assert page.evaluate("document.activeElement.id") == "model"
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "field-text"
    page.keyboard.press("End")
    page.keyboard.type(" t [ m ?")
    assert page.locator("#field-text").input_value().endswith(" t [ m ?"), "in a field, keys are letters"
    page.keyboard.press("Control+Enter")
    ready(page)
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    ready(page)
    assert page.locator("article h2").inner_text().startswith("2.")
    page.go_back()
    page.wait_for_function("() => document.querySelector('h1').textContent === 'Training data'")
