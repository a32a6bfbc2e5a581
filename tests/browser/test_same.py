"""Under every panel stand a command and lines of Python: they run as they stand, and give the panel's numbers."""

from __future__ import annotations

import ast
import base64
import json
import re
import shlex
import zlib
from pathlib import Path

import numpy as np
import pytest
from pages import PANELS, at
from typer.testing import CliRunner

from everybert.cli.main import app

pytestmark = pytest.mark.browser
PAIRS = {
    "fill with a pair": at("fill", "words", text="the dog [MASK] at the cat .", pair="the [MASK] went"),
    "tokens of a pair": at("tokens", "words", text="the cat", pair="a dog"),
    "steps of a pair": at("steps", "words", text="the [MASK]", pair="a dog", step="5"),
    "a number": at("classify", "ranker", text="good food"),
}


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

    def run(address: str, as_json: bool = True):
        page = open_page(address)
        if not page.get_by_label("Command line", exact=True).count():
            return page, None, evaluated(page.get_by_label("Python", exact=True).inner_text())
        command = page.get_by_label("Command line", exact=True).inner_text()
        done = CliRunner().invoke(app, [*shlex.split(command)[1:], *(["--json"] if as_json else [])])
        assert done.exit_code == 0, f"{command}: {done.output}"
        code = page.get_by_label("Python", exact=True).inner_text()
        return page, json.loads(done.stdout) if as_json else done.stdout, evaluated(code)

    return run


def percents(page, selector):
    """Percentages of the page."""
    texts = page.locator(selector).all_inner_texts()
    return [0.0 if "<" in text else float(text.removesuffix(" %")) / 100 for text in texts]


def near(one, other, tolerance=6e-4):
    return np.abs(np.asarray(one, dtype=float) - np.asarray(other, dtype=float)).max() <= tolerance


@pytest.mark.parametrize("address", [PANELS["fill"], PAIRS["fill with a pair"]])
def test_fill(elsewhere, address):
    page, told, (found,) = elsewhere(address)
    assert len(found) == len(told[0]["masks"]) == page.locator(".card").count()
    for card, blank, printed in zip(page.locator(".card").all(), found, told[0]["masks"]):
        assert (
            card.locator(".both .name").all_inner_texts() == [c.token for c in blank] == [c["token"] for c in printed]
        )
        assert near(percents(card, ".both .value"), [c.score for c in blank])
        assert near([c["score"] for c in printed], [c.score for c in blank], 1e-6)


def test_classify(elsewhere):
    page, told, ((found,), why) = elsewhere(PANELS["classify"])
    shown = dict(zip(page.locator(".bar .name").all_inner_texts(), percents(page, ".bar .value")))
    assert near([shown[k] for k in found.scores], list(found.scores.values()))
    assert near([told[0]["scores"][k] for k in found.scores], list(found.scores.values()), 1e-6)
    titles = page.locator(".shade").evaluate_all("all => all.map(e => e.title.replace('−', '-'))")
    assert near([float(x) for x in titles], [s for s, t in zip(why.scores, why.texts) if t == 0])


def test_a_number(elsewhere):
    page, told, ((found,),) = elsewhere(PAIRS["a number"])
    assert near(float(page.locator(".big").inner_text()), found) and near(told[0]["value"], found, 1e-5)


def test_names(elsewhere):
    page, told, (spans,) = elsewhere(PANELS["names"])
    assert page.locator("tbody tr td:first-child").all_inner_texts() == [s.text for s in spans]
    assert near(percents(page, "tbody tr td:last-child"), [s.score for s in spans])
    printed = told[0]["spans"] if isinstance(told[0], dict) else told[0]
    assert [(s["text"], s["label"], s["start"]) for s in printed] == [(s.text, s.label, s.start) for s in spans]


def test_answer(elsewhere):
    page, told, (answers, why) = elsewhere(PANELS["answer"])
    assert page.locator(".bar .name").all_inner_texts() == [a.text for a in answers]
    assert near(percents(page, ".bar .value"), [a.score for a in answers])
    printed = told[0]["answers"] if "answers" in told[0] else told
    assert near([a["score"] for a in printed], [a.score for a in answers], 1e-6)
    titles = page.locator(".shade").evaluate_all("all => all.map(e => e.title.replace('−', '-'))")
    assert near([float(x) for x in titles], [s for s, t in zip(why.scores, why.texts) if t is not None], 1e-3)


def test_next(elsewhere):
    page, told, (found,) = elsewhere(PANELS["next"])
    assert near(percents(page, ".big")[0], found) and near(told[0]["probability"], found, 1e-6)


def test_similar(elsewhere):
    page, _, (cosines,) = elsewhere(PANELS["similar"])
    cells = [t.replace("−", "-") for t in page.locator(".heat td[title]").all_inner_texts()]
    assert near([float(x) for x in cells], cosines.ravel(), 6e-3)
    vectors = np.load("vectors.npy")
    assert near(vectors @ vectors.T, cosines, 1e-5)


@pytest.mark.parametrize("address", [PANELS["tokens"], PAIRS["tokens of a pair"]])
def test_tokens(elsewhere, address):
    page, told, (found,) = elsewhere(address)
    assert page.locator(".pieces").first.locator("small").all_inner_texts() == [str(i) for i in found.ids]
    assert [t["id"] for t in told[0]["tokens"]] == list(found.ids)
    assert near([t["vector"] for t in told[0]["tokens"]], found.vectors, 1e-5)


def test_attention(elsewhere):
    page, _, (found,) = elsewhere(PANELS["attention"], as_json=False)
    text = Path("attention.html").read_text("utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))
    written = (
        np.frombuffer(zlib.decompress(base64.b64decode(data["weights"])), "<u2").reshape(found.weights.shape) / 65535
    )
    assert near(written, found.weights, 1e-5)
    weights = found.weights[1, 0] * (1 - np.eye(len(found.tokens)))
    assert page.locator(".av-readout").inner_text().endswith(f"{weights.max():.3f}")


def test_context(elsewhere):
    page, told, (found,) = elsewhere(PANELS["context"])
    assert near(told["similarity"], found.similarity, 1e-5)
    label = page.locator("svg.chart").get_attribute("aria-label")
    assert near([float(x) for x in re.findall(r" (\d\.\d\d)", label)], found.similarity[:, 0, 1], 6e-3)


@pytest.mark.parametrize("address", [PANELS["steps"].replace("step=4", "step=5"), PAIRS["steps of a pair"]])
def test_steps(elsewhere, address):
    page, told, (weights,) = elsewhere(address, as_json=False)
    cells = page.locator(".grid-numbers td[style]").all_inner_texts()
    assert near([float(x) for x in cells], weights.ravel())
    n = len(weights)
    rows = [[float(x) for x in re.findall(r" (\d\.\d+(?:e-\d+)?)(?= |$)", line)] for line in told.splitlines()]
    assert any(len(row) == n and near(row, weights[1], 1e-4) for row in rows), "the terminal shows the same numbers"


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
