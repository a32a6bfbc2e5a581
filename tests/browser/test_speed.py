"""How fast: bytes before the first paint, a 12 × 768 model's attention, and frames at 512 tokens."""

from __future__ import annotations

import json
import time

import pytest
from pages import ready

pytestmark = pytest.mark.browser
FRAMES = """async (steps) => {
  // moves the pointer (or scrolls) once a frame, and measures from one frame to the next
  const stage = document.querySelector(".av-stage"), box = stage.getBoundingClientRect(), took = [];
  let slowest = 0;
  let last = await new Promise(requestAnimationFrame);
  for (let i = 0; i < steps; i++) {
    const y = box.top + 10 + ((i * 37) % (Math.min(innerHeight, box.bottom) - box.top - 20));
    // at a token on either side, or at none: then all links are drawn
    const x = i % 3 ? box.left + 40 : i % 2 ? box.right - 40 : (box.left + box.right) / 2;
    stage.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
    if (i % 5 === 0) stage.scrollTop = (i * 97) % Math.max(1, stage.scrollHeight - stage.clientHeight);
    const now = await new Promise(requestAnimationFrame);
    took.push(now - last);
    last = now;
    slowest = Math.max(slowest, Number(document.querySelector(".av").dataset.frame));
  }
  return [took.sort((a, b) => a - b), slowest];
}"""


def keep(shots, name, values):
    """Measurements beside the screenshots."""
    file = shots / "timings.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**found, name: values}, indent=1))


def test_first_paint_needs_less_than_100_kb(browser, url, shots):
    context = browser.new_context()
    page = context.new_page()
    client = context.new_cdp_session(page)
    client.send("Network.enable")
    sizes = []
    client.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    page.goto(url + "/#attention?model=words&text=the+cat")
    ready(page)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    keep(shots, "first paint", {"bytes": sum(sizes), "requests": len(sizes), "ms": round(paint)})
    assert sum(sizes) < 100_000, "with the largest panel and its first answer"
    context.close()


def test_128_tokens_through_bert_base(open_page, shots):
    """From the reply to the picture."""
    page = open_page("#attention?model=base&text=cat", wait=True)
    replied = {}
    page.on("response", lambda r: replied.setdefault("at", time.monotonic()) if r.url.endswith("/attention") else None)
    page.evaluate("delete document.querySelector('.av').dataset.frame")
    page.get_by_label("Text A").fill(" ".join(["the cat sees a red dog and mary eats"] * 14))
    page.wait_for_function(
        "() => document.querySelector('.av-stage')?.getAttribute('aria-label')?.includes('128 tokens')", timeout=60_000
    )
    page.wait_for_function("() => document.querySelector('.av').dataset.frame")
    took = time.monotonic() - replied["at"]
    assert page.locator(".av-cell").count() == 144
    keep(shots, "128 tokens, 12 x 768, from the reply to the picture (s)", round(took, 3))
    assert took < 1.0


@pytest.mark.parametrize("view", ["Lines", "Matrix"])
def test_512_tokens_do_not_stall(open_page, shots, view):
    text = " ".join(["the cat sees a red dog and mary eats food"] * 51)
    page = open_page("#attention?model=base&text=cat")
    page.get_by_label("Text A").fill(text)
    page.wait_for_function(
        "() => document.querySelector('.av-stage')?.getAttribute('aria-label')?.includes('512 tokens')", timeout=120_000
    )
    page.get_by_role("gridcell", name="Layer 0, head 3").click()
    page.get_by_role("button", name=view).click()
    page.wait_for_function("() => document.querySelector('.av-stage').getAttribute('aria-label').includes('layer 0')")
    assert int(page.locator(".av").get_attribute("data-links")) > 2000, "a head with much to draw"
    frames, slowest = page.evaluate(FRAMES, 60)
    middle, late = frames[len(frames) // 2], frames[int(0.95 * len(frames))]
    found = {"median": round(middle, 1), "95 %": round(late, 1), "slowest drawing": slowest}
    keep(shots, f"512 tokens, {view.lower()}: frames (ms)", found)
    assert late < 100 and slowest < 100, frames[-10:]
    began = time.monotonic()
    page.get_by_role("gridcell", name="Layer 1, head 7").click()
    page.wait_for_function("() => document.querySelector('.av-stage').getAttribute('aria-label').includes('1, head 7')")
    keep(shots, f"512 tokens, {view.lower()}: another head (s)", round(time.monotonic() - began, 3))
    page.screenshot(path=shots / f"attention-512-{view.lower()}.png")
