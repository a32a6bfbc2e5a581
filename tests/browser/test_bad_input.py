"""What people paste, and servers that go away."""

from __future__ import annotations

import pytest
import server as own
from pages import SIZES, ready

pytestmark = pytest.mark.browser
NASTY = '<img src=x onerror=alert(1)><script>window.hacked = 1</script> & "cat" [MASK]'


def test_empty_text(open_page):
    page = open_page("#tokens?model=words&text=cat")
    page.get_by_label("Text", exact=True).fill("   ")
    page.wait_for_selector("text=type something above")
    page.get_by_label("Text", exact=True).fill("a cat")
    page.wait_for_selector(".piece >> text=cat")


def test_100_000_characters(open_page):
    page = open_page("#tokens?model=words&text=cat")
    page.get_by_label("Text", exact=True).fill("cat " * 25_000)
    page.wait_for_selector(".notice.bad")
    words = page.locator(".notice.bad").inner_text()
    assert "100,000 characters are more than this page takes at once (20,000)" in words
    assert page.locator(".count.over").inner_text() == "100,000 of 20,000 characters"
    page.get_by_label("Text", exact=True).fill("cat " * 4_000)
    page.wait_for_selector(".facts")
    assert "overlapping windows" in page.locator(".result").inner_text()


def test_longer_than_the_window(open_page):
    page = open_page("#attention?model=words&text=cat")
    page.get_by_label("Text A").fill("cat " * 100)
    page.wait_for_selector(".notice.bad")
    assert "102 tokens, the model reads 64 at once" in page.locator(".notice.bad").inner_text()
    open_page.wrong.clear()  # Chromium logs the refusal itself as a failed resource


@pytest.mark.parametrize("panel", ["fill", "tokens", "attention", "steps", "context", "similar"])
def test_html_is_text(open_page, panel):
    page = open_page(f"#{panel}?model=words")
    field = "texts" if panel in ("context", "similar") else "text"
    page.locator(f"#field-{field}").fill(NASTY if field == "text" else f"{NASTY}\n{NASTY}")
    if panel == "context":
        page.locator("#field-word").fill("cat")
    page.wait_for_timeout(1000)
    ready(page)
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("window.hacked") is None
    assert "<script>" in page.locator(".same").inner_text()


@pytest.mark.parametrize(("panel", "model"), [("classify", "labels"), ("names", "ner")])
def test_html_is_text_in_tasks(open_page, panel, model):
    page = open_page(f"#{panel}?model={model}")
    page.locator("#field-text").fill(NASTY)
    page.wait_for_timeout(800)
    ready(page)
    assert (
        NASTY in page.locator(".passage").first.inner_text().replace("PER", "").replace("LOC", "") or panel == "names"
    )
    assert page.locator("main img, main script").count() == 0 and page.evaluate("window.hacked") is None


def test_right_to_left_and_emoji(open_page, shots):
    text = "שלום cat 👩‍👩‍👧‍👦 مرحبا dog 🏳️‍🌈"
    page = open_page(f"#names?model=ner&text={text}")
    assert page.locator(".passage").evaluate("e => e.dir") == "auto"
    marks = page.locator("mark").evaluate_all("all => all.map(e => e.firstChild.textContent)")
    spans = page.locator("tbody tr td:first-child").all_inner_texts()
    assert marks == spans, "offsets count code points, also behind emoji"
    assert page.evaluate("getComputedStyle(document.querySelector('.passage')).direction") == "rtl"
    page.screenshot(path=shots / "right-to-left.png", full_page=True)
    page = open_page(f"#attention?model=words&text={text}")
    ink = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((x, i) => i % 4 === 3 && x).length"
    assert page.locator(".av-canvas").evaluate(ink) > 500
    page.screenshot(path=shots / "right-to-left-attention.png", full_page=True)


def test_server_gone_in_mid_request_and_back(browser, folders):
    """The page says so, tries again by itself, and goes on when the server is there."""
    context = browser.new_context(viewport=SIZES["laptop"])
    page = context.new_page()
    page.set_default_timeout(30_000)
    with own.running({"words": folders["words"]}) as (url, _):
        port = int(url.rpartition(":")[2])
        page.goto(url + "/#tokens?model=words&text=cat")
        ready(page)
        page.route("**/playground/tokens", lambda route: route.abort("connectionreset"))
        page.get_by_label("Text", exact=True).fill("a cat eats")
        page.wait_for_selector("#banner:not([hidden])")
        assert "does not answer" in page.locator(".notice.bad").inner_text()
        page.unroute("**/playground/tokens")
        page.wait_for_selector("#banner[hidden]", state="attached")
        page.wait_for_selector(".piece >> text=eats")
    page.get_by_label("Text", exact=True).fill("a dog")
    page.wait_for_selector("#banner:not([hidden])")
    assert "The server does not answer" in page.locator("#banner").inner_text()
    with own.running({"words": folders["words"]}, port=port):
        page.wait_for_selector("#banner[hidden]", state="attached")
        page.wait_for_selector(".piece >> text=dog")
        assert page.get_by_label("Text", exact=True).input_value() == "a dog", "what was typed is still there"
    context.close()


def test_a_server_with_a_key_asks_for_it(browser, folders):
    context = browser.new_context(viewport=SIZES["laptop"])
    page = context.new_page()
    asked = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept("secret")))
    with own.running({"words": folders["words"]}, key="secret") as (url, _):
        page.goto(url + "/#tokens?model=words&text=cat")
        page.wait_for_selector(".piece >> text=cat")
        assert len(asked) == 1 and "API key" in asked[0]
        page.get_by_label("Text", exact=True).fill("a dog")
        page.wait_for_selector(".piece >> text=dog")
        assert len(asked) == 1
    context.close()
