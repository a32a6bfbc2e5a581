"""Words that read from the right, and emoji, that are in the vocabulary: how the attention viewer draws them.

What the canvas is told is listened to (LISTEN); what it shows is compared, as pixels, with the browser's own text.
"""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest
import torch
from pages import at, painted, ready, some
from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers import models as kinds
from tokenizers import pre_tokenizers

from everybert.inference.model import Model
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.text.tokenizer import Tokenizer
from everybert.text.train_tokenizer import train_tokenizer

pytestmark = pytest.mark.browser
FAMILY, FLAG, WAVE, HEART, PRIDE = "👩‍👩‍👧‍👦", "🇩🇪", "👋🏽", "❤️", "🏳️‍🌈"
CROWD = FAMILY * 14
LONG = "والاستقلاليات" * 3
ARABIC, HEBREW = ["مرحبا", "بالعالم", "قطة"], ["שלום", "חתול"]
TEXT = f"مرحبا بالعالمين , שלום cat {FLAG} {WAVE} {HEART} قطة ."
PIECES = ["مرحبا", "بالعالم", "##ين", ",", "שלום", "cat", FLAG, WAVE, HEART, "قطة", "."]
WHOLE = f"שלום {FAMILY} قطة {PRIDE} {FLAG} cat {CROWD} {LONG}"
SVG = "{http://www.w3.org/2000/svg}text"
LISTEN = """() => {
  window.said = [];
  const draw = CanvasRenderingContext2D.prototype.fillText, clear = CanvasRenderingContext2D.prototype.clearRect;
  CanvasRenderingContext2D.prototype.clearRect = function (...box) { window.said = []; return clear.apply(this, box); };
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const { width } = this.measureText(text), { a, b, e, f } = this.getTransform(), scale = window.devicePixelRatio;
    const turned = Math.abs(b) > 1e-6;
    const [left, top] = turned ? [e / scale, f / scale] : [x, y];
    const start = this.textAlign === "right" ? -width : 0;
    const size = Number(this.font.match(/([\\d.]+)px/)[1]);
    window.said.push({ text, x: left, y: top, start, width, turned, way: this.direction, size });
    return draw.apply(this, arguments);
  };
}"""
BROKEN = """([token, label]) => {
  const kept = label.replace(/…$/, ""), cuts = new Set([token.length]);
  for (const { index } of new Intl.Segmenter("en", { granularity: "grapheme" }).segment(token)) cuts.add(index);
  return !token.startsWith(kept) || !cuts.has(kept.length);
}"""


@pytest.fixture(scope="session")
def written(served, tmp_path_factory):
    """Small random models that know these words, beside the others: in WordPiece, Unigram and bytes."""
    root = tmp_path_factory.mktemp("scripts")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *ARABIC, *HEBREW, "##ين", "##ים", "cat", ",", ".", FLAG, WAVE, HEART]
    (root / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    settings = {"do_lower_case": False, "strip_accents": False, "tokenizer_class": "BertTokenizer"}
    (root / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizers = {"scripts": Tokenizer.load(root)}
    names = [f"▁{word}" for word in (*ARABIC, *HEBREW, "cat", FAMILY, FLAG, PRIDE, CROWD, LONG)]
    vocabulary = [("<pad>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("<mask>", 0.0)]
    backend = Backend(kinds.Unigram([*vocabulary, *((name, -2.0) for name in names)], unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizers["pieces"] = Tokenizer(backend, {"cls_token": "<s>", "sep_token": "</s>"})
    tokenizers["bytes"], _ = train_tokenizer([TEXT.replace(",", "")] * 50, kind="bpe", size=400)
    models = {}
    for name, tokenizer in tokenizers.items():
        torch.manual_seed(3)
        config = EncoderConfig(
            vocab_size=tokenizer.size,
            layers=2,
            hidden_size=32,
            heads=2,
            intermediate_size=48,
            max_positions=64,
            init_range=0.4,
        )
        models[name] = Model(Network(config, {"mlm": None}).eval(), tokenizer)
        served[1].registry.add(name, models[name])
    return models


def spoken(page, view: str) -> list[dict]:
    """Every label of one view as the canvas drew it last."""
    page.evaluate(LISTEN)
    other = "Matrix" if view == "Lines" else "Lines"
    for name in (other, view):
        page.get_by_role("button", name=name, exact=True).click()
        ready(page)
        painted(page)
    return page.evaluate("window.said")


def grey(data: bytes, box=None) -> np.ndarray:
    """A picture's ink, from 0 to 1, whatever its background."""
    image = np.asarray(Image.open(io.BytesIO(data)).convert("L").crop(box), dtype=float)
    ink = np.abs(image - np.median(image))
    return ink / max(ink.max(), 1)


def alike(one: np.ndarray, other: np.ndarray) -> float:
    """Correlation of two pictures' ink, each cut to it, at the best shift within two pixels."""

    def cut(ink):
        rows, columns = np.flatnonzero((ink > 0.3).any(1)), np.flatnonzero((ink > 0.3).any(0))
        return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]

    a, b = cut(one), cut(other)
    height, width = max(a.shape[0], b.shape[0]) + 4, max(a.shape[1], b.shape[1]) + 4
    still = np.zeros((height, width))
    still[2 : 2 + a.shape[0], 2 : 2 + a.shape[1]] = a
    best = 0.0
    for down in range(height - b.shape[0] + 1):
        for along in range(width - b.shape[1] + 1):
            moved = np.zeros_like(still)
            moved[down : down + b.shape[0], along : along + b.shape[1]] = b
            best = max(best, float(np.corrcoef(still.ravel(), moved.ravel())[0, 1]))
    return best


def by_browser(page, text: str, size: float, override: str = "isolate", letters: bool = False) -> np.ndarray:
    """A token as the browser itself draws it on this page, with dir=auto; `letters` keeps its letters apart."""
    page.evaluate(
        """([text, size, override, letters]) => {
          const box = document.createElement("span");
          box.id = "reference";
          box.dir = "auto";
          box.textContent = letters ? [...text].join("\\u200c") : text;
          const surface = getComputedStyle(document.querySelector(".av-stage")).backgroundColor;
          box.style.cssText = `position: fixed; left: 0; top: 0; z-index: 99; padding: 8px; background: ${surface};
            color: var(--ink); white-space: pre; unicode-bidi: ${override};
            font: 400 ${size}px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace`;
          document.body.append(box);
        }""",
        [text, size, override, letters],
    )
    shot = page.locator("#reference").screenshot()
    page.evaluate("document.getElementById('reference').remove()")
    return grey(shot)[3:-3, 3:-3]  # its edge may share a pixel with the page


def label_box(label: dict, pad: float = 3) -> dict:
    left = label["x"] + label["start"]
    return {"x": left - pad, "y": label["y"] - 11, "width": label["width"] + 2 * pad, "height": 22}


def test_tokens_are_words_and_drawn_whole(open_page, written, shots):
    """Lines view: real tokens, each drawn at once and in its own direction, clear of the others and of the edge."""
    found = written["scripts"].attention(TEXT)
    assert found.tokens == ["[CLS]", *PIECES, "[SEP]"], "nothing here is unknown to the vocabulary"
    page = open_page(at("attention", "scripts", text=TEXT))
    said = spoken(page, "Lines")
    assert [label["text"] for label in said] == [token for token in found.tokens for _ in "lr"]
    ways = {label["text"]: label["way"] for label in said}
    rtl = {"مرحبا", "بالعالم", "##ين", "שלום", "قطة"}
    assert {text for text, way in ways.items() if way == "rtl"} == rtl
    width = page.locator(".av-canvas").evaluate("c => c.clientWidth")
    layout = {side: [label for label in said if (label["start"] < 0) == (side == "from")] for side in ("from", "to")}
    for side, column in layout.items():
        edge = {label["x"] for label in column}
        assert len(edge) == 1, f"labels stand at one edge: {side}"
        assert all(b["y"] - a["y"] >= a["size"] * 1.2 for a, b in pairwise(column)), "rows do not touch"
        for label in column:
            left = label["x"] + label["start"]
            assert left >= 0 and left + label["width"] <= width, f"{label['text']} is cut off"
    assert max(label["x"] for label in layout["from"]) < min(label["x"] for label in layout["to"])
    page.screenshot(path=shots / "scripts-lines.png", full_page=True)


@pytest.mark.parametrize("scheme", some(["light", "dark"], "dark"))
def test_drawn_as_the_browser_writes(open_page, written, scheme):
    """Joined, in order and with "##" where the word begins: the canvas's pixels are those of the browser's own text."""
    page = open_page(at("attention", "scripts", text=TEXT), scheme=scheme)
    said = spoken(page, "Lines")
    page.locator(".av-stage").scroll_into_view_if_needed()
    page.mouse.move(0, 0)
    painted(page)
    stage = page.locator(".av-canvas").bounding_box()
    for token in ("مرحبا", "بالعالم", "##ين", "שלום", FLAG, WAVE, "[CLS]"):
        label = next(label for label in said if label["text"] == token and label["start"] == 0)
        box = label_box(label)
        clip = {**box, "x": stage["x"] + box["x"], "y": stage["y"] + box["y"]}
        drawn = grey(page.screenshot(clip=clip))
        assert alike(drawn, by_browser(page, token, label["size"])) > 0.9, token
        if token in ("مرحبا", "بالعالم"):
            assert alike(drawn, by_browser(page, token, label["size"], letters=True)) < 0.8, "not joined"
        if token in ("##ين", "שלום"):
            turned = by_browser(page, token[::-1], label["size"], override="bidi-override")
            assert alike(drawn, turned) < 0.8, "the other way round"


def test_bytes_are_drawn_as_the_letters_they_are(open_page, written, shots):
    """A byte-level vocabulary spells Arabic in signs for bytes; pieces of whole letters are shown as those letters."""
    found = written["bytes"].attention(TEXT)
    assert "ĠÙĤØ·Ø©" in found.tokens and f"Ġ{ARABIC[2]}" in found.labels
    page = open_page(at("attention", "bytes", text=TEXT))
    said = spoken(page, "Lines")
    assert [label["text"] for label in said] == [label for label in found.labels for _ in "lr"]
    assert {"مرحبا", "Ġשלום", "Ġقطة", f"Ġ{FLAG}", "Ġcat"} <= set(found.labels)
    assert {label["way"] for label in said if re.search("[א-ת]|[ا-ي]", label["text"])} == {"rtl"}
    page.screenshot(path=shots / "scripts-bytes.png", full_page=True)


def test_matrix(open_page, written, shots):
    """Rows and turned columns: every label in its room; and what is said of a link keeps its order."""
    page = open_page(at("attention", "scripts", text=TEXT))
    tokens = written["scripts"].attention(TEXT).tokens
    said = spoken(page, "Matrix")
    assert [label["text"] for label in said] == [token for token in tokens for _ in "rc"]
    width = page.locator(".av-canvas").evaluate("c => c.clientWidth")
    rows, columns = ([label for label in said if label["turned"] is turned] for turned in (False, True))
    assert all(label["x"] + label["start"] >= 0 for label in rows), "row labels are cut off"
    assert all(label["y"] - label["width"] >= 0 for label in columns), "column labels are cut off"
    assert all(0 <= label["x"] <= width for label in columns)
    assert all(b["y"] - a["y"] >= a["size"] for a, b in pairwise(rows))
    assert all(b["x"] - a["x"] >= a["size"] for a, b in pairwise(columns))
    page.screenshot(path=shots / "scripts-matrix.png", full_page=True)
    page.locator(".av-stage").focus()
    page.keyboard.press("ArrowDown")
    for key in ["ArrowDown"] * tokens.index("بالعالم") + ["ArrowRight"] * tokens.index("שלום"):
        page.keyboard.press(key)
    weight = written["scripts"].attention(TEXT).weights[1, 0, tokens.index("بالعالم"), tokens.index("שלום")]
    assert page.locator(".av-readout").inner_text().split() == ["“بالعالم”", "→", "“שלום”", f"{weight:.4f}"]
    assert in_order(page, ".av-readout", ["بالعالم", "→", "שלום", f"{weight:.4f}"])
    page.keyboard.press("Enter")
    page.wait_for_selector(".av-links .av-chip")
    assert in_order(page, ".av-links", ["بالعالم", "→", "שלום", "is strongest in"])


def in_order(page, where: str, words: list[str]) -> bool:
    """Whether these stand from left to right, each wholly before the next."""
    boxes = page.locator(where).evaluate(
        """(root, words) => words.map((word) => {
          const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), range = document.createRange();
          while (walker.nextNode() && !walker.currentNode.data.includes(word));
          const start = walker.currentNode.data.indexOf(word);
          range.setStart(walker.currentNode, start);
          range.setEnd(walker.currentNode, start + word.length);
          const { left, right } = range.getBoundingClientRect();
          return [left, right];
        })""",
        words,
    )
    return all(a[1] <= b[0] + 1 for a, b in pairwise(boxes))


def test_other_panels_keep_their_order(open_page, written, shots):
    """A word that reads from the right turns neither the numbers behind it, nor lists, nor commands."""
    text = TEXT.replace("cat", "[MASK]")
    page = open_page(at("steps", "scripts", text=text, step="12"))
    numbers = page.locator(".values").first.inner_text().split()
    assert numbers[0] == "مرحبا:" and numbers[1] != numbers[2]
    assert in_order(page, ".values >> nth=0", ["مرحبا", *numbers[1:5]])
    page = open_page(at("context", "scripts", word="قطة", texts=f"{TEXT}\nقطة cat"))
    near = written["scripts"].neighbours("قطة", [TEXT, "قطة cat"], top=6).nearest[0][0]
    assert in_order(page, "td >> nth=0", [found.word for found in near])
    assert in_order(page, ".same pre >> nth=0", ["neighbours", '"قطة"', f'"{TEXT}"', '"قطة cat"', "--model"])
    page.screenshot(path=shots / "scripts-context.png", full_page=True)
    page = open_page(at("similar", "scripts", texts=f"{TEXT}\nقطة שלום"))
    assert in_order(page, ".same pre >> nth=0", ["embed", f'"{TEXT}"', '"قطة שלום"', "--normalize"])
    page = open_page(at("fill", "scripts", text=text, were='["cat"]'))
    assert in_order(page, ".word.blank", ["cat", "?"]) and "“cat” stood here" in page.locator(".original").inner_text()
    page = open_page(at("fill", "scripts", text=text))
    assert page.locator(".original").count() == 0, "what stood there is not known"


@pytest.mark.parametrize(
    ("view", "size"),
    [
        ("Lines", "laptop"),
        ("Matrix", "phone"),
        pytest.param("Lines", "phone", marks=pytest.mark.slow),
        pytest.param("Matrix", "laptop", marks=pytest.mark.slow),
    ],
)
def test_long_tokens_are_shortened_between_letters(open_page, written, shots, view, size):
    """Families, flags and rainbows stay whole, also where a token has no room for all of it."""
    tokens = written["pieces"].attention(WHOLE).tokens
    assert f"▁{FAMILY}" in tokens and f"▁{PRIDE}" in tokens and f"▁{CROWD}" in tokens and "<unk>" not in tokens
    page = open_page(at("attention", "pieces", text=WHOLE), size=size)
    said = spoken(page, view)
    page.screenshot(path=shots / f"scripts-long-{view.lower()}-{size}.png", full_page=True)
    labels = [label["text"] for label in said]
    assert len(labels) == 2 * len(tokens)
    shortened = 0
    for token, label in zip([token for token in tokens for _ in "lr"], labels):
        assert not page.evaluate(BROKEN, [token, label]), f"{token} was cut as {label}"
        shortened += label != token
    assert shortened >= 4, "what is too long for its column"
    assert f"▁{FAMILY}" in labels and f"▁{FLAG}" in labels and f"▁{PRIDE}" in labels
    width = page.locator(".av-canvas").evaluate("c => c.clientWidth")
    for label in said:
        room = label["y"] if label["turned"] else width - label["x"] if label["start"] == 0 else label["x"]
        assert label["width"] <= room, f"{label['text']} runs over the edge"


def test_downloads(open_page, written, tmp_path, shots):
    """SVG and PNG hold the same words, in the same places."""
    page = open_page(at("attention", "scripts", text=TEXT))
    said = spoken(page, "Lines")
    for kind in ("svg", "png"):
        with page.expect_download() as waiting:
            page.get_by_role("button", name=f"Download as {kind.upper()}").click()
        waiting.value.save_as(tmp_path / f"a.{kind}")
    nodes = list(ET.parse(tmp_path / "a.svg").getroot().iter(SVG))
    assert [(node.text, node.get("direction")) for node in nodes] == [(label["text"], label["way"]) for label in said]
    page.goto(f"file://{tmp_path / 'a.svg'}")
    boxes = page.locator("text").evaluate_all(
        "all => all.map(e => { const b = e.getBBox(); return [b.x, b.x + b.width]; })"
    )
    for label, (left, right) in zip(said, boxes):
        assert left == pytest.approx(label["x"] + label["start"], abs=2), label["text"]
        assert right == pytest.approx(label["x"] + label["start"] + label["width"], abs=2), label["text"]
    page.screenshot(path=shots / "scripts-svg.png")
    label = next(label for label in said if label["text"] == "مرحبا" and label["start"] == 0)
    box = label_box(label)
    place = tuple(round(2 * edge) for edge in (box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]))
    picture = grey((tmp_path / "a.png").read_bytes(), place)
    clip = page.screenshot(clip=box)
    small = Image.fromarray((255 * picture).astype(np.uint8)).resize([side // 2 for side in picture.shape[::-1]])
    assert alike(np.asarray(small) / 255, grey(clip)) > 0.8


def test_a_page_of_its_own(new_page, written, tmp_path, shots):
    """The notebook's page: the same drawing without a server."""
    found = written["pieces"].attention(WHOLE, f"قطة {FAMILY}")
    (tmp_path / "a.html").write_text(found.html(), encoding="utf-8")
    page = new_page(offline=True)
    page.goto(f"file://{tmp_path / 'a.html'}")
    page.wait_for_selector("html[data-ready=true]", state="attached")
    page.evaluate(LISTEN)
    for name in ("Matrix", "Lines"):
        page.get_by_role("button", name=name, exact=True).click()
        painted(page)
    said = page.evaluate("window.said")
    labels = [label["text"] for label in said[::2]]
    assert [a for a, b in zip(labels, found.tokens) if a == b] == [
        t for t in found.tokens if t[1:] not in (CROWD, LONG)
    ]
    assert {label["way"] for label in said if re.search("[א-ת]|[ا-ي]", label["text"])} == {"rtl"}
    assert page.locator(".av-cell canvas").evaluate_all(
        "all => all.every(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((x) => x))"
    )
    page.screenshot(path=shots / "scripts-file.png", full_page=True)
