"""What people paste, and servers that go away."""

from __future__ import annotations

import re

import pytest
import server as own
from pages import PANELS, at, ready, some, typed

pytestmark = pytest.mark.browser
NASTY = '<img src=x onerror=alert(1)><script>window.hacked = 1</script> & "cat" [MASK]'
FIELDS = {
    "fill": ("words", {"text": NASTY}),
    "tokens": ("words", {"text": NASTY, "pair": NASTY}),
    "attention": ("words", {"text": NASTY}),
    "steps": ("words", {"text": NASTY}),
    "context": ("words", {"word": "cat", "texts": f"{NASTY}\n{NASTY}"}),
    "similar": ("words", {"texts": f"{NASTY}\n{NASTY}"}),
    "classify": ("labels", {"text": NASTY}),
    "names": ("names", {"text": NASTY}),
    "answer": ("answers", {"question": "where <b>?", "context": NASTY}),
    "examples": ("words", {"text": f"{NASTY} A cat.\n\n{NASTY} A dog.", "kind": "full"}),
    "next": ("words", {"first": NASTY, "second": "<b>a cat</b>"}),
}


@pytest.mark.parametrize("panel", FIELDS)
def test_html_is_text(open_page, panel):
    model, values = FIELDS[panel]
    page = open_page(at(panel, model, **values))
    assert page.locator(".notice.bad").count() == 0
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("window.hacked") is None
    assert "<script>" in page.locator(".same").inner_text()
    if panel in ("classify", "names", "answer"):
        # the labels stand behind the words that they mark
        whole = page.locator(".passage").first.evaluate("""(e) => {
          const copy = e.cloneNode(true);
          copy.querySelectorAll(".tag").forEach((tag) => tag.remove());
          return copy.textContent;
        }""")
        assert whole == NASTY


@pytest.mark.parametrize("panel", some(PANELS, "fill", "answer"))
def test_empty_text(open_page, panel):
    page = open_page(PANELS[panel])
    field = page.locator("main textarea, main input[type=text]").first
    text = field.input_value()
    field.fill("   ")
    ready(page)
    assert re.fullmatch(r".+: type something above\.", page.locator(".notice").inner_text())
    assert page.locator(".same pre").count() == 0
    field.fill(text)
    ready(page)
    assert page.locator(".notice").count() == 0


def test_100_000_characters(open_page):
    page = open_page(at("tokens", "words", text="cat"))
    typed(page, "Text", "cat " * 25_000)
    words = page.locator(".notice.bad").inner_text()
    assert "100,000 characters are more than this page takes at once (20,000)" in words
    assert page.locator(".count.over").inner_text() == "100,000 of 20,000 characters"
    typed(page, "Text", "cat " * 1_000)
    assert "overlapping windows" in page.locator(".result").inner_text()
    assert page.locator(".facts dd").first.inner_text() == "1002 of 96"


def test_longer_than_the_window(open_page):
    page = open_page(at("attention", "words", text="cat"))
    typed(page, "Text A", "cat " * 100)
    assert "102 tokens, the model reads 96" in page.locator(".notice.bad").inner_text()
    open_page.wrong.clear()  # Chromium logs the error response itself as a failed resource


def test_right_to_left_and_emoji(open_page, models, shots):
    text = "שלום 👩‍👩‍👧‍👦 John Smith lives in London . 🏳️‍🌈 مرحبا"
    page = open_page(at("names", "names", text=text))
    spans = models["names"].tag(text)
    assert "London" in {s.text for s in spans}
    marks = page.locator("mark").evaluate_all("all => all.map(e => e.firstChild.textContent)")
    assert marks == [s.text for s in spans], "offsets count code points, also behind emoji"
    assert page.evaluate("getComputedStyle(document.querySelector('.passage')).direction") == "rtl"
    assert page.locator("#field-text").evaluate("e => getComputedStyle(e).direction") == "rtl"
    page.screenshot(path=shots / "right-to-left.png", full_page=True)
    # in a line, what is written first stands on the right
    left = page.locator(".passage").evaluate("""(passage) => ["ש", "J", "L", "م"].map((letter) => {
      const walker = document.createTreeWalker(passage, NodeFilter.SHOW_TEXT), range = document.createRange();
      while (!walker.nextNode().data.includes(letter));
      range.setStart(walker.currentNode, walker.currentNode.data.indexOf(letter));
      range.setEnd(walker.currentNode, range.startOffset + 1);
      return range.getBoundingClientRect().left;
    })""")
    assert left[0] > left[2] > left[1] > left[3], "Hebrew, then (from left to right within) English, then Arabic"
    page = open_page(at("attention", "words", text=text))
    ink = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((x, i) => i % 4 === 3 && x).length"
    assert page.locator(".av-canvas").evaluate(ink) > 500
    page.screenshot(path=shots / "right-to-left-attention.png", full_page=True)
    page = open_page(at("fill", "words", text=f"{text} [MASK]"))
    names = page.locator(".line button").evaluate_all("all => all.map(e => e.textContent)")
    assert "👩‍👩‍👧‍👦" in names and "🏳️‍🌈" in names and "שלום" in names, "an emoji is one word, not its parts"


def test_server_gone_in_mid_request_and_back(new_page, folders):
    """The page says so, tries again by itself, and goes on when the server is there."""
    page = new_page()
    with own.running({"words": folders["words"]}) as (url, _):
        port = int(url.rpartition(":")[2])
        page.goto(f"{url}/{at('tokens', 'words', text='cat')}")
        ready(page)
        page.route("**/playground/tokens", lambda route: route.abort("connectionreset"))
        typed(page, "Text", "a cat sleeps")
        page.wait_for_selector("#banner:not([hidden])")
        assert "does not answer" in page.locator(".notice.bad").inner_text()
        page.unroute("**/playground/tokens")
        page.wait_for_selector("#banner[hidden]", state="attached")
        page.wait_for_selector(".piece >> text=sleeps")
    typed(page, "Text", "a dog")
    page.wait_for_selector("#banner:not([hidden])")
    assert "The server does not answer" in page.locator("#banner").inner_text()
    with own.running({"words": folders["words"]}, port=port):
        page.wait_for_selector("#banner[hidden]", state="attached")
        page.wait_for_selector(".piece >> text=dog")
        assert page.get_by_label("Text", exact=True).input_value() == "a dog", "what was typed is still there"


def test_a_server_with_a_key_asks_for_it(new_page, folders):
    page = new_page()
    asked = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept("secret")))
    with own.running({"words": folders["words"]}, keys=["secret"]) as (url, _):
        page.goto(f"{url}/{at('tokens', 'words', text='cat')}")
        page.wait_for_selector(".piece >> text=cat")
        assert len(asked) == 1 and "API key" in asked[0]
        typed(page, "Text", "a dog")
        page.wait_for_selector(".piece >> text=dog")
        assert len(asked) == 1
