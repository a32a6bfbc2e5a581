"""Every panel, end to end: what the page shows is what the model gives."""

from __future__ import annotations

import re
import shlex

import numpy as np
import pytest
from pages import PANELS, ready
from typer.testing import CliRunner

from everybert.cli.main import app

pytestmark = pytest.mark.browser


def shown(probability: float) -> str:
    if probability >= 0.0995:
        return f"{100 * probability:.1f} %"
    return f"{100 * probability:.2f} %"


def test_fill(open_page, models, shots):
    page = open_page(PANELS["fill"])
    model, text = models["words"], "the cat sees a [MASK] dog ."
    both = page.locator(".both .bar")
    expected = model.fill(text, top=8)[0]
    assert both.locator(".name").all_inner_texts() == [c.token for c in expected]
    assert both.locator(".value").first.inner_text() == shown(expected[0].score)
    left, right = page.locator(".aside").all()
    assert left.locator(".name").first.inner_text() == model.fill("the cat sees a [MASK]")[0][0].token
    assert right.locator(".name").first.inner_text() == model.fill("[MASK] dog .")[0][0].token
    assert "“red” stood here" in page.locator(".original").inner_text()
    # click another word: two blanks, each with its own card
    page.get_by_role("button", name="Blank out cat").click()
    page.wait_for_selector(".card >> nth=1")
    assert page.get_by_label("Sentence", exact=True).input_value() == "the [MASK] sees a [MASK] dog ."
    assert "“cat” stood here" in page.locator(".original").first.inner_text()
    # put the first guess of the second blank in; the first blank is restored
    word = page.locator(".card").nth(1).locator(".both .name").first.inner_text()
    page.locator(".card").nth(1).locator(".both button.bar").first.click()
    page.wait_for_function("() => document.querySelectorAll('.card').length === 1")
    page.get_by_role("button", name="Blank 1: restore cat").click()
    page.wait_for_function("() => !document.querySelector('.card')")
    piece = word[2:] if word.startswith("##") else f" {word}"
    assert page.get_by_label("Sentence", exact=True).input_value() == f"the cat sees a{piece} dog ."
    page.screenshot(path=shots / "panel-fill.png", full_page=True)


def test_two_masks_in_a_pair(open_page):
    page = open_page("#fill?model=words&text=the+%5BMASK%5D+eats&pair=a+dog+sees+%5BMASK%5D")
    assert page.locator(".card").count() == 2
    assert page.get_by_label("Second sentence", exact=True).is_visible()
    assert page.get_by_role("button", name=re.compile("Blank 2")).count() == 1


def test_tokens(open_page, models):
    page = open_page(PANELS["tokens"])
    encoding = models["words"].tokenizer.encode("the cat likes qué 🐍")
    pieces = page.locator(".pieces").first.locator(".piece")
    assert pieces.locator("b").all_inner_texts() == encoding.tokens
    assert pieces.locator("small").all_inner_texts() == [str(i) for i in encoding.ids]
    unknown = sum(i == models["words"].tokenizer.unk_id for i in encoding.ids)
    assert page.locator(".piece.unknown").count() == unknown > 0
    assert "lower-cases what it reads" in page.locator(".result").inner_text()
    page.get_by_text("As a table").click()
    assert page.locator("table tbody tr").count() == len(encoding)


def test_attention(open_page, models, tmp_path, shots):
    page = open_page(PANELS["attention"])
    weights = models["words"].attention("the cat sees a red dog .", "where does it eats").weights
    tokens = models["words"].tokenizer.encode("the cat sees a red dog .", "where does it eats").tokens
    assert page.locator(".av-cell").count() == 4
    page.get_by_role("gridcell", name="Layer 1, head 1").click()
    page.wait_for_function("() => document.querySelector('.av-title').textContent === 'Layer 1, head 1'")
    assert "layer=1" in page.url and "head=1" in page.url
    # the keyboard walks through tokens and the readout names their strongest links
    page.locator(".av-stage").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    best = np.argsort(-weights[1, 1, 2])[:4]
    links = ", ".join(f"“{tokens[j]}” {weights[1, 1, 2, j]:.3f}" for j in best)
    assert page.locator(".av-readout").inner_text() == f"“{tokens[2]}” attends to {links}"
    # from B to A only
    page.get_by_label("Which links").select_option("ba")
    page.wait_for_timeout(100)
    allowed = [(i, j) for i in range(9, 13) for j in range(1, 8)]
    i, j = max(allowed, key=lambda at: weights[1, 1][at])
    page.keyboard.press("Escape")
    page.locator(".av-stage").focus()
    page.keyboard.press("Escape")
    assert (
        page.locator(".av-readout").inner_text()
        == f"Strongest link: “{tokens[i]}” → “{tokens[j]}” {weights[1, 1, i, j]:.3f}"
    )
    # the matrix: four digits of one weight, under the pointer and equal to the model's
    page.get_by_label("Which links").select_option("all")
    page.get_by_role("button", name="Matrix").click()
    page.wait_for_timeout(150)
    page.locator(".av-stage").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert page.locator(".av-readout").inner_text().endswith(f"{weights[1, 1, 1, 1]:.4f}")
    page.keyboard.press("Enter")
    page.wait_for_selector(".av-chip")
    top = float(weights[:, :, 1, 1].max())
    assert page.locator(".av-chip small").first.inner_text() == f"{top:.2f}"
    page.screenshot(path=shots / "panel-attention-matrix.png", full_page=True)
    for kind, start in (("PNG", b"\x89PNG"), ("SVG", b"<svg ")):
        with page.expect_download() as waiting:
            page.get_by_role("button", name=f"Download as {kind}").click()
        waiting.value.save_as(tmp_path / "picture")
        assert (tmp_path / "picture").read_bytes().startswith(start)
    # the link opens the same view
    again = open_page(page.url.partition("/#")[2].join(["#", ""]))
    assert again.locator(".av-title").inner_text() == "Layer 1, head 1"
    assert again.get_by_role("button", name="Matrix").get_attribute("aria-pressed") == "true"


def test_attention_svg_holds_every_token(open_page, tmp_path):
    page = open_page("#attention?model=words&text=the+cat+%3Cscript%3E+%26")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download as SVG").click()
    waiting.value.save_as(tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    import xml.etree.ElementTree as ET

    root = ET.fromstring(text)
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("cat") == 2 and words.count("[CLS]") == 2 and words.count("[SEP]") == 2


def test_presets_find_the_head_that_shows_them(open_page, models):
    page = open_page("#attention?model=words&text=x")
    page.get_by_role("button", name="across a pair").click()
    page.wait_for_selector(".av-chip")
    model = models["words"]
    found = model.attention("The cat sleeps on the sofa.", "Where is the cat?")
    second = next(i for i, t in enumerate(found.tokens) if t == "cat" and found.texts[i] == 1)
    first = found.tokens.index("cat")
    each = found.weights[:, :, second, first]
    layer, head = np.unravel_index(each.argmax(), each.shape)
    assert page.locator(".av-title").inner_text() == f"Layer {layer}, head {head}"
    assert page.get_by_label("Which links").input_value() == "ba"


def test_context(open_page, models):
    page = open_page(PANELS["context"])
    expected = models["words"].neighbours("red", ["the red cat", "a red song and food", "red food"], top=6)
    rows = page.locator("table").first.locator("tbody tr")
    assert rows.locator("th").all_inner_texts() == expected.levels
    assert rows.nth(3).locator("td").nth(1).inner_text() == ", ".join(n.word for n in expected.nearest[3][1])
    label = page.locator("svg.chart").get_attribute("aria-label")
    assert f"layer 2 {expected.similarity[3, 0, 1]:.2f}" in label
    assert page.locator(".heat").count() == 3


def test_classify(open_page, models):
    page = open_page(PANELS["classify"])
    text = "good food , bad song !"
    expected = models["labels"].classify([text])[0]
    assert page.locator(".bar .name").first.inner_text() == expected.label
    assert page.locator(".bar .value").first.inner_text() == shown(expected.score)
    assert page.locator(".why .passage").inner_text() == text
    why = models["labels"].attribution(text)
    strongest = why.tokens[int(np.abs(why.scores).argmax())]
    shades = page.locator(".shade").evaluate_all("all => all.map(e => [e.textContent, e.title])")
    assert max(shades, key=lambda s: abs(float(s[1].replace("−", "-"))))[0] == strongest
    assert "left over" in page.locator(".why").inner_text()
    page.get_by_label("Attribution by").select_option("gradient")
    page.wait_for_selector("text=first-order picture")
    number = open_page("#classify?model=ranker&text=good+food")
    assert number.locator(".big").inner_text() == f"{models['ranker'].regress(['good food'])[0]:.3f}"


def test_names(open_page, models):
    page = open_page(PANELS["names"])
    spans = models["ner"].tag("john smith lives in london")
    assert page.locator("mark .tag").all_inner_texts() == [s.label for s in spans]
    assert page.locator("tbody tr td:first-child").all_inner_texts() == [s.text for s in spans]


def test_answer(open_page, models):
    page = open_page(PANELS["answer"])
    question, context = "where does john lives", "john smith lives in london and mary in paris"
    best = models["qa"].answer(question, context, top=3)
    assert page.locator(".answer").inner_text() == best[0].text == page.locator(".passage mark").inner_text()
    assert page.locator(".bar .name").all_inner_texts() == [a.text for a in best]
    assert page.locator(".end").count() == len(context.split())
    assert "log-probability of" in page.locator(".why h2").inner_text()


def test_next(open_page, models):
    page = open_page(PANELS["next"])
    p = models["words"].next_sentence("the cat eats", "it likes food")
    q = models["words"].next_sentence("it likes food", "the cat eats")
    assert page.locator(".big").inner_text() == shown(p)
    assert page.locator(".bar .value").all_inner_texts() == [shown(p), shown(q)]


def test_similar(open_page, models):
    page = open_page(PANELS["similar"])
    vectors = models["words"].embed(["the cat eats", "a dog eats", "red and blue"], normalize=True)
    cells = page.locator(".heat tbody tr").nth(0).locator("td").all_inner_texts()
    assert cells == ["1", *(f"{vectors[0] @ v:.2f}".replace("-", "−") for v in vectors[1:])]


def test_steps(open_page, models, shots):
    page = open_page(PANELS["steps"])
    trace = models["words"].trace("the cat [MASK] food")
    scores = trace["layers.1.attention.scores"][0]
    assert page.locator("article h2").inner_text().endswith("Scores")
    row = page.locator(".grid-numbers tbody tr").nth(2).locator("td").all_inner_texts()
    assert row == [f"{x:.2f}".replace("-", "−") for x in scores[2]]
    page.get_by_role("button", name="Next →").click()
    page.wait_for_function("() => document.querySelector('article h2').textContent.includes('Softmax')")
    first = page.locator(".grid-numbers tbody tr").nth(0).locator("td").all_inner_texts()
    assert sum(map(float, first)) == pytest.approx(1, abs=0.01)
    page.get_by_role("button", name="The vocabulary").click()
    page.wait_for_selector("article .bars")
    top = trace.vocabulary(models["words"].tokenizer)[3][0]
    assert page.locator("article .card").nth(3).locator(".name").first.inner_text() == top[0]
    page.get_by_role("button", name="Embeddings, summed").click()
    page.wait_for_selector("article .strip")
    page.get_by_role("button", name="Show the numbers of food").first.click()
    values = page.locator(".values").first.inner_text()
    at = trace.tokens.index("food")
    assert values.startswith(
        "food: " + " ".join(f"{x:.3f}".replace("-", "−") for x in trace["embeddings.token"][at][:8])
    )
    page.screenshot(path=shots / "panel-steps.png", full_page=True)


def test_every_command_and_line_of_python_works(open_page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("the cat\na dog\n")
    for name, at in PANELS.items():
        page = open_page(at)
        command = page.get_by_label("Command line", exact=True).inner_text()
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, f"{name}: {command}: {done.output}"
        exec(page.get_by_label("Python", exact=True).inner_text(), {})


def test_a_model_that_cannot_says_so_and_offers_one_that_can(open_page):
    page = open_page("#fill?model=qa")
    words = page.locator(".notice").inner_text()
    assert "qa has no masked-word head" in words
    page.get_by_role("button", name="words", exact=True).click()
    page.wait_for_selector(".both .bar")
    assert page.locator("#model").input_value() == "words"
    for panel, words in (("classify", "label texts"), ("names", "tag words"), ("answer", "answer questions")):
        page = open_page(f"#{panel}?model=words")
        assert f"words was not fine-tuned to {words}" in page.locator(".notice").inner_text()


def test_pickers_and_theme(open_page):
    page = open_page("#tokens?model=words")
    page.locator("#model").select_option("qa")
    page.wait_for_function("() => location.hash.includes('model=qa')")
    ready(page)
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 27)"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "field-text"
