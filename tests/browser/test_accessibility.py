"""Names, labels, contrast, headings and focus order, on every panel, light and dark, laptop and phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import PANELS, ready

pytestmark = pytest.mark.browser
CHECK = (Path(__file__).parent / "accessibility.js").read_text().split("\n", 1)[1].rstrip().rstrip(";")


@pytest.mark.parametrize("panel", PANELS)
def test_panels_pass(open_page, panel):
    page = open_page(PANELS[panel])
    for size, theme in (({"width": 1366, "height": 820}, "light"), ({"width": 390, "height": 844}, "dark")):
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=theme)
        page.wait_for_timeout(250)
        assert page.evaluate(CHECK) == [], (size["width"], theme)


def test_the_check_itself_finds_faults(open_page):
    page = open_page(PANELS["tokens"])
    page.evaluate("""() => {
      const main = document.querySelector("main");
      main.insertAdjacentHTML("beforeend", "<button></button><h4>x</h4><img><input><p id='model'>y</p>");
      const faint = Object.assign(document.createElement("p"), { textContent: "faint" });
      faint.style.color = "#bbb";
      main.append(faint);
    }""")
    found = "\n".join(page.evaluate(CHECK))
    for words in (
        "no accessible name",
        "heading of level 4",
        "without alt",
        "without a label",
        "used twice",
        "contrast",
    ):
        assert words in found


@pytest.mark.parametrize("panel", ["fill", "attention", "steps"])
def test_focus_follows_the_page_and_is_seen(open_page, panel):
    page = open_page(PANELS[panel])
    seen = []
    describe = """() => {
      const e = document.activeElement, style = getComputedStyle(e), box = e.getBoundingClientRect();
      const order = [...document.querySelectorAll("*")].indexOf(e);
      const outline = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
      const seen = box.width > 0 && box.bottom > 0 && box.top < innerHeight;
      return { order, outline, seen, name: e.className || e.id || e.tagName };
    }"""
    for _ in range(60):
        page.keyboard.press("Tab")
        at = page.evaluate(describe)
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
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Layer 0, head 1"
    assert page.locator(".av-title").inner_text() == "Layer 0, head 1"
    ready(page)
    label = page.locator(".av-stage").get_attribute("aria-label")
    assert label.startswith("Attention of layer 0, head 1") and "link" in label


def test_results_are_announced(open_page):
    page = open_page(PANELS["fill"])
    assert page.locator(".result").get_attribute("aria-label") == "Result"
    page.get_by_label("Sentence", exact=True).fill("")
    page.wait_for_selector(".notice")
    bad = open_page("#tokens?model=words&text=" + "x" * 3000)
    bad.get_by_label("Text", exact=True).fill("y" * 30_000)
    bad.wait_for_selector("[role=alert].notice")
