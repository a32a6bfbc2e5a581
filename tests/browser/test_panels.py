"""Every panel, end to end: what the page shows is what the model gives, and what was to be learnt.

Under every panel stand a command and lines of Python: they run as they stand, and give the panel's numbers.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import shlex
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path

import numpy as np
import pytest
import server as own
import tiny_model
import torch
from commandline import run
from pages import (
    BLANK,
    DOCUMENTS,
    FIRST,
    HOLD,
    LINES,
    PAIR,
    PANELS,
    PASSAGE,
    REVIEW,
    SECOND,
    SENTENCE,
    at,
    ready,
    typed,
)

from everybert.corpus.show import text_examples
from everybert.inference.model import load
from everybert.inside.attention import without_heads
from everybert.training.finetune import finetune

pytestmark = pytest.mark.browser


def shown(probability: float) -> str:
    if probability >= 0.9995 or probability < 1e-4:
        return "100 %" if probability > 0.5 else "<0.01 %"
    return f"{100 * probability:.1f} %" if probability >= 0.0995 else f"{100 * probability:.2f} %"


def value(text: str) -> float:
    """A percentage of the page."""
    return 0.0 if "<" in text else float(text.removesuffix(" %")) / 100


def evaluated(code: str) -> list:
    """The values of a script's lines that are expressions."""
    names: dict = {}
    out = []
    for node in ast.parse(code).body:
        if isinstance(node, ast.Expr):
            out.append(eval(compile(ast.Expression(node.value), "page", "eval"), names))
        else:
            exec(compile(ast.Module([node], []), "page", "exec"), names)
    return out


@pytest.fixture
def elsewhere(open_page, tmp_path, monkeypatch):
    """elsewhere(address) → the page, what its command printed (as JSON where it can), what its Python gives."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")

    def both(address: str, as_json: bool = True):
        page = open_page(address)
        if not page.get_by_label("Command line", exact=True).count():
            return page, None, evaluated(page.get_by_label("Python", exact=True).inner_text())
        command = page.get_by_label("Command line", exact=True).inner_text()
        said = run(*shlex.split(command)[1:], *(["--json"] if as_json else [])).stdout
        code = page.get_by_label("Python", exact=True).inner_text()
        return page, json.loads(said) if as_json else said, evaluated(code)

    return both


def near(one, other, tolerance=6e-4):
    return np.abs(np.asarray(one, dtype=float) - np.asarray(other, dtype=float)).max() <= tolerance


def near_shades(page, scores, tolerance=6e-4):
    """The numbers behind the shaded words."""
    titles = page.locator(".shade").evaluate_all("all => all.map(e => e.title.replace('−', '-'))")
    return near([float(title) for title in titles], scores, tolerance)


def check_cards(page, told, found):
    """Of each mask: the card, what the command printed, and what Python gives."""
    assert len(found) == len(told[0]["masks"]) == page.locator(".card").count()
    for card, blank, printed in zip(page.locator(".card").all(), found, told[0]["masks"]):
        names = [c.token for c in blank]
        assert card.locator(".both .name").all_inner_texts() == names == [c["token"] for c in printed]
        assert card.locator(".both .value").all_inner_texts() == [shown(c.score) for c in blank]
        assert near([c["score"] for c in printed], [c.score for c in blank], 1e-6)


def test_fill(elsewhere):
    page, told, (found,) = elsewhere(PANELS["fill"])
    check_cards(page, told, found)
    (expected,) = found
    # either side alone leaves two verbs, both sides leave one
    assert expected[0].token == "barks" and expected[0].score > 0.8
    for side, others in zip(page.locator(".aside").all(), ({"barks", "howls"}, {"barks", "hoots"})):
        assert set(side.locator(".name").all_inner_texts()[:2]) == others
        assert all(0.3 < value(text) < 0.7 for text in side.locator(".value").all_inner_texts()[:2])
    said = page.locator(".original").inner_text()
    assert said.startswith(
        f"“barks” stood here: {shown(expected[0].score)}, the first guess. Not hidden, it would get "
    )
    # click another word: two blanks, each with its own card
    page.get_by_role("button", name="Blank out cat").click()
    ready(page)
    assert page.locator(".card").count() == 2
    assert page.get_by_label("Sentence", exact=True).input_value() == "The dog [MASK] at the [MASK]."
    assert "“cat” stood here" in page.locator(".original").nth(1).inner_text()
    # put the first guess of the first blank in; the other blank is restored
    page.locator(".card").first.locator(".both button.bar").first.click()
    ready(page)
    page.get_by_role("button", name="Blank 1: restore cat").click()
    ready(page)
    assert page.locator(".card").count() == 0
    filled = page.get_by_label("Sentence", exact=True).input_value()
    assert re.fullmatch(r"The dog (barks|howls) at the cat\.", filled)
    page.get_by_role("button", name="a ticket").click()
    ready(page)
    assert "“stop” stood here" in page.locator(".original").inner_text()


def test_a_one_way_model_beside(new_page, folders, tmp_path):
    ways = {"l2r": True, "r2l": "reverse"}
    for name, causal in ways.items():
        tiny_model.save(tmp_path / name, {"mlm": None}, seed=3, causal=causal)
    both = {"words": folders["words"], **{name: tmp_path / name for name in ways}}
    text = "the cat sees a [MASK] dog"
    with own.running(both) as (address, _):
        for name in ("words", "l2r"):
            page = new_page()
            page.goto(f"{address}/{at('fill', name, text=text)}")
            ready(page)
            assert page.locator(".three").count() == (name == "words"), "sides are of a model that reads both"
            cards = page.locator(".one-way")
            assert cards.locator("h2").all_inner_texts() == [
                f"A {way} model would say" for way in ("left-to-right", "right-to-left")[: 2 if name == "words" else 1]
            ]
            expected = load(both["l2r"], device="cpu").fill("the cat sees a [MASK]", top=8)[0]
            assert cards.first.locator(".name").all_inner_texts() == [c.token for c in expected]
            assert cards.first.locator("p").inner_text() == "l2r reads: the cat sees a ___"


def test_two_masks_in_a_pair(elsewhere):
    page, told, (found,) = elsewhere(
        at("fill", "words", text="the dog [MASK] at the moon .", pair="the owl [MASK] at the cat .")
    )
    assert len(found) == 2
    check_cards(page, told, found)
    assert page.get_by_label("Second sentence", exact=True).is_visible()
    assert page.get_by_role("button", name=re.compile("Blank 2")).count() == 1


@pytest.mark.parametrize("address", [PANELS["tokens"], at("tokens", "words", text="the cat", pair="a dog")])
def test_tokens_elsewhere(elsewhere, address):
    page, told, (found,) = elsewhere(address)
    assert page.locator(".pieces").first.locator("small").all_inner_texts() == [str(i) for i in found.ids]
    assert [t["id"] for t in told[0]["tokens"]] == list(found.ids)
    assert near([t["vector"] for t in told[0]["tokens"]], found.vectors, 1e-5)


def test_tokens(open_page, models):
    page = open_page(PANELS["tokens"])
    encoding = models["words"].tokenizer.encode("The cat likes qué 🐍")
    pieces = page.locator(".pieces").first.locator(".piece")
    assert pieces.locator("b").all_inner_texts() == encoding.tokens
    unknown = sum(i == models["words"].tokenizer.unk_id for i in encoding.ids)
    assert page.locator(".pieces").first.locator(".unknown").count() == unknown > 0
    assert "lower-cases what it reads" in page.locator(".result").inner_text()
    beside = page.get_by_label("Tokenizers side by side").locator("tbody tr")
    assert beside.first.locator("td").all_inner_texts()[:3] == ["words", "WordPiece", "uncased"]
    other = models["ranker"].tokenizer.describe("The cat likes qué 🐍")
    counts = [str(other["tokens"]), str(other["unknown"]), f"{other['tokens_per_word']:.2f}"]
    assert beside.nth(1).locator("td").all_inner_texts()[4:] == counts
    page.get_by_text("As a table").click()
    rows = page.locator("details table tbody tr")
    assert rows.count() == len(encoding)
    assert rows.nth(2).locator("td").all_inner_texts() == ["2", "cat", str(encoding.ids[2]), "0", "4–7"]


@pytest.mark.parametrize(
    "more", ["", "&kind=full&strategy=pmi&rate=0.3&collocations=the+store", "&kind=order&static=true&seed=5"]
)
def test_examples(elsewhere, more):
    page, _, (found,) = elsewhere(PANELS["examples"] + more)
    tokens = page.locator(".example .piece > b").all_inner_texts()
    assert tokens == [token for one in found for token in one["tokens"]]
    predicted = page.locator(".example .piece:is(.mask, .random, .kept) > small").all_inner_texts()
    assert predicted == [was for one in found for was in one["was"]]
    assert page.locator(".card").count() == len(found) // 2


def test_a_link_with_a_choice_that_does_not_exist_shows_the_usual_one(open_page):
    page = open_page(PANELS["examples"] + "&static=yes&rate=0.9&kind=pairs")
    chosen = [page.get_by_label(name, exact=True).input_value() for name in ("Epochs", "Rate", "Kind")]
    assert chosen == ["", "0.15", "pairs"]


def test_training_data(open_page, models, shots):
    page = open_page(PANELS["examples"])
    expected = text_examples(DOCUMENTS, models["words"].tokenizer, seed=3)
    titles = page.locator(".card h2").all_inner_texts()
    assert [re.search(r"(IsNext|NotNext)|pack", title)[1] for title in titles] == [
        one["label"] for one in expected[::2]
    ]
    before = page.locator(".example").all_inner_texts()
    assert page.locator(".example").first.locator("h3").inner_text() == "Epoch 0"
    page.get_by_role("button", name="Draw again").click()
    ready(page)
    assert page.locator(".example").all_inner_texts() != before and "seed=4" in page.url
    page.get_by_label("Epochs", exact=True).select_option("true")
    ready(page)
    rows = [row.split("\n")[1:] for row in page.locator(".example").all_inner_texts()]
    assert rows[::2] == rows[1::2], "static masks: both epochs are the same"
    page.get_by_role("button", name="collocations").click()
    ready(page)
    assert "strategy=pmi" in page.url and page.get_by_label("Masks", exact=True).input_value() == "pmi"
    assert page.get_by_label("Collocations, separated by commas").input_value() == "New York, gallon of milk"
    page.get_by_label("Kind", exact=True).select_option("pairs")
    typed(page, "Text", "The man went to the store. He bought milk.")
    assert "Pairs need sentences of other documents" in page.locator(".notice.bad").inner_text()
    open_page.wrong.clear()  # Chromium logs the error response itself as a failed resource


def test_attention(open_page, elsewhere, tmp_path, shots):
    page, _, (found,) = elsewhere(PANELS["attention"], as_json=False)
    weights, tokens = found.weights, found.tokens
    data = json.loads(re.search(r'id="data">(.*?)</script>', Path("attention.html").read_text("utf-8"), re.DOTALL)[1])
    written = np.frombuffer(zlib.decompress(base64.b64decode(data["weights"])), "<u2").reshape(weights.shape) / 65535
    assert near(written, weights, 1e-5)
    most = (weights[1, 0] * (1 - np.eye(len(tokens)))).max()
    assert page.locator(".av-readout").inner_text().endswith(f"{most:.3f}")
    assert page.locator(".av-cell").count() == 8
    page.get_by_role("gridcell", name="Layer 2, head 2").click()
    ready(page)
    assert page.locator(".av-title").inner_text() == "Layer 2, head 2"
    assert "layer=1" in page.url and "head=1" in page.url
    # the keyboard walks through tokens and the readout names their strongest links
    page.locator(".av-stage").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    best = [j for j in np.argsort(-weights[1, 1, 2])[:4] if weights[1, 1, 2, j] > 1e-3]  # smaller ones may tie
    links = ", ".join(f"“{tokens[j]}” {weights[1, 1, 2, j]:.3f}" for j in best)
    assert page.locator(".av-readout").inner_text().startswith(f"“{tokens[2]}” attends to {links}")
    # each direction alone
    page.keyboard.press("Escape")
    sides = {"a": [i for i, t in enumerate(found.texts) if t == 0], "b": [i for i, t in enumerate(found.texts) if t]}
    seen: list[float] = []
    for way in ("ba", "ab", "aa", "bb"):
        page.get_by_label("Which links").select_option(way)
        allowed = [(i, j) for i in sides[way[0]] for j in sides[way[1]] if i != j]
        most = max(weights[1, 1][link] for link in allowed)
        best = [(i, j) for i, j in allowed if weights[1, 1, i, j] > most - 2e-5]  # as near as the page can tell
        said = [f"Strongest link: “{tokens[i]}” → “{tokens[j]}” {most:.3f}" for i, j in best]
        found_out = page.locator(".av-readout").inner_text()
        assert found_out in said or (most < 0.01 and found_out == "No link stands out in this selection."), way
        seen.append(most)
        assert f"filter={way}" in page.url
    assert sorted(seen)[-2] > 0.01
    # the matrix: four digits of one weight, under the keys and equal to the model's
    page.get_by_label("Which links").select_option("all")
    page.get_by_role("button", name="Matrix").click()
    page.locator(".av-stage").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert page.locator(".av-readout").inner_text().endswith(f"{weights[1, 1, 1, 1]:.4f}")
    page.keyboard.press("Enter")
    page.wait_for_selector(".av-links .av-chip")
    assert page.locator(".av-chip small").first.inner_text() == f"{weights[:, :, 1, 1].max():.2f}"
    page.screenshot(path=shots / "attention-matrix.png", full_page=True)
    for kind, start in (("PNG", b"\x89PNG"), ("SVG", b"<svg ")):
        with page.expect_download() as waiting:
            page.get_by_role("button", name=f"Download as {kind}").click()
        waiting.value.save_as(tmp_path / "picture")
        assert (tmp_path / "picture").read_bytes().startswith(start)
    # the link opens the same view
    again = open_page(page.url.partition("/#")[2].join(["#", ""]))
    assert again.locator(".av-title").inner_text() == "Layer 2, head 2"
    assert again.get_by_role("button", name="Matrix").get_attribute("aria-pressed") == "true"


def test_pointing_isolates_a_token(open_page, models):
    page = open_page(PANELS["attention"])
    found = models["words"].attention(SENTENCE, PAIR)
    box = page.locator(".av-canvas").bounding_box()
    ink = """c => c.getContext("2d").getImageData(c.width * .35, 0, c.width * .3, c.height).data
      .reduce((n, x, i) => n + (i % 4 === 3 && x > 24), 0)"""  # between the two columns
    ready(page)
    all_links = page.locator(".av-canvas").evaluate(ink)
    row = box["height"] / len(found.tokens)
    page.mouse.move(box["x"] + 60, box["y"] + 2.5 * row)
    page.wait_for_function("() => document.querySelector('.av-readout').textContent.includes('attends to')")
    said = page.locator(".av-readout").inner_text()
    token = next(i for i, name in enumerate(found.tokens) if said.startswith(f"“{name}”"))
    best = int(found.weights[1, 0, token].argmax())
    assert f"“{found.tokens[best]}” {found.weights[1, 0, token, best]:.3f}" in said
    page.wait_for_function(f"(most) => ({ink})(document.querySelector('.av-canvas')) < most", arg=all_links / 2)


def test_attention_svg_holds_every_token(open_page, tmp_path):
    page = open_page(at("attention", "words", text="the cat <script> &"))
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download as SVG").click()
    waiting.value.save_as(tmp_path / "a.svg")
    root = ET.fromstring((tmp_path / "a.svg").read_text())
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("cat") == 2 and words.count("[CLS]") == 2 and words.count("[SEP]") == 2


def test_presets_find_the_head_that_shows_them(open_page, models):
    page = open_page("#attention?model=words")
    found = models["words"].attention("My friend told me about this class and I love it so far! She was right.")
    each = found.weights[:, :, found.tokens.index("she"), found.tokens.index("friend")]
    layer, head = np.unravel_index(each.argmax(), each.shape)
    assert page.locator(".av-title").inner_text() == f"Layer {layer + 1}, head {head + 1}", "what a first visit shows"
    assert page.locator(".av-readout").inner_text().startswith("“she” attends to")
    page.get_by_role("button", name="across a pair").click()
    ready(page)
    page.wait_for_selector(".av-links .av-chip")
    found = models["words"].attention("The cat sleeps on the sofa.", "Where is the cat?")
    second = next(i for i, t in enumerate(found.tokens) if t == "cat" and found.texts[i] == 1)
    each = found.weights[:, :, second, found.tokens.index("cat")]
    layer, head = np.unravel_index(each.argmax(), each.shape)
    assert page.locator(".av-title").inner_text() == f"Layer {layer + 1}, head {head + 1}"
    assert page.get_by_label("Which links").input_value() == "ba"


def test_context(elsewhere, models):
    page, told, (expected,) = elsewhere(PANELS["context"])
    nearest = models["words"].neighbours("cat", HOLD, top=6).nearest
    assert near(told["similarity"], expected.similarity, 1e-5)
    rows = page.locator("table").first.locator("tbody tr")
    assert rows.locator("th").all_inner_texts() == expected.levels
    assert rows.nth(3).locator("td").nth(1).inner_text() == ", ".join(n.word for n in nearest[3][1])
    label = page.locator("svg.chart").get_attribute("aria-label")
    assert "static 1.00, embeddings " in label and "layer 2 " in label
    assert near([float(x) for x in re.findall(r" (\d\.\d\d)", label)], expected.similarity[:, 0, 1], 6e-3)
    assert page.locator(".heat").count() == 3


def test_classify(elsewhere, open_page):
    page, told, ((expected,), why) = elsewhere(PANELS["classify"])
    bars = dict(zip(page.locator(".bar .name").all_inner_texts(), page.locator(".bar .value").all_inner_texts()))
    assert bars == {label: shown(score) for label, score in expected.scores.items()}
    assert next(iter(bars)) == expected.label == "praise" and expected.score > 0.7
    assert near([told[0]["scores"][k] for k in expected.scores], list(expected.scores.values()), 1e-6)
    assert page.locator(".why .passage").inner_text() == REVIEW
    assert near_shades(page, [s for s, t in zip(why.scores, why.texts) if t == 0])
    assert why.tokens[why.scores.argmax()] == "wonderful", "the word that it rests on"
    assert "explain" in page.locator(".why").inner_text()
    page.get_by_role("button", name="a complaint").click()
    ready(page)
    assert page.locator(".bar .name").first.inner_text() == "complaint"
    number, told, ((found,),) = elsewhere(at("classify", "ranker", text="good food"))
    assert number.locator(".big").inner_text() == f"{found:.3f}" and near(told[0]["value"], found, 1e-5)


def test_names(elsewhere):
    page, told, (spans,) = elsewhere(PANELS["names"])
    printed = told[0]["spans"] if isinstance(told[0], dict) else told[0]
    assert [(s["text"], s["label"], s["start"]) for s in printed] == [(s.text, s.label, s.start) for s in spans]
    wanted = [("John Smith", "PER"), ("New York", "LOC"), ("Acme", "ORG")]
    assert [(s.text, s.label) for s in spans] == wanted
    marks = page.locator("mark").evaluate_all(
        "all => all.map(e => [e.firstChild.textContent, e.lastChild.textContent])"
    )
    assert [tuple(mark) for mark in marks] == wanted
    rows = page.locator("tbody tr").all()
    assert [tuple(row.locator("td").all_inner_texts()) for row in rows] == [
        (s.text, s.label, f"{s.start}–{s.end}", shown(s.score)) for s in spans
    ]


def test_answer(elsewhere, models):
    page, told, (best, why) = elsewhere(PANELS["answer"])
    printed = told[0]["answers"] if "answers" in told[0] else told
    assert near([a["score"] for a in printed], [a.score for a in best], 1e-6)
    assert (
        page.locator(".answer").inner_text() == best[0].text == page.locator(".passage mark").inner_text() == "Canada"
    )
    assert page.locator(".bar .name").all_inner_texts() == [a.text for a in best]
    assert page.locator(".bar .value").all_inner_texts() == [shown(a.score) for a in best]
    ends = page.locator(".end").evaluate_all("all => all.map(e => [e.textContent, e.title])")
    assert [text for text, _ in ends] == models["answers"].tokenizer.encode(PASSAGE, specials=False).tokens
    begins, stops = ([float(re.findall(r"\d\.\d+", title)[k]) for _, title in ends] for k in (0, 1))
    assert ends[int(np.argmax(begins))][0] == ends[int(np.argmax(stops))][0] == "canada"
    assert sum(begins) < 1.001 and sum(stops) < 1.001
    assert page.locator(".why h2").inner_text() == "What speaks for it: log-probability of “Canada”"
    assert page.locator(".why .shade").count() > 5
    assert near_shades(page, [s for s, t in zip(why.scores, why.texts) if t is not None], 1e-3)
    typed(page, "Question", "When did Matt move?")
    assert page.locator(".answer").inner_text() == "2019"


def test_next(elsewhere, models):
    page, told, (p,) = elsewhere(PANELS["next"])
    assert near(told[0]["probability"], p, 1e-6)
    q = models["words"].next_sentence(SECOND, FIRST)
    assert page.locator(".big").inner_text() == shown(p) and p > 0.9
    assert page.locator(".bar .value").all_inner_texts() == [shown(p), shown(q)]
    page.get_by_role("button", name="does not").click()
    ready(page)
    assert value(page.locator(".big").inner_text()) < 0.1


def test_similar(elsewhere):
    page, _, (cosines,) = elsewhere(PANELS["similar"])
    vectors = np.load("vectors.npy")
    assert near(vectors @ vectors.T, cosines, 1e-5)
    cells = page.locator(".heat tbody tr").nth(0).locator("td").all_inner_texts()
    assert cells == ["1", *(f"{x:.2f}".replace("-", "−") for x in cosines[0, 1:])]
    every = [t.replace("−", "-") for t in page.locator(".heat td[title]").all_inner_texts()]
    assert near([float(x) for x in every], cosines.ravel(), 6e-3)
    best = max(((i, j) for i in range(3) for j in range(i)), key=lambda at: cosines[at])
    assert all(LINES[i] in page.locator(".bar .name").first.inner_text() for i in best)


@pytest.mark.parametrize(
    "address",
    [PANELS["steps"].replace("step=4", "step=5"), at("steps", "words", text="the [MASK]", pair="a dog", step="5")],
)
def test_steps_elsewhere(elsewhere, address):
    page, told, (weights,) = elsewhere(address, as_json=False)
    cells = page.locator(".grid-numbers td[style]").all_inner_texts()
    assert near([float(x) for x in cells], weights.ravel())
    rows = [[float(x) for x in re.findall(r" (\d\.\d+(?:e-\d+)?)(?= |$)", line)] for line in told.splitlines()]
    found = [row for row in rows if len(row) == len(weights) and near(row, weights[1], 1e-4)]
    assert found, "the terminal shows the same numbers"


def test_steps(open_page, models):
    page = open_page(PANELS["steps"])
    trace = models["words"].trace(BLANK)
    scores = trace["layers.1.attention.scores"][0]
    assert page.locator("article h2").inner_text().endswith("Scores")
    row = page.locator(".grid-numbers tbody tr").nth(2).locator("td").all_inner_texts()
    assert row == [f"{x:.2f}".replace("-", "−") for x in scores[2]]
    page.get_by_role("button", name="Next →").click()
    ready(page)
    assert "Softmax" in page.locator("article h2").inner_text()
    first = page.locator(".grid-numbers tbody tr").nth(0).locator("td").all_inner_texts()
    assert sum(map(float, first)) == pytest.approx(1, abs=0.01)
    page.get_by_role("button", name="The vocabulary").click()
    ready(page)
    top = trace.vocabulary(models["words"].tokenizer)[3][0]
    assert page.locator("article .card").nth(3).locator(".name").first.inner_text() == top[0] == "barks"
    page.get_by_role("button", name="Embeddings, summed").click()
    ready(page)
    page.get_by_role("button", name="Show the numbers of cat").first.click()
    values = page.locator(".values").first.inner_text()
    numbers = trace["embeddings.token"][trace.tokens.index("cat")][:8]
    assert values.startswith("cat: " + " ".join(f"{x:.3f}".replace("-", "−") for x in numbers))


@pytest.mark.slow
def test_every_step_shows_something(open_page, models):
    page = open_page(at("steps", "words", text=BLANK))
    titles = page.locator(".steps button").all_inner_texts()
    for number, title in enumerate(titles):
        page.locator(".steps button").nth(number).click()
        ready(page)
        assert page.locator("article h2").inner_text() == f"{number + 1}. {title}"
        assert page.locator("article .equation").inner_text()
        assert page.locator("article canvas, article table, article .card, article .piece").count()


def test_a_model_that_cannot_says_so_and_offers_one_that_can(open_page, new_page, folders):
    page = open_page("#fill?model=answers")
    assert "answers has no masked-word head" in page.locator(".notice").inner_text()
    assert page.locator("nav a.unable").all_inner_texts() == ["Fill", "Classify", "Names", "Next sentence"]
    page.get_by_role("button", name="words", exact=True).click()
    ready(page)
    assert page.locator("#model").input_value() == "words" and page.locator(".both .bar").count() == 8
    lacks = {
        "classify": ("label texts", "everybert finetune classify --model"),
        "names": ("tag words", "everybert finetune tag --model"),
        "answer": ("answer questions", "everybert finetune answer --model"),
    }
    with own.running({"words": folders["words"]}) as (url, _):
        alone = new_page()
        for panel, (words, command) in lacks.items():
            alone.goto(f"{url}/?{panel}#{panel}")
            ready(alone)
            said = alone.locator(".notice").inner_text()
            assert f"words was not fine-tuned to {words}" in said and "No model that is served here can" in said
            remedy = alone.get_by_label("Commands that make and serve one", exact=True).inner_text()
            assert command in remedy and str(folders["words"]) in remedy and "everybert serve --model" in remedy


def test_pickers(open_page, new_page, folders, tmp_path):
    page = open_page("#tokens?model=words")
    page.locator("#model").select_option("answers")
    ready(page)
    assert "model=answers" in page.url and page.locator("#adapter-picker").is_hidden()
    rows = [("the film was wonderful .", "hot"), ("the film was dull .", "cold")] * 20
    settings = {"mode": "lora", "epochs": 2, "device": "cpu", "quiet": True}
    finetune(folders["labels"], "classify", rows, None, tmp_path / "mine", **settings)
    adapters = {"labels": {"mine": tmp_path / "mine"}}
    with own.running({"labels": folders["labels"]}, adapters=adapters) as (url, _):
        page = new_page()
        page.goto(f"{url}/{at('classify', 'labels', text=REVIEW)}")
        ready(page)
        assert set(page.locator(".bar .name").all_inner_texts()) == {"praise", "complaint"}
        page.get_by_label("Adapter").select_option(label="mine")
        ready(page)
        expected = load(tmp_path / "mine", device="cpu").classify([REVIEW])[0]
        assert set(page.locator(".bar .name").all_inner_texts()) == {"hot", "cold"}
        assert page.locator(".bar .value").first.inner_text() == shown(expected.score)
        assert str(tmp_path / "mine") in page.get_by_label("Python", exact=True).inner_text()


def test_panels_that_show_the_parts_begin_with_the_model_of_the_paper(new_page, folders):
    page = new_page()
    both = {"everybert-small": folders["words"], "everybert-classic": folders["words"]}
    with own.running(both) as (url, _):
        page.goto(url)
        for panel, model in (("Attention", "everybert-classic"), ("Fill", "everybert-small")):
            page.get_by_role("link", name=panel, exact=True).click()
            page.wait_for_url(f"**model={model}*")
        page.get_by_role("combobox", name="Model").select_option("everybert-classic")
        page.wait_for_url("**#fill?model=everybert-classic*")
        page.get_by_role("link", name="Tokens", exact=True).click()
        page.wait_for_url("**#tokens?model=everybert-classic*")  # a choice stays


def test_two_panels_side_by_side(open_page, models):
    page = open_page(PANELS["fill"])
    page.get_by_role("button", name="Compare").click()
    ready(page)
    page.locator("#field-text-second").fill("the owl [MASK] at the cat .")
    page.wait_for_function("() => location.hash.includes('owl')")
    page.wait_for_function(
        "() => document.querySelectorAll('.half .result:not([data-stale]) .both .bar').length === 16"
    )
    for half, text in zip(page.locator(".half").all(), (BLANK, "the owl [MASK] at the cat .")):
        expected = [c.token for c in models["words"].fill(text, top=8)[0]]
        assert half.locator(".both .name").all_inner_texts() == expected
    again = open_page(page.url.partition("/#")[2].join(["#", ""]))
    assert again.locator("#field-text-second").input_value() == "the owl [MASK] at the cat ."
    again.get_by_role("button", name="Close").click()
    ready(again)
    assert again.locator(".half").count() == 0 and again.locator("#field-text").input_value() == BLANK


def test_heads_are_switched_off_and_drawn_over_each_other(open_page, models):
    page = open_page(at("attention", "words", text=BLANK, layer="1", head="1"))
    page.get_by_role("button", name="Switch this head off").click()
    page.wait_for_selector(".av-change li")
    model = models["words"]
    encoding = model.one_window(BLANK)
    whole, without = (without_heads(model.network, encoding, heads) for heads in ([], [(1, 1)]))
    least = torch.cosine_similarity(whole, without, dim=-1).min()
    assert page.locator(".av-change li small").first.inner_text() == f"{least:.3f}"
    assert "[MASK]" in page.locator(".av-change").inner_text()
    assert page.locator(".av-cell.off").count() == 1
    page.get_by_role("button", name="Switch this head on again").click()
    page.wait_for_function("() => !document.querySelector('.av-change li')")
    page.get_by_text("click adds a head in another colour").click()
    ink = """c => new Set(Array.from(new Uint32Array(c.getContext("2d")
      .getImageData(c.width * .4, 0, c.width * .2, c.height).data.buffer)).filter(x => x >>> 24)).size"""
    before = page.locator(".av-canvas").evaluate(ink)
    page.locator(".av-cell").first.click()
    page.wait_for_function("() => document.querySelector('.av-cell').style.outline")
    page.wait_for_function(f"(was) => ({ink})(document.querySelector('.av-canvas')) > was", arg=before)
    page.locator(".av-cell").first.click()
    page.wait_for_function("() => !document.querySelector('.av-cell').style.outline")


def test_a_score_is_a_sum_of_products(open_page, models):
    page = open_page(PANELS["steps"])  # the step of the scores
    page.locator(".cell").nth(1).click()
    page.wait_for_selector(".terms i")
    trace = models["words"].trace(BLANK)
    score = trace["layers.1.attention.scores"][0, 0, 1]
    said = page.locator(".part header b").last.inner_text()
    assert float(said.rpartition("= ")[2].replace("−", "-")) == pytest.approx(score, abs=0.006)
    assert page.locator(".terms i").count() == models["words"].config.head_size


def test_the_map_leads_to_layers_heads_and_blocks(open_page):
    page = open_page(at("steps", "words", text=BLANK))
    plan = page.get_by_role("group", name="Architecture")
    plan.get_by_role("button", name="Layer 2").click()
    ready(page)
    plan.get_by_role("button", name="Head 2").click()
    ready(page)
    assert "layer=1" in page.url and "head=1" in page.url
    plan.get_by_role("button", name="Prediction").click()
    ready(page)
    assert "After all" in page.locator("article h2").inner_text()


def test_json_and_picture_of_an_answer(open_page, tmp_path):
    page = open_page(PANELS["similar"])
    page.locator(".json summary").click()
    assert "POST /embed" in page.locator(".json").inner_html()
    assert re.search(r"Answered in [\d,]+ ms", page.locator(".json summary").inner_text())
    assert open_page(PANELS["fill"].replace("%5BMASK%5D", "barks")).locator(".json").count() == 0, "nothing was asked"
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Picture").click()
    waiting.value.save_as(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_the_tour_leads_through_the_panels(open_page):
    page = open_page(PANELS["fill"])
    page.get_by_role("button", name="Tour").click()
    seen = []
    while True:
        ready(page)
        seen.append(page.locator(".tour h2").inner_text())
        if not page.locator(".tour").get_by_role("button", name="Next").count():
            break
        page.locator(".tour").get_by_role("button", name="Next").click()
    assert len(seen) == len(set(seen)) == 10
    page.get_by_role("button", name="End").click()
    assert page.locator(".tour").count() == 0
