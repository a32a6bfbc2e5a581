"""How fast: bytes before the first paint, a 12 × 768 model's attention, and frames at 512 tokens.

Measured by the page's own clock. What the clock judges is for a machine that does little else: `make test-browser` runs
it, `make test` does not.
"""

from __future__ import annotations

import json

import pytest
from pages import at, ready

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("speed")]
TRIES = 3
FRAMES = """async (steps) => {
  // moves the pointer (or scrolls) in every other frame, and measures those frames and the idle ones between them
  const stage = document.querySelector(".av-stage"), box = stage.getBoundingClientRect(), took = [[], []];
  const frame = () => new Promise(requestAnimationFrame);
  let slowest = 0;
  let last = await frame();
  for (let i = 0; i < steps; i++) {
    const y = box.top + 10 + ((i * 37) % (Math.min(innerHeight, box.bottom) - box.top - 20));
    // at a token on either side, or at none: then all links are drawn
    const x = i % 3 ? box.left + 40 : i % 2 ? box.right - 40 : (box.left + box.right) / 2;
    stage.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
    if (i % 5 === 0) stage.scrollTop = (i * 97) % Math.max(1, stage.scrollHeight - stage.clientHeight);
    await frame(); // draws
    let now = await frame(); // comes late if that took long
    took[0].push(now - last);
    slowest = Math.max(slowest, Number(document.querySelector(".av").dataset.frame));
    await frame();
    last = now;
    now = await frame();
    took[1].push(now - last);
    last = now;
  }
  const late = (list) => list.sort((a, b) => a - b)[Math.floor(0.95 * list.length)] - 16.7; // of two, one on time
  return { busy: late(took[0]), idle: late(took[1]), slowest };
}"""
DRAWN = """() => {
  // from the last byte of the reply to the first picture of a head
  const replies = performance.getEntriesByType("resource").filter((e) => e.name.endsWith("/playground/attention"));
  return Number(document.querySelector(".av").dataset.drawn) - replies.at(-1).responseEnd;
}"""
WORDS = "the dog barks at the cat and mary sleeps in"


def keep(shots, name, values):
    """Measurements beside the screenshots."""
    file = shots / "timings.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**found, name: values}, indent=1))


def share(frames: dict) -> float:
    """How much of its 100 ms a frame with work takes (95th percentile)."""
    return max(frames["busy"], frames["slowest"]) / 100


def test_first_paint_needs_less_than_100_kb(new_page, url, shots):
    page = new_page()
    client = page.context.new_cdp_session(page)
    client.send("Network.enable")
    sizes = []
    client.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    page.goto(url + "/" + at("attention", "words", text="the cat"))
    ready(page)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    keep(shots, "first paint", {"bytes": sum(sizes), "requests": len(sizes), "ms": round(paint)})
    assert len(sizes) > 8 and 10_000 < sum(sizes) < 100_000, "with the largest panel and its first answer"


@pytest.mark.slow
def test_128_tokens_through_bert_base(open_page, base, shots):
    """From the reply to the picture."""
    page = open_page(at("attention", base, text="cat"))
    page.set_default_timeout(120_000)
    took = []
    for attempt in range(TRIES):
        text = " ".join((WORDS.split() * 13)[attempt : 126 + attempt])
        page.get_by_label("Text A").fill(text)
        ready(page)
        assert "128 tokens" in page.locator(".av-stage").get_attribute("aria-label")
        assert page.locator(".av-cell").count() == 144
        took.append(page.evaluate(DRAWN))
        if took[-1] < 1000:
            break
    keep(shots, "128 tokens, 12 x 768, from the reply to the picture (ms)", round(min(took)))
    assert 0 < min(took) < 1000, took


@pytest.mark.slow
def test_512_tokens_do_not_stall(open_page, base, shots):
    page = open_page(at("attention", base, text="cat"))
    page.set_default_timeout(240_000)
    page.get_by_label("Text A").fill(" ".join([WORDS] * 51))
    ready(page)
    assert "512 tokens" in page.locator(".av-stage").get_attribute("aria-label")
    page.get_by_role("gridcell", name="Layer 1, head 4").click()
    ready(page)
    assert int(page.locator(".av").get_attribute("data-links")) > 2000, "a head with much to draw"
    for view in ("Lines", "Matrix"):
        page.get_by_role("button", name=view).click()
        found = []
        for _ in range(TRIES):
            found.append(page.evaluate(FRAMES, 30))
            if share(found[-1]) < 1:
                break
        best = min(found, key=share)
        keep(shots, f"512 tokens, {view.lower()}: frames (ms)", {name: round(ms, 1) for name, ms in best.items()})
        assert share(best) < 1, found
        page.screenshot(path=shots / f"attention-512-{view.lower()}.png")


@pytest.mark.slow
def test_the_measure_itself_sees_a_stall(open_page):
    page = open_page(at("attention", "words", text="the dog barks at the cat ."))
    page.evaluate("""() => document.querySelector(".av-stage").addEventListener("pointermove", () => {
      const end = performance.now() + 1000;
      while (performance.now() < end);
    })""")
    assert share(page.evaluate(FRAMES, 3)) > 1
