"""Every panel at laptop and phone width, light and dark: nothing runs over or jumps, all is legible; pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import PANELS, SIZES, painted, ready, typed

pytestmark = pytest.mark.browser
CHECK = (Path(__file__).parent / "accessibility.js").read_text().split("\n", 1)[1].rstrip().rstrip(";")
PAST = """(width) => [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility()
  && !e.closest(".scroll, nav, .skip") && e.getBoundingClientRect().right > width + 1).map((e) => e.className)"""
SHIFTS = """
  window.shifts = 0;
  const add = (list) => list.getEntries().forEach((e) => { if (!e.hadRecentInput) window.shifts += e.value; });
  new PerformanceObserver(add).observe({ type: "layout-shift", buffered: true });
"""


@pytest.mark.parametrize("panel", PANELS)
def test_panel(open_page, shots, panel):
    """Four ways to see it; and its address gives it again."""
    page = open_page(PANELS[panel])
    for size, box in SIZES.items():
        page.set_viewport_size(box)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            ready(page)
            painted(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= box["width"]
            assert page.evaluate(PAST, box["width"]) == [], (size, scheme)
            assert page.evaluate(CHECK) == [], (size, scheme)
            page.screenshot(path=shots / f"{panel}-{size}-{scheme}.png", full_page=True)
    shown = page.locator(".result").inner_text()
    page.reload()
    ready(page)
    assert page.locator(".result").inner_text() == shown, "the address holds all that the panel needs"


def test_what_a_model_lacks(open_page, shots):
    page = open_page("#classify?model=words", "phone", "dark")
    assert page.evaluate(CHECK) == [] and page.evaluate(PAST, 390) == []
    page.screenshot(path=shots / "lacking.png", full_page=True)


@pytest.mark.parametrize("panel", ["fill", "attention", "classify", "steps"])
def test_nothing_jumps(new_page, url, panel):
    page = new_page()
    page.add_init_script(SHIFTS)
    page.goto(url + "/" + PANELS[panel])
    ready(page)
    painted(page)
    before = page.evaluate("window.shifts")
    top = page.locator(".result").bounding_box()["y"]
    typed(page, page.locator("label[for=field-text]").inner_text(), "the owl [MASK] at the moon .")
    painted(page)
    assert page.locator(".result").bounding_box()["y"] == top
    assert before < 0.1 and page.evaluate("window.shifts") - before < 0.1


def test_the_check_itself_finds_faults(open_page):
    page = open_page(PANELS["tokens"])
    page.evaluate("""() => {
      const main = document.querySelector("main");
      main.insertAdjacentHTML("beforeend", "<button></button><h4>x</h4><img><input><p id='model'>y</p>");
      const faint = Object.assign(document.createElement("p"), { textContent: "faint", className: "wide" });
      faint.style.color = "#bbb";
      faint.style.width = "3000px";
      main.append(faint);
    }""")
    found = "\n".join(page.evaluate(CHECK))
    faults = ("no accessible name", "heading of level 4", "without alt", "without a label", "used twice", "contrast")
    assert all(words in found for words in faults)
    assert "wide" in page.evaluate(PAST, 1366)
