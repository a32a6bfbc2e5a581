"""Every panel at laptop and phone width, light and dark: nothing runs over, nothing jumps; pictures for people."""

from __future__ import annotations

import pytest
from pages import PANELS

pytestmark = pytest.mark.browser
SHIFTS = """
  window.shifts = 0;
  const add = (list) => list.getEntries().forEach((e) => { if (!e.hadRecentInput) window.shifts += e.value; });
  new PerformanceObserver(add).observe({ type: "layout-shift", buffered: true });
"""


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize(("size", "scheme"), [("laptop", "light"), ("phone", "dark")])
def test_nothing_runs_over(open_page, shots, panel, size, scheme):
    page = open_page(PANELS[panel], size, scheme)
    page.wait_for_timeout(200)
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    past = page.evaluate(
        "w => [...document.querySelectorAll('main *')].filter(e => e.checkVisibility() && !e.closest('.scroll')"
        " && e.getBoundingClientRect().right > w + 1).map(e => e.className)",
        width,
    )
    assert past == []
    page.screenshot(path=shots / f"{panel}-{size}-{scheme}.png", full_page=True)


@pytest.mark.parametrize("panel", ["fill", "attention", "classify", "steps"])
def test_nothing_jumps(browser, url, panel):
    context = browser.new_context(viewport={"width": 1366, "height": 820})
    page = context.new_page()
    page.add_init_script(SHIFTS)
    page.goto(url + "/" + PANELS[panel])
    page.wait_for_selector(".result[aria-busy=false] > *")
    page.wait_for_timeout(500)
    before = page.evaluate("window.shifts")
    box = page.locator(".result").bounding_box()
    page.locator("#field-text").fill("the dog likes a [MASK] song .")
    page.wait_for_timeout(1200)
    assert page.locator(".result").bounding_box()["y"] == box["y"]
    assert before < 0.1 and page.evaluate("window.shifts") - before < 0.1
    context.close()
